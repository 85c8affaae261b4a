"""Calls of causal_conv1d_fn and causal_conv1d_update in any of their modes, and what they must leave behind."""

import random

import torch
import torch.nn.functional as F

from .inputs import offsets

# What rounding to the dtype costs of an output, and float32 arithmetic of the sum of the terms' magnitudes.
ROUNDING = {torch.float64: 0, torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
ARITHMETIC = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-6, torch.float16: 2e-6}

COMMON = {
    "lengths": ([1], [1, 1, 1], [4, 4], [2, 0, 5, 1], [0], [37, 1], [0, 0, 1, 5], [2] * 9, [70]),
    "packed": (False, True),  # if not, all sequences are as long as the first
    "tail": (0, 0, 1, 3),  # tokens of no sequence
    "bias": (False, True),
    "activation": (None, "silu", "swish"),
    "layout": ("channels", "tokens", "split", "sliced", "misaligned"),
    "index_dtype": (torch.int32, torch.int64),
    "padding": (-1, 0, 2),
    "states": ("channels", "columns"),  # which of them is contiguous
    "page": (False, True),  # slots apart from each other, as in a cache that several kinds of layers share
}
PREFILL = COMMON | {"mode": ("none", "final", "zeros", "rows", "dense", "slots", "fresh", "moved")}
UPDATE = COMMON | {
    "lengths": ([1], [1, 1, 1], [4, 4], [2, 0, 5, 1], [0], [3, 1], [0, 0, 1, 5]),
    "mode": ("rows", "slots", "moved", "verify"),
    "extra": (0, 1, 4),  # columns beside the W - 1
}


def draw(choices, count, **fixed):
    """``count`` of the combinations of ``choices``, always the same ones."""
    at_random = random.Random(str(fixed))
    for _ in range(count):
        values = {name: at_random.choice(options) for name, options in choices.items()}
        yield values | fixed | {"seed": at_random.randrange(1 << 16)}


def convolve(x, before, weight, bias, silu):
    """Float64 outputs ``[len, C]`` of tokens ``x [len, C]`` behind ``before [W - 1, C]``, and the terms' magnitudes."""
    if not len(x):
        return x.double(), x.double()
    window, weight = torch.cat([before, x]).double().t()[None], weight.double()[:, None]
    bias = torch.zeros(weight.shape[0], dtype=torch.float64, device=x.device) if bias is None else bias.double()
    out = F.conv1d(window, weight, bias, groups=weight.shape[0])[0].t()
    magnitude = F.conv1d(window.abs(), weight.abs(), bias.abs(), groups=weight.shape[0])[0].t()
    return F.silu(out) if silu else out, magnitude


def assert_close(got, want, magnitude):
    """Element by element; a NaN fails."""
    limit = ROUNDING[got.dtype] * want.abs() + ARITHMETIC[got.dtype] * magnitude
    limit += 2**-25 if got.dtype is torch.float16 else 0  # half of its smallest number
    excess = ((got.double() - want).abs() - limit).nan_to_num(nan=float("inf"))
    assert not (excess > 0).any(), f"off by {excess.max().item():.1e} more than allowed at {excess.argmax().item()}"


def lay_out(x, layout):
    """The values of ``x [B, T, C]`` as ``[B, C, T]`` in memory as ``layout`` says; what lies between them is NaN."""
    B, T, C = x.shape
    nan = lambda *shape: torch.full(shape, float("nan"), dtype=x.dtype, device=x.device)  # noqa: E731
    view = {
        "channels": lambda: nan(B, T, C).mT,
        "tokens": lambda: nan(B, C, T),
        "split": lambda: nan(B, T, 8 + C + 16)[..., 8 : 8 + C].mT,
        "sliced": lambda: nan(B, C, T + 3)[..., 3:],
        "misaligned": lambda: nan(B * T * C + 1)[1:].view(B, T, C).mT,
    }[layout]()
    return view.copy_(x.mT)


