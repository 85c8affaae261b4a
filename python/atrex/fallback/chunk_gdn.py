"""Chunked gated delta rule in PyTorch: any device, any head size, differentiable.

Within a chunk of 64 tokens, with G the running sum of g from the chunk's start, S the state before it, and
D_ij = exp(G_i - G_j) for i >= j, else 0, the recurrence is a unit lower triangular system::

    A = strict_lower(diag(beta) (K K^T * D))
    U = (I + A)^-1 diag(beta) (V - exp(G) * K S)
    O = scale (exp(G) * Q S + (Q K^T * D) U)
    S <- exp(G_last) S + K^T (exp(G_last - G) * U)

K K^T and Q K^T are shared by the v heads of a q/k head. What does not depend on S is computed for a segment of
several chunks at once; the rest runs chunk by chunk, for all heads and for a block of sequences together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ._chunks import CHUNK, Chunks, sequence_spans

if TYPE_CHECKING:
    from ..api._chunk_gdn_call import ChunkGdnCall

# Chunks times v heads that are worked on together; one takes about 0.2 MB at K = V = 128. On a CPU they should stay
# in its cache, a GPU wants many at once.
_TOGETHER_ON_CPU, _TOGETHER_ON_GPU = 32, 1024
# exp of it is 0 in float64 too, and unlike -inf it may be multiplied by 0.
_LOWEST_LOG_DECAY = -1e4


def chunk_gated_delta_rule(call: ChunkGdnCall) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The contract of ``atrex.chunk_gated_delta_rule``. Reads ``cu_seqlens`` and ``state_indices`` back to the host."""
    with torch.autocast(call.q.device.type, enabled=False):
        return _run(call)


