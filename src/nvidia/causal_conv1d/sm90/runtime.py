"""Causal depthwise convolution on Hopper (sm_90a): allocates, describes the tensors to the kernels, launches."""

from __future__ import annotations

import torch
from torch._C import _cuda_getCurrentRawStream as current_stream

from . import _native

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def _tokens(x: torch.Tensor, dtype: int, device: int, stream: int) -> tuple[torch.Tensor, tuple[int, ...]]:
    """``x [B, T, C]`` and how it lies, or a packed copy where it cannot be read in 16-byte vectors."""
    strides = b, t, c = x.stride()
    pointer = x.data_ptr()
    B, T, C = x.shape
    b, t = b if B > 1 else 0, t if T > 1 else 0  # nobody steps along a dimension of one
    if c == 1 and not (pointer & 15 or (b | t) & (7 if dtype else 3)):
        return x, (pointer, b, t)
    packed = torch.empty((B, T, C), dtype=x.dtype, device=x.device)
    if T:
        _native.pack((pointer, *strides), B, T, C, dtype, packed.data_ptr(), device, stream)
    return packed, (packed.data_ptr(), T * C, C)


def _indices(x: torch.Tensor | None) -> tuple[int, ...] | None:
    return None if x is None else (x.data_ptr(), x.dtype is torch.int64, x.stride(0))


def _states(x: torch.Tensor) -> tuple[int, ...]:
    return (x.data_ptr(), x.shape[0], *x.stride())


def causal_conv1d_fn(call):
    """Serve a checked call; see ``atrex.causal_conv1d_fn``. Launches on the current stream."""
    B, T, C, N = call.B, call.T, call.C, call.N
    bias, initial, write = call.bias, call.initial, call.cache_indices
    where = call.x.device
    device = where.index
    stream = current_stream(device)
    dtype = _DTYPES[call.x.dtype]
    x, x_at = _tokens(call.x, dtype, device, stream)  # x holds the copy, if there is one, until the launch
    # empty_strided takes less host time than empty.
    out = torch.empty_strided((B, T, C), (T * C, C, 1), dtype=x.dtype, device=where)
    final = kept = None
    if call.pool:
        kept = _states(initial)
        if call.has_initial_state is None:
            initial = None
    elif call.return_final_states:
        final = torch.empty((N, 3, C), dtype=x.dtype, device=where).transpose(1, 2)
        kept = (final.data_ptr(), N, 3 * C, 1, C)
    _native.prefill(
        (B, T, C, N),
        dtype,
        call.silu,
        x_at,
        call.weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        _indices(call.query_start_loc),
        call.pad_slot_id,
        None if initial is None else _states(initial),
        _indices(write if call.initial_state_indices is None else call.initial_state_indices),
        _indices(call.has_initial_state),
        kept,
        _indices(write),
        call.pool,
        device,
        stream,
    )
    return out, final


def causal_conv1d_update(call):
    """Serve a checked call; see ``atrex.causal_conv1d_update``. Launches on the current stream."""
    B, T, C = call.B, call.T, call.C
    bias, state, write = call.bias, call.conv_state, call.conv_state_indices
    where = call.x.device
    device = where.index
    stream = current_stream(device)
    dtype = _DTYPES[call.x.dtype]
    x, x_at = _tokens(call.x, dtype, device, stream)
    out = torch.empty_strided((B, T, C), (T * C, C, 1), dtype=x.dtype, device=where)
    if T:
        _native.update(
            (B, T, C, call.N),
            dtype,
            call.silu,
            x_at,
            call.weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            _indices(call.query_start_loc),
            call.pad_slot_id,
            _states(state),
            state.shape[2],
            _indices(write if call.initial_state_indices is None else call.initial_state_indices),
            _indices(write),
            _indices(call.num_accepted_tokens),
            device,
            stream,
        )
    return out
