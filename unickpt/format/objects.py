"""Codec of non-tensor state: Python values to JSON and back, without pickle.

Plain values stay plain JSON, so a manifest is readable. Other types become an object with one ``$`` key, such as
``{"$tuple": [...]}``. Tensors and arrays are stored as tensors, and ``{"$tensor": key}`` takes their place. A value
of an unknown type becomes an opaque blob. It never fails a save, and is only loaded with ``allow_pickle``.
"""

from __future__ import annotations

import argparse
import base64
import collections
import datetime
import enum
import math
import pathlib
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from unickpt.errors import FormatError
from unickpt.format import dtypes

MAX_DEPTH = 128


JOB_PREFIX = "objects/job"  # key prefix of the tensors in the job's objects


def rank_prefix(rank: int) -> str:
    """Return the tensor name of the objects of one rank, which is also the key prefix of the tensors in them."""
    return f"objects/rank{rank:05d}"


@dataclass(frozen=True, slots=True)
class Opaque:
    """Placeholder of an opaque blob that was not loaded. ``type_name`` is the class that was saved."""

    type_name: str


@dataclass(slots=True)
class Encoded:
    """Result of ``encode``.

    Attributes:
        value: JSON value.
        tensors: detached CPU tensors by key, to be stored separately.
        opaque: paths (``a.b[0]``) and class names of the values stored as blobs, or not stored because pickle
            failed.
    """

    value: Any
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    opaque: list[str] = field(default_factory=list)


def encode(value: Any, *, prefix: str) -> Encoded:
    """Encode any Python value. No content of ``value`` raises an exception.

    Args:
        value: the value to store.
        prefix: prefix of the keys of extracted tensors.
    """
    out = Encoded(None)
    out.value = _Encoder(prefix, out).encode(value, path="", depth=0)
    return out


class _Encoder:
    def __init__(self, prefix: str, out: Encoded) -> None:
        self._prefix = prefix
        self._out = out

    def encode(self, value: Any, *, path: str, depth: int) -> Any:
        if depth > MAX_DEPTH:  # a cycle, or extreme nesting
            return self._opaque(value, path)
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            return value if abs(value) < 2**63 else {"$int": str(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if kind is list:
            return self._items(value, path, depth)
        if kind is dict:
            return self._mapping(value, path, depth)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        handler = _ENCODERS.get(kind)
        if handler is not None:
            tag, plain = handler
            return {tag: self.encode(plain(value), path=path, depth=depth + 1)}
        if isinstance(value, enum.Enum):
            return {"$enum": [kind.__module__, kind.__qualname__, value.name]}
        if kind is np.ndarray and value.dtype.kind in "biuf":
            return {"$ndarray": self.encode(_array_as_tensor(value), path=path, depth=depth + 1)}
        if isinstance(value, np.generic):
            return {"$numpy": [value.dtype.str, value.item()]} if value.dtype.kind in "biuf" else self._opaque(value, path)
        return self._opaque(value, path)

    def _items(self, values: list[Any], path: str, depth: int) -> list[Any]:
        return [self.encode(item, path=f"{path}[{at}]", depth=depth + 1) for at, item in enumerate(values)]

    def _mapping(self, value: dict[Any, Any], path: str, depth: int) -> Any:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.encode(item, path=f"{path}.{key}".lstrip("."), depth=depth + 1) for key, item in value.items()}
        pairs = [[key, item] for key, item in value.items()]
        return {"$dict": self._items(pairs, path, depth)}

    def _tensor(self, value: torch.Tensor, path: str) -> Any:
        tensor = value.detach()
        try:
            dtypes.name_of(tensor.dtype)
            tensor = tensor.to("cpu").contiguous()
        except Exception:  # quantized, sparse, meta or nested: the format cannot store it
            return self._opaque(value, path)
        key = f"{self._prefix}/{len(self._out.tensors)}"
        self._out.tensors[key] = tensor
        return {"$tensor": key}

    def _opaque(self, value: Any, path: str) -> Any:
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        self._out.opaque.append(f"{path or '(root)'}: {name}")
        try:
            blob = base64.b64encode(pickle.dumps(value)).decode()
        except Exception:  # locks, files, lambdas, recursion: an error of pickle must not fail a save
            return {"$lost": name}
        return {"$opaque": {"type": name, "pickle": blob}}


def _array_as_tensor(array: np.ndarray[Any, Any]) -> Any:
    native = array.astype(array.dtype.newbyteorder("="), order="C", copy=True)
    return [array.dtype.str, torch.from_numpy(native)]


_ENCODERS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    tuple: ("$tuple", list),
    set: ("$set", list),
    frozenset: ("$frozenset", list),
    collections.OrderedDict: ("$ordered", lambda v: [list(pair) for pair in v.items()]),
    bytes: ("$bytes", lambda v: base64.b64encode(v).decode()),
    complex: ("$complex", lambda v: [v.real, v.imag]),
    torch.Size: ("$size", list),
    torch.dtype: ("$dtype", str),
    torch.device: ("$device", str),
    argparse.Namespace: ("$namespace", vars),
    pathlib.PosixPath: ("$path", str),
    datetime.datetime: ("$datetime", lambda v: v.isoformat()),
}


@dataclass(slots=True)
class Decoded:
    """Result of ``decode``: the value, and a description of every value in it that could not be decoded."""

    value: Any
    left_out: list[str] = field(default_factory=list)


