"""The checked calls that ``api/causal_conv1d.py`` hands to an implementation, and their checks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ._check import INDEX_DTYPES, not_a_tensor, wrong_dtype, wrong_shape

DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})
_ACTIVATIONS = {None: False, "silu": True, "swish": True}


class PrefillCall(NamedTuple):
    """Arguments of ``causal_conv1d_fn`` after their checks, token by token, with the sizes.

    An implementation returns ``(out, final_states or None)``: ``out [B, T, C]``, contiguous, and if
    ``return_final_states`` new ``[N, C, W - 1]`` of any strides. ``initial`` is written in place if ``pool``.

    Guaranteed: all tensors on one device, shapes and dtypes of the public docstring, ``query_start_loc`` contiguous.
    Not guaranteed: strides and alignment of all others, the values of all integer tensors.
    """

    x: Tensor  # [B, T, C], a view
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
    """Arguments of ``causal_conv1d_update`` after their checks, token by token, with the sizes.

    An implementation returns ``out [B, T, C]``, contiguous, and writes ``conv_state`` in place. What is guaranteed is
    what ``PrefillCall`` guarantees.
    """

    x: Tensor  # [B, T, C], a view
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
    _check_tensors((("x", x), ("weight", weight)))
    dims = x.dim()
    if dims == 3:
        tokens = x.transpose(1, 2)
    elif dims == 2 and query_start_loc is not None:
        tokens = x.t().unsqueeze(0)
    else:
        raise wrong_shape("x", x, "[B, C, T], or with query_start_loc [C, T]")
    B, T, C = tokens.shape
    W = _check_weights(x, C, weight, bias)
    N = _check_offsets(query_start_loc, x, B)

    initial, pool = initial_states, conv_states is not None
    if pool:
        if initial_states is not None or return_final_states:
            raise ValueError(
                "conv_states holds the initial and the final states: initial_states must be None and "
                "return_final_states False"
            )
        _check_states("conv_states", conv_states, x, C)
        initial = conv_states
        shape = conv_states.shape  # type: ignore[union-attr]
        if shape[2] != W - 1 or (cache_indices is None and shape[0] != N):
            rows = f"N={N}" if cache_indices is None else "P"
            raise wrong_shape("conv_states", conv_states, f"[{rows}, C={C}, W - 1={W - 1}]")  # type: ignore[arg-type]
        if cache_indices is not None:
            _check_row("cache_indices", cache_indices, x, N)
        if has_initial_state is not None:
            _check_row("has_initial_state", has_initial_state, x, N, (torch.bool,))
        if initial_state_indices is not None:
            _check_row("initial_state_indices", initial_state_indices, x, N)
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
            _check_states("initial_states", initial_states, x, C)
            if initial_states.shape[0] != N or initial_states.shape[2] != W - 1:
                raise wrong_shape("initial_states", initial_states, f"[N={N}, C={C}, W - 1={W - 1}]")
    _check_padding(pad_slot_id)
    needs_grad = _needs_grad(x, weight, bias, initial)
    if needs_grad and pool and initial.requires_grad:  # type: ignore[union-attr]
        raise ValueError("conv_states is written in place: it must not require grad")
    return PrefillCall(
        tokens, weight, bias, _silu(activation), query_start_loc, initial, pool, cache_indices, initial_state_indices,
        has_initial_state, pad_slot_id, bool(return_final_states), B, T, C, W, N, needs_grad,
    )  # fmt: skip


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
    _check_tensors((("x", x), ("weight", weight)))
    dims = x.dim()
    if query_start_loc is not None:
        if dims != 2:
            raise wrong_shape("x", x, "[T, C] with query_start_loc")
        tokens = x.unsqueeze(0)
    elif dims == 2:
        tokens = x.unsqueeze(1)
    elif dims == 3:
        tokens = x.transpose(1, 2)
    else:
        raise wrong_shape("x", x, "[N, C] or [N, C, T]")
    B, T, C = tokens.shape
    W = _check_weights(x, C, weight, bias)
    N = _check_offsets(query_start_loc, x, B)
    _check_states("conv_state", conv_state, x, C)
    shape = conv_state.shape
    if shape[2] < W - 1 or (conv_state_indices is None and shape[0] != N):
        rows = f"N={N}" if conv_state_indices is None else "P"
        raise wrong_shape("conv_state", conv_state, f"[{rows}, C={C}, L] with L of at least W - 1={W - 1}")
    if conv_state_indices is not None:
        _check_row("conv_state_indices", conv_state_indices, x, N)
    if initial_state_indices is not None:
        _check_row("initial_state_indices", initial_state_indices, x, N)
        if conv_state_indices is None:
            raise ValueError("initial_state_indices needs conv_state_indices, where the states are written, got None")
    if num_accepted_tokens is not None:
        _check_row("num_accepted_tokens", num_accepted_tokens, x, N)
        if query_start_loc is None and shape[2] < W - 2 + T:
            raise wrong_shape(
                "conv_state", conv_state, f"[., C={C}, L] with L of at least W - 2 + T={W - 2 + T} to keep T={T} tokens"
            )
    _check_padding(pad_slot_id)
    needs_grad = _needs_grad(x, weight, bias, conv_state)
    if needs_grad and conv_state.requires_grad:
        raise ValueError("conv_state is written in place: it must not require grad")
    return UpdateCall(
        tokens, conv_state, weight, bias, _silu(activation), query_start_loc, conv_state_indices,
        initial_state_indices, num_accepted_tokens, pad_slot_id, B, T, C, W, N, needs_grad,
    )  # fmt: skip


def _check_tensors(arguments: Iterable[tuple[str, object]]) -> None:
    for name, x in arguments:
        if not isinstance(x, Tensor):
            raise not_a_tensor(name, x)


def _check_like(name: str, x: object, like: Tensor) -> None:
    """A tensor on the device of the argument ``x``, and of its dtype."""
    if not isinstance(x, Tensor):
        raise not_a_tensor(name, x)
    if x.device != like.device:
        raise _wrong_device(name, x, like)
    if x.dtype is not like.dtype:
        raise wrong_dtype(name, x, (like.dtype,))


def _check_weights(x: Tensor, C: int, weight: Tensor, bias: Tensor | None) -> int:
    """The width."""
    if x.dtype not in DTYPES:
        raise wrong_dtype("x", x, DTYPES)
    if C < 1:
        raise wrong_shape("x", x, "with C of at least 1")
    _check_like("weight", weight, x)
    shape = weight.shape
    if len(shape) != 2 or shape[0] != C or shape[1] < 2:
        raise wrong_shape("weight", weight, f"[C={C}, W] with W of at least 2")
    if bias is not None:
        _check_like("bias", bias, x)
        if bias.shape != (C,):
            raise wrong_shape("bias", bias, f"[C={C}]")
    return shape[1]


def _check_offsets(query_start_loc: Tensor | None, x: Tensor, B: int) -> int:
    """The number of sequences."""
    if query_start_loc is None:
        if B < 1:
            raise wrong_shape("x", x, "with at least one sequence")
        return B
    _check_integers("query_start_loc", query_start_loc, x)
    if query_start_loc.dim() != 1 or query_start_loc.shape[0] < 2:
        raise wrong_shape("query_start_loc", query_start_loc, "[N + 1] with N of at least 1")
    if not query_start_loc.is_contiguous():
        raise ValueError(f"query_start_loc must be contiguous, got stride {query_start_loc.stride(0)}")
    if B != 1:
        raise ValueError(f"query_start_loc packs the sequences into one batch: x must have B=1, got B={B}")
    return query_start_loc.shape[0] - 1


def _check_states(name: str, states: object, x: Tensor, C: int) -> None:
    _check_like(name, states, x)
    shape = states.shape  # type: ignore[attr-defined]
    if len(shape) != 3 or shape[1] != C:
        raise wrong_shape(name, states, f"[., C={C}, .]")  # type: ignore[arg-type]


def _check_integers(name: str, x: object, like: Tensor, accepted: Iterable[torch.dtype] = INDEX_DTYPES) -> None:
    if not isinstance(x, Tensor):
        raise not_a_tensor(name, x)
    if x.device != like.device:
        raise _wrong_device(name, x, like)
    if x.dtype not in accepted:
        raise wrong_dtype(name, x, tuple(accepted))


def _check_row(name: str, x: object, like: Tensor, N: int, accepted: Iterable[torch.dtype] = INDEX_DTYPES) -> None:
    _check_integers(name, x, like, accepted)
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


def _wrong_device(name: str, x: Tensor, like: Tensor) -> ValueError:
    return ValueError(f"{name} must be on {like.device} as x, got {x.device}")
