"""Sequences of any length laid out as chunks of 64 tokens."""

from __future__ import annotations

import itertools

import torch

CHUNK = 64


def sequence_spans(offsets: list[int], T: int, strict: bool) -> tuple[list[int], list[int]]:
    """Starts and lengths of packed sequences. Malformed offsets are an error if ``strict``, else clamped to [0, T].

    Raises:
        ValueError: ``strict``, and the offsets do not rise from 0 to at most T.
    """
    if strict and (offsets[0] != 0 or offsets[-1] > T or any(a > b for a, b in itertools.pairwise(offsets))):
        shown = str(offsets if len(offsets) <= 10 else [*offsets[:5], "...", *offsets[-4:]])
        raise ValueError(f"cu_seqlens must rise from 0 to at most T={T}, got {shown}")
    starts = [min(max(offset, 0), T) for offset in offsets[:-1]]
    return starts, [min(max(offset, start), T) - start for offset, start in zip(offsets[1:], starts, strict=True)]


class Chunks:
    """Where the tokens of sequences lie in chunks; the last chunk of a sequence is filled up with zeros.

    Chunks are ordered by their step, that is their place within the sequence, then by falling length of the sequence:
    at each step the sequences that still run are the first ``running[step]`` of ``order``, and ``full[step]`` of
    them fill the chunk.
    """

    def __init__(self, starts: list[int], lengths: list[int], tokens: int, device: torch.device) -> None:
        self.order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        steps = -(-max(lengths) // CHUNK)
        self.running = [sum(length > step * CHUNK for length in lengths) for step in range(steps)]
        self.full = [sum(length >= (step + 1) * CHUNK for length in lengths) for step in range(steps)]
        self._tokens = tokens
        self._count = sum(self.running)
        # One sequence of whole chunks: packing is a view.
        self._in_place = starts == [0] and lengths == [tokens] and tokens % CHUNK == 0
        if self._in_place:
            return
        first = [0, *itertools.accumulate(self.running)]
        within = torch.arange(CHUNK)
        source, packed = [], []
        for rank, i in enumerate(self.order):
            ids = [first[step] + rank for step in range(-(-lengths[i] // CHUNK))]
            packed.append((torch.tensor(ids, dtype=torch.int64)[:, None] * CHUNK + within).flatten()[: lengths[i]])
            source.append(torch.arange(starts[i], starts[i] + lengths[i]))
        self._packed, self._source = torch.cat(packed).to(device), torch.cat(source).to(device)

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, T, ...]`` to ``[chunks, 64, ...]``."""
        flat = x.flatten(0, 1)
        if not self._in_place:
            zeros = x.new_zeros(self._count * CHUNK, *x.shape[2:])
            flat = zeros.index_copy(0, self._packed, flat.index_select(0, self._source))
        return flat.unflatten(0, (self._count, CHUNK))

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        """``[chunks, 64, ...]`` to ``[B * T, ...]``; tokens of no sequence get zeros."""
        flat = x.flatten(0, 1)
        if self._in_place:
            return flat
        zeros = x.new_zeros(self._tokens, *x.shape[2:])
        return zeros.index_copy(0, self._source, flat.index_select(0, self._packed))