def _run(call: ChunkGdnCall) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    device, pool, every = call.q.device, call.initial_state, call.checkpoint_every
    if call.cu_seqlens is None:
        starts, lengths = [b * call.T for b in range(call.B)], [call.T] * call.B
    else:
        starts, lengths = sequence_spans(call.cu_seqlens.tolist(), call.T, strict=device.type == "cpu")
    first_rows = [0]  # of the checkpoints of each sequence
    for length in lengths:
        first_rows.append(first_rows[-1] + (length // every if every else 0))
    slots, live = list(range(call.N)), [True] * call.N
    if call.state_indices is not None:
        slots = call.state_indices.tolist()
        live = [0 <= slot < pool.shape[0] for slot in slots]
        lengths = [length if alive else 0 for length, alive in zip(lengths, live, strict=True)]

    order = sorted(range(call.N), key=lambda n: -lengths[n])
    S = _initial_states(call, torch.tensor([slots[n] if live[n] else 0 for n in order], device=device))
    together = _TOGETHER_ON_CPU if device.type == "cpu" else _TOGETHER_ON_GPU
    # Autograd would fill up the gradient of each block to the size of the inputs.
    block = call.N if call.needs_grad else max(1, together // call.HV)
    sources, outputs, finals, kept, rows = [], [], [], [], []
    for first in range(0, call.N, block):
        sequences = order[first : first + block]
        chunks = Chunks([starts[n] for n in sequences], [lengths[n] for n in sequences], device)
        packed, final, snapshots = _scan(call, chunks, S[first : first + block], together)
        sources.append(chunks.source)
        outputs.append(chunks.tokens(packed))
        finals.append(final)
        for step, states in snapshots:
            kept.append(states)
            rows += [first_rows[n] + step * CHUNK // every - 1 for n in sequences[: states.shape[0]]]

    o = call.v.new_zeros(call.B * call.T, call.HV, call.V)
    o = o.index_copy(0, torch.cat(sources), torch.cat(outputs)).view(call.v.shape)
    S = torch.cat(finals)
    if call.state_indices is not None:
        ranks = [rank for rank, n in enumerate(order) if live[n]]
        written = torch.tensor([slots[order[rank]] for rank in ranks], dtype=torch.int64, device=device)
        states = _as_returned(call, S.detach()[torch.tensor(ranks, dtype=torch.int64, device=device)])
        final_state = pool.index_copy_(0, written, states)
    else:
        final_state = _as_returned(call, S[torch.tensor(order, device=device).argsort()])
    checkpoints = None
    if every:
        total = call.B * (call.T // every)
        # Overlapping offsets, which only a GPU lets through, ask for more rows than there are.
        checkpoints = S.new_zeros(max([total, *(row + 1 for row in rows)]), *S.shape[1:])
        if rows:
            checkpoints = checkpoints.index_copy(0, torch.tensor(rows, device=device), torch.cat(kept))
        checkpoints = _as_returned(call, checkpoints[:total])
    return o, final_state if call.output_final_state else None, checkpoints


def _initial_states(call: ChunkGdnCall, rows: torch.Tensor) -> torch.Tensor:
    """States ``[N, HV, K, V]`` in the dtype of the computation."""
    dtype = _compute_dtype(call)
    states = call.initial_state
    if states is None:
        return torch.zeros(call.N, call.HV, call.K, call.V, dtype=dtype, device=call.q.device)
    if states.shape[0] == 0:  # a pool without slots: every sequence is padding
        return states.new_zeros(call.N, call.HV, call.K, call.V, dtype=dtype)
    states = states.index_select(0, rows)
    return _contiguous(states.mT if call.state_v_first else states, dtype)


def _as_returned(call: ChunkGdnCall, states: torch.Tensor) -> torch.Tensor:
    return _contiguous(states.mT if call.state_v_first else states, call.state_dtype)


def _contiguous(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # A cast lays out anew while it copies; without a cast ``to`` would return x as it is.
    return x.to(dtype, memory_format=torch.contiguous_format).contiguous()


def _compute_dtype(call: ChunkGdnCall) -> torch.dtype:
    return torch.float64 if call.q.dtype is torch.float64 else torch.float32


def _scan(
    call: ChunkGdnCall, chunks: Chunks, S: torch.Tensor, together: int
) -> tuple[torch.Tensor, torch.Tensor, list[tuple[int, torch.Tensor]]]:
    """Outputs ``[chunks, 64, HV, V]``, final states, and the checkpoints as (steps done, states of the first few)."""
    HV, V, every = call.HV, call.V, call.checkpoint_every
    segments = _segments(chunks.running, together // HV)
    sizes = [sum(running) for running in segments]
    packed = [chunks.pack(x).split(sizes) for x in (call.q, call.k, call.g, call.beta, call.v)] if segments else []
    # Writing into one tensor is the cheaper way, but autograd would keep a copy of it for every write.
    written = None if call.needs_grad else call.v.new_empty(sum(sizes), CHUNK, HV, V)
    outputs, finished, snapshots = [call.v.new_empty(0, CHUNK, HV, V)], [], []
    step = done = 0
    for running, q, k, g, beta, v in zip(segments, *packed, strict=True):
        minus_k_and_q, k_to_end, T, P, decay = _prepare(call, q, k, g, beta)
        v = v.transpose(1, 2).to(S.dtype)
        at = 0
        for count in running:
            if count < S.shape[0]:
                finished.append(S[count:])
                S = S[:count]
            now = slice(at, at + count)
            flat = S.flatten(0, 1)
            products = torch.bmm(minus_k_and_q[now].flatten(0, 1), flat)
            R = v[now].flatten(0, 1) + products[:, :CHUNK]
            U = torch.bmm(T[now].flatten(0, 1), R)
            o = torch.baddbmm(products[:, CHUNK:], P[now].flatten(0, 1), U)
            o = o.unflatten(0, (count, HV)).transpose(1, 2)
            if written is None:
                outputs.append(o.to(call.v.dtype))
            else:
                written[done + at : done + at + count] = o
            flat = torch.baddbmm(flat * decay[now].flatten()[:, None, None], k_to_end[now].flatten(0, 1).mT, U)
            S = flat.unflatten(0, (count, HV))
            at += count
            step += 1
            full = chunks.full[step - 1]
            if every and step * CHUNK % every == 0 and full:
                snapshots.append((step, S[:full]))
        done += at
    S = torch.cat([S, *reversed(finished)])
    return torch.cat(outputs) if written is None else written, S, snapshots


def _segments(running: list[int], most: int) -> list[list[int]]:
    """Consecutive steps together, as long as they have no more than ``most`` chunks."""
    segments: list[list[int]] = []
    for count in running:
        if segments and sum(segments[-1]) + count <= most:
            segments[-1].append(count)
        else:
            segments.append([count])
    return segments


def _prepare(
    call: ChunkGdnCall, q: torch.Tensor, k: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the chunks of a segment need besides S, all ``[chunks, HV, ...]``.

    Returns:
        exp(G) times -K and Q ``[128, K]``; K decayed to the chunk's end ``[64, K]``; (I + A)^-1 diag(beta) and
        Q K^T * D ``[64, 64]``; exp(G_last).
    """
    dtype, HV, H = _compute_dtype(call), call.HV, call.H
    m, ratio, C = q.shape[0], HV // H, CHUNK
    q, k, g, beta = (_contiguous(x.transpose(1, 2), dtype) for x in (q, k, g, beta))
    if call.use_qk_l2norm_in_kernel:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    g = g.clamp(min=_LOWEST_LOG_DECAY)

    # G_i - G_j as a sum of its own for each pair: differences of running sums lose all digits after a strong decay.
    lower = torch.ones(C, C, dtype=dtype, device=q.device).tril()
    above = torch.zeros_like(lower).masked_fill(lower == 0, float("-inf"))
    terms = (g[..., None] * lower.tril(-1)).flatten(0, 1)
    D = torch.baddbmm(above.expand(m * HV, C, C), lower.expand(m * HV, C, C), terms).exp()
    D = D.view(m, H, ratio, C, C)
    from_start = g.cumsum(-1).exp()

    kq = torch.cat([k, q * call.scale], 2)
    kk, qk = (kq @ k.mT).unsqueeze(2).split(C, 3)
    beta = beta.view(m, H, ratio, C)
    T = torch.linalg.solve_triangular(kk * D * beta[..., None], beta.diag_embed(), upper=False, unitriangular=True)
    signed = torch.cat([-from_start, from_start], -1).view(m, H, ratio, 2 * C, 1)
    minus_k_and_q = kq.unsqueeze(2) * signed
    k_to_end = k.unsqueeze(2) * D[..., -1, :, None]
    return (*(x.flatten(1, 2) for x in (minus_k_and_q, k_to_end, T, qk * D)), from_start[..., -1])
