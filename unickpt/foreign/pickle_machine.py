"""An interpreter for pickle streams that runs no code and imports nothing.

Python's own unpickler builds objects with the interpreter's machinery: ``BUILD`` calls ``__setstate__`` or writes attributes of
any object on the stack, ``REDUCE`` calls any callable, the memo is an array as long as the largest index. A list of allowed
globals does not change that. This machine knows containers, numbers, text, and the ``Name`` objects that its caller provides.
``BUILD`` changes records only; calls go to ``Name`` objects only; other opcodes are refused.

Opcodes: the standard library's ``pickletools`` describes them.
"""

from __future__ import annotations

import codecs
import pickle
import struct
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

from unickpt.errors import FormatError
from unickpt.foreign.records import Name, Record, UnsafePickleError

# Memory that a stream may ask for: a fixed amount, and a multiple of its own length. DCP tables take eight times their length.
ALLOWANCE_BYTES, ALLOWANCE_FACTOR = 64 << 20, 40
MAX_INTEGER_BYTES = 1024
MAX_PROTOCOL = 5
_MAX_LINE_BYTES = 4096  # of text opcodes
_KEY_BITS = 61  # a larger integer hashes to a small one, so that a file can make all keys of a dictionary collide
_KEY_MEMBERS, _KEY_DEPTH = 64, 4  # of a tuple that is a key
_TUPLE_BYTES, _LIST_BYTES, _DICT_BYTES, _SET_BYTES, _RECORD_BYTES = 64, 72, 240, 232, 128  # about what CPython takes
_UNSET = object()
_SCALARS = frozenset({str, bytes, bool, float, type(None)})


class Machine:
    """One run over one stream. Attributes: stream, stack, positions of marks, memo, memory that is left, the two callbacks."""

    __slots__ = ("data", "find", "left", "marks", "memo", "named", "persistent", "stack")

    def __init__(self, data: bytes, find: Callable[[str, str], Any], persistent: Callable[[Any], Any]) -> None:
        self.data, self.find, self.persistent = data, find, persistent
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []
        self.named: dict[tuple[str, str], Any] = {}
        self.left = ALLOWANCE_BYTES + ALLOWANCE_FACTOR * len(data)

    def run(self) -> Any:
        """The object that the stream describes. Raises FormatError, and what a damaged stream leads to (see ``interpret``)."""
        data, table, at = self.data, _TABLE, 0
        while at >= 0:
            at = table[data[at]](self, at + 1)
        return self.stack.pop()

    def spend(self, size_bytes: int) -> None:
        self.left -= size_bytes
        if self.left < 0:
            raise FormatError(f"asks for more memory than {ALLOWANCE_FACTOR} times its own {len(self.data):,} bytes")

    def above_mark(self) -> list[Any]:
        """Take what lies above the last mark from the stack."""
        mark = self.marks.pop()
        if mark > len(self.stack):
            raise FormatError("takes more from its stack than it put there")
        items = self.stack[mark:]
        del self.stack[mark:]
        return items

    def global_(self, module: Any, name: Any) -> Any:
        if type(module) is not str or type(name) is not str or len(module) + len(name) > _MAX_LINE_BYTES:
            raise FormatError("names something by what is not text")
        found = self.named.get((module, name), _UNSET)
        if found is _UNSET:
            found = self.named[module, name] = self.find(module, name)
        return found

    def call(self, callee: Any, arguments: Any) -> Any:
        if type(callee) is not Name:
            raise UnsafePickleError(f"calls a {_kind(callee)}, which is not a class or function on the list of what is read")
        self.spend(_RECORD_BYTES)
        return callee.call(arguments)


def interpret(data: bytes, find: Callable[[str, str], Any], persistent: Callable[[Any], Any]) -> Any:
    """The object that a pickle stream describes.

    Args:
        data: the stream. What follows its end is ignored, as Python ignores it.
        find: ``(module, name)`` -> a ``Name``, or a value. It raises UnsafePickleError for what is not on its list.
        persistent: persistent id -> value.

    Raises:
        UnsafePickleError: the stream names or calls something that is not on the list.
        FormatError: the stream is damaged or hostile: what it asks for is not bounded by its own length.
        OSError: ``persistent`` cannot read a file.
    """
    try:
        return Machine(data, find, persistent).run()
    except (FormatError, OSError):
        raise
    except struct.error:
        raise FormatError("ends too early") from None
    except IndexError:
        raise FormatError("ends too early, or takes more from its stack than it put there") from None
    except Exception as err:  # damaged streams raise whatever their bytes lead to
        raise FormatError(f"{type(err).__name__}: {str(err)[:200]}") from None


