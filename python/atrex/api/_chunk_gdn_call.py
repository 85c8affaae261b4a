"""The checked call that ``api/chunk_gdn.py`` hands to an implementation."""

from __future__ import annotations

from typing import NamedTuple

import torch


class ChunkGdnCall(NamedTuple):
    """Arguments of ``chunk_gated_delta_rule`` after their checks, with defaults filled in, and the sizes.

    An implementation returns ``(o, final_state or None, checkpoints or None)``: ``final_state`` if
    ``output_final_state`` (the pool itself if there are ``state_indices``), ``checkpoints`` if ``checkpoint_every``.
    What it returns is contiguous and, but for the pool, shares no memory with the arguments.

    Guaranteed: all tensors on one device, shapes and dtypes of the public docstring, ``cu_seqlens`` and
    ``state_indices`` contiguous. Not guaranteed: strides and alignment of all others, the values of ``cu_seqlens``
    and ``state_indices``.

    A named tuple rather than a dataclass: a frozen dataclass of this width costs a microsecond more to make.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    scale: float
    initial_state: torch.Tensor | None
    output_final_state: bool
    use_qk_l2norm_in_kernel: bool
    cu_seqlens: torch.Tensor | None
    state_v_first: bool
    state_indices: torch.Tensor | None
    checkpoint_every: int
    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    N: int  # sequences: B, or len(cu_seqlens) - 1
    state_dtype: torch.dtype  # of final_state and checkpoints
    needs_grad: bool  # grad mode is on and an input requires grad
