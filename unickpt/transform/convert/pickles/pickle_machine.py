"""State and limits of the pickle interpreter: stack, memo, memory limit, and the keys that a stream may hash."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unickpt.base.errors import FormatError
from unickpt.transform.convert.pickles.pickle_records import Name, Record, UnsafePickleError

# Memory limit of a stream: a fixed amount plus a multiple of its length. DCP tables take eight times their length.
ALLOWANCE_BYTES, ALLOWANCE_FACTOR = 64 << 20, 40
MAX_LINE_BYTES = 4096  # line of a text opcode
_KEY_BITS = 61  # larger integers can be chosen so that all keys of a dictionary have the same hash
_KEY_MEMBERS, _KEY_DEPTH = 64, 4  # limits of a tuple used as a key
TUPLE_BYTES, LIST_BYTES, DICT_BYTES, SET_BYTES, _RECORD_BYTES = 64, 72, 240, 232, 128  # approximate sizes in CPython
UNSET = object()
_SCALARS = frozenset({str, bytes, bool, float, type(None)})


class Machine:
    """State of the interpreter of one stream.

    Attributes:
        data: the stream.
        find, persistent: callbacks, see ``pickle_opcodes.interpret``.
        stack, marks: the stack, and the positions of the marks in it.
        memo: memoized values.
        named: results of ``find`` by module and name.
        left: remaining memory in bytes.
    """

    __slots__ = ("data", "find", "left", "marks", "memo", "named", "persistent", "stack")

    def __init__(self, data: bytes, find: Callable[[str, str], Any], persistent: Callable[[Any], Any]) -> None:
        self.data, self.find, self.persistent = data, find, persistent
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []
        self.named: dict[tuple[str, str], Any] = {}
        self.left = ALLOWANCE_BYTES + ALLOWANCE_FACTOR * len(data)

    def spend(self, size_bytes: int) -> None:
        self.left -= size_bytes
        if self.left < 0:
            raise FormatError(f"needs more memory than {ALLOWANCE_FACTOR} times its length of {len(self.data):,} bytes")

    def above_mark(self) -> list[Any]:
        """Pop the values above the last mark."""
        mark = self.marks.pop()
        if mark > len(self.stack):
            raise FormatError("pops more values from the stack than it pushed")
        items = self.stack[mark:]
        del self.stack[mark:]
        return items

    def global_(self, module: Any, name: Any) -> Any:
        if type(module) is not str or type(name) is not str or len(module) + len(name) > MAX_LINE_BYTES:
            raise FormatError("has a global whose name is not text or too long")
        found = self.named.get((module, name), UNSET)
        if found is UNSET:
            found = self.named[module, name] = self.find(module, name)
        return found

    def call(self, callee: Any, arguments: Any) -> Any:
        if type(callee) is not Name:
            raise UnsafePickleError(f"calls a {kind_of(callee)}, which is not an allowed class or function")
        self.spend(_RECORD_BYTES)
        return callee.call(arguments)


def kind_of(value: Any) -> str:
    return value.kind[:80] if isinstance(value, Record) else type(value).__name__


def check_keys(keys: list[Any]) -> None:
    """Refuse keys that are slow to hash or chosen to collide. Raises FormatError."""
    for key in keys:
        if type(key) not in _SCALARS:
            _check_key(key, [_KEY_MEMBERS], 0)


def _check_key(key: Any, left: list[int], depth: int) -> None:
    left[0] -= 1
    if left[0] < 0 or depth > _KEY_DEPTH:
        raise FormatError("has a dictionary key that is too long or nested too deeply")
    if type(key) in (tuple, frozenset):
        for each in key:
            _check_key(each, left, depth + 1)
    elif type(key) is int and key.bit_length() > _KEY_BITS - 1:
        raise FormatError(f"has the integer key {key:#x}, the limit is {_KEY_BITS - 1} bits")


def keyed(values: Any, kind: type) -> Any:
    """Return a ``set`` or ``frozenset`` of values after ``check_keys``. Raises FormatError."""
    listed = list(values)
    check_keys(listed)
    return kind(listed)
