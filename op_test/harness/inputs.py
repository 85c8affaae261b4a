"""Inputs of the gated delta rule, fresh from a seed."""

import torch
import torch.nn.functional as F

GATES = ("mixed", "none", "strong", "resets")
LAYOUTS = ("contiguous", "split", "heads_first", "transposed", "misaligned")


def make_gates(gen, shape, regime, device):
    """Log decay ``[B, T, HV]``, float32."""
    randn = torch.randn(shape, device=device, generator=gen)
    if regime == "none":
        return torch.zeros_like(randn)
    if regime == "strong":  # down to about -10 a token: exp of a chunk's sum underflows
        return F.logsigmoid(3 * randn) * 2
    g = F.logsigmoid(randn) / 16
    g[..., : max(1, shape[-1] // 4)] = 0  # heads that never decay keep every error
    if regime == "resets":
        where = torch.rand(shape, device=device, generator=gen)
        g = g.masked_fill(where < 0.03, float("-inf")).masked_fill((where > 0.03) & (where < 0.05), -1e4)
    return g


def lay_out(x, layout):
    """The values of ``x`` ``[B, T, heads, D]`` in memory as ``layout`` says; what lies between them is NaN."""
    if layout == "contiguous":
        return x.contiguous()
    B, T, heads, D = x.shape
    if layout == "split":  # one of several neighbours in a row, as torch.split of a convolution's output
        view = _nan(x, B, T, 8 + heads * D + 24)[..., 8 : 8 + heads * D].unflatten(-1, (heads, D))
    elif layout == "heads_first":  # steps grow from batch entries over tokens to heads
        view = _nan(x, heads, T, B, D + 8)[..., :D].permute(2, 1, 0, 3)
    elif layout == "transposed":  # no dimension is contiguous
        view = _nan(x, B, heads, D, T + 1, 2)[..., :T, 1].permute(0, 3, 1, 2)
    elif layout == "misaligned":  # off the 16-byte grid by one element
        view = _nan(x, x.numel() + 1)[1:].view(x.shape)
    else:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")
    return view.copy_(x)


def _nan(like, *shape):
    return torch.full(shape, float("nan"), dtype=like.dtype, device=like.device)


def make_inputs(B, T, H, HV, K=128, V=128, *, seed, device, dtype=torch.bfloat16, gate_dtype=torch.float32,
                gates="mixed", layout="contiguous", correlated=False, unit_keys=True):  # fmt: skip
    """q, k, v, g, beta. ``correlated`` keys share a direction, which makes the 64 x 64 systems ill-conditioned."""
    gen = torch.Generator(device).manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, device=device, generator=gen)

    q, k, v = randn(B, T, H, K), randn(B, T, H, K), randn(B, T, HV, V)
    if correlated:
        k = 0.3 * k + 2 * randn(1, 1, H, K)
    if unit_keys:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    q, k, v = (lay_out(x.to(dtype), layout) for x in (q, k, v))
    g = make_gates(gen, (B, T, HV), gates, device).to(gate_dtype)
    return q, k, v, g, randn(B, T, HV).sigmoid().to(gate_dtype)


def make_states(N, HV, K=128, V=128, *, seed, device, dtype=torch.float32, v_first=False):
    """Initial states, as different in K as in V, so that a transposed layout cannot pass."""
    gen = torch.Generator(device).manual_seed(seed)
    states = 0.3 * torch.randn(N, HV, K, V, device=device, generator=gen) * torch.linspace(0.2, 1.8, V, device=device)
    return (states.mT.contiguous() if v_first else states).to(dtype)


def offsets(lengths, device, dtype=torch.int32):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=dtype, device=device)