def _kind(value: Any) -> str:
    return value.kind[:80] if isinstance(value, Record) else type(value).__name__


def _check_keys(keys: list[Any]) -> None:
    """Refuse keys whose hash takes long or collides by construction."""
    for key in keys:
        if type(key) not in _SCALARS:
            _check_key(key, [_KEY_MEMBERS], 0)


def _check_key(key: Any, left: list[int], depth: int) -> None:
    left[0] -= 1
    if left[0] < 0 or depth > _KEY_DEPTH:
        raise FormatError("has a key of a dictionary that is nested too deeply or too long")
    if type(key) in (tuple, frozenset):
        for each in key:
            _check_key(each, left, depth + 1)
    elif type(key) is int and key.bit_length() > _KEY_BITS - 1:
        raise FormatError(f"has the key {key:#x}, which is larger than any that a framework writes")


def keyed(values: Any, kind: type) -> Any:
    """A ``set`` or ``frozenset`` of values whose hash is cheap. Raises FormatError."""
    listed = list(values)
    _check_keys(listed)
    return kind(listed)


# ---------------------------------------------------------------- opcodes: (machine, position) -> next position

_Opcode = Callable[[Machine, int], int]


def _refused(m: Machine, at: int) -> int:
    raise FormatError(f"has opcode {m.data[at - 1]:#04x} at byte {at - 1:,}, which no checkpoint needs")


_TABLE: list[_Opcode] = [_refused] * 256


def _opcode(*codes: bytes) -> Callable[[_Opcode], _Opcode]:
    def register(function: _Opcode) -> _Opcode:
        for code in codes:
            _TABLE[code[0]] = function
        return function

    return register


@_opcode(pickle.PROTO)
def _proto(m: Machine, at: int) -> int:
    if m.data[at] > MAX_PROTOCOL:
        raise FormatError(f"is of protocol {m.data[at]}; {MAX_PROTOCOL} is the newest that is known")
    return at + 1


@_opcode(pickle.FRAME)
def _frame(_m: Machine, at: int) -> int:
    return at + 8


@_opcode(pickle.STOP)
def _stop(m: Machine, _at: int) -> int:
    if len(m.stack) != 1 or m.marks:
        raise FormatError(f"leaves {len(m.stack)} values where one is its result")
    return -1


@_opcode(pickle.MARK)
def _mark(m: Machine, at: int) -> int:
    m.marks.append(len(m.stack))
    return at


@_opcode(pickle.POP)
def _pop(m: Machine, at: int) -> int:
    if m.marks and m.marks[-1] == len(m.stack):
        m.marks.pop()
    else:
        m.stack.pop()
    return at


@_opcode(pickle.POP_MARK)
def _pop_mark(m: Machine, at: int) -> int:
    m.above_mark()
    return at


# -------- scalars


def _constant(code: bytes, value: Any) -> None:
    def push(m: Machine, at: int) -> int:
        m.stack.append(value)
        return at

    _TABLE[code[0]] = push


for _code, _value in ((pickle.NONE, None), (pickle.NEWTRUE, True), (pickle.NEWFALSE, False), (pickle.EMPTY_TUPLE, ())):
    _constant(_code, _value)


def _packed(code: bytes, layout: str) -> None:
    unpack, size = struct.Struct(layout).unpack_from, struct.calcsize(layout)

    def push(m: Machine, at: int) -> int:
        m.stack.append(unpack(m.data, at)[0])
        return at + size

    _TABLE[code[0]] = push


for _code, _layout in ((pickle.BININT, "<i"), (pickle.BININT2, "<H"), (pickle.BINFLOAT, ">d")):
    _packed(_code, _layout)


@_opcode(pickle.BININT1)
def _binint1(m: Machine, at: int) -> int:
    m.stack.append(m.data[at])
    return at + 1


