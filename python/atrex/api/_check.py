"""What the checks of the operators share: accepted dtypes, and errors that name the argument."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

INDEX_DTYPES = frozenset({torch.int32, torch.int64})
# Accepted dtypes of q/k/v, of gates and of states, for float64 calls and for all others.
DOUBLE_DTYPES = (
    frozenset({torch.float64}),
    frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16}),
    frozenset({torch.float64, torch.float32, torch.bfloat16}),
)
SINGLE_DTYPES = (
    frozenset({torch.float32, torch.bfloat16, torch.float16}),
    frozenset({torch.float32, torch.bfloat16, torch.float16}),
    frozenset({torch.float32, torch.bfloat16}),
)


def check_tensor(
    name: str, x: object, device: torch.device, accepted: Collection[torch.dtype] = INDEX_DTYPES, first: str = "q"
) -> None:
    """Fail unless ``x`` is a tensor on ``device``, where ``first`` is, of an ``accepted`` dtype."""
    if not isinstance(x, Tensor):
        raise not_a_tensor(name, x)
    if x.device != device:
        raise wrong_device(name, x, device, first)
    if x.dtype not in accepted:
        raise wrong_dtype(name, x, accepted)


def check_list(name: str, x: Tensor, device: torch.device) -> int:
    """The length of ``x``; fail unless it is an integer tensor on ``device`` with one dimension, contiguous."""
    check_tensor(name, x, device)
    shape = x.shape
    if len(shape) != 1:
        raise wrong_shape(name, x, "one dimension")
    if not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got stride {x.stride(0)}")
    return shape[0]


def checked_scale(scale: object, K: int) -> float:
    """The factor on the outputs, ``K ** -0.5`` if None; fail unless it is a number."""
    if scale is None:
        return K**-0.5
    if isinstance(scale, bool) or not isinstance(scale, (float, int)):
        raise TypeError(f"scale must be a number or None, got {type(scale).__name__}")
    return float(scale)


def packed_sequences(cu_seqlens: Tensor, B: int, device: torch.device) -> int:
    """How many sequences ``cu_seqlens`` packs into the one batch; fail unless it is a list of offsets."""
    N = check_list("cu_seqlens", cu_seqlens, device) - 1
    if B != 1:
        raise ValueError(f"cu_seqlens packs the sequences into one batch: q must have B=1, got B={B}")
    if N < 1:
        raise wrong_shape("cu_seqlens", cu_seqlens, "[N + 1] with N of at least 1")
    return N


def not_a_tensor(name: str, x: object) -> TypeError:
    """The error for something else than a tensor."""
    return TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")


def wrong_device(name: str, x: Tensor, device: torch.device, first: str = "q") -> ValueError:
    """The error for a tensor that is not where ``first``, the operator's first tensor, is."""
    return ValueError(f"{name} must be on {device} as {first}, got {x.device}")


def wrong_dtype(name: str, x: Tensor, accepted: Collection[torch.dtype]) -> TypeError:
    """The error for a dtype that is not accepted."""
    return TypeError(f"{name} must be {' or '.join(sorted(map(dtype_name, accepted)))}, got {dtype_name(x.dtype)}")


def wrong_shape(name: str, x: Tensor, accepted: str) -> ValueError:
    """The error for a shape that does not fit; ``accepted`` describes one that does."""
    return ValueError(f"{name} must have shape {accepted}, got {list(x.shape)}")


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")
