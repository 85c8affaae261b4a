"""Recurrent gated delta rule in PyTorch: any device, any head size, differentiable.

Token by token as the recurrence is written; all heads and all sequences that have a token at this step together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from ._chunks import sequence_spans

if TYPE_CHECKING:
    from ..api._recurrent_gdn_call import RecurrentGdnCall

_FLOAT16_MAX = torch.finfo(torch.float16).max


def fused_recurrent_gated_delta_rule(call: RecurrentGdnCall) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The contract of ``atrex.fused_recurrent_gated_delta_rule``. Reads all integer tensors back to the host."""
    with torch.autocast(call.q.device.type, enabled=False):
        return _run(call)


def _run(call: RecurrentGdnCall) -> tuple[torch.Tensor, torch.Tensor | None]:
    device, pool, slots = call.q.device, call.initial_state, call.state_indices
    if call.cu_seqlens is None:
        starts, lengths = [b * call.T for b in range(call.B)], [call.T] * call.B
    else:
        starts, lengths = sequence_spans(call.cu_seqlens.tolist(), call.T, strict=device.type == "cpu")
    rows = _rows_read(call)
    written = None if slots is None or call.buffer is not None else slots.reshape(call.N, -1).tolist()
    each_token = call.buffer is not None or (slots is not None and slots.dim() == 2)

    q, k, v, g, beta = _inputs(call)
    live = [n for n in range(call.N) if rows[n] >= 0]
    S = _initial_states(call, torch.tensor([rows[n] for n in live], dtype=torch.int64, device=device))
    o = v.new_zeros(v.shape)
    for t in range(max(lengths)):
        ranks = [rank for rank, n in enumerate(live) if t < lengths[n]]
        now = [live[rank] for rank in ranks]
        if not now:
            continue
        at = torch.tensor(ranks, device=device)
        tokens = torch.tensor([starts[n] + t for n in now], device=device)
        state = g[tokens].exp()[..., None, None] * S[at]
        u = beta[tokens][..., None] * (v[tokens] - torch.einsum("nhkv,nhk->nhv", state, k[tokens]))
        state = state + k[tokens][..., :, None] * u[..., None, :]
        o = o.index_copy(0, tokens, torch.einsum("nhkv,nhk->nhv", state, q[tokens]))
        state = state.to(call.state_dtype).to(state.dtype)  # as if each token were a call of its own
        if each_token:
            _keep(call, state, now, t, written)
        S = S.index_copy(0, at, state)
    if call.v.dtype is torch.float16:
        o = o.clamp(-_FLOAT16_MAX, _FLOAT16_MAX)
    o = o.to(call.v.dtype).view_as(call.v)

    if slots is not None:
        if not each_token:
            ended = [rank for rank, n in enumerate(live) if lengths[n] and _is_slot(call, written[n][0])]
            _write(call, pool, [written[live[rank]][0] for rank in ended], S[ended])
        return o, pool if call.output_final_state else None
    return o, _as_stored(call, S) if call.output_final_state else None


def _rows_read(call: RecurrentGdnCall) -> list[int]:
    """The row of ``initial_state`` that each sequence starts from; -1: the sequence is padding."""
    if call.state_indices is None:
        return list(range(call.N))
    if call.initial_state_indices is not None:
        rows = call.initial_state_indices.tolist()
    else:
        slots = call.state_indices.reshape(call.N, -1).tolist()
        accepted = [1] * call.N if call.num_accepted_tokens is None else call.num_accepted_tokens.tolist()
        rows = [row[count - 1] if 1 <= count <= len(row) else -1 for row, count in zip(slots, accepted, strict=True)]
    return [row if _is_slot(call, row) else -1 for row in rows]


def _is_slot(call: RecurrentGdnCall, index: int) -> bool:
    return 0 <= index < call.initial_state.shape[0] and index != call.padding_index


def _inputs(call: RecurrentGdnCall) -> tuple[torch.Tensor, ...]:
    """q, k, v ``[B * T, HV, .]``, g and beta ``[B * T, HV]`` in the dtype of the computation."""
    dtype = torch.float64 if call.q.dtype is torch.float64 else torch.float32
    q, k, v = (x.flatten(0, 1).to(dtype) for x in (call.q, call.k, call.v))
    if call.use_qk_l2norm_in_kernel:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q, k = ((x * scale).repeat_interleave(call.HV // call.H, 1) for x, scale in ((q, call.scale), (k, 1.0)))
    if call.A_log is None:
        g, beta = (x.reshape(-1, call.HV).to(dtype) for x in (call.g, call.beta))
    else:
        a, b = (x.reshape(-1, call.HV).to(dtype) for x in (call.a, call.b))
        g = -call.A_log.to(dtype).exp() * F.softplus(a + call.dt_bias.to(dtype))  # its own threshold is 20
        beta = b.sigmoid()
    return q, k, v, g, beta


def _initial_states(call: RecurrentGdnCall, rows: torch.Tensor) -> torch.Tensor:
    """States ``[len(rows), HV, K, V]`` in the dtype of the computation."""
    dtype = torch.float64 if call.q.dtype is torch.float64 else torch.float32
    if call.initial_state is None:
        return torch.zeros(len(rows), call.HV, call.K, call.V, dtype=dtype, device=call.q.device)
    states = call.initial_state[rows]
    return (states.mT if call.state_v_first else states).to(dtype)


def _as_stored(call: RecurrentGdnCall, states: torch.Tensor) -> torch.Tensor:
    states = states.mT if call.state_v_first else states
    # A cast lays out anew while it copies; without a cast ``to`` would return its input.
    return states.to(call.state_dtype, memory_format=torch.contiguous_format).contiguous()


def _keep(
    call: RecurrentGdnCall, states: torch.Tensor, sequences: list[int], t: int, written: list[list[int]] | None
) -> None:
    """Store the states that ``sequences`` have after their token ``t``."""
    if call.buffer is None:
        places = [row[t] if t < len(row) else -1 for row in (written[n] for n in sequences)]
        kept = [i for i, place in enumerate(places) if _is_slot(call, place)]
        _write(call, call.initial_state, [places[i] for i in kept], states[kept])
    elif t < call.buffer.shape[1]:
        rows = sequences
        if call.buffer_indices is not None:
            all_rows = call.buffer_indices.tolist()
            rows = [all_rows[n] for n in sequences]
        kept = [i for i, row in enumerate(rows) if 0 <= row < call.buffer.shape[0]]
        _write(call, call.buffer[:, t], [rows[i] for i in kept], states[kept])


def _write(call: RecurrentGdnCall, to: torch.Tensor, rows: list[int], states: torch.Tensor) -> None:
    with torch.no_grad():
        to.index_copy_(0, torch.tensor(rows, dtype=torch.int64, device=to.device), _as_stored(call, states.detach()))
