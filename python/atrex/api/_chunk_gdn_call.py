"""The checked call that ``api/chunk_gdn.py`` hands to an implementation, and its checks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ._check import (
    DOUBLE_DTYPES,
    SINGLE_DTYPES,
    check_list,
    checked_scale,
    not_a_tensor,
    packed_sequences,
    wrong_device,
    wrong_dtype,
    wrong_shape,
)

_CHUNK = 64


class ChunkGdnCall(NamedTuple):
    """Arguments of ``chunk_gated_delta_rule`` after their checks, with defaults filled in, and the sizes.

    An implementation returns ``(o, final_state or None, checkpoints or None)``: ``final_state`` if
    ``output_final_state`` (the pool itself if there are ``state_indices``), ``checkpoints`` if ``checkpoint_every``.
    What it returns is contiguous and, but for the pool, shares no memory with the arguments.

    Guaranteed: all tensors on one device, shapes and dtypes of the public docstring, ``cu_seqlens`` and
    ``state_indices`` contiguous. Not guaranteed: strides and alignment of all others, the values of ``cu_seqlens``
    and ``state_indices``.

    A named tuple rather than a dataclass: a frozen dataclass of this width costs a microsecond more to make.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    scale: float
    initial_state: Tensor | None
    output_final_state: bool
    use_qk_l2norm_in_kernel: bool
    cu_seqlens: Tensor | None
    state_v_first: bool
    state_indices: Tensor | None
    checkpoint_every: int
    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    N: int  # sequences: B, or len(cu_seqlens) - 1
    state_dtype: torch.dtype  # of final_state and checkpoints
    needs_grad: bool  # grad mode is on and an input requires grad


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: Tensor | None,
    state_v_first: bool,
    state_indices: Tensor | None,
    checkpoint_every: int,
    head_first: bool,
) -> ChunkGdnCall:
    """Reject what the contract rejects. This runs before every launch: nothing is formatted on the good path."""
    if not (
        isinstance(q, Tensor)
        and isinstance(k, Tensor)
        and isinstance(v, Tensor)
        and isinstance(g, Tensor)
        and isinstance(beta, Tensor)
    ):
        raise next(not_a_tensor(*item) for item in _named(q, k, v, g, beta) if not isinstance(item[1], Tensor))
    device = q.device
    if not (k.device == device and v.device == device and g.device == device and beta.device == device):
        raise next(wrong_device(*item, device) for item in _named(q, k, v, g, beta) if item[1].device != device)
    if head_first:
        raise ValueError("head_first=True is not accepted: tensors are [B, T, heads, ...], so transpose(1, 2) first")

    q_shape = q.shape
    if len(q_shape) != 4:
        raise wrong_shape("q", q, "[B, T, H, K]")
    B, T, H, K = q_shape
    v_shape = v.shape
    if len(v_shape) != 4 or v_shape[0] != B or v_shape[1] != T:
        raise wrong_shape("v", v, f"[B={B}, T={T}, HV, V] as q")
    HV, V = v_shape[2], v_shape[3]
    if B < 1 or H < 1 or K < 1:
        raise wrong_shape("q", q, "[B, T, H, K] with B, H and K of at least 1")
    if HV < 1 or V < 1 or HV % H != 0:
        raise wrong_shape("v", v, f"[B, T, HV, V] with HV a multiple of H={H} and V of at least 1")
    if k.shape != q_shape:
        raise wrong_shape("k", k, f"[B={B}, T={T}, H={H}, K={K}] as q")
    gate_shape = (B, T, HV)
    if g.shape != gate_shape:
        raise wrong_shape("g", g, f"[B={B}, T={T}, HV={HV}]")
    if beta.shape != gate_shape:
        raise wrong_shape("beta", beta, f"[B={B}, T={T}, HV={HV}]")

    dtype = q.dtype
    double = dtype is torch.float64
    inputs, gates, states = DOUBLE_DTYPES if double else SINGLE_DTYPES
    if not (dtype in inputs and k.dtype in inputs and v.dtype in inputs):
        raise next(wrong_dtype(*item, inputs) for item in _named(q, k, v) if item[1].dtype not in inputs)
    if g.dtype not in gates:
        raise wrong_dtype("g", g, gates)
    if beta.dtype not in gates:
        raise wrong_dtype("beta", beta, gates)

    scale = checked_scale(scale, K)
    N = B if cu_seqlens is None else packed_sequences(cu_seqlens, B, device)

    state_dtype = torch.float64 if double else torch.float32
    if initial_state is not None:
        if not isinstance(initial_state, Tensor):
            raise not_a_tensor("initial_state", initial_state)
        if initial_state.device != device:
            raise wrong_device("initial_state", initial_state, device)
        state_dtype = initial_state.dtype
        if state_dtype not in states:
            raise wrong_dtype("initial_state", initial_state, states)
        state_shape = initial_state.shape
        rows = N if state_indices is None else (state_shape[0] if len(state_shape) == 4 else -1)
        if state_shape != ((rows, HV, V, K) if state_v_first else (rows, HV, K, V)):
            first = f"N={N}" if state_indices is None else "P"
            layout = f"V={V}, K={K}" if state_v_first else f"K={K}, V={V}"
            raise wrong_shape(
                "initial_state", initial_state, f"[{first}, HV={HV}, {layout}] with state_v_first={bool(state_v_first)}"
            )

    if state_indices is not None:
        slots = check_list("state_indices", state_indices, device)
        if initial_state is None:
            raise ValueError("state_indices names slots of a pool: initial_state must be that pool, got None")
        if slots != N:
            raise wrong_shape("state_indices", state_indices, f"[N={N}]")

    if not isinstance(checkpoint_every, int) or isinstance(checkpoint_every, bool):
        raise TypeError(f"checkpoint_every must be an int, got {type(checkpoint_every).__name__}")
    if checkpoint_every < 0 or checkpoint_every % _CHUNK != 0:
        raise ValueError(f"checkpoint_every must be 0 or a positive multiple of {_CHUNK}, got {checkpoint_every}")

    needs_grad = torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or g.requires_grad
        or beta.requires_grad
        or (initial_state is not None and initial_state.requires_grad)
    )
    if needs_grad and state_indices is not None and initial_state.requires_grad:  # type: ignore[union-attr]
        raise ValueError("initial_state is written in place with state_indices: it must not require grad")
    return ChunkGdnCall(
        q, k, v, g, beta, scale, initial_state, bool(output_final_state), bool(use_qk_l2norm_in_kernel),
        cu_seqlens, bool(state_v_first), state_indices, checkpoint_every, B, T, H, HV, K, V, N, state_dtype, needs_grad,
    )  # fmt: skip


def _named(*tensors: Tensor) -> Iterable[tuple[str, Tensor]]:
    return zip(("q", "k", "v", "g", "beta"), tensors, strict=False)
