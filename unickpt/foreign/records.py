"""What stands for objects of classes that are not run: the values that were stored, without the code of the class."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from unickpt.errors import FormatError

_NOTHING: Mapping[Any, Any] = MappingProxyType({})
_SHOWN = 3  # attributes of a record in a message


class UnsafePickleError(FormatError):
    """A pickle names or calls something that is not on the list of what may be read."""


class Record:
    """What was stored of an object of some class; nothing of the class itself.

    Two records are equal only if they are the same object.

    Attributes:
        kind: the class, with its module.
        arguments: constructor arguments.
        state: attributes; under the key '' whatever the class stores that is not a dictionary.
        items, entries: what it held as a list or as a mapping.
    """

    __slots__ = ("arguments", "entries", "items", "kind", "state")

    def __init__(self, kind: str, arguments: tuple[Any, ...] = ()) -> None:
        self.kind, self.arguments = kind, arguments
        self.state: Mapping[str, Any] = _NOTHING
        self.items: Sequence[Any] = ()
        self.entries: Mapping[Any, Any] = _NOTHING

    def set_state(self, state: Any) -> None:
        """Keep what opcode BUILD carries. A pair of dictionaries belongs to a class with slots."""
        if type(state) is dict:
            self.state = state
        elif type(state) is tuple and len(state) == 2 and all(type(each) in (dict, type(None)) for each in state):
            self.state = {**(state[0] or {}), **(state[1] or {})}
        else:
            self.state = {"": state}

    def extend(self, values: Sequence[Any]) -> None:
        """Add members of a list."""
        if not isinstance(self.items, list):
            self.items = []
        self.items.extend(values)

    def update(self, pairs: Mapping[Any, Any]) -> None:
        """Add entries of a mapping."""
        if not isinstance(self.entries, dict):
            self.entries = {}
        self.entries.update(pairs)

    def __repr__(self) -> str:
        names = [str(name)[:40] for name, _ in zip(self.state, range(_SHOWN), strict=False)]
        return f"<{self.kind[:80]}{f' with {len(self.state)} attributes: ' + ', '.join(names) if names else ''}>"


class Name(Record):
    """A class or function that a pickle names.

    It is a record too, because a pickle may store a class as a value.

    Attributes:
        name: with its module.
        make: pure function that makes the value of a call; None: a call makes a record.
    """

    __slots__ = ("make", "name")

    def __init__(self, name: str, make: Callable[..., Any] | None = None) -> None:
        super().__init__(f"type[{name}]")
        self.name, self.make = name, make

    def call(self, arguments: Any) -> Any:
        """What a call makes. Raises FormatError if the arguments are not a tuple, and whatever ``make`` raises."""
        if type(arguments) is not tuple:
            raise FormatError(f"{self.name[:80]} is called with a {type(arguments).__name__} for arguments")
        return Record(self.name, arguments) if self.make is None else self.make(*arguments)
