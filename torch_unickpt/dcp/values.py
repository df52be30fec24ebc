"""Values of a state dict that are no tensors, in the form in which a checkpoint stores them."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unickpt.base.errors import UnsupportedLayoutError
from unickpt.checkpoint.format import objects


@dataclass(frozen=True)
class Bytes:
    """What a planner of its own kind made of a value. A load gives it back to the planner."""

    data: bytes


@dataclass(frozen=True)
class Stream:
    """A ``BytesIO``."""

    data: bytes
    position: int


def stored(value: Any) -> Any:
    """Return the form in which a checkpoint stores a value."""
    return Stream(value.getvalue(), value.tell()) if type(value) is io.BytesIO else value


def restored(value: Any) -> Any:
    """Return the value of a stored form."""
    if not isinstance(value, Stream):
        return value
    stream = io.BytesIO(value.data)
    stream.seek(value.position)
    return stream


def check(values: Mapping[str, Any], *, pickled: bool) -> None:
    """Check that values can be stored without pickle: a load would leave the others out, and miss them.

    Args:
        values: by key.
        pickled: those are stored that a planner has pickled.

    Raises:
        UnsupportedLayoutError: some cannot.
    """
    opaque = objects.encode(values, prefix="").opaque
    if opaque:
        raise UnsupportedLayoutError(f"values of types that unickpt does not store without pickle: {'; '.join(opaque[:8])}")
    made = sorted(key for key, value in values.items() if isinstance(value, Bytes))
    if made and not pickled:
        raise UnsupportedLayoutError(f"the planner pickles values, which a load would refuse: {', '.join(made[:8])}")
