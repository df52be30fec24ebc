"""What a program passes, before anything is done with it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from torch_unickpt.held_state.job_objects import JobObjects
from unickpt.base.errors import ConfigError


def path_of(directory: Any, name: str = "directory") -> str:
    """Return the path or URL of an argument of a name.

    Raises:
        ConfigError: it is something else, such as the model: the arguments have another order.
    """
    if not isinstance(directory, (str, os.PathLike)):
        raise ConfigError(f"{name}: expected a path or a URL, got {_name(directory)}. The order is model, optimizer, {name}")
    path: str | bytes = os.fspath(directory)
    return os.fsdecode(path)


def check_kind(name: str, value: Any, kind: type) -> None:
    """Raise ConfigError if an argument is not of its class."""
    if not isinstance(value, kind):
        raise ConfigError(f"{name}: expected {kind.__name__}, got {_name(value)}")


def check_objects(objects: JobObjects, client_state: Any = None, *, method: Literal["state_dict", "load_state_dict"]) -> None:
    """Raise ConfigError if an object beside model and optimizer is not what it should be. ``method``: what it must have."""
    for name, value in (("stateful", objects.stateful), ("client_state", client_state)):
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{name}: expected a dictionary, got {_name(value)}")
    given = [("scheduler", each) for each in objects.schedulers]
    given += [] if objects.loader is None else [("loader", objects.loader)]
    given += [(f"stateful[{name!r}]", each) for name, each in objects.stateful.items()]
    for name, each in given:
        if not callable(getattr(each, method, None)):
            raise ConfigError(f"{name}: expected an object with {method}, got {_name(each)}")


def _name(value: Any) -> str:
    return type(value).__name__
