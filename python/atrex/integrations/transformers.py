"""`atrex` in Hugging Face transformers: the linear-attention layers of Qwen3-Next, Qwen3.5 and Qwen3.5-MoE.

    import atrex.integrations.transformers

    atrex.integrations.transformers.enable()
    model.generate(...)

The layers look their operators up in their module, in each forward pass. `enable` replaces these globals and the
forward pass of the gated norm's class, so models that exist switch as well as those that are built later; parameters,
caches and configurations stay what they are. Prefill, decode and reading on from a cache are served by
`causal_conv1d_fn`, `causal_conv1d_update`, `chunk_gated_delta_rule`, `fused_recurrent_gated_delta_rule` and
`gated_rms_norm`. The projections stay transformers' own, and so do the gates: g and beta are written out between the
operators, where nothing is looked up. A norm whose forward pass was replaced in the module itself, as accelerate does
when it dispatches a model over devices, keeps what it has.

Packed texts: pass `cu_seq_lens_q`, their offsets `[N + 1]` from 0, to the model. No text sees another in these layers
then. The full-attention layers have rules of their own: eager and SDPA attention need
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
from typing import Any, NamedTuple

_KNOWN = "5.17"

# The classes of the layers and of their norm in each modelling module.
_LAYERS = {
    "qwen3_next": ("Qwen3NextGatedDeltaNet", "Qwen3NextRMSNormGated"),
    "qwen3_5": ("Qwen3_5GatedDeltaNet", "Qwen3_5RMSNormGated"),
    "qwen3_5_moe": ("Qwen3_5MoeGatedDeltaNet", "Qwen3_5MoeRMSNormGated"),
}
# What the norm's forward pass reads of itself; the stand-in reads the same.
_NORM_PARAMETERS = ["self", "hidden_states", "gate"]
_NORM_ATTRIBUTES = {"weight", "variance_epsilon", "activation"}


class _Place(NamedTuple):
    """Where an operator of transformers stands: an attribute of a module or of a class."""

    owner: ModuleType | type
    name: str
    path: str  # for messages


_ENABLE = object()
_lock = threading.Lock()
_holders: set[object] = set()  # _ENABLE, and one object for each block that runs
_replaced: list[tuple[_Place, Callable[..., Any], Callable[..., Any]]] = []  # where, own, ours


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
            from ._transformers_hooks import GLOBALS, rms_norm_gated

            for module, norm in _modules(list(GLOBALS)):
                for name, ours in GLOBALS.items():
                    _replace(_Place(module, name, f"{module.__name__}.{name}"), ours)
                _replace(_Place(norm, "forward", f"{module.__name__}.{norm.__name__}.forward"), rms_norm_gated)
        _holders.add(holder)


def _replace(place: _Place, ours: Callable[..., Any]) -> None:
    own = getattr(place.owner, place.name)
    setattr(place.owner, place.name, ours)
    _replaced.append((place, own, ours))


def _release(holder: object) -> None:
    with _lock:
        _holders.discard(holder)
        while _replaced and not _holders:
            place, own, ours = _replaced.pop()
            if getattr(place.owner, place.name) is ours:
                setattr(place.owner, place.name, own)
            else:  # to overwrite it would take away what somebody else relies on
                logging.getLogger("atrex").warning(
                    "%s was replaced again while atrex served it, and is left as it is", place.path
                )


def _modules(names: list[str]) -> list[tuple[ModuleType, type]]:
    """The modelling modules and the classes of their norms, once it is sure that their layers look all of it up."""
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ImportError(f"transformers is not installed; atrex knows the layers of {_KNOWN}") from error

    found, unknown = [], []
    for model, (layer, norm) in _LAYERS.items():
        try:
            module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith(f"transformers.models.{model}"):
                raise
            continue  # a version from before this model
        layer_class, norm_class = getattr(module, layer, None), getattr(module, norm, None)
        found.append((module, norm_class))
        # A global that is there is not enough: older layers look it up once, when they are built.
        looked_up = _looked_up(layer_class, "forward")
        unknown += [f"{module.__name__}.{name}" for name in names if name not in looked_up or not hasattr(module, name)]
        if norm not in _looked_up(layer_class, "__init__") or "norm" not in looked_up or not _is_known_norm(norm_class):
            unknown.append(f"{module.__name__}.{norm}.forward(hidden_states, gate)")
    if not found:
        raise ImportError(f"transformers {transformers.__version__} has none of {', '.join(_LAYERS)}")
    if unknown:
        raise RuntimeError(
            f"the linear-attention layers of transformers {transformers.__version__} do not look up "
            f"{', '.join(unknown)}; atrex knows those of {_KNOWN}"
        )
    return found


def _looked_up(owner: type | None, method: str) -> tuple[str, ...]:
    """The names of globals and attributes in the code of a method of ``owner``'s own."""
    function = vars(owner).get(method) if owner else None
    code = getattr(inspect.unwrap(function), "__code__", None) if function else None
    return code.co_names if code else ()


def _is_known_norm(norm: type | None) -> bool:
    if not _NORM_ATTRIBUTES.issubset(_looked_up(norm, "forward")):
        return False
    return list(inspect.signature(norm.forward).parameters) == _NORM_PARAMETERS  # type: ignore[union-attr]