class _Case:
    """``choices`` holds one of each of PREFILL or UPDATE, and C, W, dtype and seed. Slots are distinct."""

    def __init__(self, choices, device, columns):
        self.choices, self.device, self.columns = choices, device, columns
        self.packed, self.mode, lengths = choices["packed"], choices["mode"], choices["lengths"]
        C, W, dtype, seed = choices["C"], choices["W"], choices["dtype"], choices["seed"]
        self.N = N = len(lengths)
        self.lengths = lengths if self.packed else [lengths[0]] * N
        self.B, self.T = (1, sum(lengths) + choices["tail"]) if self.packed else (N, lengths[0])
        gen = torch.Generator(device).manual_seed(seed)
        randn = lambda *shape: torch.randn(*shape, generator=gen, device=device).to(dtype)  # noqa: E731
        self.tokens = randn(self.B, self.T, C)
        self.x = lay_out(self.tokens, choices["layout"])
        self.weight, self.bias = randn(C, W), randn(C) if choices["bias"] else None
        self.P = P = N * 2 + 3
        self.before = randn(P, C, columns)
        at_random = torch.Generator().manual_seed(seed)
        slots = torch.randperm(P, generator=at_random)[: 2 * N].view(2, N)
        slots[seed % 2, seed % N] = (-1, P, choices["padding"], -(1 << 31), (1 << 31) - 1)[seed % 5]
        self.written, self.read = slots.tolist()
        self.has_initial = torch.randint(0, 2, (N,), generator=at_random).bool()
        put = lambda x: x.to(choices["index_dtype"]).to(device)  # noqa: E731
        self.slots = put(slots.t())  # columns of a table
        self.options = {"bias": self.bias, "activation": choices["activation"], "pad_slot_id": choices["padding"]}
        if self.packed:
            self.options["query_start_loc"] = offsets(lengths, device, choices["index_dtype"])

    def pool(self, rows):
        states = self.before[:rows]
        shape = states.shape if self.choices["states"] == "columns" else states.mT.shape
        room = 64 if self.choices["page"] else 0
        self.pages = torch.full((rows, shape[1] * shape[2] + room), 7.0, dtype=states.dtype, device=self.device)
        view = self.pages[:, : shape[1] * shape[2]].unflatten(1, shape[1:])
        return (view if self.choices["states"] == "columns" else view.mT).copy_(states)

    def is_slot(self, index, rows):
        return 0 <= index < rows and index != self.choices["padding"]

    def check_out(self, out, wanted):
        """``wanted``: before ``[W - 1, C]`` of each sequence, None for padding."""
        choices, (B, T, C) = self.choices, self.tokens.shape
        assert out.shape == self.arguments["x"].shape and out.dtype is choices["dtype"]
        out = self.as_tokens(out)
        assert out.shape == (B, T, C) and out.is_contiguous()
        want = torch.zeros(B * T, C, dtype=torch.float64, device=self.device)
        magnitude = torch.zeros_like(want)
        start = 0
        for before, length in zip(wanted, self.lengths, strict=True):
            if before is not None:
                now = slice(start, start + length)
                want[now], magnitude[now] = convolve(
                    self.tokens.flatten(0, 1)[now], before, self.weight, self.bias, choices["activation"] is not None
                )
            start += length
        assert_close(out.flatten(0, 1), want, magnitude)

    def check_pool(self, states, expected):
        """Bit for bit: ``expected`` slots, and all others as they were."""
        for slot in range(len(states)):
            assert torch.equal(states[slot], expected.get(slot, self.before[slot])), f"slot {slot}"
        assert (self.pages[:, states[0].numel() :] == 7).all()

    def sequences(self):
        """Tokens ``[len, C]`` of each sequence."""
        return self.tokens.flatten(0, 1)[: sum(self.lengths)].split(self.lengths)


