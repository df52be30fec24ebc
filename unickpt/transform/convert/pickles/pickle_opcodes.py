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
from collections.abc import Callable, Mapping
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
        while (code := data[at]) != _STOP:
            if code in _PLAIN:
                _PLAIN[code](machine)
                at += 1
            elif code in _WITH_ARGUMENT:
                read, act = _WITH_ARGUMENT[code]
                argument, at = read(data, at + 1)
                act(machine, argument)
            elif code in _VALUES:
                value, at = _VALUES[code](data, at + 1)
                machine.stack.append(value)
            else:
                raise FormatError(f"has opcode {code:#04x} at byte {at:,}, which is not supported")
        if len(machine.stack) != 1 or machine.marks:
            raise FormatError(f"ends with {len(machine.stack)} values on the stack, expected one")
        return machine.stack.pop()
    except (FormatError, OSError):
        raise
    except struct.error:
        raise FormatError("is truncated") from None
    except IndexError:
        raise FormatError("is truncated, or pops more values from the stack than it pushed") from None
    except Exception as err:  # a damaged stream can cause any error
        raise FormatError(f"{type(err).__name__}: {str(err)[:200]}") from None


# -------- arguments in the stream


# (stream, position of the argument) -> the argument, and the position after it
_Reader = Callable[[bytes, int], tuple[Any, int]]


def _byte(data: bytes, at: int) -> tuple[int, int]:
    return data[at], at + 1


def _frame(_data: bytes, at: int) -> tuple[None, int]:
    return None, at + 8


def _packed(layout: str) -> _Reader:
    unpack, size = struct.Struct(layout).unpack_from, struct.calcsize(layout)

    def read(data: bytes, at: int) -> tuple[Any, int]:
        return unpack(data, at)[0], at + size

    return read


