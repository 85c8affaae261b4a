"""Causal depthwise convolution over time, for prefill and for decode: contract, and the policies that pick.

In both, for every channel c and token t of a sequence, with W taps::

    out[c, t] = act(bias[c] + sum_j weight[c, j] * x[c, t - (W - 1) + j])

where tokens before the first are those of the state, or 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._device import device_target
from .._dispatch import Eligibility, Implementation, dispatch, pick
from ._causal_conv1d_call import PrefillCall, UpdateCall, check_prefill, check_update
from ._check import dtype_name


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    query_start_loc: Tensor | None = None,
    conv_states: Tensor | None = None,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    pad_slot_id: int = -1,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal depthwise convolution over whole sequences: prefill.

    For channel c and token t of a sequence, with W taps, in float32::

        out[c, t] = act(bias[c] + sum_j weight[c, j] * x[c, t - (W - 1) + j])

    where tokens before the first are those of the initial state, or 0. A state is the last W - 1 tokens, unchanged, so
    a sequence cut in two gives bit for bit what the whole one gives. NaN or inf in one sequence never reaches another.

    Sizes: B batches, C channels, T tokens, W taps, N sequences (B, or ``len(query_start_loc) - 1``), P slots of a pool.

    With ``conv_states`` sequence ``n`` starts from slot ``cache_indices[n]`` if ``has_initial_state[n]``, else from
    zeros, and its final state is written to that slot. An index is padding if it equals ``pad_slot_id`` or lies outside
    of [0, P). A sequence is padding if the slot that it reads, or with nothing to read the one that it writes, is: its
    outputs are 0 and nothing is written for it. A sequence without tokens leaves its slot as it is.

    Args:
        x: ``[B, C, T]``, or with ``query_start_loc`` also ``[C, T]``; bfloat16, float16, float32 or float64, any
            strides. Fastest where channels are contiguous, as in ``[B, T, C].transpose(1, 2)``.
        weight: ``[C, W]``, W of at least 2; dtype of x.
        bias: ``[C]``; dtype of x.
        activation: None, or ``"silu"``, which ``"swish"`` is another name of.
        initial_states: ``[N, C, W - 1]``, dtype of x, any strides; zeros if None.
        return_final_states: Whether to return the last W - 1 tokens of each sequence too.
        query_start_loc: Offsets ``[N + 1]`` of packed sequences, rising from 0, int32 or int64, contiguous, on the
            device of x; B must be 1. Lengths of 0 are allowed. Outputs of tokens from ``query_start_loc[-1]`` on, which
            are padding, are 0. On a CPU malformed offsets are an error. On a GPU values are not checked: each is
            clamped to [0, T], and the outputs and states of malformed ones are not defined, but no other memory is
            touched.
        conv_states: The pool ``[P, C, W - 1]``, or ``[N, C, W - 1]`` without ``cache_indices``; dtype of x, any
            strides. Written in place, outside of autograd.
        cache_indices: Slot ``[N]`` of each sequence, int32 or int64, any stride, each slot once at most.
        has_initial_state: ``[N]`` bool; all False if None.
        initial_state_indices: Slot ``[N]`` to read where it differs from the one that is written, int32 or int64. No
            slot that one sequence reads may be written by another.
        pad_slot_id: An index that marks padding, beside those outside of [0, P). With 0 slot 0 is never used.

    Returns:
        ``out`` of x's shape and dtype, channels contiguous; with ``return_final_states`` ``(out, final_states)``, new
        ``[N, C, W - 1]``.

    Raises:
        TypeError: an argument has a type or dtype that is not accepted.
        ValueError: shapes, devices or options do not fit each other.
        RuntimeError: no kernel serves a call on a GPU and the environment has ``ATREX_REQUIRE_KERNEL=1``.

    A call that no kernel serves runs on a PyTorch fallback, on a GPU with one warning a reason;
    ``can_use_causal_conv1d_fn`` tells. The fallback alone takes gradients and float64, which is computed in float64. On
    a GPU it waits for the values of the integer tensors, and cannot be captured in a graph.
    """
    call = check_prefill(
        x, weight, bias, activation, initial_states, return_final_states, query_start_loc, conv_states, cache_indices,
        has_initial_state, initial_state_indices, pad_slot_id,
    )  # fmt: skip
    out, final = dispatch("causal_conv1d_fn", _PREFILL_POLICY, _prefill_fallback, x.device, call)
    return (out, final) if return_final_states else out


