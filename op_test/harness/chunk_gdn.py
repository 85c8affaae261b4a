"""A call of chunk_gated_delta_rule as a value: its inputs, what it must give, and how far off it may be."""

import contextlib
import dataclasses
from unittest import mock

import torch

import atrex
from harness import inputs, poison, reference, rounded
from harness.compare import assert_heads_close, head_errors

NAN = float("nan")
# Relative L2 of a head. The kernels round operands to the dtype of q, k and v and accumulate in float32. One such
# rounding costs 1.7e-3 in bfloat16 and 0.2e-3 in float16, and up to 3.9e-3 and 0.5e-3 where a single number, the score
# of a lone token, scales the whole output.
OUTPUT_LIMITS = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}
# Correlated keys: times what rounding costs in exact arithmetic (rounded.py), since their outputs cancel.
ROUNDING_ALLOWANCE = 1.5
# A state in bfloat16 is rounded once more, whatever computed it: 1.7e-3 of its norm.
STATE_ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2**-9}


@dataclasses.dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    H: int = 2
    HV: int = 4
    packed: bool = True  # cu_seqlens; else each length is a batch entry, and all are equal
    tail: int = 0  # tokens past cu_seqlens[-1]; all NaN
    dtype: torch.dtype = torch.bfloat16
    gates: str = "mixed"
    gate_dtype: torch.dtype = torch.float32
    gate_layout: str = "contiguous"
    layout: str = "contiguous"
    v_layout: str | None = None  # if not that of q and k
    correlated: bool = False
    index_dtype: torch.dtype = torch.int32
    state: torch.dtype | None = None  # of initial_state
    gap: int = 0  # elements between one state and the next
    pool: bool = False
    padding: bool = False  # with pool: one index is no slot
    v_first: bool = False
    every: int = 0
    l2norm: bool = False
    scale: float | None = None
    final: bool = True
    K: int = 128
    V: int = 128
    seed: int = 0

    @property
    def sizes(self):
        """B, T, N."""
        N = len(self.lengths)
        return (1, sum(self.lengths) + self.tail, N) if self.packed else (N, self.lengths[0], N)


def lay_out_gate(x, layout):
    """``x`` ``[B, T, HV]`` as the slice of a wider projection, or with tokens innermost; NaN lies between."""
    B, T, HV = x.shape
    if layout == "contiguous":
        return x.contiguous()
    if layout == "split":
        return x.new_full((B, T, 2 * HV + 3), NAN)[..., 1 : 1 + HV].copy_(x)
    assert layout == "transposed", layout
    return x.new_full((B, HV, T + 1), NAN)[..., :T].mT.copy_(x)


