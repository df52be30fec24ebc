"""Hooks on the modules of a user's model that do not hinder the user from copying, pickling or sending the model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any


class ModuleHook:
    """A hook of a module, which calls a function.

    Code that torch compiles, exports or traces does not have it. A copy of the model keeps it. A pickled model has one of the
    standard library instead, which does nothing. So the model can be read without unickpt.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__name__ = type(self).__name__  # as hooks have that are functions

    def __call__(self, *args: Any) -> Any:
        import torch

        return None if torch.compiler.is_compiling() or torch._C._is_tracing() else self._function(*args)

    def __deepcopy__(self, _known: dict[int, Any]) -> ModuleHook:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")