def can_use_causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    query_start_loc: Tensor | None = None,
    conv_states: Tensor | None = None,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    pad_slot_id: int = -1,
) -> Eligibility:
    """Whether a kernel, not the fallback, would serve ``causal_conv1d_fn`` with the same arguments.

    Reads metadata only: it compiles, allocates and launches nothing, and changes no tensor.

    Returns:
        A truthy or falsy object with ``.target``, the hardware target as ``vendor/arch``, and ``.reason``, why not.
        A call that ``causal_conv1d_fn`` would reject is not eligible, for the reason that its error gives.
    """
    try:
        call = check_prefill(
            x, weight, bias, activation, initial_states, return_final_states, query_start_loc, conv_states,
            cache_indices, has_initial_state, initial_state_indices, pad_slot_id,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        return _rejected(x, error)
    return pick(_PREFILL_POLICY, x.device, call)[1]


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    conv_state_indices: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    pad_slot_id: int = -1,
) -> Tensor:
    """Causal depthwise convolution over one or a few tokens a sequence, after a state: decode and verify.

    What is computed is what ``causal_conv1d_fn`` computes, bit for bit. Sizes as there, and L columns of a state.

    How a state ``[C, L]`` is read and written:

    * Without ``num_accepted_tokens`` (decode): its last W - 1 columns are the tokens before, as Dao's causal-conv1d and
      transformers keep them. It becomes the last L columns of itself and the new tokens.
    * With ``num_accepted_tokens`` (verify): a window slides over it, as vLLM keeps it. The W - 1 columns from
      ``num_accepted_tokens[n] - 1`` on are the tokens before. The last W - 2 of them become columns 0 to W - 3, and
      token ``t`` becomes column ``W - 2 + t``; other columns stay. A state that ``causal_conv1d_fn`` has written to
      columns 0 to W - 2 has one accepted token.

    An index is padding if it equals ``pad_slot_id`` or lies outside of [0, P). A sequence is padding if the slot to be
    read is, or if its number of accepted tokens is outside of [1, L - W + 2]: its outputs are 0 and nothing is written
    for it. A slot to be written that is padding is left out, and so is a token for which the state has no column. A
    sequence without tokens leaves its state as it is.

    Args:
        x: ``[N, C]`` or ``[N, C, T]``, or with ``query_start_loc`` ``[T, C]``; bfloat16, float16, float32 or float64,
            any strides.
        conv_state: ``[N, C, L]``, or the pool ``[P, C, L]`` with ``conv_state_indices``, L of at least W - 1, in verify
            W - 2 + T; dtype of x, any strides. Written in place, outside of autograd.
        weight: ``[C, W]``, W of at least 2; dtype of x.
        bias: ``[C]``; dtype of x.
        activation: None, or ``"silu"``, which ``"swish"`` is another name of.
        conv_state_indices: Slot ``[N]`` of each sequence, int32 or int64, any stride, each slot once at most.
        query_start_loc: Offsets ``[N + 1]`` of packed sequences, rising from 0, int32 or int64, contiguous. Lengths of
            0 are allowed. Tokens from ``query_start_loc[-1]`` on are padding: their outputs are 0. On a CPU malformed
            offsets are an error. On a GPU the values are not checked: sequence ``i`` runs from ``query_start_loc[i]``
            clamped to [0, T] to ``query_start_loc[i + 1]`` clamped to [start, T].
        num_accepted_tokens: How many tokens ``[N]`` of the step before were accepted, int32 or int64.
        initial_state_indices: Slot ``[N]`` to read where it differs from the one that is written, int32 or int64. No
            slot that one sequence reads may be written by another.
        pad_slot_id: An index that marks padding, beside those outside of [0, P). With 0 slot 0 is never used.

    Returns:
        ``out`` of x's shape and dtype, new, channels contiguous.

    Raises:
        TypeError: an argument has a type or dtype that is not accepted.
        ValueError: shapes, devices or options do not fit each other.
        RuntimeError: no kernel serves a call on a GPU and the environment has ``ATREX_REQUIRE_KERNEL=1``.

    A call that no kernel serves runs on a PyTorch fallback, on a GPU with one warning a reason;
    ``can_use_causal_conv1d_update`` tells. The fallback alone takes gradients and float64, computed in float64. On a
    GPU it waits for the values of the integer tensors, and cannot be captured in a graph.
    """
    call = check_update(
        x, conv_state, weight, bias, activation, conv_state_indices, query_start_loc, num_accepted_tokens,
        initial_state_indices, pad_slot_id,
    )  # fmt: skip
    return dispatch("causal_conv1d_update", _UPDATE_POLICY, _update_fallback, x.device, call)


