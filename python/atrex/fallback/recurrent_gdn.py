"""Recurrent gated delta rule in PyTorch: any device, any head size, differentiable.

Token by token; all heads and all sequences that have a token at this step together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from ._chunks import sequence_spans
from ._exact import without_autocast

if TYPE_CHECKING:
    from ..api._recurrent_gdn_call import RecurrentGdnCall

_FLOAT16_MAX = torch.finfo(torch.float16).max


def fused_recurrent_gated_delta_rule(call: RecurrentGdnCall) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The contract of ``atrex.fused_recurrent_gated_delta_rule``. Reads all integer tensors back to the host."""
    with without_autocast(call.q.device):
        if call.cu_seqlens is None and call.state_indices is None and call.buffer is None:
            return _run_rows(call)
        return _run_anywhere(call)


def _run_rows(call: RecurrentGdnCall) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sequences of one length, states in their order: nothing is looked up, and nothing is read back."""
    tokens = _inputs(call)
    S = _initial_states(call, None)
    outputs = []
    for t in range(call.T):
        o, S = _step(call, S, *(x[:, t] for x in tokens))
        outputs.append(o)
    o = _outputs(call, torch.stack(outputs, 1) if outputs else tokens[1])
    if not call.output_final_state:
        return o, None
    return o, _as_stored(call, S if outputs else S.clone())


def _step(
    call: RecurrentGdnCall, S: torch.Tensor, qk: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs ``[n, HV, V]`` without the scale, and new states, of a token each of n sequences.

    The states are large and everything else is small: they are read once for both sums, and written once more.
    """
    of_q, of_k = (qk @ S).unbind(-2)  # S^T q, S^T k
    q, k = qk.unbind(-2)
    u = torch.addcmul(v, decay, of_k, value=-1) * beta
    o = torch.addcmul(decay * of_q, (q * k).sum(-1, keepdim=True), u)
    S = (decay.unsqueeze(-1) * S).addcmul_(k.unsqueeze(-1), u.unsqueeze(-2))
    return o, S.to(call.state_dtype).to(S.dtype)  # rounded as if each token were a call of its own


def _outputs(call: RecurrentGdnCall, o: torch.Tensor) -> torch.Tensor:
    o = o * call.scale
    if call.v.dtype is torch.float16:
        o = o.clamp(-_FLOAT16_MAX, _FLOAT16_MAX)
    return o.to(call.v.dtype).view(call.v.shape)


def _run_anywhere(call: RecurrentGdnCall) -> tuple[torch.Tensor, torch.Tensor | None]:
    device, pool, slots = call.q.device, call.initial_state, call.state_indices
    if call.cu_seqlens is None:
        starts, lengths = [b * call.T for b in range(call.B)], [call.T] * call.B
    else:
        starts, lengths = sequence_spans(call.cu_seqlens.tolist(), call.T, strict=device.type == "cpu")
    rows = _rows_read(call)
    written = None if slots is None or call.buffer is not None else slots.reshape(call.N, -1).tolist()
    each_token = call.buffer is not None or (slots is not None and slots.dim() == 2)

    inputs = [x.flatten(0, 1) for x in _inputs(call)]
    live = [n for n in range(call.N) if rows[n] >= 0]
    S = _initial_states(call, torch.tensor([rows[n] for n in live], dtype=torch.int64, device=device))
    o = inputs[1].new_zeros(inputs[1].shape)
    for t in range(max(lengths)):
        ranks = [rank for rank, n in enumerate(live) if t < lengths[n]]
        now = [live[rank] for rank in ranks]
        if not now:
            continue
        at = torch.tensor(ranks, device=device)
        tokens = torch.tensor([starts[n] + t for n in now], device=device)
        now_o, state = _step(call, S[at], *(x[tokens] for x in inputs))
        o = o.index_copy(0, tokens, now_o)
        if each_token:
            _keep(call, state, now, t, written)
        S = S.index_copy(0, at, state)
    o = _outputs(call, o)

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
    """q over k ``[B, T, HV, 2, K]``, v ``[B, T, HV, V]``, decay and beta ``[B, T, HV, 1]``, as they are computed."""
    dtype = torch.float64 if call.q.dtype is torch.float64 else torch.float32
    qk = torch.stack((call.q, call.k), -2).to(dtype)
    if call.use_qk_l2norm_in_kernel:
        qk = qk * (qk.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    if call.HV != call.H:
        qk = qk.repeat_interleave(call.HV // call.H, 2)
    # A CPU's float32 gives an element other bits within a vector than at its end, and so in one call than in many.
    wide = torch.float64 if call.q.device.type == "cpu" else dtype
    if call.A_log is None:
        g, beta = call.g.to(wide), call.beta.to(dtype)
    else:
        a, b = (x.reshape(call.B, call.T, call.HV).to(wide) for x in (call.a, call.b))
        g = -call.A_log.to(wide).exp() * F.softplus(a + call.dt_bias.to(wide))  # its own threshold is 20
        beta = b.sigmoid().to(dtype)
    return qk, call.v.to(dtype), g.exp().to(dtype).unsqueeze(-1), beta.unsqueeze(-1)


def _initial_states(call: RecurrentGdnCall, rows: torch.Tensor | None) -> torch.Tensor:
    """States ``[len(rows), HV, K, V]``, all of them if None, in the dtype of the computation, contiguous.

    The layout decides in which order a product adds up, and many tokens in a call have to equal many calls.
    """
    dtype = torch.float64 if call.q.dtype is torch.float64 else torch.float32
    if call.initial_state is None:
        count = call.N if rows is None else len(rows)
        return torch.zeros(count, call.HV, call.K, call.V, dtype=dtype, device=call.q.device)
    states = call.initial_state if rows is None else call.initial_state[rows]
    return (states.mT if call.state_v_first else states).to(dtype).contiguous()


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
