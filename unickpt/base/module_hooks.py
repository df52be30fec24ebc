"""Hooks on the modules of a user's model that do not hinder the user from copying, pickling or sending the model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any


class ModuleHook:
    """A hook of a module, which calls a function.

    A copy of the model keeps it. A pickled model has one of the standard library instead, which does nothing. So the model can
    be read without unickpt.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __deepcopy__(self, _known: dict[int, Any]) -> ModuleHook:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")
