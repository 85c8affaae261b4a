"""Recurrent gated delta rule on Hopper (sm_90a): allocates, describes the tensors to the kernel, launches."""

from __future__ import annotations

import torch
from torch._C import _cuda_getCurrentRawStream as current_stream

from . import _native

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_STORE_NONE, _STORE_LAST, _STORE_EACH_TOKEN = range(3)


def _activation(x: torch.Tensor, device: int, stream: int) -> tuple[torch.Tensor, tuple[int, ...]]:
    """``x`` and how it lies, or a packed copy where it cannot be read in 16-byte vectors."""
    strides = b, t, h, d = x.stride()
    pointer = x.data_ptr()
    if d == 1 and not (pointer & 15 or (b | t | h) & 7):
        return x, (pointer, b, t, h)
    B, T, heads, D = x.shape
    b, t, h = b if B > 1 else 0, t if T > 1 else 0, h if heads > 1 else 0  # nobody steps along a dimension of one
    if d == 1 and not (pointer & 15 or (b | t | h) & 7):
        return x, (pointer, b, t, h)
    packed = torch.empty((B, T, heads, D), dtype=x.dtype, device=x.device)
    if T:
        _native.pack((pointer, *strides), B, T, heads, packed.data_ptr(), device, stream)
    return packed, (packed.data_ptr(), T * heads * D, heads * D, D)


def _gate(x: torch.Tensor, T: int) -> tuple[int, ...]:
    strides = x.stride()
    if len(strides) == 2:  # [B * T, HV]
        strides = (T * strides[0], *strides)
    return (x.data_ptr(), *strides, _DTYPES[x.dtype])


def _indices(x: torch.Tensor | None) -> tuple[int, ...] | None:
    return None if x is None else (x.data_ptr(), x.dtype is torch.int64, *x.stride())


def fused_recurrent_gated_delta_rule(call):
    """Serve a checked call; see ``atrex.fused_recurrent_gated_delta_rule``. Launches on the current stream."""
    T, HV, N, initial, slots, buffer = call.T, call.HV, call.N, call.initial_state, call.state_indices, call.buffer
    A_log, dt_bias, accepted = call.A_log, call.dt_bias, call.num_accepted_tokens
    where = call.q.device
    device = where.index
    stream = current_stream(device)

    # q, k and v hold the copies, if there are any, until the launch.
    q, q_at = _activation(call.q, device, stream)
    k, k_at = _activation(call.k, device, stream)
    v, v_at = _activation(call.v, device, stream)
    # empty_strided takes less host time than empty.
    o = torch.empty_strided((call.B, T, HV, 128), (T * HV * 128, HV * 128, 128, 1), dtype=v.dtype, device=where)
    g, beta = (call.g, call.beta) if A_log is None else (call.a, call.b)

    final = stored = write = None
    store, steps, padding = _STORE_NONE, 1, call.padding_index
    write_padding = padding
    if buffer is not None:
        rows, steps = buffer.shape[:2]
        stored = (buffer.data_ptr(), rows, *buffer.stride()[:3])
        store, write, write_padding = _STORE_EACH_TOKEN, call.buffer_indices, -1
    elif slots is not None:
        final, write = initial, slots
        stored = (initial.data_ptr(), initial.shape[0], initial.stride(0), 0, initial.stride(1))
        store = _STORE_LAST
        if slots.dim() == 2:
            store, steps = _STORE_EACH_TOKEN, slots.shape[1]
    elif call.output_final_state:
        final = torch.empty((N, HV, 128, 128), dtype=call.state_dtype, device=where)
        stored, store = (final.data_ptr(), N, HV * 128 * 128, 0, 128 * 128), _STORE_LAST
    read = slots if call.initial_state_indices is None else call.initial_state_indices

    _native.forward(
        (T, call.H, HV, N),
        (call.state_v_first, call.state_dtype is torch.bfloat16, v.dtype is torch.float16),
        call.scale,
        call.use_qk_l2norm_in_kernel,
        q_at,
        k_at,
        v_at,
        _gate(g, T),
        _gate(beta, T),
        None if A_log is None else (A_log.data_ptr(), _DTYPES[A_log.dtype], A_log.stride(0)),
        None if A_log is None else (dt_bias.data_ptr(), _DTYPES[dt_bias.dtype], dt_bias.stride(0)),
        o.data_ptr(),
        _indices(call.cu_seqlens),
        None if initial is None else (initial.data_ptr(), initial.shape[0], initial.stride(0), 0, initial.stride(1)),
        _indices(read),
        _indices(accepted),
        1 if accepted is None else slots.shape[1],
        padding,
        store,
        stored,
        _indices(write),
        write_padding,
        steps,
        device,
        stream,
    )
    return o, final if call.output_final_state else None
