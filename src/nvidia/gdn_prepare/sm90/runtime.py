"""Norms and gates before the delta rule on Hopper (sm_90a): allocates, describes the tensors, launches."""

from __future__ import annotations

import torch
from torch._C import _cuda_getCurrentRawStream as current_stream

from . import _native

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def _gate(x: torch.Tensor) -> tuple[int, ...]:
    strides = x.stride()
    if len(strides) == 3:
        return (x.data_ptr(), _DTYPES[x.dtype], *strides)
    return (x.data_ptr(), _DTYPES[x.dtype], 0, *strides)


def gdn_prepare(call):
    """Serve a checked call; see ``atrex.gdn_prepare``. Launches on the current stream."""
    x, a, b, A_log, dt_bias, apply_l2norm, H, HV, _, V, _ = call
    shape, strides, dtype, device = x.shape, x.stride(), x.dtype, x.device.index
    columns = H * 128
    start = x.storage_offset()
    # The cheapest ways on the host: as_strided for a slice and its unflatten, new_empty of sizes one by one, empty_like
    # where there is one alike. The results are no views of a common allocation: one may be changed without the others.
    if len(shape) == 3:
        B, T, _ = shape
        step_b, step, _ = strides
        v = x.as_strided((B, T, HV, V), (step_b, step, V, 1), start + 2 * columns)
        g = x.new_empty(B, T, HV, dtype=torch.float32)
        heads, steps = (B, T, H, 128), (step_b, step, 128, 1)
    else:
        B, step_b = 1, 0
        T, _ = shape
        step, _ = strides
        v = x.as_strided((T, HV, V), (step, V, 1), start + 2 * columns)
        g = x.new_empty(T, HV, dtype=torch.float32)
        heads, steps = (T, H, 128), (step, 128, 1)
    beta = torch.empty_like(g)
    if apply_l2norm:
        q = x.new_empty(*heads)
        k = torch.empty_like(q)
    else:
        q, k = x.as_strided(heads, steps, start), x.as_strided(heads, steps, start + columns)
    if B and T:
        _native.forward(
            (B, T, H if apply_l2norm else 0, HV),
            (x.data_ptr(), step_b, step),
            q.data_ptr(),
            k.data_ptr(),
            _gate(a),
            _gate(b),
            (A_log.data_ptr(), _DTYPES[A_log.dtype], 0, 0, *A_log.stride()),
            (dt_bias.data_ptr(), _DTYPES[dt_bias.dtype], 0, 0, *dt_bias.stride()),
            g.data_ptr(),
            beta.data_ptr(),
            dtype is torch.float16,
            device,
            current_stream(device),
        )
    return q, k, v, g, beta
