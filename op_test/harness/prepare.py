"""A call of gdn_prepare with any of its options, and what it must return."""

import torch
import torch.nn.functional as F

from .compare import assert_heads_close
from .inputs import lay_out

LIMITS = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}

CHOICES = {
    "tokens": ([1, 1], [2, 3], [1, 130], [3, 17], [2, 0], [7], [1]),  # [B, T] or [T]
    "padded": (False, True),  # columns of something else beside those of the convolution, and of the gates
    "gate_dtype": (torch.float32, torch.bfloat16, torch.float16),
    "parameter_dtype": (torch.float32, torch.bfloat16, torch.float16),
    "apply_l2norm": (True, True, False),
}


def make_gates(tokens, HV, *, gen, device, dtype, parameter_dtype, padded):
    """a and b as neighbours in one projection, A_log and dt_bias, with a + dt_bias on both sides of every limit."""
    both = 3 * torch.randn(*tokens, 2 * HV + 3 * padded, generator=gen, device=device)
    if both.numel():
        large = torch.tensor([19.0, 21.0, 89.0, 2e4, -50.0, -2e4], device=device)
        flat = both.view(-1)
        flat[: min(6, flat.numel())] = large[: flat.numel()]
    both = both.to(dtype)
    A_log, dt_bias = (torch.randn(HV, generator=gen, device=device).to(parameter_dtype) for _ in range(2))
    return both[..., :HV], both[..., HV : 2 * HV], A_log, dt_bias


class Case:
    """``choices`` holds one of each of CHOICES, and H, HV, K, V, dtype and seed; ``arguments`` are the call's."""

    def __init__(self, choices, device):
        self.choices = choices
        tokens, H, HV, K, V = (choices[name] for name in ("tokens", "H", "HV", "K", "V"))
        gen = torch.Generator(device).manual_seed(choices["seed"])
        C = 2 * H * K + HV * V
        x = torch.randn(*tokens, C, generator=gen, device=device).to(choices["dtype"])
        if choices["padded"]:
            B, T = (1, *tokens)[-2:]
            x = lay_out(x.view(B, T, 1, C), "split").view(*tokens, C)
        a, b, A_log, dt_bias = make_gates(
            tokens, HV, gen=gen, device=device, dtype=choices["gate_dtype"],
            parameter_dtype=choices["parameter_dtype"], padded=choices["padded"],
        )  # fmt: skip
        self.arguments = {
            "conv_output": x, "a": a, "b": b, "A_log": A_log, "dt_bias": dt_bias, "num_k_heads": H, "head_k_dim": K,
            "head_v_dim": V, "apply_l2norm": choices["apply_l2norm"],
        }  # fmt: skip

    def check(self, q, k, v, g, beta, views=True):
        """``views``: whether what shares the input's memory must do so."""
        x, tokens = self.arguments["conv_output"], tuple(self.choices["tokens"])
        H, HV, K, V = (self.choices[name] for name in ("H", "HV", "K", "V"))
        l2norm = self.arguments["apply_l2norm"]
        for i, got in enumerate((q, k)):
            want = x[..., i * H * K : (i + 1) * H * K].reshape(*tokens, H, K)
            if l2norm:
                assert got.is_contiguous() and got.dtype is x.dtype
                double = want.double()
                want = double / (double.square().sum(-1, keepdim=True) + 1e-6).sqrt()
                assert_heads_close("qk"[i], got, want, len(tokens), LIMITS[x.dtype])
            else:
                assert torch.equal(got, want) and (shares(got, x) or not views)
        assert torch.equal(v, x[..., 2 * H * K :].reshape(*tokens, HV, V)) and (shares(v, x) or not views)
        a, b, A_log, dt_bias = (self.arguments[name].double() for name in ("a", "b", "A_log", "dt_bias"))
        want_g = -A_log.exp() * F.softplus(a + dt_bias)
        dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
        for name, got, want in (("g", g, want_g), ("beta", beta, b.sigmoid())):
            assert got.dtype is dtype and got.is_contiguous() and got.shape == (*tokens, HV)
            # a + dt_bias loses digits where it cancels: exp of it is off by as much.
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-30, msg=lambda m, n=name: f"{n}: {m}")


def shares(view, x):
    """Whether ``view`` lies in the memory of ``x``; nobody can say so of nothing."""
    return x.numel() == 0 or view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