def memory(x):
    """All bytes of the storage that ``x`` is a view of, gaps included."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


class GuardedMemory:
    """While it lasts, what ``torch.empty`` gives starts with every byte 0xFF and lies between guards of the same.

    0xFF reads as NaN in every float type and as no counter's start. ``check`` fails if a guard changed.
    """

    GUARD = 4096  # bytes; keeps the alignment of the allocator

    def __init__(self):
        self.blocks = []

    def __enter__(self):
        empty = torch.empty

        def guarded(*size, dtype=None, device=None, **others):
            if others or torch.device(device or "cpu").type == "meta":
                return empty(*size, dtype=dtype, device=device, **others)
            shape = torch.Size(size if not size or isinstance(size[0], int) else size[0])
            dtype = dtype or torch.get_default_dtype()
            block = empty(shape.numel() * dtype.itemsize + 2 * self.GUARD, dtype=torch.uint8, device=device).fill_(255)
            self.blocks.append(block)
            return block[self.GUARD : block.numel() - self.GUARD].view(dtype).view(shape)

        self.stack = contextlib.ExitStack()
        self.stack.enter_context(poison.nan_empty())  # what comes from the other makers is NaN at least
        self.stack.enter_context(mock.patch.object(torch, "empty", guarded))
        return self

    def __exit__(self, *error):
        self.stack.close()

    def holds(self, x):
        return any(block.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for block in self.blocks)

    def check(self):
        for block in self.blocks:
            size = block.numel() - 2 * self.GUARD
            for name, guard in (("before", block[: self.GUARD]), ("behind", block[-self.GUARD :])):
                assert (guard == 255).all(), f"a write {name} an allocation of {size} bytes"


class Call:
    """The tensors of a case on a device, and their memory as it was before the call."""

    def __init__(self, case, device):
        self.case = case
        B, T, N = case.sizes
        q, k, v, g, beta = inputs.make_inputs(
            B, T, case.H, case.HV, case.K, case.V, seed=case.seed, device=device, dtype=case.dtype, gates=case.gates,
            gate_dtype=case.gate_dtype, layout=case.layout, correlated=case.correlated, unit_keys=not case.l2norm,
        )  # fmt: skip
        if case.v_layout is not None:
            v = inputs.lay_out(v.contiguous(), case.v_layout)
        g, beta = lay_out_gate(g, case.gate_layout), lay_out_gate(beta, case.gate_layout)
        self.tensors = [q, k, v, g, beta]
        for x in self.tensors:
            x[:, T - case.tail :] = NAN
        self.rounding = [0.0] * 3  # what 16-bit operands cost each result, as far as its limit depends on it
        self.live = [True] * N
        self.slots = list(range(N))
        self.states = None
        self.options = {"use_qk_l2norm_in_kernel": case.l2norm, "state_v_first": case.v_first,
                        "checkpoint_every": case.every}  # fmt: skip
        if case.state is not None:
            self._make_states(device)
        if case.packed:
            self.options["cu_seqlens"] = inputs.offsets(case.lengths, device, case.index_dtype)
        self.before = [memory(x).clone() for x in self._read_only()]

    def _make_states(self, device):
        """Rows of a larger page, between two guard rows, ``gap`` apart; whatever no sequence owns is NaN."""
        case, N = self.case, len(self.case.lengths)
        P = N + 3 if case.pool else N
        values = inputs.make_states(
            N, case.HV, case.K, case.V, seed=case.seed + 1, device=device, dtype=case.state, v_first=case.v_first
        )
        size = values[0].numel()
        self.page = torch.full((P + 2, size + case.gap), NAN, dtype=case.state, device=device)
        self.states = self.page[1:-1, :size].unflatten(1, values.shape[1:])
        if case.pool:
            order = torch.randperm(P, generator=torch.Generator().manual_seed(case.seed))
            self.slots = order[:N].tolist()
            if case.padding:
                n = case.seed % N
                bad = [-1, P, -(2**31), 2**31 - 1]
                if case.index_dtype is torch.int64:
                    bad += [2**32 + self.slots[n], -(2**63)]  # the first becomes a slot if cut to 32 bits
                self.slots[n] = bad[case.seed % len(bad)]
                self.live[n] = False
            self.options["state_indices"] = torch.tensor(self.slots, dtype=case.index_dtype, device=device)
        for n, slot in enumerate(self.slots):
            if self.live[n]:
                self.states[slot] = values[n]
        self.initial = values
        self.page_before = self.page.clone()

    def _read_only(self):
        return [*self.tensors, *(x for x in self.options.values() if isinstance(x, torch.Tensor))]

    def to(self, device):
        """The call on another device, every tensor's memory copied there as it lies."""
        copies = {}

        def moved(x):
            storage = x.untyped_storage().data_ptr()
            if storage not in copies:
                copies[storage] = memory(x).to(device).untyped_storage()
            return torch.empty(0, dtype=x.dtype, device=device).set_(
                copies[storage], x.storage_offset(), x.size(), x.stride()
            )

        self.tensors = [moved(x) for x in self.tensors]
        self.options = {k: moved(x) if isinstance(x, torch.Tensor) else x for k, x in self.options.items()}
        self.before = [x.to(device) for x in self.before]
        if self.states is not None:
            self.page, self.states, self.initial = moved(self.page), moved(self.states), moved(self.initial)
            self.page_before = self.page_before.to(device)
        return self

    def bring(self, result, device):
        """Moves the call to another device, to be verified there, and returns its ``result`` moved as well."""
        states = self.states
        self.to(device)
        return tuple(None if x is None else self.states if x is states else x.to(device) for x in result)

    def run(self):
        """What atrex returns, always as three."""
        result = atrex.chunk_gated_delta_rule(
            *self.tensors, self.case.scale, self.states, self.case.final, **self.options
        )
        assert len(result) == 2 + bool(self.case.every)
        return (*result, None)[:3]

    def expected(self, device=None):
        """Float64 outputs, final states and checkpoints (K first), computed on ``device``; zeros for padding."""
        case, lengths = self.case, self.case.lengths
        device = device or self.tensors[0].device
        states = None if self.states is None else (self.initial.mT if case.v_first else self.initial).to(device)
        scale = case.K**-0.5 if case.scale is None else case.scale
        tensors = [x.to(device) for x in self.tensors]
        want = reference.gated_delta_rule(
            *tensors, scale, states, lengths if case.packed else None, case.l2norm, case.every
        )
        self._clear_padding(*want)
        if case.correlated:
            spans = [(0, sum(lengths[:n]), sum(lengths[: n + 1])) if case.packed else (n, 0, length)
                     for n, length in enumerate(lengths)]  # fmt: skip
            model = rounded.gated_delta_rule(*tensors, scale, states, spans, case.l2norm, case.dtype, case.every)
            self._clear_padding(*model)
            self.rounding = [
                head_errors(x, y, dim).max().item() for x, y, dim in zip(model, want, (2, 1, 1), strict=True)
            ]
        return want

    def _clear_padding(self, o, finals, checkpoints):
        """Zero what belongs to padding sequences."""
        lengths, every = self.case.lengths, self.case.every
        for n, alive in enumerate(self.live):
            if not alive:
                self._tokens(o, n).zero_()
                finals[n] = 0
                if every:
                    row = sum(length // every for length in lengths[:n])
                    checkpoints[row : row + lengths[n] // every] = 0

    def _tokens(self, o, n):
        lengths = self.case.lengths
        return o[0, sum(lengths[:n]) : sum(lengths[: n + 1])] if self.case.packed else o[n]

    def verify(self, result, want):
        """Fail unless ``result`` is right and nothing else was written. Returns the worst error of each output."""
        case, (o, final, checkpoints), (want_o, want_final, want_checkpoints) = self.case, result, want
        lengths, state_dtype = case.lengths, case.state or torch.float32
        limit, *state_limits = (max(OUTPUT_LIMITS[case.dtype], ROUNDING_ALLOWANCE * cost) for cost in self.rounding)
        final_limit, checkpoint_limit = (x + STATE_ROUNDING[state_dtype] for x in state_limits)

        def states_error(name, got, want, limit):
            assert got.dtype is state_dtype
            return assert_heads_close(name, got.mT if case.v_first else got, want.to(got.device), 1, limit)

        assert o.dtype is case.dtype and o.is_contiguous()
        errors = {"o": assert_heads_close("o", o, want_o.to(o.device), 2, limit)}
        assert not o.flatten(0, 1)[sum(lengths) :].any(), "outputs of padding tokens"
        if case.scale == 0:
            assert not o.any()
        for n, alive in enumerate(self.live):
            assert alive or not self._tokens(o, n).any(), f"outputs of the padding sequence {n}"
        if case.pool:
            assert final is (self.states if case.final else None)
            final = self.states
        elif case.final:
            assert final.is_contiguous()
        else:
            assert final is None
        if final is not None:
            for n, (slot, alive) in enumerate(zip(self.slots, self.live, strict=True)):
                if alive and lengths[n] == 0:
                    assert torch.equal(final[slot], torch.zeros_like(final[slot]) if case.state is None
                                       else self.initial[n]), f"state of the empty sequence {n}"  # fmt: skip
            used = [slot for slot, alive in zip(self.slots, self.live, strict=True) if alive]
            if used:
                errors["final"] = states_error("final_state", final[used], want_final[self.live], final_limit)
        if case.every:
            assert checkpoints.is_contiguous()
            errors["checkpoints"] = states_error("checkpoints", checkpoints, want_checkpoints, checkpoint_limit)
            for row, wanted in enumerate(want_checkpoints):
                assert wanted.any() or not checkpoints[row].any(), f"checkpoint row {row} must be zero"
        self.verify_memory()
        return errors

    def verify_memory(self):
        """Nothing but the slots that sequences own has changed."""
        for x, before in zip(self._read_only(), self.before, strict=True):
            assert torch.equal(memory(x), before), "an input was written"
        if self.states is not None:
            expected = self.page_before.clone()
            if self.case.pool:
                rows = [slot + 1 for slot, alive in zip(self.slots, self.live, strict=True) if alive]
                size = self.states[0].numel()
                expected[rows, :size] = self.page[rows, :size]
            assert torch.equal(memory(self.page), memory(expected)), "memory beside the states was written"


def check(case, device):
    """Run ``case`` in poisoned, guarded memory and compare it with the recurrence; the worst errors."""
    call = Call(case, device)
    want = call.expected()
    with GuardedMemory() as allocations:
        result = call.run()
    errors = call.verify(result, want)
    allocations.check()
    assert allocations.holds(result[0]), "the outputs were not allocated by torch.empty: nothing poisoned them"
    return errors
