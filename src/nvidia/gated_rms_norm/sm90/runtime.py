"""Gated RMS norm on Hopper (sm_90a): allocates, describes the tensors to the kernel, launches."""

from __future__ import annotations

import torch
from torch._C import _cuda_getCurrentRawStream as current_stream

from atrex.api._gated_rms_norm_call import row_runs

from . import _native

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def _rows(x: torch.Tensor) -> tuple[int, int, int, int]:
    """Where the rows lie: ``(data_ptr, inner, stride_outer, stride_inner)``, inner 0 if one stride is enough."""
    if x.is_contiguous():
        return x.data_ptr(), 0, 0, 128
    runs = row_runs(x.shape, x.stride())
    if len(runs) < 2:
        return x.data_ptr(), 0, 0, runs[0][1] if runs else 0
    (inner, stride_inner), (_, stride_outer) = runs
    return x.data_ptr(), inner, stride_outer, stride_inner


def gated_rms_norm(call):
    """Serve a checked call; see ``atrex.gated_rms_norm``. Launches on the current stream."""
    x, weight, z, eps, is_sigmoid, cast, rows, _, _ = call
    # empty_like takes less host time than empty.
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if rows:
        device, dtype, weight_dtype = x.device.index, x.dtype, weight.dtype
        _native.forward(
            rows,
            _rows(x),
            _rows(z),
            weight.data_ptr(),
            _DTYPES[weight_dtype],
            out.data_ptr(),
            eps,
            is_sigmoid,
            cast,
            cast and weight_dtype is dtype,
            dtype is torch.float16,
            device,
            current_stream(device),
        )
    return out
