"""`atrex` in Hugging Face transformers: the linear-attention layers of Qwen3-Next, Qwen3.5 and Qwen3.5-MoE.

    import atrex.integrations.transformers

    atrex.integrations.transformers.enable()
    model.generate(...)

The layers look their operators up in their module, in each forward pass. `enable` replaces these globals, so models
that exist switch as well as those that are built later; parameters, caches and configurations stay what they are.
Served are prefill, decode and reading on from a cache, by `chunk_gated_delta_rule` and
`fused_recurrent_gated_delta_rule`; convolution, gating and norm stay transformers' own.

Packed texts: pass `cu_seq_lens_q`, their offsets `[N + 1]` from 0, to the model. No text sees another in these layers
then, in their convolution either. The full-attention layers have rules of their own: eager and SDPA attention need
`position_ids` that start again with each text, and `use_cache=False`. Position ids alone do not reach the
linear-attention layers. Several texts cannot continue from a cache, and `seq_idx` without offsets is an error.

The switch is one for the process: while it is on, all threads are served by `atrex`.

Importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

_KNOWN = "5.17"

# The class of the layers in each modelling module.
_LAYERS = {
    "qwen3_next": "Qwen3NextGatedDeltaNet",
    "qwen3_5": "Qwen3_5GatedDeltaNet",
    "qwen3_5_moe": "Qwen3_5MoeGatedDeltaNet",
}

_ENABLE = object()
_lock = threading.Lock()
_holders: set[object] = set()  # _ENABLE, and one object for each block that runs
_replaced: list[tuple[ModuleType, str, Callable[..., Any], Callable[..., Any]]] = []  # module, name, own, ours


def enable() -> None:
    """Let `atrex` serve the linear-attention layers until `disable`; again, it changes nothing.

    Imports the modelling modules that the installed transformers has, so that none is left to be imported later,
    with operators of its own.

    Raises:
        ImportError: transformers is not installed, or has none of these models.
        RuntimeError: the layers of this transformers do not look up the operators that are to be replaced. The message
            names them, and nothing was replaced.
    """
    _hold(_ENABLE)


def disable() -> None:
    """End what `enable` began: the modules have their own operators again. Without `enable`, it changes nothing.

    Within a block of `enabled` the layers stay with `atrex` until the block ends.
    """
    _release(_ENABLE)


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """Let `atrex` serve the linear-attention layers for the time of a `with`, or of a function that this decorates.

    After the last of several blocks, nested or in other threads, they are served as before, errors or not. Raises what
    `enable` raises.
    """
    block = object()
    _hold(block)
    try:
        yield
    finally:
        _release(block)


def _hold(holder: object) -> None:
    with _lock:
        if not _holders:
            from ._transformers_hooks import HOOKS

            for module in _modules(list(HOOKS)):
                for name, stand_in_for in HOOKS.items():
                    own = getattr(module, name)
                    ours = stand_in_for(own)
                    setattr(module, name, ours)
                    _replaced.append((module, name, own, ours))
        _holders.add(holder)


def _release(holder: object) -> None:
    with _lock:
        _holders.discard(holder)
        while _replaced and not _holders:
            module, name, own, ours = _replaced.pop()
            if getattr(module, name) is ours:
                setattr(module, name, own)
            else:  # to overwrite it would take away what somebody else relies on
                logging.getLogger("atrex").warning(
                    "%s.%s was replaced again while atrex served it, and is left as it is", module.__name__, name
                )


def _modules(names: list[str]) -> list[ModuleType]:
    """The modelling modules, once it is sure that their layers look all `names` up."""
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ImportError(f"transformers is not installed; atrex knows the layers of {_KNOWN}") from error

    modules, unknown = [], []
    for model, layer in _LAYERS.items():
        try:
            module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith(f"transformers.models.{model}"):
                raise
            continue  # a version from before this model
        modules.append(module)
        forward = getattr(getattr(module, layer, None), "forward", None)
        # A global that is there is not enough: older layers look it up once, when they are built.
        code = getattr(inspect.unwrap(forward), "__code__", None) if forward else None
        looked_up = code.co_names if code else ()
        unknown += [f"{module.__name__}.{name}" for name in names if name not in looked_up or not hasattr(module, name)]
    if not modules:
        raise ImportError(f"transformers {transformers.__version__} has none of {', '.join(_LAYERS)}")
    if unknown:
        raise RuntimeError(
            f"the linear-attention layers of transformers {transformers.__version__} do not look up "
            f"{', '.join(unknown)}; atrex knows those of {_KNOWN}"
        )
    return modules
