"""Dtypes as the contracts say, whatever autocast would make of them."""

from __future__ import annotations

import contextlib

import torch


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context without autocast; where it is off already, one that costs nothing."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()
