"""The checked call that ``api/gdn_prepare.py`` hands to an implementation, and its checks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ._check import DOUBLE_DTYPES, SINGLE_DTYPES, check_tensor, not_a_tensor, wrong_dtype, wrong_shape


class GdnPrepareCall(NamedTuple):
    """Arguments of ``gdn_prepare`` after their checks, and the sizes.

    An implementation returns ``(q, k, v, g, beta)``: v a view of ``conv_output``, so are q and k without
    ``apply_l2norm``; all others new and contiguous.

    Guaranteed: all tensors on one device, shapes and dtypes of the public docstring. Not guaranteed: strides and
    alignment.
    """

    conv_output: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor
    apply_l2norm: bool
    H: int
    HV: int
    K: int
    V: int
    needs_grad: bool  # grad mode is on and an input requires grad


def check(
    conv_output: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    num_k_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    apply_l2norm: bool,
) -> GdnPrepareCall:
    """Reject what the contract rejects. This runs before every launch: nothing is formatted on the good path."""
    if not isinstance(conv_output, Tensor):
        raise not_a_tensor("conv_output", conv_output)
    device, dtype = conv_output.device, conv_output.dtype
    inputs, gates, _ = DOUBLE_DTYPES if dtype is torch.float64 else SINGLE_DTYPES
    if dtype not in inputs:
        raise wrong_dtype("conv_output", conv_output, inputs)
    H, K, V = num_k_heads, head_k_dim, head_v_dim
    if not (type(H) is int and type(K) is int and type(V) is int and H >= 1 and K >= 1 and V >= 1):
        raise _wrong_size(num_k_heads=H, head_k_dim=K, head_v_dim=V)
    shape = conv_output.shape
    if len(shape) not in (2, 3):
        raise wrong_shape("conv_output", conv_output, "[T, C] or [B, T, C]")
    *tokens, C = shape
    HV, rest = divmod(C - 2 * H * K, V)
    if rest or HV < 1 or HV % H:
        accepted = f"[T, C] or [B, T, C] with C=2*H*K+HV*V, H={H}, K={K}, V={V} and HV a multiple of H"
        raise wrong_shape("conv_output", conv_output, accepted)
    each, heads = (*tokens, HV), (HV,)
    _check_gate("a", a, device, gates, each)
    _check_gate("b", b, device, gates, each)
    _check_gate("A_log", A_log, device, gates, heads)
    _check_gate("dt_bias", dt_bias, device, gates, heads)
    needs_grad = torch.is_grad_enabled() and (
        conv_output.requires_grad or a.requires_grad or b.requires_grad or A_log.requires_grad or dt_bias.requires_grad
    )
    return GdnPrepareCall._make((conv_output, a, b, A_log, dt_bias, bool(apply_l2norm), H, HV, K, V, needs_grad))


def _wrong_size(**sizes: object) -> TypeError | ValueError:
    """The error for the first of ``sizes`` that is none."""
    name, size = next((name, size) for name, size in sizes.items() if type(size) is not int or size < 1)
    if type(size) is not int:
        return TypeError(f"{name} must be an int, got {type(size).__name__}")
    return ValueError(f"{name} must be at least 1, got {size}")


def _check_gate(
    name: str, x: object, device: torch.device, accepted: frozenset[torch.dtype], shape: tuple[int, ...]
) -> None:
    if isinstance(x, Tensor) and x.device == device and x.dtype in accepted and x.shape == shape:
        return
    check_tensor(name, x, device, accepted, "conv_output")
    names = ("B", "T", "HV")[-len(shape) :] if len(shape) > 1 else ("HV",)
    raise wrong_shape(name, x, f"[{', '.join(f'{n}={size}' for n, size in zip(names, shape, strict=True))}]")