class PrefillCase(_Case):
    def __init__(self, choices, device):
        super().__init__(choices, device, choices["W"] - 1)
        mode = self.mode
        self.states, options = None, {}
        if mode in ("rows", "zeros"):
            self.states = self.pool(self.N)
            options = {"initial_states": self.states}
        if mode in ("rows", "final"):
            options["return_final_states"] = True
        if mode in ("dense", "slots", "fresh", "moved"):
            self.states = self.pool(self.N if mode == "dense" else self.P)
            options = {"conv_states": self.states}
        if mode in ("dense", "slots", "moved"):
            options["has_initial_state"] = self.has_initial.to(device)
        if mode in ("slots", "fresh", "moved"):
            options["cache_indices"] = self.slots[:, 0]
        if mode == "moved":
            options["initial_state_indices"] = self.slots[:, 1]
        self.flat = self.packed and choices["seed"] % 2 == 0  # [C, T]
        x = self.x[0] if self.flat else self.x
        self.arguments = {"x": x, "weight": self.weight, **self.options, **options}

    def as_tokens(self, out):
        return out.t()[None] if self.flat else out.mT

    def check(self, result):
        mode, W = self.mode, self.choices["W"]
        zeros = self.tokens.new_zeros(W - 1, self.choices["C"])
        has = self.has_initial.tolist()
        befores, finals, expected = [], [], {}
        for n, tokens in enumerate(self.sequences()):
            read = written = n
            if mode in ("slots", "fresh", "moved"):
                written = self.written[n]
                read = self.read[n] if mode == "moved" else written
            reads = mode in ("rows", "zeros") or (mode in ("dense", "slots", "moved") and has[n])
            live = True
            if mode in ("slots", "fresh", "moved"):
                live = self.is_slot(read if reads else written, self.P)
            before = (self.before[read].t() if reads else zeros) if live else None
            befores.append(before)
            final = torch.cat([before, tokens])[len(tokens) :].t() if live else None
            finals.append(final)
            if live and len(tokens) and (mode == "dense" or self.is_slot(written, self.P)):
                expected[written] = final
        if mode in ("rows", "final"):
            out, got = result
            assert got.dtype is self.tokens.dtype and torch.equal(got, torch.stack(finals))
        else:
            out = result
        self.check_out(out, befores)
        if self.states is not None:
            self.check_pool(self.states, {} if mode in ("rows", "zeros") else expected)


class UpdateCase(_Case):
    def __init__(self, choices, device):
        W, mode = choices["W"], choices["mode"]
        columns = W - 1 + choices["extra"]
        if mode == "verify" and not choices["packed"]:
            columns = max(columns, W - 2 + choices["lengths"][0])
        super().__init__(choices, device, columns)
        self.states = self.pool(self.N if mode == "rows" else self.P)
        options = {}
        if mode != "rows":
            options["conv_state_indices"] = self.slots[:, 0]
        if mode == "moved":
            options["initial_state_indices"] = self.slots[:, 1]
        if mode == "verify":
            gen = torch.Generator().manual_seed(choices["seed"])
            accepted = torch.randint(0, columns - W + 4, (self.N,), generator=gen)
            accepted[0] = (int(accepted[0]), -1, 1 << 30)[choices["seed"] % 3]
            self.accepted = accepted.tolist()
            options["num_accepted_tokens"] = accepted.to(choices["index_dtype"]).to(device)
        self.flat = self.T == 1 and choices["seed"] % 2 == 0 and not self.packed  # [N, C]
        x = self.x[0].t() if self.packed else self.x[..., 0] if self.flat else self.x
        self.arguments = {"x": x, "conv_state": self.states, "weight": self.weight, **self.options, **options}

    def as_tokens(self, out):
        return out[None] if self.packed else out[:, None] if self.flat else out.mT

    def check(self, out):
        W, L, mode = self.choices["W"], self.columns, self.mode
        befores, expected = [], {}
        for n, tokens in enumerate(self.sequences()):
            written = n if mode == "rows" else self.written[n]
            read = self.read[n] if mode == "moved" else written
            first = self.accepted[n] - 1 if mode == "verify" else L - W + 1
            if not (mode == "rows" or self.is_slot(read, self.P)) or not 0 <= first <= L - W + 1:
                befores.append(None)
                continue
            state = self.before[read].t()
            before = state[first : first + W - 1]
            befores.append(before)
            if not len(tokens) or not (mode == "rows" or self.is_slot(written, self.P)):
                continue
            if mode == "verify":
                new = self.before[written].t().clone()
                new[: W - 2] = before[1:]
                kept = tokens[: L - W + 2]
                new[W - 2 : W - 2 + len(kept)] = kept
            else:
                new = torch.cat([state, tokens])[-L:]
            expected[written] = new.t()
        self.check_out(out, befores)
        self.check_pool(self.states, expected)