def decode(value: Any, *, tensors: Mapping[str, torch.Tensor], allow_pickle: bool = False, where: str) -> Decoded:
    """Decode the result of ``encode``.

    Args:
        value: JSON value, not trusted.
        tensors: the extracted tensors by key.
        allow_pickle: unpickle opaque blobs. This runs code from the checkpoint, so use it only for checkpoints
            that you wrote. Otherwise each blob becomes an ``Opaque`` and is listed in ``left_out``.
        where: name of the object in messages.

    Raises:
        FormatError: a tag is unknown, a tensor is missing or a value is malformed.
    """
    out = Decoded(None)
    try:
        out.value = _Decoder(tensors, allow_pickle, out).decode(value)
    except RecursionError:
        raise FormatError(f"{where}: nested too deeply") from None
    except FormatError as err:
        raise FormatError(f"{where}: {err}") from None
    return out


class _Decoder:
    """Recursive decoder. The path is a stack and is only joined for a message, because hostile keys can be long."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], allow_pickle: bool, out: Decoded) -> None:
        self._tensors = tensors
        self._allow_pickle = allow_pickle
        self._out = out
        self._path: list[str] = []

    def _where(self) -> str:
        return "".join(self._path)[-200:].lstrip(".") or "(root)"

    def _member(self, step: str, value: Any) -> Any:
        if len(self._path) >= 2 * MAX_DEPTH:
            raise FormatError("nested too deeply")
        self._path.append(step)
        found = self.decode(value)
        self._path.pop()
        return found

    def decode(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._member(f"[{at}]", item) for at, item in enumerate(value)]
        if not isinstance(value, dict):
            return value
        tagged = [key for key in value if key.startswith("$")]
        if not tagged:
            return {key: self._member(f".{key}", item) for key, item in value.items()}
        if len(value) != 1:
            raise FormatError(f"{self._where()}: {sorted(value)} is not one tag")
        return self._tagged(tagged[0], value[tagged[0]])

    def _tagged(self, tag: str, body: Any) -> Any:
        if tag == "$opaque":
            return self._blob(body)
        if tag == "$lost":
            self._out.left_out.append(f"{self._where()}: {body} (could not be pickled when it was saved)")
            return Opaque(str(body))
        if tag == "$enum":
            return self._enum(body)
        if tag == "$tensor":
            if not isinstance(body, str) or body not in self._tensors:
                raise FormatError(f"{self._where()}: tensor {body!r} is not stored")
            return self._tensors[body]
        build = _DECODERS.get(tag)
        if build is None:
            raise FormatError(f"{self._where()}: unknown tag {tag!r}; written by a newer release?")
        inner = self._member("", body)
        try:
            return build(inner)
        except Exception as err:  # torch, numpy and datetime raise various types for invalid values
            raise FormatError(f"{self._where()}: {tag} cannot hold {str(body)[:80]!r} ({err})") from None

    def _enum(self, body: Any) -> Any:
        """Return a member of an enumeration if its module is already imported. Nothing is imported."""
        if not (isinstance(body, list) and len(body) == 3 and all(isinstance(part, str) for part in body)):
            raise FormatError(f"{self._where()}: malformed enumeration member {str(body)[:80]!r}")
        module, path, name = body
        found: Any = sys.modules.get(module)
        for part in path.split("."):
            found = getattr(found, "__dict__", {}).get(part)
        if isinstance(found, enum.EnumMeta) and name in found.__members__:
            return found.__members__[name]
        self._out.left_out.append(f"{self._where()}: {path}.{name} (this job has not imported {module}.{path})")
        return Opaque(f"{module}.{path}")

    def _blob(self, body: Any) -> Any:
        if not isinstance(body, dict) or not isinstance(body.get("type"), str) or not isinstance(body.get("pickle"), str):
            raise FormatError(f"{self._where()}: malformed opaque value")
        if not self._allow_pickle:
            self._out.left_out.append(f"{self._where()}: {body['type']} (a pickle; set allow_pickle to load it)")
            return Opaque(body["type"])
        return pickle.loads(base64.b64decode(body["pickle"]))  # only with the user's opt-in, see the docstring of decode


def _torch_named(text: str) -> torch.dtype:
    dtype = vars(torch).get(text.removeprefix("torch."))  # not getattr, which imports lazy modules of torch
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{text!r} is not a dtype")
    return dtype


def _size(extents: list[int]) -> torch.Size:
    if not all(type(n) is int and 0 <= n < 2**63 for n in extents):
        raise ValueError("not a list of extents")
    return torch.Size(extents)


def _device(text: str) -> torch.device:
    if not isinstance(text, str):
        raise TypeError(f"{text!r} is not a device")
    return torch.device(text)


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
    if len(text) > 4000:
        raise ValueError("integer of more than 4000 digits")
    return int(text)


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$int": _int,
    "$float": _number,
    "$tuple": tuple,
    "$set": set,
    "$frozenset": frozenset,
    "$dict": lambda pairs: {key: item for key, item in pairs},
    "$ordered": lambda pairs: collections.OrderedDict((key, item) for key, item in pairs),
    "$bytes": lambda text: base64.b64decode(text, validate=True),
    "$complex": lambda parts: complex(*parts),
    "$size": _size,
    "$dtype": _torch_named,
    "$device": _device,
    "$namespace": lambda members: argparse.Namespace(**members),
    "$path": pathlib.Path,
    "$datetime": datetime.datetime.fromisoformat,
    "$numpy": lambda body: _plain_numpy(body[0]).type(body[1]),
    "$ndarray": _numpy_array,
}
