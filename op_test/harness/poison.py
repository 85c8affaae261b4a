"""Memory that an implementation forgets to write must not pass by luck of being zero."""

import contextlib
from unittest import mock

import torch


def fill_cached_memory(device):
    """Leave NaN behind in the caching allocator of ``device``, in large and in small blocks."""
    large = [torch.full((1 << 23,), float("nan"), device=device) for _ in range(8)]
    small = [torch.full((1 << 15,), float("nan"), device=device) for _ in range(64)]
    del large, small


@contextlib.contextmanager
def nan_empty():
    """``torch.empty``, ``empty_like``, ``empty_strided`` and ``Tensor.new_empty`` return NaN while this lasts."""

    def poisoned(function):
        def wrapper(*args, **kwargs):
            x = function(*args, **kwargs)
            return x.fill_(float("nan")) if x.is_floating_point() else x

        return wrapper

    with contextlib.ExitStack() as stack:
        for owner, name in (
            (torch, "empty"),
            (torch, "empty_like"),
            (torch, "empty_strided"),
            (torch.Tensor, "new_empty"),
        ):
            stack.enter_context(mock.patch.object(owner, name, poisoned(getattr(owner, name))))
        yield
