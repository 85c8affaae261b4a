"""Recurrent gated delta rule for decode and verify: contract, checks, and the policy that picks an implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from .._device import device_target
from .._dispatch import Eligibility, Implementation, dispatch, pick
from ._check import dtype_name
from ._recurrent_gdn_call import RecurrentGdnCall, check

_OPERATOR = "fused_recurrent_gated_delta_rule"


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    *,
    A_log: Tensor | None = None,
    a: Tensor | None = None,
    b: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    state_indices: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    padding_index: int = -1,
    intermediate_states_buffer: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule over one or a few tokens a sequence: decode, and verify of speculated tokens.

    For every sequence and v head, with a state S of shape [K, V], token by token::

        S <- exp(g) S
        u  = beta (v - S^T k)
        S <- S + k u^T
        o  = scale S^T q

    ``chunk_gated_delta_rule`` computes the same for long sequences. NaN or inf in one sequence never reaches another.

    Sizes: B batches, T tokens, H heads of q and k, HV heads of v (a multiple of H: q/k head ``h`` serves the v heads
    ``h * HV/H`` to ``(h + 1) * HV/H - 1``), K and V head sizes, N sequences (B, or ``len(cu_seqlens) - 1``),
    P slots of a state pool, S tokens of a sequence whose states are kept.

    Where states are read and written:

    * Without ``state_indices``: read from row ``n`` of ``initial_state``; the states after the last token are new.
    * ``state_indices [N]`` (decode): read from and, after the last token, written to slot ``state_indices[n]``.
    * ``state_indices [N, S]`` (verify): read from slot ``state_indices[n, num_accepted_tokens[n] - 1]``; after token
      ``t < S`` written to slot ``state_indices[n, t]``.
    * ``intermediate_states_buffer`` (verify): read as without it; the pool stays as it is, and the state after token
      ``t < S`` goes to ``intermediate_states_buffer[intermediate_state_indices[n], t]``.

    A state is rounded to its dtype after each token, whether it is stored or not: many tokens in a call give bit for
    bit what as many calls of one token give, so verify equals decode.

    An index is padding if it equals ``padding_index`` or lies outside of its range. A sequence is padding if the slot
    to be read is, or if its number of accepted tokens is outside of [1, S]: its outputs are 0 and nothing is written
    for it. A slot to be written that is padding is left out. A sequence without tokens leaves its slots as they are.

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
        A_log: ``[HV]``, with ``a``, ``b`` and ``dt_bias`` in place of ``g`` and ``beta``: then
            ``g = -exp(A_log) softplus(a + dt_bias)``, where softplus(x) is x above 20, and ``beta = sigmoid(b)``,
            both in float32. Dtypes as for g.
        a: ``[B, T, HV]`` or ``[B * T, HV]``.
        b: ``[B, T, HV]`` or ``[B * T, HV]``.
        dt_bias: ``[HV]``.
        use_qk_l2norm_in_kernel: Divide q and k by ``sqrt(sum(x * x) + 1e-6)`` over K first.
        cu_seqlens: Offsets ``[N + 1]`` of packed sequences, rising from 0, int32 or int64, contiguous, on the device
            of q; B must be 1 and N at least 1. Lengths of 0 are allowed. Tokens from ``cu_seqlens[-1]`` on are
            padding: their outputs are 0. On a GPU the values are not checked: sequence ``i`` runs from
            ``cu_seqlens[i]`` clamped to [0, T] to ``cu_seqlens[i + 1]`` clamped to [start, T]. On a CPU malformed
            offsets are an error.
        state_v_first: States are ``[., HV, V, K]`` instead of ``[., HV, K, V]``, in the buffer too.
        state_indices: Slots ``[N]`` or ``[N, S]`` in the pool ``initial_state``, int32 or int64, any strides, each
            slot in one row at most. The pool is read and written in place, outside of autograd.
        initial_state_indices: Slots ``[N]`` to read instead, where they differ from those that are written; int32 or
            int64.
        num_accepted_tokens: How many tokens ``[N]`` of the step before were accepted, int32 or int64; 1 if None.
        padding_index: An index that marks padding, beside those outside of [0, P). With 0 slot 0 is never used.
        intermediate_states_buffer: ``[R, S, HV, K, V]`` for the states after each token, dtype of ``initial_state``.
        intermediate_state_indices: Row ``[N]`` of each sequence in the buffer, int32 or int64; row ``n`` if None. The
            range is [0, R), and ``padding_index`` does not count here.

    Returns:
        ``(o, final_state)``.

        o: ``[B, T, HV, V]`` of v's dtype. float16 outputs out of its range become its largest number, not inf.
        final_state: None without ``output_final_state``; the pool with ``state_indices``; else a new
            ``[N, HV, K, V]`` of the dtype of ``initial_state``, or float32.

    Raises:
        TypeError: an argument has a type or dtype that is not accepted.
        ValueError: shapes, devices or options do not fit each other.
        RuntimeError: no kernel serves a call on a GPU and the environment has ``ATREX_REQUIRE_KERNEL=1``.

    A call that no kernel serves runs on a PyTorch fallback, on a GPU with one warning a reason;
    ``can_use_fused_recurrent_gated_delta_rule`` tells. The fallback alone takes float32, gradients, and float64:
    float64 q, k and v are computed in float64, and gates and states may be float64 with them. Everything else is
    computed in float32 there. On a GPU the fallback waits for the values of the integer tensors, and cannot be captured
    in a graph.
    """
    call = check(
        q, k, v, g, beta, scale, initial_state, output_final_state, A_log, a, b, dt_bias, use_qk_l2norm_in_kernel,
        cu_seqlens, state_v_first, state_indices, initial_state_indices, num_accepted_tokens, padding_index,
        intermediate_states_buffer, intermediate_state_indices,
    )  # fmt: skip
    return dispatch(_OPERATOR, _POLICY, _fallback, q.device, call)


