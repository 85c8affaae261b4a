"""Causal depthwise convolution on Hopper (sm_90a): allocates, describes the tensors to the kernels, launches."""

from __future__ import annotations

import torch
from torch._C import _cuda_getCurrentRawStream as current_stream

from . import _native

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def _tokens(
    x: torch.Tensor, sizes: tuple[int, int, int], strides: tuple[int, int, int], dtype: int, device: int, stream: int
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """``x`` and how it lies, or a packed copy where it cannot be read in 16-byte vectors.

    ``sizes`` are B, T and C, and ``strides`` those of x along them.
    """
    B, T, C = sizes
    b, t, c = strides
    pointer = x.data_ptr()
    b, t = b if B > 1 else 0, t if T > 1 else 0  # nobody steps along a dimension of one
    if c == 1 and not (pointer & 15 or (b | t) & (7 if dtype else 3)):
        return x, (pointer, b, t)
    packed = torch.empty((B, T, C), dtype=x.dtype, device=x.device)
    if T:
        _native.pack((pointer, *strides), B, T, C, dtype, packed.data_ptr(), device, stream)
    return packed, (packed.data_ptr(), T * C, C)


def _indices(x: torch.Tensor | None) -> tuple[int, ...] | None:
    return None if x is None else (x.data_ptr(), x.dtype is torch.int64, *x.stride())


def _states(x: torch.Tensor) -> tuple[int, ...]:
    return (x.data_ptr(), x.shape[0], *x.stride())


def causal_conv1d_fn(call):
    """Serve a checked call; see ``atrex.causal_conv1d_fn``. Launches on the current stream."""
    (
        x, weight, bias, silu, offsets, initial, pool, write, read, has_initial, padding, return_final_states,
        B, T, C, _, N, _,
    ) = call  # fmt: skip
    where, dtype = x.device, x.dtype
    device, code = where.index, _DTYPES[dtype]
    stream = current_stream(device)
    strides = x.stride()
    # In one step: a view of an output [B, T, C] takes as much host time again. empty_strided takes less than empty.
    if len(strides) == 3:
        b, c, t = strides
        out = torch.empty_strided((B, C, T), (T * C, 1, C), dtype=dtype, device=where)
    else:
        b, (c, t) = 0, strides
        out = torch.empty_strided((C, T), (1, C), dtype=dtype, device=where)
    # x holds the copy, if there is one, until the launch.
    x, x_at = _tokens(x, (B, T, C), (b, t, c), code, device, stream)
    initial_at = None if initial is None else _states(initial)
    final = final_at = None
    if pool:
        final_at = initial_at
        if has_initial is None:
            initial_at = None
    elif return_final_states:
        final = torch.empty(N, 3, C, dtype=dtype, device=where).transpose(1, 2)
        final_at = (final.data_ptr(), N, 3 * C, 1, C)
    write_at = _indices(write)
    _native.prefill(
        (B, T, C, N),
        code,
        silu,
        x_at,
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        _indices(offsets),
        padding,
        initial_at,
        write_at if read is None else _indices(read),
        _indices(has_initial),
        final_at,
        write_at,
        pool,
        device,
        stream,
    )
    return out, final


def causal_conv1d_update(call):
    """Serve a checked call; see ``atrex.causal_conv1d_update``. Launches on the current stream."""
    x, state, weight, bias, silu, offsets, write, read, accepted, padding, B, T, C, _, N, _ = call
    where, dtype = x.device, x.dtype
    device, code = where.index, _DTYPES[dtype]
    stream = current_stream(device)
    strides = x.stride()
    if len(strides) == 3:
        b, c, t = strides
        out = torch.empty_strided((B, C, T), (T * C, 1, C), dtype=dtype, device=where)
    else:
        row, c = strides
        # Along one token nobody steps, but a packed copy is read along the smaller stride, which shall be c.
        b, t = (row, C * c) if offsets is None else (0, row)
        out = torch.empty_strided((B * T, C), (C, 1), dtype=dtype, device=where)
    x, x_at = _tokens(x, (B, T, C), (b, t, c), code, device, stream)
    write_at = _indices(write)
    if T:
        _native.update(
            (B, T, C, N),
            code,
            silu,
            x_at,
            weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            _indices(offsets),
            padding,
            _states(state),
            state.shape[2],
            write_at if read is None else _indices(read),
            write_at,
            _indices(accepted),
            device,
            stream,
        )
    return out
