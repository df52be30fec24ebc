"""What a program passes, before anything is done with it."""

from __future__ import annotations

import os
from typing import Any

from unickpt.base.errors import ConfigError


def path_of(directory: Any, *, order: str) -> str:
    """Return the path or URL of an argument.

    Args:
        directory: the argument.
        order: names of the arguments in their order.

    Raises:
        ConfigError: it is something else, such as the model: the arguments have another order.
    """
    if not isinstance(directory, (str, os.PathLike)):
        raise ConfigError(f"expected a path or a URL, got {type(directory).__name__}. The order is {order}")
    path: str | bytes = os.fspath(directory)
    return os.fsdecode(path)


def check_kind(name: str, value: Any, kind: type) -> None:
    """Raise ConfigError if an argument is not of its class."""
    if not isinstance(value, kind):
        raise ConfigError(f"{name}: expected {kind.__name__}, got {type(value).__name__}")