def can_use_fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    *,
    A_log: Tensor | None = None,
    a: Tensor | None = None,
    b: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    state_indices: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    padding_index: int = -1,
    intermediate_states_buffer: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
) -> Eligibility:
    """Whether a kernel, not the fallback, would serve ``fused_recurrent_gated_delta_rule`` with the same arguments.

    Reads metadata only: it compiles, allocates and launches nothing, and changes no tensor.

    Returns:
        A truthy or falsy object with ``.target``, the hardware target as ``vendor/arch``, and ``.reason``, why not.
        A call that ``fused_recurrent_gated_delta_rule`` would reject is not eligible, for the reason that its error
        gives.
    """
    try:
        call = check(
            q, k, v, g, beta, scale, initial_state, output_final_state, A_log, a, b, dt_bias, use_qk_l2norm_in_kernel,
            cu_seqlens, state_v_first, state_indices, initial_state_indices, num_accepted_tokens, padding_index,
            intermediate_states_buffer, intermediate_state_indices,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        target = str(device_target(q.device)) if isinstance(q, Tensor) else "unknown"
        return Eligibility(False, target, str(error))
    return pick(_POLICY, q.device, call)[1]


def _fallback(call: RecurrentGdnCall) -> tuple[Tensor, Tensor | None]:
    # An import statement, because torch.compile traces it.
    from ..fallback import recurrent_gdn

    return recurrent_gdn.fused_recurrent_gated_delta_rule(call)


_HALF_DTYPES = (torch.bfloat16, torch.float16)
_SM90 = "nvidia/sm90"
_SM90_SERVES = Eligibility(True, _SM90, "")


def _supports_sm90(call: RecurrentGdnCall) -> Eligibility:
    dtype, initial_state, buffer = call.q.dtype, call.initial_state, call.buffer
    if dtype not in _HALF_DTYPES or call.k.dtype is not dtype or call.v.dtype is not dtype:
        got = ", ".join(dtype_name(x.dtype) for x in (call.q, call.k, call.v))
        return Eligibility(False, _SM90, f"q, k and v must be all bfloat16 or all float16, got {got}")
    if call.K != 128 or call.V != 128:
        return Eligibility(False, _SM90, f"q, k and v must have head sizes K=V=128, got K={call.K}, V={call.V}")
    if call.needs_grad:
        return Eligibility(False, _SM90, "no input may require grad in grad mode: the kernels have no backward")
    if initial_state is not None and not _in_vectors(initial_state, call.HV):
        return Eligibility(False, _SM90, _reason("initial_state", initial_state))
    if buffer is not None and not _in_vectors(buffer, call.HV):
        return Eligibility(False, _SM90, _reason("intermediate_states_buffer", buffer))
    return _SM90_SERVES


def _in_vectors(states: Tensor, HV: int) -> bool:
    """Whether the states of a sequence or slot lie in one piece, each piece on the 16-byte grid."""
    strides = states.stride()
    off_grid = 16 // states.element_size() - 1
    return (
        strides[-2:] == (128, 1)
        and (strides[-3] == 128 * 128 or HV == 1)
        and not (strides[0] | strides[-4] | states.storage_offset()) & off_grid
    )


def _reason(name: str, states: Tensor) -> str:
    return (
        f"{name} must be contiguous within a sequence or slot and start at multiples of 16 bytes, got strides "
        f"{states.stride()} of {dtype_name(states.dtype)} at offset {states.storage_offset()}"
    )


_POLICY = (
    Implementation(
        "nvidia",
        "sm90",
        _supports_sm90,
        "atrex.kernels.nvidia.recurrent_gdn.sm90.runtime:fused_recurrent_gated_delta_rule",
    ),
)
