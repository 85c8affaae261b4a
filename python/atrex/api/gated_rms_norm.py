"""Gated RMS norm behind the delta rule: contract, checks, and the policy that picks an implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from .._device import device_target
from .._dispatch import Eligibility, Implementation, dispatch, pick
from ._check import dtype_name
from ._gated_rms_norm_call import GatedRmsNormCall, check, row_runs

_OPERATOR = "gated_rms_norm"


def gated_rms_norm(
    x: Tensor,
    weight: Tensor,
    z: Tensor,
    eps: float = 1e-6,
    *,
    activation: str = "silu",
    cast_before_weight: bool = False,
) -> Tensor:
    """RMS norm of the last dimension with a weight, then a gate: ``x rsqrt(mean(x x) + eps) weight act(z)``.

    The norm behind the delta rule in Qwen3-Next and Qwen3.5, where a row is a head of a token. NaN or inf in one row
    never reaches another.

    Args:
        x: ``[*, D]``; bfloat16, float16, float32 or float64, any strides.
        weight: ``[D]``; bfloat16, float16 or float32, float64 if x is. It is the factor itself, not one less.
        z: Gate ``[*, D]`` with as many rows as x, in the same order: ``[T, HV, D]`` fits to ``[T * HV, D]``. Dtypes as
            for weight, any strides.
        eps: Added to the mean of the squares.
        activation: Of the gate: ``"silu"`` (also ``"swish"``), ``z sigmoid(z)``; or ``"sigmoid"``.
        cast_before_weight: Which of two roundings. False, as FLA, vLLM, SGLang and rtp-llm: float32 to the end. True,
            as transformers: the normalised x is rounded to the dtype of x, and its product with the weight to the
            dtype that the two dtypes promote to; the gate in float32 follows. They differ by about a unit in the last
            place of bfloat16.

    Returns:
        A new contiguous tensor with the shape and dtype of x.

    Raises:
        TypeError: an argument has a type or dtype that is not accepted.
        ValueError: shapes or devices do not fit each other, or the activation is unknown.
        RuntimeError: no kernel serves a call on a GPU and the environment has ``ATREX_REQUIRE_KERNEL=1``.

    A call that no kernel serves runs on a PyTorch fallback, on a GPU with one warning a reason;
    ``can_use_gated_rms_norm`` tells. The fallback alone takes float32, gradients, and float64, which is computed in
    float64.
    """
    call = check(x, weight, z, eps, activation, cast_before_weight)
    return dispatch(_OPERATOR, _POLICY, _fallback, x.device, call)


def can_use_gated_rms_norm(
    x: Tensor,
    weight: Tensor,
    z: Tensor,
    eps: float = 1e-6,
    *,
    activation: str = "silu",
    cast_before_weight: bool = False,
) -> Eligibility:
    """Whether a kernel, not the fallback, would serve ``gated_rms_norm`` with the same arguments.

    Reads metadata only: it compiles, allocates and launches nothing, and changes no tensor.

    Returns:
        A truthy or falsy object with ``.target``, the hardware target as ``vendor/arch``, and ``.reason``, why not.
        A call that ``gated_rms_norm`` would reject is not eligible, for the reason that its error gives.
    """
    try:
        call = check(x, weight, z, eps, activation, cast_before_weight)
    except (TypeError, ValueError) as error:
        target = str(device_target(x.device)) if isinstance(x, Tensor) else "unknown"
        return Eligibility(False, target, str(error))
    return pick(_POLICY, x.device, call)[1]


def _fallback(call: GatedRmsNormCall) -> Tensor:
    # An import statement, because torch.compile traces it.
    from ..fallback import gated_rms_norm

    return gated_rms_norm.gated_rms_norm(call)


_HALF_DTYPES = (torch.bfloat16, torch.float16)
_SM90 = "nvidia/sm90"
_SM90_SERVES = Eligibility(True, _SM90, "")


def _supports_sm90(call: GatedRmsNormCall) -> Eligibility:
    x, z, weight = call.x, call.z, call.weight
    dtype = x.dtype
    if dtype not in _HALF_DTYPES or z.dtype is not dtype:
        got = f"{dtype_name(dtype)}, {dtype_name(z.dtype)}"
        return Eligibility(False, _SM90, f"x and z must be both bfloat16 or both float16, got {got}")
    if call.D != 128:
        return Eligibility(False, _SM90, f"x must have rows of D=128, got D={call.D}")
    if call.needs_grad:
        return Eligibility(False, _SM90, "no input may require grad in grad mode: the kernels have no backward")
    if not (_in_vectors(x) and _in_vectors(z)):
        name, one = ("z", z) if _in_vectors(x) else ("x", x)
        reason = (
            f"{name} must have contiguous rows on the 16-byte grid, at most two strides from row to row, got shape "
            f"{list(one.shape)}, strides {one.stride()}, offset {one.storage_offset()}"
        )
        return Eligibility(False, _SM90, reason)
    if weight.stride() != (1,) or weight.data_ptr() & 15:
        reason = (
            f"weight must be contiguous on the 16-byte grid, got stride {weight.stride(0)}, "
            f"offset {weight.storage_offset()}"
        )
        return Eligibility(False, _SM90, reason)
    return _SM90_SERVES


def _in_vectors(x: Tensor) -> bool:
    """Whether rows of 16-bit elements can be read in 16-byte vectors and found by a division of their number."""
    if x.data_ptr() & 15:
        return False
    if x.is_contiguous():
        return True
    strides = x.stride()
    if strides[-1] != 1:
        return False
    runs = row_runs(x.shape, strides)
    return not runs or (len(runs) <= 2 and not (runs[0][1] | runs[-1][1]) & 7)


_POLICY = (
    Implementation("nvidia", "sm90", _supports_sm90, "atrex.kernels.nvidia.gated_rms_norm.sm90.runtime:gated_rms_norm"),
)
