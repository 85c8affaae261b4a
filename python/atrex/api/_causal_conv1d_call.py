"""The checked calls that ``api/causal_conv1d.py`` hands to an implementation, and their checks."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from ._check import INDEX_DTYPES, check_tensor, not_a_tensor, wrong_dtype, wrong_shape

DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})
_ACTIVATIONS = {None: False, "silu": True, "swish": True}


class PrefillCall(NamedTuple):
    """Arguments of ``causal_conv1d_fn`` after their checks, with the sizes.

    An implementation returns ``(out, final_states or None)``: ``out`` of x's shape, token by token with contiguous
    channels, and if ``return_final_states`` new ``[N, C, W - 1]`` of any strides. ``initial`` is written in place if
    ``pool``.

    Guaranteed: all tensors on one device, shapes and dtypes of the public docstring, ``query_start_loc`` contiguous.
    Not guaranteed: strides and alignment of all others, the values of all integer tensors.
    """

    x: Tensor  # [B, C, T], or [C, T] with B=1
    weight: Tensor
    bias: Tensor | None
    silu: bool
    query_start_loc: Tensor | None
    initial: Tensor | None  # initial_states [N, C, W - 1], or conv_states [P, C, W - 1]
    pool: bool  # initial is conv_states
    cache_indices: Tensor | None
    initial_state_indices: Tensor | None
    has_initial_state: Tensor | None
    pad_slot_id: int
    return_final_states: bool
    B: int
    T: int
    C: int
    W: int
    N: int  # sequences: B, or len(query_start_loc) - 1
    needs_grad: bool  # grad mode is on and an input requires grad


class UpdateCall(NamedTuple):
    """Arguments of ``causal_conv1d_update`` after their checks, with the sizes.

    An implementation returns ``out`` as that of ``PrefillCall``, and writes ``conv_state`` in place. What is guaranteed
    is what ``PrefillCall`` guarantees.
    """

    x: Tensor  # [B, C, T]; [B, C] with T=1; [T, C] with B=1 if there is query_start_loc
    conv_state: Tensor  # [N or P, C, L]
    weight: Tensor
    bias: Tensor | None
    silu: bool
    query_start_loc: Tensor | None
    conv_state_indices: Tensor | None
    initial_state_indices: Tensor | None
    num_accepted_tokens: Tensor | None
    pad_slot_id: int
    B: int
    T: int
    C: int
    W: int
    N: int
    needs_grad: bool


def check_prefill(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    initial_states: Tensor | None,
    return_final_states: bool,
    query_start_loc: Tensor | None,
    conv_states: Tensor | None,
    cache_indices: Tensor | None,
    has_initial_state: Tensor | None,
    initial_state_indices: Tensor | None,
    pad_slot_id: int,
) -> PrefillCall:
    """Reject what the contract of ``causal_conv1d_fn`` rejects. Nothing is formatted on the good path."""
    if not (isinstance(x, Tensor) and isinstance(weight, Tensor)):
        raise not_a_tensor("weight", weight) if isinstance(x, Tensor) else not_a_tensor("x", x)
    device, accepted, dims = x.device, (x.dtype,), x.dim()
    if dims == 3:
        B, C, T = x.shape
    elif dims == 2 and query_start_loc is not None:
        B, (C, T) = 1, x.shape
    else:
        raise wrong_shape("x", x, "[B, C, T], or with query_start_loc [C, T]")
    W = _check_weights(x, C, weight, bias, device, accepted)
    N = _check_offsets(query_start_loc, x, B, device)

    initial, pool = initial_states, conv_states is not None
    if pool:
        if initial_states is not None or return_final_states:
            raise ValueError(
                "conv_states holds the initial and the final states: initial_states must be None and "
                "return_final_states False"
            )
        shape = _check_states("conv_states", conv_states, C, device, accepted)
        initial = conv_states
        if shape[2] != W - 1 or (cache_indices is None and shape[0] != N):
            rows = f"N={N}" if cache_indices is None else "P"
            raise wrong_shape("conv_states", conv_states, f"[{rows}, C={C}, W - 1={W - 1}]")  # type: ignore[arg-type]
        if cache_indices is not None:
            _check_row("cache_indices", cache_indices, N, device)
        if has_initial_state is not None:
            _check_row("has_initial_state", has_initial_state, N, device, (torch.bool,))
        if initial_state_indices is not None:
            _check_row("initial_state_indices", initial_state_indices, N, device)
            if cache_indices is None or has_initial_state is None:
                raise ValueError("initial_state_indices needs cache_indices and has_initial_state, got None")
    else:
        for name, given in (
            ("cache_indices", cache_indices),
            ("has_initial_state", has_initial_state),
            ("initial_state_indices", initial_state_indices),
        ):
            if given is not None:
                raise ValueError(f"{name} is about a pool: conv_states must be that pool, got None")
        if initial_states is not None:
            shape = _check_states("initial_states", initial_states, C, device, accepted)
            if shape[0] != N or shape[2] != W - 1:
                raise wrong_shape("initial_states", initial_states, f"[N={N}, C={C}, W - 1={W - 1}]")
    _check_padding(pad_slot_id)
    needs_grad = _needs_grad(x, weight, bias, initial)
    if needs_grad and pool and initial.requires_grad:  # type: ignore[union-attr]
        raise ValueError("conv_states is written in place: it must not require grad")
    return PrefillCall._make((
        x, weight, bias, _silu(activation), query_start_loc, initial, pool, cache_indices, initial_state_indices,
        has_initial_state, pad_slot_id, bool(return_final_states), B, T, C, W, N, needs_grad,
    ))  # fmt: skip


def check_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    conv_state_indices: Tensor | None,
    query_start_loc: Tensor | None,
    num_accepted_tokens: Tensor | None,
    initial_state_indices: Tensor | None,
    pad_slot_id: int,
) -> UpdateCall:
    """Reject what the contract of ``causal_conv1d_update`` rejects. Nothing is formatted on the good path."""
    if not (isinstance(x, Tensor) and isinstance(weight, Tensor)):
        raise not_a_tensor("weight", weight) if isinstance(x, Tensor) else not_a_tensor("x", x)
    device, accepted, dims = x.device, (x.dtype,), x.dim()
    if query_start_loc is not None:
        if dims != 2:
            raise wrong_shape("x", x, "[T, C] with query_start_loc")
        B, (T, C) = 1, x.shape
    elif dims == 2:
        T, (B, C) = 1, x.shape
    elif dims == 3:
        B, C, T = x.shape
    else:
        raise wrong_shape("x", x, "[N, C] or [N, C, T]")
    W = _check_weights(x, C, weight, bias, device, accepted)
    N = _check_offsets(query_start_loc, x, B, device)
    shape = _check_states("conv_state", conv_state, C, device, accepted)
    if shape[2] < W - 1 or (conv_state_indices is None and shape[0] != N):
        rows = f"N={N}" if conv_state_indices is None else "P"
        raise wrong_shape("conv_state", conv_state, f"[{rows}, C={C}, L] with L of at least W - 1={W - 1}")
    if conv_state_indices is not None:
        _check_row("conv_state_indices", conv_state_indices, N, device)
    if initial_state_indices is not None:
        _check_row("initial_state_indices", initial_state_indices, N, device)
        if conv_state_indices is None:
            raise ValueError("initial_state_indices needs conv_state_indices, where the states are written, got None")
    if num_accepted_tokens is not None:
        _check_row("num_accepted_tokens", num_accepted_tokens, N, device)
        if query_start_loc is None and shape[2] < W - 2 + T:
            raise wrong_shape(
                "conv_state", conv_state, f"[., C={C}, L] with L of at least W - 2 + T={W - 2 + T} to keep T={T} tokens"
            )
    _check_padding(pad_slot_id)
    needs_grad = _needs_grad(x, weight, bias, conv_state)
    if needs_grad and conv_state.requires_grad:
        raise ValueError("conv_state is written in place: it must not require grad")
    return UpdateCall._make((
        x, conv_state, weight, bias, _silu(activation), query_start_loc, conv_state_indices, initial_state_indices,
        num_accepted_tokens, pad_slot_id, B, T, C, W, N, needs_grad,
    ))  # fmt: skip


def _check_weights(
    x: Tensor, C: int, weight: Tensor, bias: Tensor | None, device: torch.device, accepted: tuple[torch.dtype]
) -> int:
    """The width."""
    if x.dtype not in DTYPES:
        raise wrong_dtype("x", x, DTYPES)
    if C < 1:
        raise wrong_shape("x", x, "with C of at least 1")
    check_tensor("weight", weight, device, accepted, "x")
    shape = weight.shape
    if len(shape) != 2 or shape[0] != C or shape[1] < 2:
        raise wrong_shape("weight", weight, f"[C={C}, W] with W of at least 2")
    if bias is not None:
        check_tensor("bias", bias, device, accepted, "x")
        if bias.shape != (C,):
            raise wrong_shape("bias", bias, f"[C={C}]")
    return shape[1]


def _check_offsets(query_start_loc: Tensor | None, x: Tensor, B: int, device: torch.device) -> int:
    """The number of sequences."""
    if query_start_loc is None:
        if B < 1:
            raise wrong_shape("x", x, "with at least one sequence")
        return B
    check_tensor("query_start_loc", query_start_loc, device, first="x")
    shape = query_start_loc.shape
    if len(shape) != 1 or shape[0] < 2:
        raise wrong_shape("query_start_loc", query_start_loc, "[N + 1] with N of at least 1")
    if not query_start_loc.is_contiguous():
        raise ValueError(f"query_start_loc must be contiguous, got stride {query_start_loc.stride(0)}")
    if B != 1:
        raise ValueError(f"query_start_loc packs the sequences into one batch: x must have B=1, got B={B}")
    return shape[0] - 1


def _check_states(name: str, states: object, C: int, device: torch.device, accepted: tuple[torch.dtype]) -> torch.Size:
    """The shape."""
    check_tensor(name, states, device, accepted, "x")
    shape = states.shape  # type: ignore[attr-defined]
    if len(shape) != 3 or shape[1] != C:
        raise wrong_shape(name, states, f"[., C={C}, .]")  # type: ignore[arg-type]
    return shape


def _check_row(
    name: str, x: object, N: int, device: torch.device, accepted: Collection[torch.dtype] = INDEX_DTYPES
) -> None:
    check_tensor(name, x, device, accepted, "x")
    if x.shape != (N,):  # type: ignore[attr-defined]
        raise wrong_shape(name, x, f"[N={N}]")  # type: ignore[arg-type]


def _check_padding(pad_slot_id: int) -> None:
    if type(pad_slot_id) is not int:
        raise TypeError(f"pad_slot_id must be an int, got {type(pad_slot_id).__name__}")


def _silu(activation: str | None) -> bool:
    try:
        return _ACTIVATIONS[activation]
    except (KeyError, TypeError):
        raise ValueError(f"activation must be None, 'silu' or 'swish', got {activation!r}") from None


def _needs_grad(x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor | None) -> bool:
    return torch.is_grad_enabled() and (
        x.requires_grad
        or weight.requires_grad
        or (bias is not None and bias.requires_grad)
        or (states is not None and states.requires_grad)
    )
