"""The checked call that ``api/recurrent_gdn.py`` hands to an implementation, and its checks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ._check import (
    DOUBLE_DTYPES,
    SINGLE_DTYPES,
    check_tensor,
    checked_scale,
    not_a_tensor,
    packed_sequences,
    wrong_device,
    wrong_dtype,
    wrong_shape,
)


class RecurrentGdnCall(NamedTuple):
    """Arguments of ``fused_recurrent_gated_delta_rule`` after their checks, with defaults filled in, and the sizes.

    An implementation returns ``(o, final_state or None)``: ``final_state`` if ``output_final_state``, the pool itself
    if there are ``state_indices``. What it returns is contiguous and, but for the pool, shares no memory with the
    arguments.

    Guaranteed: all tensors on one device, shapes and dtypes of the public docstring, ``cu_seqlens`` contiguous. Not
    guaranteed: strides and alignment of all others, the values of all integer tensors.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None  # g and beta, or else A_log, a, b and dt_bias
    beta: Tensor | None
    A_log: Tensor | None
    a: Tensor | None
    b: Tensor | None
    dt_bias: Tensor | None
    scale: float
    initial_state: Tensor | None
    output_final_state: bool
    use_qk_l2norm_in_kernel: bool
    cu_seqlens: Tensor | None
    state_v_first: bool
    state_indices: Tensor | None
    initial_state_indices: Tensor | None
    num_accepted_tokens: Tensor | None
    padding_index: int
    buffer: Tensor | None  # intermediate_states_buffer
    buffer_indices: Tensor | None  # intermediate_state_indices
    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    N: int  # sequences: B, or len(cu_seqlens) - 1
    state_dtype: torch.dtype  # of all states
    needs_grad: bool  # grad mode is on and an input requires grad


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    A_log: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    dt_bias: Tensor | None,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: Tensor | None,
    state_v_first: bool,
    state_indices: Tensor | None,
    initial_state_indices: Tensor | None,
    num_accepted_tokens: Tensor | None,
    padding_index: int,
    intermediate_states_buffer: Tensor | None,
    intermediate_state_indices: Tensor | None,
) -> RecurrentGdnCall:
    """Reject what the contract rejects. This runs before every launch: nothing is formatted on the good path."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        raise next(not_a_tensor(name, x) for name, x in (("q", q), ("k", k), ("v", v)) if not isinstance(x, Tensor))
    device = q.device
    if not (k.device == device and v.device == device):
        raise wrong_device("v", v, device) if k.device == device else wrong_device("k", k, device)

    q_shape, v_shape = q.shape, v.shape
    if len(q_shape) != 4:
        raise wrong_shape("q", q, "[B, T, H, K]")
    B, T, H, K = q_shape
    if len(v_shape) != 4 or v_shape[0] != B or v_shape[1] != T:
        raise wrong_shape("v", v, f"[B={B}, T={T}, HV, V] as q")
    HV, V = v_shape[2], v_shape[3]
    if B < 1 or H < 1 or K < 1:
        raise wrong_shape("q", q, "[B, T, H, K] with B, H and K of at least 1")
    if HV < 1 or V < 1 or HV % H != 0:
        raise wrong_shape("v", v, f"[B, T, HV, V] with HV a multiple of H={H} and V of at least 1")
    if k.shape != q_shape:
        raise wrong_shape("k", k, f"[B={B}, T={T}, H={H}, K={K}] as q")
    dtype = q.dtype
    double = dtype is torch.float64
    inputs, gates, states = DOUBLE_DTYPES if double else SINGLE_DTYPES
    if not (dtype in inputs and k.dtype in inputs and v.dtype in inputs):
        raise next(wrong_dtype(name, x, inputs) for name, x in (("q", q), ("k", k), ("v", v)) if x.dtype not in inputs)

    if A_log is None and a is None and b is None and dt_bias is None:
        each = (B, T, HV)
        _check_gate("g", g, device, gates, each)
        _check_gate("beta", beta, device, gates, each)
    else:
        if g is not None or beta is not None:
            raise ValueError(
                "g and beta are computed from A_log, a, b and dt_bias: give the one pair or the other four"
            )
        _check_gate("A_log", A_log, device, gates, (HV,))
        _check_gate("a", a, device, gates, (B, T, HV))
        _check_gate("b", b, device, gates, (B, T, HV))
        _check_gate("dt_bias", dt_bias, device, gates, (HV,))

    scale = checked_scale(scale, K)
    N = B if cu_seqlens is None else packed_sequences(cu_seqlens, B, device)

    state_dtype = torch.float64 if double else torch.float32
    state_shape = (HV, V, K) if state_v_first else (HV, K, V)
    if initial_state is not None:
        check_tensor("initial_state", initial_state, device, states)
        state_dtype, shape = initial_state.dtype, initial_state.shape
        P = N if state_indices is None or len(shape) != 4 else shape[0]
        if shape != (P, *state_shape):
            rows = f"N={N}" if state_indices is None else "P"
            layout = f"V={V}, K={K}" if state_v_first else f"K={K}, V={V}"
            raise wrong_shape(
                "initial_state", initial_state, f"[{rows}, HV={HV}, {layout}] with state_v_first={bool(state_v_first)}"
            )

    if state_indices is not None:
        check_tensor("state_indices", state_indices, device)
        if initial_state is None:
            raise ValueError("state_indices names slots of a pool: initial_state must be that pool, got None")
        shape = state_indices.shape
        if len(shape) not in (1, 2) or shape[0] != N or (len(shape) == 2 and shape[1] < 1):
            raise wrong_shape("state_indices", state_indices, f"[N={N}] or [N={N}, S]")
    if initial_state_indices is not None:
        _check_row("initial_state_indices", initial_state_indices, device, N)
        if state_indices is None:
            raise ValueError("initial_state_indices needs state_indices, where the states are written, got None")
        if num_accepted_tokens is not None:
            raise ValueError("initial_state_indices and num_accepted_tokens both choose the slots that are read")
    if num_accepted_tokens is not None:
        _check_row("num_accepted_tokens", num_accepted_tokens, device, N)
        if state_indices is None or state_indices.dim() != 2:
            got = "None" if state_indices is None else list(state_indices.shape)
            raise ValueError(f"num_accepted_tokens needs state_indices of shape [N={N}, S], got {got}")
    if type(padding_index) is not int:
        raise TypeError(f"padding_index must be an int, got {type(padding_index).__name__}")
    buffer = intermediate_states_buffer
    if buffer is not None or intermediate_state_indices is not None:
        _check_buffer(buffer, intermediate_state_indices, device, N, state_shape, initial_state)
        if initial_state_indices is not None or (state_indices is not None and state_indices.dim() == 2):
            raise ValueError("with intermediate_states_buffer state_indices must be the slots [N] that are read")
        if output_final_state:
            raise ValueError(
                "with intermediate_states_buffer there is no final state: output_final_state must be False"
            )

    needs_grad = torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (initial_state is not None and initial_state.requires_grad)
        or (g if A_log is None else a).requires_grad  # type: ignore[union-attr]
        or (beta if A_log is None else b).requires_grad  # type: ignore[union-attr]
        or (A_log is not None and (A_log.requires_grad or dt_bias.requires_grad))  # type: ignore[union-attr]
    )
    if needs_grad and state_indices is not None and initial_state.requires_grad:  # type: ignore[union-attr]
        raise ValueError("initial_state is written in place with state_indices: it must not require grad")
    return RecurrentGdnCall._make((
        q, k, v, g, beta, A_log, a, b, dt_bias, scale, initial_state, bool(output_final_state),
        bool(use_qk_l2norm_in_kernel), cu_seqlens, bool(state_v_first), state_indices, initial_state_indices,
        num_accepted_tokens, padding_index, buffer, intermediate_state_indices, B, T, H, HV, K, V, N, state_dtype,
        needs_grad,
    ))  # fmt: skip


def _check_gate(
    name: str, x: object, device: torch.device, accepted: frozenset[torch.dtype], shape: tuple[int, ...]
) -> None:
    """A gate of ``shape``; ``a`` and ``b`` may have their tokens in one dimension."""
    if isinstance(x, Tensor) and x.device == device and x.dtype in accepted and x.shape == shape:
        return
    check_tensor(name, x, device, accepted)
    if len(shape) == 1:
        raise wrong_shape(name, x, f"[HV={shape[0]}]")
    B, T, HV = shape
    if name not in ("a", "b"):
        raise wrong_shape(name, x, f"[B={B}, T={T}, HV={HV}]")
    if x.shape != (B * T, HV):
        raise wrong_shape(name, x, f"[B={B}, T={T}, HV={HV}] or [B * T={B * T}, HV={HV}]")


def _check_row(name: str, x: Tensor, device: torch.device, N: int) -> None:
    check_tensor(name, x, device)
    if x.shape != (N,):
        raise wrong_shape(name, x, f"[N={N}]")


def _check_buffer(
    buffer: Tensor | None,
    indices: Tensor | None,
    device: torch.device,
    N: int,
    state_shape: tuple[int, ...],
    initial_state: Tensor | None,
) -> None:
    name = "intermediate_states_buffer"
    if not isinstance(buffer, Tensor):
        raise not_a_tensor(name, buffer)
    if buffer.device != device:
        raise wrong_device(name, buffer, device)
    if initial_state is None:
        raise ValueError(f"{name} needs an initial_state, got None")
    if buffer.dtype is not initial_state.dtype:
        raise wrong_dtype(name, buffer, (initial_state.dtype,))
    shape = buffer.shape
    if len(shape) != 5 or shape[2:] != state_shape or shape[1] < 1 or (indices is None and shape[0] < N):
        rows = f"at least N={N}" if indices is None else "R"
        raise wrong_shape(name, buffer, f"[{rows}, S, {', '.join(map(str, state_shape))}]")
    if indices is not None:
        _check_row("intermediate_state_indices", indices, device, N)
