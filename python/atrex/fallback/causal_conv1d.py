"""Causal depthwise convolution in PyTorch: any device, any width, differentiable."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from ._exact import without_autocast

if TYPE_CHECKING:
    from ..api._causal_conv1d_call import PrefillCall, UpdateCall


def causal_conv1d_fn(call: PrefillCall) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The contract of ``atrex.causal_conv1d_fn``. Reads all integer tensors back to the host."""
    x = call.x
    tokens = x.transpose(1, 2) if x.dim() == 3 else x.t().unsqueeze(0)
    with without_autocast(x.device):
        out, finals = _prefill(call._replace(x=tokens))
    return out.transpose(1, 2) if x.dim() == 3 else out[0].t(), finals


def causal_conv1d_update(call: UpdateCall) -> torch.Tensor:
    """The contract of ``atrex.causal_conv1d_update``. Reads all integer tensors back to the host."""
    x, packed = call.x, call.query_start_loc is not None
    call = call._replace(x=x.transpose(1, 2) if x.dim() == 3 else x.unsqueeze(0 if packed else 1))
    with without_autocast(x.device):
        if packed or call.conv_state_indices is not None or call.num_accepted_tokens is not None:
            out = _update(call)
        else:
            out = _update_rows(call)
    return out.transpose(1, 2) if x.dim() == 3 else out.squeeze(0 if packed else 1)


# Below, x and the outputs are [B, T, C].


def _prefill(call: PrefillCall) -> tuple[torch.Tensor, torch.Tensor | None]:
    N, W, states = call.N, call.W, call.initial
    written = list(range(N)) if call.cache_indices is None else _slots(call.cache_indices, call, states)
    source = written
    if call.initial_state_indices is not None:
        source = _slots(call.initial_state_indices, call, states)
    reads = [states is not None and not call.pool] * N
    if call.has_initial_state is not None:
        reads = call.has_initial_state.tolist()

    x, parts, finals, places = call.x.flatten(0, 1), [], [], []
    zeros = x.new_zeros(W - 1, call.C)
    for n, (start, length) in enumerate(_spans(call)):
        first = source[n] if reads[n] else written[n]
        if first < 0:
            parts.append((start, x.new_zeros(length, call.C)))
            continue
        before = states[source[n]].t() if reads[n] else zeros
        window = torch.cat([before, x[start : start + length]])
        parts.append((start, _convolved(call, window)))
        if not call.pool:
            finals.append(window[length:].t())
        elif length and written[n] >= 0:
            places.append(written[n])
            finals.append(window[length:].t())
    out = _placed(call, parts)
    if call.pool:
        _write(states, places, finals)
    return out, torch.stack(finals) if call.return_final_states else None


def _update_rows(call: UpdateCall) -> torch.Tensor:
    """Sequences of one length, states in their order: all at once."""
    if not call.T:
        return call.x.new_zeros(call.B, 0, call.C)
    columns = torch.cat([call.conv_state.mT, call.x], 1)
    out = _convolved(call, columns[:, columns.shape[1] - call.T - call.W + 1 :])
    with torch.no_grad():
        call.conv_state.copy_(columns[:, call.T :].mT)
    return out


def _update(call: UpdateCall) -> torch.Tensor:
    W, states = call.W, call.conv_state
    L = states.shape[2]
    written = list(range(call.N))
    if call.conv_state_indices is not None:
        written = _slots(call.conv_state_indices, call, states)
    source = written
    if call.initial_state_indices is not None:
        source = _slots(call.initial_state_indices, call, states)
    accepted = None if call.num_accepted_tokens is None else call.num_accepted_tokens.tolist()

    x, parts, finals, places = call.x.flatten(0, 1), [], [], []
    for n, (start, length) in enumerate(_spans(call)):
        first = L - W + 1 if accepted is None else accepted[n] - 1
        if source[n] < 0 or not 0 <= first <= L - W + 1:
            parts.append((start, x.new_zeros(length, call.C)))
            continue
        before, tokens = states[source[n]].t(), x[start : start + length]
        window = torch.cat([before[first : first + W - 1], tokens])
        parts.append((start, _convolved(call, window)))
        if length and written[n] >= 0:
            if accepted is None:
                final = torch.cat([before, tokens])[length:]
            else:
                kept = min(L, W - 2 + length)
                final = torch.cat([window[1 : 1 + kept], states[written[n]].t()[kept:]])
            places.append(written[n])
            finals.append(final.t())
    out = _placed(call, parts)
    _write(states, places, finals)
    return out


def _slots(indices: torch.Tensor, call: PrefillCall | UpdateCall, states: torch.Tensor) -> list[int]:
    """Rows of ``states``; -1 for padding."""
    return [i if 0 <= i < states.shape[0] and i != call.pad_slot_id else -1 for i in indices.tolist()]


def _spans(call: PrefillCall | UpdateCall) -> list[tuple[int, int]]:
    """First token and length of each sequence in the tokens of all batches.

    Raises:
        ValueError: on a CPU, if the offsets do not rise from 0 to at most T.
    """
    T = call.T
    if call.query_start_loc is None:
        return [(b * T, T) for b in range(call.B)]
    offsets = call.query_start_loc.tolist()
    malformed = offsets[0] != 0 or offsets[-1] > T or any(a > b for a, b in itertools.pairwise(offsets))
    if malformed and call.x.device.type == "cpu":
        shown = str(offsets if len(offsets) <= 10 else [*offsets[:5], "...", *offsets[-4:]])
        raise ValueError(f"query_start_loc must rise from 0 to at most T={T}, got {shown}")
    starts = [min(max(offset, 0), T) for offset in offsets[:-1]]
    ends = [min(max(end, start), T) for start, end in zip(starts, offsets[1:], strict=True)]
    return [(start, end - start) for start, end in zip(starts, ends, strict=True)]


def _convolved(call: PrefillCall | UpdateCall, window: torch.Tensor) -> torch.Tensor:
    """Outputs ``[., len - (W - 1), C]`` of the tokens that follow the first W - 1 ones of ``window [., len, C]``."""
    dtype = torch.float64 if window.dtype is torch.float64 else torch.float32
    count = window.shape[-2] - (call.W - 1)
    window, taps = window.to(dtype), call.weight.to(dtype).t().contiguous()
    out = window[..., :count, :] * taps[0]
    for j in range(1, call.W):
        out.addcmul_(window[..., j : j + count, :], taps[j])
    if call.bias is not None:
        out = out + call.bias.to(dtype)
    return (F.silu(out) if call.silu else out).to(call.x.dtype)


def _placed(call: PrefillCall | UpdateCall, parts: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """``parts``, each with its first token, as ``[B, T, C]``; zeros between them."""
    out = call.x.new_zeros(call.B * call.T, call.C)
    for start, part in parts:
        out[start : start + part.shape[0]] = part
    return out.view(call.B, call.T, call.C)


def _write(states: torch.Tensor, places: list[int], finals: list[torch.Tensor]) -> None:
    """Last of all: a slot may be read by several sequences."""
    with torch.no_grad():
        for place, final in zip(places, finals, strict=True):
            states[place] = final
