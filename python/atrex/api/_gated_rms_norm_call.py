"""The checked call that ``api/gated_rms_norm.py`` hands to an implementation, and its checks."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ._check import not_a_tensor, wrong_device, wrong_dtype, wrong_shape

_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
_DOUBLE = frozenset({torch.float64})
_IS_SIGMOID = {"silu": False, "swish": False, "sigmoid": True}


class GatedRmsNormCall(NamedTuple):
    """Arguments of ``gated_rms_norm`` after their checks, and the sizes.

    An implementation returns a new contiguous tensor with the shape and dtype of ``x``.

    Guaranteed: all tensors on one device, shapes and dtypes of the public docstring. Not guaranteed: strides and
    alignment.
    """

    x: Tensor
    weight: Tensor
    z: Tensor
    eps: float
    is_sigmoid: bool
    cast_before_weight: bool
    rows: int
    D: int
    needs_grad: bool  # grad mode is on and an input requires grad


def check(
    x: Tensor, weight: Tensor, z: Tensor, eps: float, activation: str, cast_before_weight: bool
) -> GatedRmsNormCall:
    """Reject what the contract rejects. This runs before every launch: nothing is formatted on the good path."""
    if not (isinstance(x, Tensor) and isinstance(weight, Tensor) and isinstance(z, Tensor)):
        named = (("x", x), ("weight", weight), ("z", z))
        raise next(not_a_tensor(name, one) for name, one in named if not isinstance(one, Tensor))
    device = x.device
    if weight.device != device:
        raise wrong_device("weight", weight, device, "x")
    if z.device != device:
        raise wrong_device("z", z, device, "x")
    dtype = x.dtype
    accepted = _DOUBLE if dtype is torch.float64 else _DTYPES
    if not (dtype in accepted and weight.dtype in accepted and z.dtype in accepted):
        named = (("x", x), ("weight", weight), ("z", z))
        raise next(wrong_dtype(name, one, accepted) for name, one in named if one.dtype not in accepted)

    x_shape, z_shape = x.shape, z.shape
    if len(x_shape) < 1 or x_shape[-1] < 1:
        raise wrong_shape("x", x, "[*, D] with D of at least 1")
    D = x_shape[-1]
    rows = x.numel() // D
    if weight.shape != (D,):
        raise wrong_shape("weight", weight, f"[D={D}]")
    if z_shape != x_shape and (len(z_shape) < 1 or z_shape[-1] != D or z.numel() != rows * D):
        raise wrong_shape("z", z, f"[*, D={D}] with {rows} rows as x")
    if isinstance(eps, bool) or not isinstance(eps, (float, int)):
        raise TypeError(f"eps must be a number, got {type(eps).__name__}")
    is_sigmoid = _IS_SIGMOID.get(activation) if isinstance(activation, str) else None
    if is_sigmoid is None:
        raise ValueError(f"activation must be 'silu', 'swish' or 'sigmoid', got {activation!r}")

    needs_grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad or z.requires_grad)
    return GatedRmsNormCall._make((
        x, weight, z, float(eps), is_sigmoid, bool(cast_before_weight), rows, D, needs_grad,
    ))  # fmt: skip


@lru_cache(maxsize=4096)  # a server's sizes differ from call to call
def row_runs(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The rows of such a tensor in as few runs as there are strides from row to row: rows and stride, inner first."""
    runs: list[tuple[int, int]] = []
    for size, stride in zip(reversed(shape[:-1]), reversed(strides[:-1]), strict=True):
        if size <= 1:
            continue
        if runs and stride == runs[-1][0] * runs[-1][1]:
            runs[-1] = (size * runs[-1][0], runs[-1][1])
        else:
            runs.append((size, stride))
    return tuple(runs)
