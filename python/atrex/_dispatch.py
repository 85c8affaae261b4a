"""From a checked call to the implementation that serves it."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ._device import device_target

_logger = logging.getLogger("atrex")


@dataclass(frozen=True)
class Eligibility:
    """Whether a kernel serves a call; truthy if one does.

    ``target`` is the hardware target of the call's device, as ``vendor/arch``. ``reason`` is empty for an eligible
    call, otherwise it names the argument, what came and what is accepted.
    """

    ok: bool
    target: str
    reason: str

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True)
class Implementation:
    """One line of an operator's policy.

    ``supports(call)`` reads metadata only: it compiles, allocates, copies and changes nothing. ``entry`` is
    ``module:function``; the module is imported only when the implementation is picked.
    """

    vendor: str
    arch: str
    supports: Callable[[Any], Eligibility]
    entry: str


@cache
def _load(entry: str) -> Callable[[Any], Any]:
    module, function = entry.split(":")
    return getattr(importlib.import_module(module), function)


@cache
def _in_wheel(entry: str) -> bool:
    """Whether the wheel was built with this target; its package is looked up, not imported."""
    package = entry.split(":")[0].rpartition(".")[0]
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # a wheel without any target of the vendor or the operator lacks the parents too
        return False


def pick(
    policy: Sequence[Implementation], device: torch.device, call: Any
) -> tuple[Implementation | None, Eligibility]:
    """The first implementation of ``policy`` that takes the checked ``call``, or None and why there is none."""
    target = device_target(device)
    vendor, arch = target.vendor, target.arch
    refusal = None
    for implementation in policy:
        if implementation.vendor == vendor and implementation.arch == arch:
            if _in_wheel(implementation.entry):
                answer = implementation.supports(call)
                if answer.ok:
                    return implementation, answer
            else:
                answer = Eligibility(False, str(target), f"the {target} implementation is not in this wheel")
            refusal = answer
    if refusal is None:
        known = ", ".join(f"{implementation.vendor}/{implementation.arch}" for implementation in policy)
        reason = f"no implementation for {target} ({call._fields[0]} is on {device}), there is one for {known}"
        refusal = Eligibility(False, str(target), reason)
    return None, refusal


def dispatch(
    operator: str,
    policy: Sequence[Implementation],
    fallback: Callable[[Any], Any],
    device: torch.device,
    call: Any,
) -> Any:
    """Run ``call`` on the implementation that ``policy`` picks, else on ``fallback``.

    Raises:
        RuntimeError: no implementation serves a call on a GPU and ATREX_REQUIRE_KERNEL is 1.
    """
    implementation, answer = pick(policy, device, call)
    if implementation is not None:
        return _load(implementation.entry)(call)
    if device.type != "cpu":
        if os.environ.get("ATREX_REQUIRE_KERNEL") == "1":
            raise RuntimeError(f"{operator}: {answer.reason}; ATREX_REQUIRE_KERNEL=1 forbids the PyTorch fallback")
        _warn_once(operator, answer.reason)
    return fallback(call)


@cache
def _warn_once(operator: str, reason: str) -> None:
    _logger.warning("%s runs on the slower PyTorch fallback: %s", operator, reason)
