"""A call of fused_recurrent_gated_delta_rule in any of its modes, and what it must leave behind."""

import torch
import torch.nn.functional as F

from . import inputs, reference
from .compare import assert_heads_close

# Relative L2 of a head: float32 arithmetic, and a result rounded to bfloat16 or float16.
LIMITS = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 6e-4}
# The same where a given state, which is rounded to its dtype after each token, reaches what is compared.
ROUNDED_LIMITS = {torch.float64: 0, torch.float32: 1e-6, torch.bfloat16: 1e-2}

CHOICES = {
    "lengths": ([1], [1, 1, 1], [4, 4], [2, 0, 5, 1], [0], [3, 1], [0, 0, 1, 5]),
    "packed": (False, True),  # if not, all sequences are as long as the first
    "tail": (0, 0, 1, 3),  # tokens of no sequence
    "gates": inputs.GATES,
    "gate_dtype": (torch.float32, torch.bfloat16, torch.float16),
    "fused": (None, None, "BT", "flat"),  # A_log, a, b, dt_bias; a and b as [B, T, HV] or [B * T, HV]
    "layout": inputs.LAYOUTS,
    "index_dtype": (torch.int32, torch.int64),
    "state": (torch.float32, torch.bfloat16),
    "mode": ("none", "zeros", "rows", "slots", "moved", "verify", "accepted", "buffer"),
    "width": (1, 2, 5),  # S
    "padding": (-1, 0, 2),
    "page": (False, True),  # slots apart from each other, as in a cache that several kinds of layers share
    "v_first": (False, True),
    "l2norm": (False, True),
    "scale": (None, 0.0, 0.3),
    "final": (False, True),
}


def fused_gates(tokens, HV, seed, device, dtype):
    """A_log, a, b, dt_bias as a layer's projections make them, and the g and beta that they stand for."""
    gen = torch.Generator(device).manual_seed(seed)
    A_log, dt_bias = (torch.randn(HV, generator=gen, device=device).to(dtype) for _ in range(2))
    both = 2 * torch.randn(*tokens, 2 * HV, generator=gen, device=device).to(dtype)
    b, a = both.split(HV, -1)
    g = -A_log.double().exp() * F.softplus(a.double() + dt_bias.double())
    return {"A_log": A_log, "a": a, "b": b, "dt_bias": dt_bias}, g, b.double().sigmoid()