def _sized(size_bytes: int, make: Callable[[bytes], Any], limit: int = 1 << 62) -> _Reader:
    """Return the reader of data with a length prefix of ``size_bytes``."""

    def read(data: bytes, at: int) -> tuple[Any, int]:
        begin = at + size_bytes
        size = int.from_bytes(data[at:begin], "little")
        end = begin + size
        if size > limit or end > len(data):
            raise FormatError(f"has a value of {size:,} bytes at byte {at - 1:,} of {len(data):,}")
        return make(data[begin:end]), end

    return read


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _integer(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _line(data: bytes, at: int) -> tuple[str, int]:
    end = data.find(b"\n", at, at + MAX_LINE_BYTES)
    if end < 0:
        raise FormatError(f"has an unterminated line at byte {at:,}")
    return data[at:end].decode(), end + 1


def _lined(make: Callable[[str], Any]) -> _Reader:
    def read(data: bytes, at: int) -> tuple[Any, int]:
        text, end = _line(data, at)
        return make(text), end

    return read


def _two_lines(data: bytes, at: int) -> tuple[tuple[str, str], int]:
    first, at = _line(data, at)
    second, at = _line(data, at)
    return (first, second), at


def _escaped_line(data: bytes, at: int) -> tuple[str, int]:
    end = data.index(b"\n", at)
    return codecs.raw_unicode_escape_decode(data[at:end])[0], end + 1


def _int_or_bool(text: str) -> int:
    return {"00": False, "01": True}[text] if text in ("00", "01") else int(text)


# -------- the stack


def _proto(_m: Machine, version: int) -> None:
    if version > MAX_PROTOCOL:
        raise FormatError(f"has protocol {version}; the newest supported one is {MAX_PROTOCOL}")


def _mark(m: Machine) -> None:
    m.marks.append(len(m.stack))


def _pop(m: Machine) -> None:
    if m.marks and m.marks[-1] == len(m.stack):
        m.marks.pop()
    else:
        m.stack.pop()


def _constant(value: Any) -> Callable[[Machine], None]:
    return lambda m: m.stack.append(value)


# -------- containers


def _empty(kind: type, size_bytes: int) -> Callable[[Machine], None]:
    def push(m: Machine) -> None:
        m.spend(size_bytes)
        m.stack.append(kind())

    return push


def _collected(make: Callable[[list[Any]], Any], size_bytes: int) -> Callable[[Machine], None]:
    """Return the opcode that makes a container of the values above the mark."""

    def push(m: Machine) -> None:
        items = m.above_mark()
        m.spend(size_bytes)
        m.stack.append(make(items))

    return push


def _tuple_of(count: int) -> Callable[[Machine], None]:
    def push(m: Machine) -> None:
        stack = m.stack
        if len(stack) < count:
            raise IndexError
        m.spend(TUPLE_BYTES)
        stack[-count:] = [tuple(stack[-count:])]

    return push


def _append(m: Machine) -> None:
    value = m.stack.pop()
    _extend(m.stack[-1], [value])


def _appends(m: Machine) -> None:
    items = m.above_mark()
    _extend(m.stack[-1], items)


def _extend(target: Any, values: list[Any]) -> None:
    if type(target) not in (list, deque, Record):
        raise FormatError(f"appends to a {kind_of(target)}")
    target.extend(values)


def _setitem(m: Machine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    _update(m.stack[-1], [key, value])


def _setitems(m: Machine) -> None:
    items = m.above_mark()
    _update(m.stack[-1], items)


def _update(target: Any, items: list[Any]) -> None:
    if type(target) not in (dict, OrderedDict, Record):
        raise FormatError(f"sets items of a {kind_of(target)}")
    target.update(_pairs(items))


def _pairs(items: list[Any]) -> dict[Any, Any]:
    keys = items[::2]
    check_keys(keys)
    return dict(zip(keys, items[1::2], strict=True))


def _additems(m: Machine) -> None:
    items = m.above_mark()
    if type(m.stack[-1]) is not set:
        raise FormatError(f"adds members to a {kind_of(m.stack[-1])}")
    m.stack[-1].update(keyed(items, set))


# -------- memo


def _memoize(m: Machine) -> None:
    m.memo.append(m.stack[-1])


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


# -------- names, calls, states


def _global(m: Machine, names: tuple[str, str]) -> None:
    m.stack.append(m.global_(*names))


def _stack_global(m: Machine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    m.stack.append(m.global_(module, name))


def _reduce(m: Machine) -> None:
    arguments = m.stack.pop()
    m.stack[-1] = m.call(m.stack[-1], arguments)


def _newobj_ex(m: Machine) -> None:
    named, arguments = m.stack.pop(), m.stack.pop()
    callee = m.stack[-1]
    if type(named) is not dict or (named and not (type(callee) is Name and callee.make is None)):
        raise FormatError(f"calls a {kind_of(callee)} with keyword arguments")
    m.stack[-1] = result = m.call(callee, arguments)
    if named:
        result.set_state(named)


def _build(m: Machine) -> None:
    state = m.stack.pop()
    target = m.stack[-1]
    if type(target) is Record:
        m.spend(DICT_BYTES)
        target.set_state(state)
    elif type(target) is not OrderedDict or type(state) is not dict:  # attributes of a state_dict are ignored
        raise UnsafePickleError(f"sets the state of a {kind_of(target)}, which is not allowed")


def _binpersid(m: Machine) -> None:
    m.stack[-1] = m.persistent(m.stack[-1])


_STOP = pickle.STOP[0]
# Opcodes that push their argument, with its reader.
_VALUES: Mapping[int, _Reader] = {code[0]: read for code, read in (
    (pickle.BININT, _packed("<i")), (pickle.BININT1, _byte), (pickle.BININT2, _packed("<H")), (pickle.BINFLOAT, _packed(">d")),
    (pickle.INT, _lined(_int_or_bool)), (pickle.LONG, _lined(lambda text: int(text.removesuffix("L")))),
    (pickle.LONG1, _sized(1, _integer, MAX_INTEGER_BYTES)), (pickle.LONG4, _sized(4, _integer, MAX_INTEGER_BYTES)),
    (pickle.FLOAT, _lined(float)), (pickle.UNICODE, _escaped_line), (pickle.SHORT_BINUNICODE, _sized(1, _text)),
    (pickle.BINUNICODE, _sized(4, _text)), (pickle.BINUNICODE8, _sized(8, _text)), (pickle.SHORT_BINBYTES, _sized(1, bytes)),
    (pickle.BINBYTES, _sized(4, bytes)), (pickle.BINBYTES8, _sized(8, bytes)), (pickle.BYTEARRAY8, _sized(8, bytearray)),
)}  # fmt: skip
# Other opcodes with an argument: its reader, and what is done with it.
_WITH_ARGUMENT: Mapping[int, tuple[_Reader, Callable[[Machine, Any], None]]] = {code[0]: (read, act) for code, read, act in (
    (pickle.PROTO, _byte, _proto), (pickle.FRAME, _frame, lambda _m, _: None),
    (pickle.BINPUT, _byte, _put), (pickle.LONG_BINPUT, _packed("<I"), _put), (pickle.PUT, _lined(int), _put),
    (pickle.BINGET, _byte, _get), (pickle.LONG_BINGET, _packed("<I"), _get),
    (pickle.GET, _lined(lambda text: max(int(text), 0)), _get), (pickle.GLOBAL, _two_lines, _global),
)}  # fmt: skip
# Opcodes without an argument.
_PLAIN: Mapping[int, Callable[[Machine], object]] = {code[0]: act for code, act in (
    (pickle.MARK, _mark), (pickle.POP, _pop), (pickle.POP_MARK, Machine.above_mark), (pickle.MEMOIZE, _memoize),
    (pickle.NONE, _constant(None)), (pickle.NEWTRUE, _constant(True)), (pickle.NEWFALSE, _constant(False)),
    (pickle.EMPTY_TUPLE, _constant(())), (pickle.TUPLE, _collected(tuple, TUPLE_BYTES)), (pickle.TUPLE1, _tuple_of(1)),
    (pickle.TUPLE2, _tuple_of(2)), (pickle.TUPLE3, _tuple_of(3)),
    (pickle.EMPTY_LIST, _empty(list, LIST_BYTES)), (pickle.LIST, _collected(list, LIST_BYTES)), (pickle.APPEND, _append),
    (pickle.APPENDS, _appends),
    (pickle.EMPTY_DICT, _empty(dict, DICT_BYTES)), (pickle.DICT, _collected(_pairs, DICT_BYTES)), (pickle.SETITEM, _setitem),
    (pickle.SETITEMS, _setitems),
    (pickle.EMPTY_SET, _empty(set, SET_BYTES)), (pickle.ADDITEMS, _additems),
    (pickle.FROZENSET, _collected(lambda items: keyed(items, frozenset), SET_BYTES)),
    (pickle.STACK_GLOBAL, _stack_global), (pickle.REDUCE, _reduce), (pickle.NEWOBJ, _reduce), (pickle.NEWOBJ_EX, _newobj_ex),
    (pickle.BUILD, _build), (pickle.BINPERSID, _binpersid),
)}  # fmt: skip
