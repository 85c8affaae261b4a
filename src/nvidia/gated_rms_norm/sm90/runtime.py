"""Gated RMS norm on Hopper (sm_90a): allocates, describes the tensors to the kernel, launches."""

from __future__ import annotations

import torch
from torch._C import _cuda_getCurrentRawStream as current_stream

from . import _native

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def _rows(x: torch.Tensor) -> tuple[int, int, int, int]:
    """Where the rows lie: ``(data_ptr, inner, stride_outer, stride_inner)``, inner 0 if one stride is enough."""
    if x.is_contiguous():
        return x.data_ptr(), 0, 0, 128
    runs: list[tuple[int, int]] = []  # (rows, stride), the innermost first
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if runs and stride == runs[-1][0] * runs[-1][1]:
            runs[-1] = (size * runs[-1][0], runs[-1][1])
        else:
            runs.append((size, stride))
    if len(runs) < 2:
        return x.data_ptr(), 0, 0, runs[0][1] if runs else 0
    (inner, stride_inner), (_, stride_outer) = runs
    return x.data_ptr(), inner, stride_outer, stride_inner


def gated_rms_norm(call):
    """Serve a checked call; see ``atrex.gated_rms_norm``. Launches on the current stream."""
    x, weight, cast = call.x, call.weight, call.cast_before_weight
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if call.rows:
        device = x.device.index
        _native.forward(
            call.rows,
            _rows(x),
            _rows(call.z),
            weight.data_ptr(),
            _DTYPES[weight.dtype],
            out.data_ptr(),
            call.eps,
            call.is_sigmoid,
            cast,
            cast and weight.dtype is x.dtype,
            x.dtype is torch.float16,
            device,
            current_stream(device),
        )
    return out
