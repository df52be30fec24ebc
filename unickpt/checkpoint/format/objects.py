"""Codec of non-tensor state: Python values to JSON and back, without pickle.

Plain values stay plain JSON, so a manifest is readable. Other types become an object with one ``$`` key, such as
``{"$tuple": [...]}`` (``object_types.py`` has the table). Tensors and arrays are stored as tensors, and ``{"$tensor": key}``
takes their place. A value of an unknown type becomes an opaque blob. It never fails a save, and is only loaded with
``allow_pickle``. Otherwise the entry of the dictionary that contains it is left out.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import pickle
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import numpy as np
import torch

from unickpt.base.errors import FormatError
from unickpt.checkpoint.format import object_types
from unickpt.checkpoint.format.object_encoder import MAX_DEPTH, Encoded, encode
from unickpt.checkpoint.format.object_types import BUILT, DICT, LIST, MAX_DIGITS, OPEN, ROWS, NotHereError, TypeRow

__all__ = ["JOB_PREFIX", "TAGS", "Decoded", "Encoded", "Opaque", "decode", "encode", "rank_prefix"]

JOB_PREFIX = "objects/job"  # key prefix of the tensors in the job's objects


def rank_prefix(rank: int) -> str:
    """Return the tensor name of the objects of one rank, which is also the key prefix of the tensors in them."""
    return f"objects/rank{rank:05d}"


@dataclass(frozen=True, slots=True)
class Opaque:
    """An object that consists of nothing but an opaque blob that was not loaded. ``type_name`` is the class that was saved.

    It never takes the place of a value within an object.
    """

    type_name: str


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A value that was not decoded: its path (``a.b[0]``), and why."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


@dataclass(slots=True)
class Decoded:
    """Result of ``decode``: the value, and a description of every value in it that could not be decoded."""

    value: Any
    left_out: list[LeftOut] = field(default_factory=list)


def decode(value: Any, *, tensors: Mapping[str, torch.Tensor], allow_pickle: bool = False, where: str) -> Decoded:
    """Decode the result of ``encode``.

    Args:
        value: JSON value, not trusted.
        tensors: the extracted tensors by key.
        allow_pickle: unpickle opaque blobs. This runs code from the checkpoint, so use it only for checkpoints
            that you wrote. Otherwise the entry of a dictionary or the attribute of a namespace that contains the blob is left
            out, and listed in ``left_out``. Without one the whole value becomes an ``Opaque``.
        where: name of the object in messages.

    Raises:
        FormatError: a tag is unknown, a tensor is missing or a value is malformed.
    """
    out = Decoded(None)
    try:
        out.value = _Decoder(tensors, allow_pickle, out).decode(value)
    except _LeftOutError as left:
        out.value = Opaque(left.type_name)
    except RecursionError:
        raise FormatError(f"{where}: nested too deeply") from None
    except FormatError as err:
        raise FormatError(f"{where}: {err}") from None
    return out


class _LeftOutError(Exception):
    """A value that cannot be decoded here. It ends at the innermost entry of a dictionary, which is left out."""

    def __init__(self, type_name: str) -> None:
        super().__init__(type_name)
        self.type_name = type_name


_EMPTY: Mapping[str, TypeRow] = {row.tag: row for row in (*ROWS.values(), DICT) if row.empty is not None}
_PAIRS = ("$dict", "$ordered", "$counter")
_CONTENTS: Mapping[str, type] = {"$enum": str, "$namedtuple": list, "$dataclass": dict}
_MISSING = object()
_SHARED = frozenset({*_EMPTY, "", "$set", "$bytearray", "$ndarray", "$raw_array", "$dataclass", "$opaque", "$lost"})
_MAX_HASHED = 1_000_000  # values within dataclasses that are keys or members of sets: references multiply them


class _Decoder:
    """Recursive decoder. The path is a stack and is only joined for a message, because hostile keys can be long."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], allow_pickle: bool, out: Decoded) -> None:
        self._tensors = tensors
        self._allow_pickle = allow_pickle
        self._out = out
        self._path: list[str] = []
        self._objects: dict[int, Any] = {}  # those with several references, by number
        self._read: dict[str, torch.Tensor] = {}
        self._closed = 0  # rows around the value whose parts have no references and ranges: these are larger than their text
        self._hashed = 0

    def _where(self) -> str:
        return "".join(self._path)[-200:].lstrip(".") or "(root)"

    def _member(self, step: str, value: Any) -> Any:
        if len(self._path) >= 2 * MAX_DEPTH:
            raise FormatError("nested too deeply")
        self._path.append(step)
        try:
            return self.decode(value)
        finally:
            self._path.pop()

    def decode(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._member(f"[{at}]", item) for at, item in enumerate(value)]
        if not isinstance(value, dict):
            return value
        tagged = [key for key in value if key.startswith("$")]
        if not tagged:
            return self._entries(value)
        if len(value) != 1:
            raise FormatError(f"{self._where()}: {sorted(value)} is not one tag")
        return self._tagged(tagged[0], value[tagged[0]])

    def _entries(self, value: dict[str, Any]) -> dict[str, Any]:
        """Decode a dictionary, without the entries that cannot be decoded here."""
        found = {}
        for key, item in value.items():
            try:
                found[key] = self._member(f".{key}", item)
            except _LeftOutError:
                continue
        return found

    def _pairs(self, body: Any) -> list[list[Any]]:
        """Decode the pairs of a dictionary, without those that cannot be decoded here."""
        if not isinstance(body, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in body):
            raise FormatError(f"{self._where()}: {str(body)[:80]!r} are not pairs of keys and values")
        found = []
        for at, pair in enumerate(body):
            try:
                found.append(self._member(f"[{at}]", pair))
            except _LeftOutError:
                continue
        self._check_hashed(key for key, _ in found)
        return found

    def _check_hashed(self, values: Iterable[Any]) -> None:
        """Refuse keys, or members of a set, whose hash would take forever: dataclasses that refer to each other many times."""
        waiting = [(value, False) for value in values] if self._objects else []
        while waiting:
            value, counted = waiting.pop()
            inside: Iterable[Any] = ()
            if isinstance(value, (tuple, frozenset)):
                inside = value
            elif is_dataclass(value):
                inside, counted = object_types.dataclass_members(value).values(), True
            before = len(waiting)
            waiting += ((each, counted) for each in inside)
            self._hashed += counted * (len(waiting) - before)
            if self._hashed > _MAX_HASHED:
                raise FormatError(f"{self._where()}: more than {_MAX_HASHED:,} values in keys")

    def _tagged(self, tag: str, body: Any) -> Any:
        if tag == "$opaque":
            return self._blob(body)
        if tag == "$lost":
            raise self._left_out(str(body), f"{body} (could not be pickled when it was saved)")
        if tag == "$tensor":
            return self._tensor(body)
        if tag in ("$shared", "$same"):
            return self._shared(tag, body)
        if tag in ("$enum", "$namedtuple", "$dataclass"):
            return self._of_class(tag, body)
        row = BUILT.get(tag)
        if row is None and tag not in ("$int", "$float", "$numpy", "$ndarray"):
            raise FormatError(f"{self._where()}: unknown tag {tag!r}; written by a newer release?")
        if self._closed and tag == "$range":
            raise FormatError(f"{self._where()}: unexpected {tag}")
        inner: Any
        if tag in _PAIRS:
            inner = self._pairs(body)
        elif tag == "$defaultdict" and isinstance(body, list) and len(body) == 2:
            inner = [body[0], self._pairs(body[1])]
        else:
            closes = tag not in OPEN
            self._closed += closes
            try:
                inner = self._member("", body)
            finally:
                self._closed -= closes
        if tag in ("$set", "$frozenset") and isinstance(inner, list):
            self._check_hashed(inner)
        try:
            return _NUMBERS[tag](inner) if row is None else row.build(inner)
        except NotHereError as err:
            raise self._left_out(tag[1:], str(err)) from None
        except Exception as err:  # torch, numpy and datetime raise various types for invalid values
            raise FormatError(f"{self._where()}: {tag} cannot hold {str(body)[:80]!r} ({err})") from None

    def _left_out(self, type_name: str, reason: str) -> _LeftOutError:
        """Note a value that cannot be decoded here, and return the exception that leaves it out."""
        self._out.left_out.append(LeftOut(self._where(), reason))
        return _LeftOutError(type_name)

    def _tensor(self, body: Any) -> torch.Tensor:
        if not isinstance(body, str) or body not in self._tensors:
            raise FormatError(f"{self._where()}: tensor {body!r} is not stored")
        if body not in self._read:
            self._read[body] = self._tensors[body]
        return self._read[body]

    def _shared(self, tag: str, body: Any) -> Any:
        """Decode an object with several references, or return it again."""
        number = body if tag == "$same" else body[0] if isinstance(body, list) and len(body) == 2 else None
        if self._closed and tag == "$same":
            raise FormatError(f"{self._where()}: unexpected {tag}")
        if type(number) is not int or (tag == "$same") != (number in self._objects):
            raise FormatError(f"{self._where()}: malformed reference {str(body)[:80]!r}")
        if tag == "$same":
            if self._objects[number] is _MISSING:
                raise _LeftOutError("reference")
            return self._objects[number]
        row, parts = _emptied(body[1])
        if _tag_of(body[1]) not in _SHARED:
            raise FormatError(f"{self._where()}: {_tag_of(body[1])} has no identity, so nothing refers to it")
        self._objects[number] = _MISSING
        try:
            if row is None or row.empty is None or row.fill is None:
                self._objects[number] = self._member("", body[1])
                return self._objects[number]
            self._objects[number] = found = row.empty(parts)
            row.fill(found, self._member("", body[1]))
        except _LeftOutError:
            self._objects[number] = _MISSING
            raise
        except (TypeError, ValueError, KeyError, IndexError, OverflowError) as err:
            raise FormatError(f"{self._where()}: malformed object {str(body[1])[:80]!r} ({err})") from None
        return found

    def _of_class(self, tag: str, body: Any) -> Any:
        """Return a value of a class that is already imported. Nothing is imported, and no method of the class runs.

        With ``allow_pickle`` the module is imported, as for a pickle.
        """
        if not (isinstance(body, list) and len(body) == 3 and all(isinstance(part, str) for part in body[:2])):
            raise FormatError(f"{self._where()}: malformed {tag[1:]} {str(body)[:80]!r}")
        module, path, content = body
        inner = content if tag == "$enum" else self._whole(content)
        fits: bool = isinstance(inner, _CONTENTS[tag])
        if not fits:
            raise FormatError(f"{self._where()}: malformed {tag[1:]} {str(body)[:80]!r}")
        if self._allow_pickle and module not in sys.modules:
            with contextlib.suppress(Exception):  # a module that is not here, or whose own code fails
                importlib.import_module(module)
        try:
            kind = object_types.class_of(module, path)
            if tag == "$enum":
                return object_types.enum_member(kind, inner)
            if tag == "$namedtuple":
                return object_types.made_named_tuple(kind, inner)
            return object_types.made_dataclass(kind, inner)
        except (NotHereError, TypeError) as err:  # TypeError: an abstract class
            raise self._left_out(f"{module}.{path}", str(err)) from None

    def _whole(self, content: Any) -> Any:
        """Decode the members of an object. It is left out as a whole if one of them is."""
        before = len(self._out.left_out)
        inner = self._member("", content)
        if len(self._out.left_out) != before:
            raise _LeftOutError("member")
        return inner

    def _blob(self, body: Any) -> Any:
        if not isinstance(body, dict) or not isinstance(body.get("type"), str) or not isinstance(body.get("pickle"), str):
            raise FormatError(f"{self._where()}: malformed opaque value")
        if not self._allow_pickle:
            raise self._left_out(body["type"], f"{body['type']} (a pickle; set allow_pickle to load it)")
        try:
            return pickle.loads(base64.b64decode(body["pickle"]))  # only with the user's opt-in, see the docstring of decode
        except Exception as err:  # the class has moved, or its own code fails
            raise self._left_out(body["type"], f"{body['type']} ({type(err).__name__}: {err})") from None


