"""GPU operators for LLM inference: one public function an operator, one implementation a hardware target.

Importing this package imports neither torch nor a kernel. The public names stand here as proxies; the first use
of one imports its contract from ``atrex.api``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Callable

from ._version import __version__ as __version__

__all__ = ["can_use_chunk_gated_delta_rule", "chunk_gated_delta_rule"]


class _LazyFunction:
    """A function that is imported when it is first called or looked at.

    ``inspect.signature`` and ``help`` see the signature and the docstring of the real function. ``__get__`` makes the
    proxy a routine in the eyes of ``inspect`` and ``pydoc``, and lets it stand in a class body as a function does.
    """

    def __init__(self, name: str, module: str) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = __name__
        self._source = module
        self._function: Callable[..., Any] | None = None

    def _resolve(self) -> Callable[..., Any]:
        function = self._function
        if function is None:
            function = getattr(importlib.import_module(self._source), self.__name__)
            self._function = function
            globals()[self.__name__] = function  # later look-ups of the public name meet no proxy
        return function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function = self._function
        if function is None:
            function = self._resolve()
        return function(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else self._resolve().__get__(instance, owner)

    def __repr__(self) -> str:
        return f"<function {__name__}.{self.__name__}>"

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self._resolve()

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return self._resolve().__doc__


def _lazy_import_and_call(name: str, module: str) -> Any:
    """A proxy for ``module.name`` that puts the real function into this namespace when it is first used."""
    return _LazyFunction(name, module)


if TYPE_CHECKING:
    from .api.chunk_gdn import can_use_chunk_gated_delta_rule, chunk_gated_delta_rule
else:
    chunk_gated_delta_rule = _lazy_import_and_call("chunk_gated_delta_rule", "atrex.api.chunk_gdn")
    can_use_chunk_gated_delta_rule = _lazy_import_and_call("can_use_chunk_gated_delta_rule", "atrex.api.chunk_gdn")
