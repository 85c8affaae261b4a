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
    packed = x.new_empty(B, T, heads, D)
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
    (
        q, k, v, g, beta, A_log, a, b, dt_bias, scale, initial, output_final_state, l2norm, offsets, v_first, slots,
        read, accepted, padding, buffer, buffer_indices, B, T, H, HV, _, _, N, state_dtype, _,
    ) = call  # fmt: skip
    dtype, device = q.dtype, q.device.index
    stream = current_stream(device)

    # q, k and v hold the copies, if there are any, until the launch.
    q, q_at = _activation(q, device, stream)
    k, k_at = _activation(k, device, stream)
    v, v_at = _activation(v, device, stream)
    # new_empty of sizes one by one takes the least host time.
    o = q.new_empty(B, T, HV, 128)

    initial_at = a_log_at = dt_bias_at = None
    if initial is not None:
        stride, stride_h, _, _ = initial.stride()
        initial_at = (initial.data_ptr(), initial.shape[0], stride, 0, stride_h)
    if A_log is not None:
        g, beta = a, b
        a_log_at = (A_log.data_ptr(), _DTYPES[A_log.dtype], *A_log.stride())
        dt_bias_at = (dt_bias.data_ptr(), _DTYPES[dt_bias.dtype], *dt_bias.stride())

    slots_at = _indices(slots)
    final = stored_at = write_at = None
    store, steps, write_padding = _STORE_NONE, 1, padding
    if buffer is not None:
        rows, steps = buffer.shape[:2]
        stored_at = (buffer.data_ptr(), rows, *buffer.stride()[:3])
        store, write_at, write_padding = _STORE_EACH_TOKEN, _indices(buffer_indices), -1
    elif slots is not None:
        final, stored_at, write_at, store = initial, initial_at, slots_at, _STORE_LAST
        if len(slots_at) == 4:
            store, steps = _STORE_EACH_TOKEN, slots.shape[1]
    elif output_final_state:
        final = q.new_empty(N, HV, 128, 128, dtype=state_dtype)
        stored_at, store = (final.data_ptr(), N, HV * 128 * 128, 0, 128 * 128), _STORE_LAST

    _native.forward(
        (T, H, HV, N),
        (v_first, state_dtype is torch.bfloat16, dtype is torch.float16),
        scale,
        l2norm,
        q_at,
        k_at,
        v_at,
        _gate(g, T),
        _gate(beta, T),
        a_log_at,
        dt_bias_at,
        o.data_ptr(),
        _indices(offsets),
        initial_at,
        slots_at if read is None else _indices(read),
        _indices(accepted),
        1 if accepted is None else slots.shape[1],
        padding,
        store,
        stored_at,
        write_at,
        write_padding,
        steps,
        device,
        stream,
    )
    return o, final if output_final_state else None
