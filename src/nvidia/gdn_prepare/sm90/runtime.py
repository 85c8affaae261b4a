"""Norms and gates before the delta rule on Hopper (sm_90a): allocates, describes the tensors, launches."""

from __future__ import annotations

import torch
from torch._C import _cuda_getCurrentRawStream as current_stream

from . import _native

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def _gate(x: torch.Tensor) -> tuple[int, ...]:
    strides = x.stride()
    return (x.data_ptr(), _DTYPES[x.dtype], *(0,) * (3 - len(strides)), *strides)


def gdn_prepare(call):
    """Serve a checked call; see ``atrex.gdn_prepare``. Launches on the current stream."""
    x, H, HV = call.conv_output, call.H, call.HV
    where, dtype, shape, strides = x.device, x.dtype, x.shape, x.stride()
    tokens, steps, columns = shape[:-1], strides[:-1], H * 128
    start = x.storage_offset()
    # as_strided is one step, a slice and its unflatten are two slow ones; empty_like is the cheapest way to allocate.
    v = x.as_strided((*tokens, HV, call.V), (*steps, call.V, 1), start + 2 * columns)
    heads = (*tokens, H, 128)
    if call.apply_l2norm:
        q = x.new_empty(heads)
        k = torch.empty_like(q)
    else:
        q, k = (x.as_strided(heads, (*steps, 128, 1), start + part) for part in (0, columns))
    g = torch.empty((*tokens, HV), dtype=torch.float32, device=where)
    beta = torch.empty_like(g)
    if g.numel():
        device = where.index
        _native.forward(
            (shape[0] if len(shape) == 3 else 1, shape[-2], H if call.apply_l2norm else 0, HV),
            (x.data_ptr(), strides[0] if len(shape) == 3 else 0, strides[-2]),
            q.data_ptr(),
            k.data_ptr(),
            _gate(call.a),
            _gate(call.b),
            _gate(call.A_log),
            _gate(call.dt_bias),
            g.data_ptr(),
            beta.data_ptr(),
            dtype is torch.float16,
            device,
            current_stream(device),
        )
    return q, k, v, g, beta
