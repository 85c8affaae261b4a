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
    """Where the tokens of sequences, given by falling length, lie in chunks; short chunks are filled up with zeros.

    Chunks are ordered by their step, that is their place within the sequence, then by sequence: at each step those
    that still run are the first ``running[step]`` sequences, and the first ``full[step]`` of them fill the chunk.
    """

    def __init__(self, starts: list[int], lengths: list[int], device: torch.device) -> None:
        steps = -(-lengths[0] // CHUNK)
        self.running = [sum(length > step * CHUNK for length in lengths) for step in range(steps)]
        self.full = [sum(length >= (step + 1) * CHUNK for length in lengths) for step in range(steps)]
        self.source = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]).to(device)
        # A sequence of whole chunks lies in the packed tensor as it lies in the source.
        self._view = slice(starts[0], starts[0] + lengths[0])
        self._is_view = len(lengths) == 1 and lengths[0] % CHUNK == 0
        if not self._is_view:
            first = [0, *itertools.accumulate(self.running)]
            within, packed = torch.arange(CHUNK), []
            for rank, length in enumerate(lengths):
                ids = [first[step] + rank for step in range(-(-length // CHUNK))]
                packed.append((torch.tensor(ids, dtype=torch.int64)[:, None] * CHUNK + within).flatten()[:length])
            self._packed = torch.cat(packed).to(device)

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, T, ...]`` to ``[chunks, 64, ...]``."""
        flat, count = x.flatten(0, 1), sum(self.running)
        if self._is_view:
            return flat[self._view].unflatten(0, (count, CHUNK))
        zeros = x.new_zeros(count * CHUNK, *x.shape[2:])
        return zeros.index_copy(0, self._packed, flat.index_select(0, self.source)).unflatten(0, (count, CHUNK))

    def tokens(self, x: torch.Tensor) -> torch.Tensor:
        """``[chunks, 64, ...]`` to ``[tokens, ...]``; ``source`` holds their places in the flat ``[B * T]``."""
        flat = x.flatten(0, 1)
        return flat if self._is_view else flat.index_select(0, self._packed)
