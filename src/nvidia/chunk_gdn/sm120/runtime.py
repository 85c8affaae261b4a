"""Chunked gated delta rule on sm_120: allocates, describes the tensors to the kernels, launches."""

from __future__ import annotations

from functools import cache, lru_cache

import torch
from torch._C import _cuda_getCurrentRawStream as current_stream

from . import _native

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache(maxsize=4096)  # a server's sizes differ from call to call
def _plan(B: int, T: int, HV: int, N: int, packed: bool, device: int) -> tuple[int, ...]:
    """How the kernels cut a problem of this size (``Plan`` in forward.h); the last item is the workspace, bytes."""
    return _native.plan(B, T, HV, N, packed, _multiprocessors(device))


def _readable(x: torch.Tensor, device: int, stream: int) -> torch.Tensor:
    """``x``, or a packed copy where 16-byte copies cannot read it: they want 16-byte steps and unit feature stride."""
    strides = x.stride()
    if strides[3] == 1 and not (x.data_ptr() & 15) | ((strides[0] | strides[1] | strides[2]) & 7):
        return x
    B, T, heads, D = x.shape
    packed = torch.empty((B, T, heads, D), dtype=x.dtype, device=x.device)
    if T:
        _native.pack((x.data_ptr(), *strides), B, T, heads, packed.data_ptr(), device, stream)
    return packed


def chunk_gated_delta_rule(call):
    """Serve a checked call; see ``atrex.chunk_gated_delta_rule``. Launches on the tensors' current stream."""
    q, k, v, g, beta, initial = call.q, call.k, call.v, call.g, call.beta, call.initial_state
    B, T, H, HV, N, every = call.B, call.T, call.H, call.HV, call.N, call.checkpoint_every
    cu_seqlens, indices = call.cu_seqlens, call.state_indices
    where = q.device
    device = where.index
    stream = current_stream(device)

    q, k, v = _readable(q, device, stream), _readable(k, device, stream), _readable(v, device, stream)
    plan = _plan(B, T, HV, N, cu_seqlens is not None, device)
    o = torch.empty((B, T, HV, 128), dtype=v.dtype, device=where)
    workspace = torch.empty(plan[-1], dtype=torch.uint8, device=where)
    final = checkpoints = None
    if indices is not None:
        final = initial
    elif call.output_final_state:
        final = torch.empty((N, HV, 128, 128), dtype=call.state_dtype, device=where)
    rows = B * (T // every) if every else 0
    if every:
        checkpoints = torch.empty((rows, HV, 128, 128), dtype=call.state_dtype, device=where)

    _native.forward(
        (B, T, H, HV, N),
        plan,
        q.dtype is torch.float16,
        call.scale,
        call.use_qk_l2norm_in_kernel,
        (q.data_ptr(), *q.stride()),
        (k.data_ptr(), *k.stride()),
        (v.data_ptr(), *v.stride()),
        (g.data_ptr(), *g.stride()),
        _DTYPES[g.dtype],
        (beta.data_ptr(), *beta.stride()),
        _DTYPES[beta.dtype],
        o.data_ptr(),
        None if cu_seqlens is None else cu_seqlens.data_ptr(),
        cu_seqlens is not None and cu_seqlens.dtype is torch.int64,
        None if initial is None else (initial.data_ptr(), *initial.stride()),
        None if final is None else (final.data_ptr(), *final.stride()),
        _DTYPES[call.state_dtype],
        call.state_v_first,
        None if indices is None else indices.data_ptr(),
        indices is not None and indices.dtype is torch.int64,
        0 if indices is None else initial.shape[0],
        None if checkpoints is None else (checkpoints.data_ptr(), *checkpoints.stride()),
        every,
        rows,
        workspace.data_ptr(),
        device,
        stream,
    )
    return o, final if call.output_final_state else None, checkpoints
