"""GPU operators for LLM inference: one public function an operator, one implementation a hardware target.

Importing this package imports neither torch nor a kernel. The public names stand here as proxies; the first use
of one imports its contract from ``atrex.api``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ._version import __version__ as __version__

__all__ = [
    "can_use_causal_conv1d_fn",
    "can_use_causal_conv1d_update",
    "can_use_chunk_gated_delta_rule",
    "can_use_fused_recurrent_gated_delta_rule",
    "can_use_gated_rms_norm",
    "can_use_gdn_prepare",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "gated_rms_norm",
    "gdn_prepare",
]

_namespace = globals()


class _LazyFunction:
    """A function that is imported when it is first called or looked at.

    ``inspect.signature`` and ``help`` see the real signature and docstring. ``__get__`` makes the proxy a routine in
    the eyes of ``inspect`` and ``pydoc``, and lets it stand in a class body as a function does.
    """

    def __init__(self, name: str, load: Callable[[], Any]) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = __name__
        self._load = load
        self._function: Callable[..., Any] | None = None

    def _resolve(self) -> Callable[..., Any]:
        function = self._function
        if function is None:
            function = self._function = getattr(self._load(), self.__name__)
            if _namespace.get(self.__name__) is self:  # and no mock or wrapper that somebody has put there
                _namespace[self.__name__] = function  # later look-ups of the public name meet no proxy
        return function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function = self._function
        if function is None:
            function = self._resolve()
        return function(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else self._resolve().__get__(instance, owner)

    def __repr__(self) -> str:
        return f"<function {self.__module__}.{self.__name__}>"

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self._resolve()

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return self._resolve().__doc__


def _lazy_import_and_call(name: str, load: Callable[[], Any]) -> Any:
    """A proxy for the function ``name`` of the module that ``load`` imports.

    ``load`` holds an import statement: that is a form of import that ``torch.compile`` can trace, should the first
    call happen in a compiled function.
    """
    return _LazyFunction(name, load)


def _causal_conv1d() -> Any:
    from .api import causal_conv1d

    return causal_conv1d


def _chunk_gdn() -> Any:
    from .api import chunk_gdn

    return chunk_gdn


def _gated_rms_norm() -> Any:
    from .api import gated_rms_norm

    return gated_rms_norm


def _gdn_prepare() -> Any:
    from .api import gdn_prepare

    return gdn_prepare


def _recurrent_gdn() -> Any:
    from .api import recurrent_gdn

    return recurrent_gdn


if TYPE_CHECKING:
    from .api.causal_conv1d import can_use_causal_conv1d_fn as can_use_causal_conv1d_fn
    from .api.causal_conv1d import can_use_causal_conv1d_update as can_use_causal_conv1d_update
    from .api.causal_conv1d import causal_conv1d_fn as causal_conv1d_fn
    from .api.causal_conv1d import causal_conv1d_update as causal_conv1d_update
    from .api.chunk_gdn import can_use_chunk_gated_delta_rule as can_use_chunk_gated_delta_rule
    from .api.chunk_gdn import chunk_gated_delta_rule as chunk_gated_delta_rule
    from .api.gated_rms_norm import can_use_gated_rms_norm as can_use_gated_rms_norm
    from .api.gated_rms_norm import gated_rms_norm as gated_rms_norm
    from .api.gdn_prepare import can_use_gdn_prepare as can_use_gdn_prepare
    from .api.gdn_prepare import gdn_prepare as gdn_prepare
    from .api.recurrent_gdn import (
        can_use_fused_recurrent_gated_delta_rule as can_use_fused_recurrent_gated_delta_rule,
    )
    from .api.recurrent_gdn import fused_recurrent_gated_delta_rule as fused_recurrent_gated_delta_rule
else:
    can_use_causal_conv1d_fn = _lazy_import_and_call("can_use_causal_conv1d_fn", _causal_conv1d)
    can_use_causal_conv1d_update = _lazy_import_and_call("can_use_causal_conv1d_update", _causal_conv1d)
    causal_conv1d_fn = _lazy_import_and_call("causal_conv1d_fn", _causal_conv1d)
    causal_conv1d_update = _lazy_import_and_call("causal_conv1d_update", _causal_conv1d)
    can_use_chunk_gated_delta_rule = _lazy_import_and_call("can_use_chunk_gated_delta_rule", _chunk_gdn)
    chunk_gated_delta_rule = _lazy_import_and_call("chunk_gated_delta_rule", _chunk_gdn)
    can_use_gated_rms_norm = _lazy_import_and_call("can_use_gated_rms_norm", _gated_rms_norm)
    gated_rms_norm = _lazy_import_and_call("gated_rms_norm", _gated_rms_norm)
    can_use_gdn_prepare = _lazy_import_and_call("can_use_gdn_prepare", _gdn_prepare)
    gdn_prepare = _lazy_import_and_call("gdn_prepare", _gdn_prepare)
    can_use_fused_recurrent_gated_delta_rule = _lazy_import_and_call(
        "can_use_fused_recurrent_gated_delta_rule", _recurrent_gdn
    )
    fused_recurrent_gated_delta_rule = _lazy_import_and_call("fused_recurrent_gated_delta_rule", _recurrent_gdn)
