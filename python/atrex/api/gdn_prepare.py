"""What lies between the convolution and the delta rule: contract, checks, and the policy for an implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from .._device import device_target
from .._dispatch import Eligibility, Implementation, dispatch, pick
from ._check import dtype_name
from ._gdn_prepare_call import GdnPrepareCall, check

_OPERATOR = "gdn_prepare"


def gdn_prepare(
    conv_output: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    num_k_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    apply_l2norm: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Inputs of the delta rule from the convolution's output: split of q, k, v, their norms, and the gates.

    Its results are what ``chunk_gated_delta_rule`` takes, as ``[B, T, ...]`` from ``[B, T, C]``;
    ``fused_recurrent_gated_delta_rule`` takes them too, and can also do all of this itself.

    Args:
        conv_output: ``[T, C]`` or ``[B, T, C]``, in which a token has its H heads of q, H heads of k and HV heads of v
            in a row: ``C = 2 * H * K + HV * V``, HV a multiple of H; bfloat16, float16, float32 or float64, any
            strides.
        a: ``[T, HV]`` or ``[B, T, HV]``; bfloat16, float16 or float32 (float64 if ``conv_output`` is), any strides.
        b: As a.
        A_log: ``[HV]``; dtypes as for a.
        dt_bias: ``[HV]``; dtypes as for a.
        num_k_heads: H.
        head_k_dim: K.
        head_v_dim: V.
        apply_l2norm: Divide q and k by ``sqrt(sum(x * x) + 1e-6)`` over K. The delta rules then need no norm of their
            own.

    Returns:
        ``(q, k, v, g, beta)``.

        q, k: ``[*, H, K]`` of the dtype of ``conv_output``, new and contiguous; without ``apply_l2norm`` views of it.
        v: ``[*, HV, V]``, a view of ``conv_output``: the delta rules read it in place, and nothing is copied.
        g: ``[*, HV]``, ``-exp(A_log) softplus(a + dt_bias)``, where softplus(x) is x above 20; float32 (float64 if
            ``conv_output`` is).
        beta: ``[*, HV]``, ``sigmoid(b)``, of the same dtype.

    Raises:
        TypeError: an argument has a type or dtype that is not accepted.
        ValueError: shapes or devices do not fit each other.
        RuntimeError: no kernel serves a call on a GPU and the environment has ``ATREX_REQUIRE_KERNEL=1``.

    A call that no kernel serves runs on a PyTorch fallback, on a GPU with one warning a reason; ``can_use_gdn_prepare``
    tells. The fallback alone takes float32 ``conv_output``, gradients, and float64, which is computed in float64.
    """
    call = check(conv_output, a, b, A_log, dt_bias, num_k_heads, head_k_dim, head_v_dim, apply_l2norm)
    return dispatch(_OPERATOR, _POLICY, _fallback, conv_output.device, call)


def can_use_gdn_prepare(
    conv_output: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    num_k_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    apply_l2norm: bool = True,
) -> Eligibility:
    """Whether a kernel, not the fallback, would serve ``gdn_prepare`` with the same arguments.

    Reads metadata only: it compiles, allocates and launches nothing, and changes no tensor.

    Returns:
        A truthy or falsy object with ``.target``, the hardware target as ``vendor/arch``, and ``.reason``, why not.
        A call that ``gdn_prepare`` would reject is not eligible, for the reason that its error gives.
    """
    try:
        call = check(conv_output, a, b, A_log, dt_bias, num_k_heads, head_k_dim, head_v_dim, apply_l2norm)
    except (TypeError, ValueError) as error:
        target = str(device_target(conv_output.device)) if isinstance(conv_output, Tensor) else "unknown"
        return Eligibility(False, target, str(error))
    return pick(_POLICY, conv_output.device, call)[1]


def _fallback(call: GdnPrepareCall) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    # An import statement, because torch.compile traces it.
    from ..fallback import gdn_prepare

    return gdn_prepare.gdn_prepare(call)


_HALF_DTYPES = (torch.bfloat16, torch.float16)
_SM90 = "nvidia/sm90"
_SM90_SERVES = Eligibility(True, _SM90, "")


def _supports_sm90(call: GdnPrepareCall) -> Eligibility:
    x = call.conv_output
    if x.dtype not in _HALF_DTYPES:
        return Eligibility(False, _SM90, f"conv_output must be bfloat16 or float16, got {dtype_name(x.dtype)}")
    if call.K != 128:
        return Eligibility(False, _SM90, f"head_k_dim must be 128, got {call.K}")
    if call.needs_grad:
        return Eligibility(False, _SM90, "no input may require grad in grad mode: the kernels have no backward")
    strides = x.stride()
    if strides[-1] != 1 or (strides[0] | strides[-2]) & 7 or x.data_ptr() & 15:
        reason = (
            f"conv_output must have contiguous channels on the 16-byte grid, got strides {strides}, "
            f"offset {x.storage_offset()}"
        )
        return Eligibility(False, _SM90, reason)
    if call.a.numel() >= 1 << 31:
        return Eligibility(False, _SM90, f"a must have fewer than 2**31 elements, got {call.a.numel()}")
    return _SM90_SERVES


_POLICY = (
    Implementation("nvidia", "sm90", _supports_sm90, "atrex.kernels.nvidia.gdn_prepare.sm90.runtime:gdn_prepare"),
)
