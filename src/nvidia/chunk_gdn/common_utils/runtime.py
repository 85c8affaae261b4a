"""Chunked gated delta rule on NVIDIA GPUs: allocates, describes the tensors to a target's kernels, launches them."""

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
def _plan(B: int, T: int, H: int, HV: int, N: int, packed: bool, device: int) -> tuple[int, ...]:
    """How the kernels cut a problem of this size (``Plan`` in forward.h); the last item is the workspace, bytes."""
    return _native.plan(B, T, H, HV, N, packed, _multiprocessors(device))


def _activation(x: torch.Tensor, device: int, stream: int) -> tuple[torch.Tensor, tuple[int, ...]]:
    """``x`` and how it lies, or a packed copy: kernels want unit feature stride and 16-byte steps, never of zero."""
    strides = b, t, h, d = x.stride()
    pointer = x.data_ptr()
    if d == 1 and b and t and h and not (pointer & 15 or (b | t | h) & 7):
        return x, (pointer, b, t, h)
    B, T, heads, D = x.shape
    packed = torch.empty(B, T, heads, D, dtype=x.dtype, device=x.device)
    if T:
        _native.pack((pointer, *strides), B, T, heads, packed.data_ptr(), device, stream)
    return packed, (packed.data_ptr(), T * heads * D, heads * D, D)


def chunk_gated_delta_rule(call):
    """Serve a checked call; see ``atrex.chunk_gated_delta_rule``. Launches on the tensors' current stream."""
    (
        q, k, v, g, beta, scale, initial, output_final_state, l2norm, cu_seqlens, v_first, indices, every,
        B, T, H, HV, _, _, N, state_dtype, _,
    ) = call  # fmt: skip
    where, dtype = q.device, q.dtype
    device = where.index
    stream = current_stream(device)

    # q, k and v hold the copies, if there are any, until the launch.
    q, q_at = _activation(q, device, stream)
    k, k_at = _activation(k, device, stream)
    v, v_at = _activation(v, device, stream)
    plan = _plan(B, T, H, HV, N, cu_seqlens is not None, device)
    # Sizes one by one take less host time than a tuple of them.
    o = torch.empty(B, T, HV, 128, dtype=dtype, device=where)
    workspace = torch.empty(plan[-1], dtype=torch.uint8, device=where)
    initial_at = None if initial is None else (initial.data_ptr(), *initial.stride())
    final = final_at = checkpoints = checkpoints_at = None
    rows = 0
    if indices is not None:
        final, final_at = initial, initial_at
    elif output_final_state:
        final = torch.empty(N, HV, 128, 128, dtype=state_dtype, device=where)
        final_at = (final.data_ptr(), HV * 128 * 128, 128 * 128, 128, 1)
    if every:
        rows = B * (T // every)
        checkpoints = torch.empty(rows, HV, 128, 128, dtype=state_dtype, device=where)
        checkpoints_at = (checkpoints.data_ptr(), HV * 128 * 128, 128 * 128, 128, 1)

    _native.forward(
        (B, T, H, HV, N),
        plan,
        dtype is torch.float16,
        scale,
        l2norm,
        q_at,
        k_at,
        v_at,
        (g.data_ptr(), *g.stride()),
        _DTYPES[g.dtype],
        (beta.data_ptr(), *beta.stride()),
        _DTYPES[beta.dtype],
        o.data_ptr(),
        None if cu_seqlens is None else cu_seqlens.data_ptr(),
        cu_seqlens is not None and cu_seqlens.dtype is torch.int64,
        initial_at,
        final_at,
        _DTYPES[state_dtype],
        v_first,
        None if indices is None else indices.data_ptr(),
        indices is not None and indices.dtype is torch.int64,
        0 if indices is None else initial.shape[0],
        checkpoints_at,
        every,
        rows,
        workspace.data_ptr(),
        device,
        stream,
    )
    return o, final if output_final_state else None, checkpoints