def _emptied(body: Any) -> tuple[TypeRow | None, Any]:
    """Return how to make the empty object of an encoded one, and its parts; None if it cannot contain itself."""
    if isinstance(body, list):
        return LIST, body
    if not isinstance(body, dict):
        return None, body
    tag = _tag_of(body)
    return (_EMPTY.get(tag), body[tag]) if tag else (DICT, body)


def _tag_of(body: Any) -> str:
    """Return the tag of an encoded object; '' for a list or a plain dictionary, and for a plain value, which has none."""
    return next((key for key in body if key.startswith("$")), "") if isinstance(body, dict) else ""


def _numpy_array(body: Any) -> np.ndarray[Any, Any]:
    code, tensor = body
    return np.asarray(tensor.numpy().astype(_plain_numpy(code)))


def _plain_numpy(code: str) -> np.dtype[Any]:
    dtype = np.dtype(code)
    if dtype.kind not in "biuf":
        raise ValueError(f"numpy dtype {code!r} is not a plain number")
    return dtype


def _number(text: str) -> float:
    if text not in ("inf", "-inf", "nan"):
        raise ValueError(text)
    return float(text)


def _int(text: str) -> int:
    if len(text) > MAX_DIGITS + 1:
        raise ValueError(f"integer of more than {MAX_DIGITS} digits")
    return int(text)


_NUMBERS: Mapping[str, Any] = {
    "$int": _int,
    "$float": _number,
    "$numpy": lambda body: _plain_numpy(body[0]).type(body[1]),
    "$ndarray": _numpy_array,
}
TAGS = frozenset(
    {*BUILT, *_NUMBERS, "$tensor", "$enum", "$namedtuple", "$dataclass", "$shared", "$same", "$opaque", "$lost"}
)  # all of them
