"""Records: the stored values of an object, without the code of its class."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from unickpt.base.errors import FormatError

_NOTHING: Mapping[Any, Any] = MappingProxyType({})
BYTES_IO_KEY = "io.BytesIO"  # key of the content of an ``io.BytesIO`` among the objects of a checkpoint
_SHOWN = 3  # attributes of a record in a message


class UnsafePickleError(FormatError):
    """A pickle names or calls a class or function that is not allowed."""


class Record:
    """The stored values of an object of any class. Records are compared by identity.

    Attributes:
        kind: class name with its module.
        arguments: constructor arguments.
        state: attributes. A stored state that is not a dictionary has the key ''.
        items, entries: members of a list subclass, and of a mapping subclass.
    """

    __slots__ = ("arguments", "entries", "items", "kind", "state")

    def __init__(self, kind: str, arguments: tuple[Any, ...] = ()) -> None:
        self.kind, self.arguments = kind, arguments
        self.state: Mapping[str, Any] = _NOTHING
        self.items: Sequence[Any] = ()
        self.entries: Mapping[Any, Any] = _NOTHING

    def set_state(self, state: Any) -> None:
        """Store the state of opcode BUILD. A pair of dictionaries comes from a class with slots."""
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
        name: name with its module.
        make: pure function that returns the value of a call; None: a call returns a record.
    """

    __slots__ = ("make", "name")

    def __init__(self, name: str, make: Callable[..., Any] | None = None) -> None:
        super().__init__(f"type[{name}]")
        self.name, self.make = name, make

    def call(self, arguments: Any) -> Any:
        """Return the value of a call. Raises FormatError if the arguments are not a tuple, and the errors of ``make``."""
        if type(arguments) is not tuple:
            raise FormatError(f"calls {self.name[:80]} with arguments of type {type(arguments).__name__}, expected a tuple")
        return Record(self.name, arguments) if self.make is None else self.make(*arguments)