def _sized(code: bytes, size_bytes: int, make: Callable[[bytes], Any], limit: int = 1 << 62) -> None:
    """An opcode with a length in front of its data."""

    def push(m: Machine, at: int) -> int:
        begin = at + size_bytes
        size = int.from_bytes(m.data[at:begin], "little")
        end = begin + size
        if size > limit or end > len(m.data):
            raise FormatError(f"has a value of {size:,} bytes at byte {at - 1:,} of {len(m.data):,}")
        m.stack.append(make(m.data[begin:end]))
        return end

    _TABLE[code[0]] = push


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _integer(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


for _code, _size, _make, _limit in (
    (pickle.LONG1, 1, _integer, MAX_INTEGER_BYTES), (pickle.LONG4, 4, _integer, MAX_INTEGER_BYTES),
    (pickle.SHORT_BINUNICODE, 1, _text, 1 << 62), (pickle.BINUNICODE, 4, _text, 1 << 62),
    (pickle.BINUNICODE8, 8, _text, 1 << 62), (pickle.SHORT_BINBYTES, 1, bytes, 1 << 62),
    (pickle.BINBYTES, 4, bytes, 1 << 62), (pickle.BINBYTES8, 8, bytes, 1 << 62), (pickle.BYTEARRAY8, 8, bytearray, 1 << 62),
):  # fmt: skip
    _sized(_code, _size, _make, _limit)


def _line(m: Machine, at: int) -> tuple[str, int]:
    end = m.data.find(b"\n", at, at + _MAX_LINE_BYTES)
    if end < 0:
        raise FormatError(f"has a line without an end at byte {at:,}")
    return m.data[at:end].decode(), end + 1


@_opcode(pickle.INT)
def _int(m: Machine, at: int) -> int:
    text, at = _line(m, at)
    m.stack.append({"00": False, "01": True}[text] if text in ("00", "01") else int(text))
    return at


@_opcode(pickle.LONG)
def _long(m: Machine, at: int) -> int:
    text, at = _line(m, at)
    m.stack.append(int(text.removesuffix("L")))
    return at


@_opcode(pickle.FLOAT)
def _float(m: Machine, at: int) -> int:
    text, at = _line(m, at)
    m.stack.append(float(text))
    return at


@_opcode(pickle.UNICODE)
def _unicode(m: Machine, at: int) -> int:
    end = m.data.index(b"\n", at)
    m.stack.append(codecs.raw_unicode_escape_decode(m.data[at:end])[0])
    return end + 1


# -------- containers


@_opcode(pickle.TUPLE)
def _tuple(m: Machine, at: int) -> int:
    items = m.above_mark()
    m.spend(_TUPLE_BYTES)
    m.stack.append(tuple(items))
    return at


def _tuple_of(code: bytes, count: int) -> None:
    def push(m: Machine, at: int) -> int:
        stack = m.stack
        if len(stack) < count:
            raise IndexError
        m.spend(_TUPLE_BYTES)
        stack[-count:] = [tuple(stack[-count:])]
        return at

    _TABLE[code[0]] = push


for _code, _count in ((pickle.TUPLE1, 1), (pickle.TUPLE2, 2), (pickle.TUPLE3, 3)):
    _tuple_of(_code, _count)


@_opcode(pickle.EMPTY_LIST)
def _empty_list(m: Machine, at: int) -> int:
    m.spend(_LIST_BYTES)
    m.stack.append([])
    return at


@_opcode(pickle.EMPTY_DICT)
def _empty_dict(m: Machine, at: int) -> int:
    m.spend(_DICT_BYTES)
    m.stack.append({})
    return at


@_opcode(pickle.EMPTY_SET)
def _empty_set(m: Machine, at: int) -> int:
    m.spend(_SET_BYTES)
    m.stack.append(set())
    return at


@_opcode(pickle.LIST)
def _list(m: Machine, at: int) -> int:
    items = m.above_mark()
    m.spend(_LIST_BYTES)
    m.stack.append(items)
    return at


@_opcode(pickle.DICT)
def _dict(m: Machine, at: int) -> int:
    items = m.above_mark()
    m.spend(_DICT_BYTES)
    m.stack.append(_pairs(items))
    return at


@_opcode(pickle.FROZENSET)
def _frozenset(m: Machine, at: int) -> int:
    items = m.above_mark()
    m.spend(_SET_BYTES)
    m.stack.append(keyed(items, frozenset))
    return at


@_opcode(pickle.APPEND)
def _append(m: Machine, at: int) -> int:
    value = m.stack.pop()
    _extend(m.stack[-1], [value])
    return at


@_opcode(pickle.APPENDS)
def _appends(m: Machine, at: int) -> int:
    items = m.above_mark()
    _extend(m.stack[-1], items)
    return at


def _extend(target: Any, values: list[Any]) -> None:
    if type(target) not in (list, deque, Record):
        raise FormatError(f"appends to a {_kind(target)}")
    target.extend(values)


@_opcode(pickle.SETITEM)
def _setitem(m: Machine, at: int) -> int:
    value, key = m.stack.pop(), m.stack.pop()
    _update(m.stack[-1], [key, value])
    return at


@_opcode(pickle.SETITEMS)
def _setitems(m: Machine, at: int) -> int:
    items = m.above_mark()
    _update(m.stack[-1], items)
    return at


def _update(target: Any, items: list[Any]) -> None:
    if type(target) not in (dict, OrderedDict, Record):
        raise FormatError(f"sets items of a {_kind(target)}")
    target.update(_pairs(items))


def _pairs(items: list[Any]) -> dict[Any, Any]:
    keys = items[::2]
    _check_keys(keys)
    return dict(zip(keys, items[1::2], strict=True))


@_opcode(pickle.ADDITEMS)
def _additems(m: Machine, at: int) -> int:
    items = m.above_mark()
    if type(m.stack[-1]) is not set:
        raise FormatError(f"adds members to a {_kind(m.stack[-1])}")
    m.stack[-1].update(keyed(items, set))
    return at


# -------- memo


@_opcode(pickle.MEMOIZE)
def _memoize(m: Machine, at: int) -> int:
    m.memo.append(m.stack[-1])
    return at


def _put(m: Machine, index: int) -> None:
    """Writers count up from 0 or 1. An index far ahead would take memory, and one that is used again hides a value."""
    if index == len(m.memo) + 1:
        m.memo.append(_UNSET)
    if index != len(m.memo):
        raise FormatError(f"memoizes a value as number {index:,}, where {len(m.memo):,} follows")
    m.memo.append(m.stack[-1])


def _get(m: Machine, index: int) -> None:
    value = m.memo[index] if index < len(m.memo) else _UNSET
    if value is _UNSET:
        raise FormatError(f"refers to value number {index:,} of {len(m.memo):,}")
    m.stack.append(value)


@_opcode(pickle.BINPUT)
def _binput(m: Machine, at: int) -> int:
    _put(m, m.data[at])
    return at + 1


@_opcode(pickle.LONG_BINPUT)
def _long_binput(m: Machine, at: int) -> int:
    _put(m, _uint4(m.data, at)[0])
    return at + 4


@_opcode(pickle.PUT)
def _text_put(m: Machine, at: int) -> int:
    text, at = _line(m, at)
    _put(m, int(text))
    return at


@_opcode(pickle.BINGET)
def _binget(m: Machine, at: int) -> int:
    _get(m, m.data[at])
    return at + 1


@_opcode(pickle.LONG_BINGET)
def _long_binget(m: Machine, at: int) -> int:
    _get(m, _uint4(m.data, at)[0])
    return at + 4


@_opcode(pickle.GET)
def _text_get(m: Machine, at: int) -> int:
    text, at = _line(m, at)
    _get(m, max(int(text), 0))
    return at


_uint4 = struct.Struct("<I").unpack_from


# -------- names, calls, states


@_opcode(pickle.GLOBAL)
def _global(m: Machine, at: int) -> int:
    module, at = _line(m, at)
    name, at = _line(m, at)
    m.stack.append(m.global_(module, name))
    return at


@_opcode(pickle.STACK_GLOBAL)
def _stack_global(m: Machine, at: int) -> int:
    name, module = m.stack.pop(), m.stack.pop()
    m.stack.append(m.global_(module, name))
    return at


@_opcode(pickle.REDUCE, pickle.NEWOBJ)
def _reduce(m: Machine, at: int) -> int:
    arguments = m.stack.pop()
    m.stack[-1] = m.call(m.stack[-1], arguments)
    return at


@_opcode(pickle.NEWOBJ_EX)
def _newobj_ex(m: Machine, at: int) -> int:
    named, arguments = m.stack.pop(), m.stack.pop()
    callee = m.stack[-1]
    if type(named) is not dict or (named and not (type(callee) is Name and callee.make is None)):
        raise FormatError(f"makes a {_kind(callee)} with named arguments")
    m.stack[-1] = made = m.call(callee, arguments)
    if named:
        made.set_state(named)
    return at


@_opcode(pickle.BUILD)
def _build(m: Machine, at: int) -> int:
    state = m.stack.pop()
    target = m.stack[-1]
    if type(target) is Record:
        m.spend(_DICT_BYTES)
        target.set_state(state)
    elif type(target) is not OrderedDict or type(state) is not dict:  # a state_dict has attributes, which nothing reads
        raise UnsafePickleError(f"sets the state of a {_kind(target)}, which has none")
    return at


@_opcode(pickle.BINPERSID)
def _binpersid(m: Machine, at: int) -> int:
    m.stack[-1] = m.persistent(m.stack[-1])
    return at
