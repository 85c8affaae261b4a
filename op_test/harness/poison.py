"""Memory that an implementation forgets to write must not pass by luck of being zero."""

import contextlib
from unittest import mock

import torch


def fill_cached_memory(device, size=1 << 28):
    """Leave ``size`` bytes of NaN behind in the caching allocator, for the next allocations of any kind to find."""
    blocks = [torch.full((size // 8 // 4,), float("nan"), device=device) for _ in range(8)]
    blocks += [torch.full((1 << 17,), float("nan"), device=device) for _ in range(64)]
    del blocks


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
