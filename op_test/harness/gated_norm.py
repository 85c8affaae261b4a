"""A call of gated_rms_norm with any of its options, and what it must return."""

import torch

from .compare import assert_heads_close
from .inputs import lay_out

# Relative L2 of a row: float32 arithmetic, and a result rounded to bfloat16 or float16.
LIMITS = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}

CHOICES = {
    "shape": ([1, 1, 1], [2, 3, 4], [1, 5, 3], [3, 1, 32], [1, 0, 4], [1, 67, 2]),
    "x_layout": ("contiguous", "split"),
    "z_layout": ("contiguous", "split"),
    "flat": (None, "x", "both"),  # tokens and heads in one dimension
    "weight_dtype": (torch.float32, torch.bfloat16, torch.float16),
    "activation": ("silu", "swish", "sigmoid"),
    "cast_before_weight": (False, True),
    "eps": (1e-6, 1e-5, 0.1),
}


def expected(x, weight, z, eps, activation, cast_before_weight):
    """The result in float64, rounded only where ``cast_before_weight`` says so."""
    y, gate = x.double(), z.double().reshape(x.shape)
    y = y / (y.square().mean(-1, keepdim=True) + eps).sqrt()
    if cast_before_weight:
        y = y.to(x.dtype).double() * weight.double()
        y = y.to(torch.promote_types(x.dtype, weight.dtype)).double()
    else:
        y = y * weight.double()
    return y * (gate.sigmoid() if activation == "sigmoid" else gate * gate.sigmoid())


def differing(got, want):
    """The share of elements that are not the nearest ones to ``want``."""
    return (got != want.to(got.dtype)).double().mean().item()


def make_tensors(shape, D, *, seed, device, dtype=torch.bfloat16, weight_dtype=None, x_layout="contiguous",
                 z_layout="contiguous"):  # fmt: skip
    """x ``[*shape, D]`` with rows of very different sizes, weight, z."""
    gen = torch.Generator(device).manual_seed(seed)

    def randn(*size):
        return torch.randn(*size, generator=gen, device=device)

    sizes = 10.0 ** torch.randint(-3, 2, (*shape, 1), generator=gen, device=device)
    x, z = lay_out((randn(*shape, D) * sizes).to(dtype), x_layout), lay_out(3 * randn(*shape, D).to(dtype), z_layout)
    return x, (1 + 0.3 * randn(D)).to(weight_dtype or dtype), z


class Case:
    """``choices`` holds one of each of CHOICES, and D, dtype and seed; ``arguments`` are those of the call."""

    def __init__(self, choices, device):
        self.choices = choices
        names = ("dtype", "weight_dtype", "x_layout", "z_layout", "seed")
        x, weight, z = make_tensors(
            choices["shape"], choices["D"], device=device, **{name: choices[name] for name in names}
        )  # fmt: skip
        self.arguments = {
            "x": x.flatten(0, 2) if choices["flat"] else x,
            "weight": weight,
            "z": z.flatten(0, 2) if choices["flat"] == "both" else z,
            **{name: choices[name] for name in ("eps", "activation", "cast_before_weight")},
        }

    def check(self, out):
        x = self.arguments["x"]
        assert out.dtype is x.dtype and out.is_contiguous() and out.shape == x.shape
        want, D = expected(**self.arguments), self.choices["D"]
        got = out.double()
        if out.dtype is torch.float16:  # its smallest numbers are further apart than a share of them
            got = torch.where((got - want).abs() <= 2**-25, want, got)
        assert_heads_close("out", got.view(-1, D), want.reshape(-1, D), 0, LIMITS[out.dtype])
        if out.dtype in (torch.bfloat16, torch.float16) and out.numel() > 2000:
            assert differing(out, want) < 5e-3  # the other rounding differs in more than a fifth
