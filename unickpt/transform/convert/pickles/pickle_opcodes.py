"""An interpreter for pickle streams that runs no code and imports nothing.

A list of allowed globals does not make Python's unpickler safe: ``BUILD`` calls ``__setstate__`` or sets attributes of any
object on the stack, ``REDUCE`` calls any callable, and the memo is an array as long as the largest index. This interpreter
knows containers, numbers, text, and the ``Name`` objects of its caller. ``BUILD`` changes only records, and only ``Name``
objects can be called. Other opcodes are refused.

Opcodes: the standard library's ``pickletools`` describes them.
"""

from __future__ import annotations

import codecs
import pickle
import struct
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

from unickpt.base.errors import FormatError
from unickpt.transform.convert.pickles.pickle_machine import (
    DICT_BYTES,
    LIST_BYTES,
    MAX_LINE_BYTES,
    SET_BYTES,
    TUPLE_BYTES,
    UNSET,
    Machine,
    check_keys,
    keyed,
    kind_of,
)
from unickpt.transform.convert.pickles.pickle_records import Name, Record, UnsafePickleError

MAX_INTEGER_BYTES = 1024
MAX_PROTOCOL = 5


def interpret(data: bytes, find: Callable[[str, str], Any], persistent: Callable[[Any], Any]) -> Any:
    """Return the object that a pickle stream describes.

    Args:
        data: the stream. Bytes after its end are ignored, as in Python.
        find: ``(module, name)`` -> a ``Name`` or a value. It raises UnsafePickleError for a name that is not allowed.
        persistent: persistent id -> value.

    Raises:
        UnsafePickleError: the stream names or calls something that is not allowed.
        FormatError: the stream is damaged, or exceeds the limits that follow from its length.
        OSError: ``persistent`` cannot read a file.
    """
    machine, at = Machine(data, find, persistent), 0
    try:
        while at >= 0:
            at = _TABLE[data[at]](machine, at + 1)
        return machine.stack.pop()
    except (FormatError, OSError):
        raise
    except struct.error:
        raise FormatError("is truncated") from None
    except IndexError:
        raise FormatError("is truncated, or pops more values from the stack than it pushed") from None
    except Exception as err:  # a damaged stream can cause any error
        raise FormatError(f"{type(err).__name__}: {str(err)[:200]}") from None


# Implementation of an opcode: (machine, position after the opcode byte) -> position of the next opcode.
_Opcode = Callable[[Machine, int], int]


def _refused(m: Machine, at: int) -> int:
    raise FormatError(f"has opcode {m.data[at - 1]:#04x} at byte {at - 1:,}, which is not supported")


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
        raise FormatError(f"has protocol {m.data[at]}; the newest supported one is {MAX_PROTOCOL}")
    return at + 1


@_opcode(pickle.FRAME)
def _frame(_m: Machine, at: int) -> int:
    return at + 8


@_opcode(pickle.STOP)
def _stop(m: Machine, _at: int) -> int:
    if len(m.stack) != 1 or m.marks:
        raise FormatError(f"ends with {len(m.stack)} values on the stack, expected one")
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
    """Register an opcode whose data has a length prefix of ``size_bytes``."""

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
    end = m.data.find(b"\n", at, at + MAX_LINE_BYTES)
    if end < 0:
        raise FormatError(f"has an unterminated line at byte {at:,}")
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
    m.spend(TUPLE_BYTES)
    m.stack.append(tuple(items))
    return at


def _tuple_of(code: bytes, count: int) -> None:
    def push(m: Machine, at: int) -> int:
        stack = m.stack
        if len(stack) < count:
            raise IndexError
        m.spend(TUPLE_BYTES)
        stack[-count:] = [tuple(stack[-count:])]
        return at

    _TABLE[code[0]] = push


for _code, _count in ((pickle.TUPLE1, 1), (pickle.TUPLE2, 2), (pickle.TUPLE3, 3)):
    _tuple_of(_code, _count)


@_opcode(pickle.EMPTY_LIST)
def _empty_list(m: Machine, at: int) -> int:
    m.spend(LIST_BYTES)
    m.stack.append([])
    return at


@_opcode(pickle.EMPTY_DICT)
def _empty_dict(m: Machine, at: int) -> int:
    m.spend(DICT_BYTES)
    m.stack.append({})
    return at


@_opcode(pickle.EMPTY_SET)
def _empty_set(m: Machine, at: int) -> int:
    m.spend(SET_BYTES)
    m.stack.append(set())
    return at


@_opcode(pickle.LIST)
def _list(m: Machine, at: int) -> int:
    items = m.above_mark()
    m.spend(LIST_BYTES)
    m.stack.append(items)
    return at


@_opcode(pickle.DICT)
def _dict(m: Machine, at: int) -> int:
    items = m.above_mark()
    m.spend(DICT_BYTES)
    m.stack.append(_pairs(items))
    return at


@_opcode(pickle.FROZENSET)
def _frozenset(m: Machine, at: int) -> int:
    items = m.above_mark()
    m.spend(SET_BYTES)
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
        raise FormatError(f"appends to a {kind_of(target)}")
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
        raise FormatError(f"sets items of a {kind_of(target)}")
    target.update(_pairs(items))


def _pairs(items: list[Any]) -> dict[Any, Any]:
    keys = items[::2]
    check_keys(keys)
    return dict(zip(keys, items[1::2], strict=True))


@_opcode(pickle.ADDITEMS)
def _additems(m: Machine, at: int) -> int:
    items = m.above_mark()
    if type(m.stack[-1]) is not set:
        raise FormatError(f"adds members to a {kind_of(m.stack[-1])}")
    m.stack[-1].update(keyed(items, set))
    return at


# -------- memo


@_opcode(pickle.MEMOIZE)
def _memoize(m: Machine, at: int) -> int:
    m.memo.append(m.stack[-1])
    return at


def _put(m: Machine, index: int) -> None:
    """Memoize the top of the stack.

    Writers number the values from 0 or 1. Other numbers are refused: a large one takes memory, a repeated one hides a value.
    """
    if index == len(m.memo) + 1:
        m.memo.append(UNSET)
    if index != len(m.memo):
        raise FormatError(f"memoizes a value as number {index:,}, expected {len(m.memo):,}")
    m.memo.append(m.stack[-1])


def _get(m: Machine, index: int) -> None:
    value = m.memo[index] if index < len(m.memo) else UNSET
    if value is UNSET:
        raise FormatError(f"refers to memo value {index:,} of {len(m.memo):,}")
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
        raise FormatError(f"calls a {kind_of(callee)} with keyword arguments")
    m.stack[-1] = result = m.call(callee, arguments)
    if named:
        result.set_state(named)
    return at


@_opcode(pickle.BUILD)
def _build(m: Machine, at: int) -> int:
    state = m.stack.pop()
    target = m.stack[-1]
    if type(target) is Record:
        m.spend(DICT_BYTES)
        target.set_state(state)
    elif type(target) is not OrderedDict or type(state) is not dict:  # attributes of a state_dict are ignored
        raise UnsafePickleError(f"sets the state of a {kind_of(target)}, which is not allowed")
    return at


@_opcode(pickle.BINPERSID)
def _binpersid(m: Machine, at: int) -> int:
    m.stack[-1] = m.persistent(m.stack[-1])
    return at
