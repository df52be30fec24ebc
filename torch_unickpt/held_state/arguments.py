"""What a program passes beside model and optimizer, before anything is done with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch_unickpt.held_state.job_objects import JobObjects
from unickpt.base.errors import ConfigError


def check_objects(objects: JobObjects, client_state: Any = None, *, method: Literal["state_dict", "load_state_dict"]) -> None:
    """Raise ConfigError if an object beside model and optimizer is not what it should be. ``method``: what it must have."""
    for name, value in (("stateful", objects.stateful), ("client_state", client_state)):
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{name}: expected a dictionary, got {type(value).__name__}")
    given = [("scheduler", each) for each in objects.schedulers]
    given += [] if objects.loader is None else [("loader", objects.loader)]
    given += [(f"stateful[{name!r}]", each) for name, each in objects.stateful.items()]
    for name, each in given:
        if not callable(getattr(each, method, None)):
            raise ConfigError(f"{name}: expected an object with {method}, got {type(each).__name__}")
