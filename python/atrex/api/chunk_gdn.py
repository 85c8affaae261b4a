"""Chunked prefill of the gated delta rule: contract, checks, and the policy that picks an implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._device import device_target
from .._dispatch import Eligibility, Implementation, dispatch, pick
from ._check import dtype_name
from ._chunk_gdn_call import ChunkGdnCall, check

_OPERATOR = "chunk_gated_delta_rule"


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    state_indices: Tensor | None = None,
    checkpoint_every: int = 0,
    head_first: bool = False,
) -> tuple[Any, ...]:
    """Gated delta rule over whole sequences (prefill), as Qwen3-Next's linear attention layers use it.

    For every sequence and v head, with a state S of shape [K, V], token by token::

        S <- exp(g) S
        u  = beta (v - S^T k)
        S <- S + k u^T
        o  = scale S^T q

    This is the recurrence of Gated Delta Networks (arXiv 2412.06464), computed 64 tokens at a time. A ``g`` of -inf
    resets the state. NaN or inf in one sequence never reaches another.

    Sizes: B batches, T tokens, H heads of q and k, HV heads of v (a multiple of H: q/k head ``h`` serves the v heads
    ``h * HV/H`` to ``(h + 1) * HV/H - 1``), K and V head sizes, N sequences (B, or ``len(cu_seqlens) - 1``),
    P slots of a state pool.

    Args:
        q: Queries ``[B, T, H, K]``; bfloat16, float16, float32 or float64, any strides.
        k: Keys ``[B, T, H, K]``; dtypes and strides as for q.
        v: Values ``[B, T, HV, V]``; dtypes and strides as for q.
        g: Decay ``[B, T, HV]`` in log space (natural logarithm, at most 0); float32, bfloat16 or float16.
        beta: Write strength ``[B, T, HV]``, usually in [0, 1]; float32, bfloat16 or float16.
        scale: Factor on the outputs; ``K ** -0.5`` if None. 0.0 means 0.0.
        initial_state: States before the first token, ``[N, HV, K, V]``, or the pool ``[P, HV, K, V]`` if there are
            ``state_indices``; float32 or bfloat16, any strides. Zeros if None.
        output_final_state: Whether to return the states after the last token.
        use_qk_l2norm_in_kernel: Divide q and k by ``sqrt(sum(x * x) + 1e-6)`` over K first.
        cu_seqlens: Offsets ``[N + 1]`` of packed sequences, rising from 0, int32 or int64, contiguous, on the device
            of q; B must be 1 and N at least 1. Lengths of 0 are allowed. Tokens from ``cu_seqlens[-1]`` on are
            padding: their outputs are 0. Malformed offsets are an error on a CPU. On a GPU nobody reads them back:
            the results then mean nothing, but no memory outside of the tensors is read or written.
        state_v_first: States are ``[., HV, V, K]`` instead of ``[., HV, K, V]``: initial, final and checkpoints.
        state_indices: Slot ``[N]`` of each sequence in the pool ``initial_state``, int32 or int64, contiguous, each
            slot at most once. The pool is read and written in place, outside of autograd. An index outside of
            [0, P), such as -1, marks padding: the outputs and checkpoints of that sequence are 0 and the pool stays
            as it is.
        checkpoint_every: Also return the states after each so many tokens of each sequence; a multiple of 64, or 0
            for none.
        head_first: Not accepted; there for callers who pass False by name.

    Returns:
        ``(o, final_state)``, or ``(o, final_state, checkpoints)`` if ``checkpoint_every`` is not 0.

        o: ``[B, T, HV, V]`` of v's dtype.
        final_state: None without ``output_final_state``; the pool with ``state_indices``; else a new
            ``[N, HV, K, V]`` of the dtype of ``initial_state``, or float32.
        checkpoints: ``[B * (T // checkpoint_every), HV, K, V]``, dtype and layout as ``final_state``. The states of a
            sequence follow those of the sequence before it: sequence ``i`` starts at the sum of
            ``len_j // checkpoint_every`` over ``j < i``; rows that are left over are 0.

    Raises:
        TypeError: an argument has a type or dtype that is not accepted.
        ValueError: shapes, devices or options do not fit each other.
        RuntimeError: no kernel serves a call on a GPU and the environment has ``ATREX_REQUIRE_KERNEL=1``.

    A call that no kernel serves runs on a PyTorch fallback, on a GPU with one warning a reason;
    ``can_use_chunk_gated_delta_rule`` tells. The fallback alone takes float32, gradients, and float64: float64 q, k
    and v are computed in float64, and g, beta and the states may be float64 with them. Everything else is computed
    in float32 there. On a GPU the fallback waits for the values of ``cu_seqlens`` and ``state_indices``, and cannot be
    captured in a graph.
    """
    call = check(
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens,
        state_v_first, state_indices, checkpoint_every, head_first,
    )  # fmt: skip
    if torch.compiler.is_compiling() and not call.needs_grad:
        from ._chunk_gdn_ops import call_compiled

        o, final_state, checkpoints = call_compiled(call)
    else:
        o, final_state, checkpoints = run(call)
    return (o, final_state, checkpoints) if checkpoint_every else (o, final_state)


def can_use_chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    state_indices: Tensor | None = None,
    checkpoint_every: int = 0,
    head_first: bool = False,
) -> Eligibility:
    """Whether a kernel, not the fallback, would serve ``chunk_gated_delta_rule`` with the same arguments.

    Reads metadata only: it compiles, allocates and launches nothing, and changes no tensor.

    Returns:
        A truthy or falsy object with ``.target``, the hardware target as ``vendor/arch``, and ``.reason``, why not.
        A call that ``chunk_gated_delta_rule`` would reject is not eligible, for the reason that its error gives.
    """
    try:
        call = check(
            q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens,
            state_v_first, state_indices, checkpoint_every, head_first,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        target = str(device_target(q.device)) if isinstance(q, Tensor) else "unknown"
        return Eligibility(False, target, str(error))
    return pick(_POLICY, q.device, call)[1]


def run(call: ChunkGdnCall) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Serve a checked call with the implementation that the policy picks."""
    return dispatch(_OPERATOR, _POLICY, _fallback, call.q.device, call)


def _fallback(call: ChunkGdnCall) -> tuple[Tensor, Tensor | None, Tensor | None]:
    # An import statement, because torch.compile traces it: inputs that require grad do not go through an operator.
    from ..fallback import chunk_gdn

    return chunk_gdn.chunk_gated_delta_rule(call)


_HALF_DTYPES = (torch.bfloat16, torch.float16)


def _supports(target: str) -> Callable[[ChunkGdnCall], Eligibility]:
    """The eligibility of a call on ``target``: the kernels of all targets take the same calls."""
    serves = Eligibility(True, target, "")

    def supports(call: ChunkGdnCall) -> Eligibility:
        dtype = call.q.dtype
        if dtype not in _HALF_DTYPES or call.k.dtype is not dtype or call.v.dtype is not dtype:
            got = ", ".join(dtype_name(x.dtype) for x in (call.q, call.k, call.v))
            return Eligibility(False, target, f"q, k and v must be all bfloat16 or all float16, got {got}")
        if call.K != 128 or call.V != 128:
            return Eligibility(False, target, f"q, k and v must have head sizes K=V=128, got K={call.K}, V={call.V}")
        if call.needs_grad:
            return Eligibility(False, target, "no input may require grad in grad mode: the kernels have no backward")
        if call.initial_state is not None:
            stride = call.initial_state.stride()  # whatever from one sequence or slot to the next
            if stride[2:] != (128, 1) or (stride[1] != 128 * 128 and call.HV > 1):
                reason = f"initial_state must be contiguous within a sequence or slot, got strides {stride}"
                return Eligibility(False, target, reason)
        return serves

    return supports


_SM90 = "atrex.kernels.nvidia.chunk_gdn.sm90.runtime:chunk_gated_delta_rule"
_SM120 = "atrex.kernels.nvidia.chunk_gdn.sm120.runtime:chunk_gated_delta_rule"

_POLICY = (
    Implementation("nvidia", "sm90", _supports("nvidia/sm90"), _SM90),
    Implementation("nvidia", "sm120", _supports("nvidia/sm120"), _SM120),
    # Machine code for capability 12.0 runs on 12.1.
    Implementation("nvidia", "sm121", _supports("nvidia/sm121"), _SM120),
)