def can_use_causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    conv_state_indices: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    pad_slot_id: int = -1,
) -> Eligibility:
    """Whether a kernel, not the fallback, would serve ``causal_conv1d_update`` with the same arguments.

    Reads metadata only: it compiles, allocates and launches nothing, and changes no tensor.

    Returns:
        A truthy or falsy object with ``.target``, the hardware target as ``vendor/arch``, and ``.reason``, why not.
        A call that ``causal_conv1d_update`` would reject is not eligible, for the reason that its error gives.
    """
    try:
        call = check_update(
            x, conv_state, weight, bias, activation, conv_state_indices, query_start_loc, num_accepted_tokens,
            initial_state_indices, pad_slot_id,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        return _rejected(x, error)
    return pick(_UPDATE_POLICY, x.device, call)[1]


def _rejected(x: object, error: Exception) -> Eligibility:
    return Eligibility(False, str(device_target(x.device)) if isinstance(x, Tensor) else "unknown", str(error))


def _prefill_fallback(call: PrefillCall) -> tuple[Tensor, Tensor | None]:
    # An import statement, because torch.compile traces it.
    from ..fallback import causal_conv1d

    return causal_conv1d.causal_conv1d_fn(call)


def _update_fallback(call: UpdateCall) -> Tensor:
    from ..fallback import causal_conv1d

    return causal_conv1d.causal_conv1d_update(call)


_SM90 = "nvidia/sm90"
_SM90_SERVES = Eligibility(True, _SM90, "")
# Elements of 16 bytes.
_VECTOR = {torch.bfloat16: 8, torch.float16: 8, torch.float32: 4}


def _supports_sm90(call: PrefillCall | UpdateCall, name: str, states: Tensor | None) -> Eligibility:
    vector = _VECTOR.get(call.x.dtype)
    weight, bias = call.weight, call.bias
    if vector is None:
        reason = f"x must be bfloat16, float16 or float32, got {dtype_name(call.x.dtype)}"
    elif call.W != 4:
        reason = f"weight must be [C, 4], got W={call.W}"
    elif call.C % vector:
        reason = f"x must have C of a multiple of {vector} for {dtype_name(call.x.dtype)}, got C={call.C}"
    elif call.needs_grad:
        reason = "no input may require grad in grad mode: the kernels have no backward"
    elif weight.stride() != (4, 1) or weight.storage_offset() % vector:
        reason = _off_grid("weight", "contiguous", weight)
    elif bias is not None and (bias.stride() != (1,) or bias.storage_offset() % vector):
        reason = _off_grid("bias", "contiguous", bias)
    elif states is not None and not _in_vectors(states, vector):
        reason = _off_grid(name, "contiguous in its channels, or in its columns with 3 or 4 of them,", states)
    else:
        return _SM90_SERVES
    return Eligibility(False, _SM90, reason)


def _in_vectors(states: Tensor, vector: int) -> bool:
    """Whether ``vector`` channels of a state lie in whole 16-byte vectors, column by column or channel by channel."""
    row, channel, column = states.stride()
    if (row | states.storage_offset()) % vector:
        return False
    if channel == 1:
        return column % vector == 0
    return column == 1 and channel in (3, 4) and channel == states.shape[2]


def _off_grid(name: str, layout: str, x: Tensor) -> str:
    return (
        f"{name} must be {layout} and start at multiples of 16 bytes, got strides {x.stride()} of "
        f"{dtype_name(x.dtype)} at offset {x.storage_offset()}"
    )


def _supports_prefill_sm90(call: PrefillCall) -> Eligibility:
    return _supports_sm90(call, "conv_states" if call.pool else "initial_states", call.initial)


def _supports_update_sm90(call: UpdateCall) -> Eligibility:
    answer = _supports_sm90(call, "conv_state", call.conv_state)
    if answer.ok and call.num_accepted_tokens is not None and call.conv_state.stride(1) != 1:
        reason = f"conv_state must be contiguous in its channels for verify, got strides {call.conv_state.stride()}"
        return Eligibility(False, _SM90, reason)
    return answer


_PREFILL_POLICY = (
    Implementation(
        "nvidia", "sm90", _supports_prefill_sm90, "atrex.kernels.nvidia.causal_conv1d.sm90.runtime:causal_conv1d_fn"
    ),
)
_UPDATE_POLICY = (
    Implementation(
        "nvidia", "sm90", _supports_update_sm90, "atrex.kernels.nvidia.causal_conv1d.sm90.runtime:causal_conv1d_update"
    ),
)