class Case:
    """``choices`` holds one of each of CHOICES, and H, HV, K, V, dtype and seed.

    ``arguments`` are those of the call. Slots are distinct for every sequence and token, and one of them is padding.
    """

    def __init__(self, choices, device):
        self.choices, self.device = choices, device
        HV, K, V, S = choices["HV"], choices["K"], choices["V"], choices["width"]
        self.packed, self.mode, self.v_first = choices["packed"], choices["mode"], choices["v_first"]
        seed, padding, lengths = choices["seed"], choices["padding"], choices["lengths"]
        self.N = N = len(lengths)
        self.lengths = lengths if self.packed else [lengths[0]] * N
        B, T = (1, sum(lengths) + choices["tail"]) if self.packed else (N, lengths[0])
        q, k, v, g, beta = inputs.make_inputs(
            B, T, choices["H"], HV, K, V, seed=seed, device=device, dtype=choices["dtype"],
            gate_dtype=choices["gate_dtype"], gates=choices["gates"], layout=choices["layout"],
        )  # fmt: skip
        gates = {"g": g, "beta": beta}
        if choices["fused"]:
            gates, g, beta = fused_gates((B, T), HV, seed, device, choices["gate_dtype"])
            if choices["fused"] == "flat":
                gates |= {name: gates[name].flatten(0, 1) for name in ("a", "b")}
        self.tensors = q, k, v, g, beta
        options = {}
        if self.packed:
            options["cu_seqlens"] = inputs.offsets(lengths, device, choices["index_dtype"])

        gen = torch.Generator().manual_seed(seed)
        self.P = P = N * (S + 1) + 3
        self.pool = inputs.make_states(
            P, HV, K, V, seed=seed, device=device, dtype=choices["state"], v_first=self.v_first
        )
        slots = torch.randperm(P, generator=gen)[: N * (S + 1)].view(N, S + 1)
        slots[seed % N, seed % (S + 1)] = (-1, P, padding, -(1 << 31), (1 << 31) - 1)[seed % 5]
        read, self.written = slots[:, 0], slots[:, 1:]
        self.accepted = torch.ones(N, dtype=torch.int64)
        self.buffer = self.rows = self.states = None
        put = lambda x: x.to(choices["index_dtype"]).to(device)  # noqa: E731
        if self.mode == "rows":
            self.states = self.pool[:N].clone()
        elif self.mode not in ("none", "zeros"):
            self.states = self._paged(self.pool) if choices["page"] else self.pool.clone()
            options["padding_index"] = padding
        if self.mode == "slots":
            options["state_indices"] = put(slots)[:, 0]
        elif self.mode == "moved":
            options |= {"state_indices": put(slots)[:, 1], "initial_state_indices": put(read)}
        elif self.mode in ("verify", "accepted"):
            read = self.written[:, 0]
            if self.mode == "accepted":
                self.accepted = torch.randint(-1, S + 3, (N,), generator=gen)
                read = self.written.gather(1, (self.accepted - 1).clamp(0, S - 1)[:, None])[:, 0]
                options["num_accepted_tokens"] = put(self.accepted)
            options["state_indices"] = put(slots)[:, 1:]
        elif self.mode == "buffer":
            self.buffer = torch.full((N + 2, S, *self.pool.shape[1:]), 7.0, dtype=choices["state"], device=device)
            self.rows = torch.randperm(N + 2, generator=gen)[:N]
            self.rows[0] = (int(self.rows[0]), -1, N + 2)[seed % 3]
            options |= {"state_indices": put(read), "intermediate_states_buffer": self.buffer}
            options["intermediate_state_indices"] = put(self.rows)
        self.read = read
        self.final = self.mode == "none" or (choices["final"] and self.mode not in ("zeros", "buffer"))
        self.arguments = {
            "q": q, "k": k, "v": v, **gates, "scale": choices["scale"], "initial_state": self.states,
            "output_final_state": self.final, "use_qk_l2norm_in_kernel": choices["l2norm"],
            "state_v_first": self.v_first, **options,
        }  # fmt: skip

    def _paged(self, pool):
        pages = torch.full((self.P, pool[0].numel() + 64), float("nan"), dtype=pool.dtype, device=self.device)
        return pages[:, 32:-32].unflatten(1, pool.shape[1:]).copy_(pool)

    def check(self, o, final):
        """Compare outputs, states, and all memory that had to stay as it was, with the float64 recurrence."""
        choices, N, S, lengths = self.choices, self.N, self.choices["width"], self.lengths
        live, initial = [True] * N, None
        if self.mode == "rows":
            initial = self.pool[:N]
        elif self.mode not in ("none", "zeros"):
            live = [self._is_slot(self.read[n]) and 1 <= self.accepted[n] <= S for n in range(N)]
            initial = self.pool[torch.where(torch.tensor(live), self.read, 0).to(self.device)]
        if initial is not None and self.v_first:
            initial = initial.mT
        scale = choices["K"] ** -0.5 if choices["scale"] is None else choices["scale"]
        want_o, want_final, want_each = reference.gated_delta_rule(
            *self.tensors, scale, initial, lengths if self.packed else None, choices["l2norm"], checkpoint_every=1
        )
        want_o = want_o.contiguous()
        firsts = [sum(lengths[:n]) for n in range(N)]
        for n in range(N):
            if not live[n]:
                want_o.flatten(0, 1)[firsts[n] : firsts[n] + lengths[n]] = 0
        each = self.mode in ("verify", "accepted", "buffer")
        extra = 0 if initial is None else ROUNDED_LIMITS[choices["state"]]
        assert o.dtype is choices["dtype"] and o.is_contiguous()
        assert_heads_close("o", o, want_o, 2, max(LIMITS[o.dtype], extra))
        assert not o.flatten(0, 1)[sum(lengths) :].any()

        def close(name, got, want, head_dim):
            got = got.mT if self.v_first else got
            assert_heads_close(name, got, want, head_dim, max(LIMITS[got.dtype], extra))

        if self.mode in ("none", "zeros", "rows"):
            assert (final is not None) == self.final
            if final is not None:
                double = choices["dtype"] is torch.float64
                new = torch.float64 if double else torch.float32
                assert final.dtype is (choices["state"] if self.mode == "rows" else new) and final.is_contiguous()
                close("final states", final, want_final, 1)
            assert self.states is None or torch.equal(self.states, self.pool[:N])
            return
        assert final is (self.states if self.final else None)
        expected = {}  # slot: state; all others stay
        for n in range(N):
            for t in range(min(lengths[n], S if each else 1)):
                slot = int(self.read[n] if self.mode == "slots" else self.written[n, t])
                if self.mode != "buffer" and live[n] and self._is_slot(slot):
                    expected[slot] = want_each[firsts[n] + t] if each else want_final[n]
        for slot in range(self.P):
            if slot in expected:
                close(f"slot {slot}", self.states[slot], expected[slot], 0)
            else:
                assert torch.equal(self.states[slot], self.pool[slot]), f"slot {slot} was written"
        if choices["page"]:
            pages = torch.as_strided(
                self.states, (self.P, self.states.stride(0)), (self.states.stride(0), 1),
                self.states.storage_offset() - 32,
            )  # fmt: skip
            assert pages[:, :32].isnan().all() and pages[:, -32:].isnan().all()
        for row in range(N + 2 if self.buffer is not None else 0):
            n = (self.rows == row).nonzero().flatten().tolist()
            kept = min(lengths[n[0]], S) if n and live[n[0]] else 0
            assert (self.buffer[row, kept:] == 7).all(), f"row {row} was written"
            for t in range(kept):
                close(f"row {row}", self.buffer[row, t], want_each[firsts[n[0]] + t], 0)

    def _is_slot(self, index):
        return 0 <= index < self.P and index != self.choices["padding"]
