"""What ``torch.save`` has written, read without running anything of it.

``pickle_machine`` interprets the stream; this module is the list of what a stream may name, and what each name makes. Tensors
are not read: a ``Located`` says where each lies, so that a file of any size costs what its pickle costs. Classes of frameworks
become ``Record`` objects: what was stored of them, without their code.

Every value of a stream is a plain container or leaf, a ``Record``, a ``Name``, a ``Storage`` or a ``Located``. A stream cannot
change the last three.
"""

from __future__ import annotations

import reprlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from unickpt.dtypes import itemsize_bytes, name_of, names, torch_dtype
from unickpt.errors import FormatError
from unickpt.foreign.located import Files, Located
from unickpt.foreign.pickle_machine import interpret, keyed
from unickpt.foreign.records import Name, Record, UnsafePickleError
from unickpt.foreign.torch_archive import MAX_PICKLE_BYTES, Archive, Extent
from unickpt.foreign.unfolding import check_unfolding
from unickpt.tensor_table import collector_paused

__all__ = ["MAX_PICKLE_BYTES", "Name", "Record", "Storage", "UnsafePickleError", "load", "load_archive", "load_plain"]

# Of these, whatever they are, only what was stored of them is taken; their modules are not imported.
RECORDS = (
    "deepspeed.", "megatron.", "transformer_engine.", "argparse.Namespace", "torch.distributed.", "pathlib.", "signal.Signals",
)  # fmt: skip
# A view may hold more bytes than the part of the storage that it spans (an expanded tensor) only up to this size.
MAX_EXPANDED_BYTES = 1 << 20
_STORAGES = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16", "LongStorage": "I64",
    "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8", "BoolStorage": "BOOL",
    "ComplexFloatStorage": "C64",
}  # fmt: skip
_RENAMED = {"__builtin__": "builtins"}  # as protocol 2, which torch.save uses, names it
_DTYPES = {str(torch_dtype(name)).removeprefix("torch."): torch_dtype(name) for name in names()}


class Storage(Record):
    """Where a storage lies. Attributes: first byte and bytes; dtype, or None for bytes whose tensors bring their own."""

    __slots__ = ("dtype", "extent")

    def __init__(self, extent: Extent, dtype: str | None) -> None:
        super().__init__("torch.storage")
        self.extent, self.dtype = extent, dtype


class _StorageType(Name):
    """A class of storages, which a pickle names and cannot call."""

    __slots__ = ("dtype",)

    def __init__(self, name: str, dtype: str | None) -> None:
        super().__init__(name)
        self.dtype = dtype


def load(path: Path, files: Files, *, also: Sequence[str] = ()) -> Any:
    """The object in a file of ``torch.save``; its tensors are ``Located``.

    Args:
        path: of the file.
        files: through which it is read, now and later.
        also: names (``module.Class``, or ``module.`` for all of it) of more classes that may be taken as records.

    Raises:
        UnsafePickleError: the pickle names something that may not be read.
        FormatError: not such a file, damaged, or made to take far more memory or disk than it has bytes.
        OSError: it cannot be read.
    """
    return load_archive(path, 0, files.size_bytes(path), files, also=also)


def load_archive(path: Path, begin: int, size: int, files: Files, *, also: Sequence[str] = ()) -> Any:
    """As ``load``, of an archive that is ``size`` bytes of a file from ``begin`` on."""
    archive = Archive(files, path, begin, size)
    return _load(archive.pickle(), _Rules(path, files, also, archive), size)


def load_plain(data: bytes, path: Path, files: Files, *, also: Sequence[str] = ()) -> Any:
    """The object in a plain pickle, without tensors. Raises as ``load``."""
    return _load(data, _Rules(path, files, also, None), 0)


def _load(data: bytes, rules: _Rules, file_bytes: int) -> Any:
    try:
        with collector_paused():
            found = interpret(data, rules.find, rules.persistent)
            check_unfolding(found, pickle_bytes=len(data), file_bytes=file_bytes)
    except UnsafePickleError as err:
        raise UnsafePickleError(f"{rules.path}: its pickle {err}") from None
    except FormatError as err:
        raise FormatError(f"{rules.path}: its pickle cannot be read ({err})") from None
    return found


class _Rules:
    """What a pickle of one file may name, and what that is here."""

    def __init__(self, path: Path, files: Files, also: Sequence[str], archive: Archive | None) -> None:
        self.path, self._files, self._archive = path, files, archive
        records = (*RECORDS, *also)
        self._prefixes, self._records = tuple(each for each in records if each.endswith(".")), frozenset(records)
        self._tensor = Name("torch._utils._rebuild_tensor_v2", self._plain_tensor)
        self._typed_tensor = Name("torch._utils._rebuild_tensor_v3", self._tensor_of_type)
        self._parameter = Name("torch._utils._rebuild_parameter", _first)
        self._known = {
            **_KNOWN, **dict.fromkeys(("torch._utils._rebuild_tensor", self._tensor.name), self._tensor),
            self._typed_tensor.name: self._typed_tensor,
            **dict.fromkeys((self._parameter.name, f"{self._parameter.name}_with_state"), self._parameter),
            "torch._tensor._rebuild_from_type_v2": Name("torch._tensor._rebuild_from_type_v2", self._of_type),
        }  # fmt: skip

    def find(self, module: str, name: str) -> Any:
        full = f"{_RENAMED.get(module, module)}.{name}"
        if module == "torch" and name in _STORAGES:
            return _StorageType(full, _STORAGES[name])
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        known = self._known.get(full)
        if known is not None:
            return known
        if full.startswith(self._prefixes) or full in self._records:
            return Name(full)
        raise UnsafePickleError(
            f"names {full[:200]}, which is not on the list of what is read; nothing of the file was run. If "
            f"you trust who wrote it, --take {full[:200]} reads what was stored of it, still without running it"
        )

    def persistent(self, pid: Any) -> Storage:
        """``("storage", type, key, device, elements)``."""
        if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage" or type(pid[1]) is not _StorageType:
            raise FormatError(f"refers to {reprlib.repr(pid)[:80]}, which is no storage")
        if self._archive is None:
            raise FormatError("holds tensors, but no storages are there")
        _, kind, key, _, count = pid
        if type(key) is not str or type(count) is not int or count < 0:
            raise FormatError(f"refers to {reprlib.repr(key)[:80]}, which is no storage")
        found = self._archive.storage(key)
        if count * (itemsize_bytes(kind.dtype) if kind.dtype else 1) > found.size_bytes:
            raise FormatError(f"storage {key[:80]} has {found.size_bytes:,} bytes, not {count:,} elements")
        return Storage(found, kind.dtype)

    def _plain_tensor(self, storage: Any, offset: Any, shape: Any, strides: Any, *_more: Any) -> Located:
        return self._located(storage, offset, shape, strides, None)

    def _tensor_of_type(
        self, storage: Any, offset: Any, shape: Any, strides: Any, _grad: Any, _hooks: Any, dtype: Any, *_more: Any
    ) -> Located:
        if not isinstance(dtype, torch.dtype):
            raise FormatError(f"has a tensor of type {reprlib.repr(dtype)[:80]}")
        return self._located(storage, offset, shape, strides, name_of(dtype))

    def _of_type(self, make: Any, _kind: Any, arguments: Any, _state: Any) -> Any:
        """A tensor of a class, or with attributes: just the tensor."""
        if make not in (self._tensor, self._typed_tensor, self._parameter):
            raise UnsafePickleError(f"wants a tensor made by {make!r:.80}")
        return make.call(arguments)

    def _located(self, storage: Any, offset: Any, shape: Any, strides: Any, dtype: str | None) -> Located:
        if type(storage) is not Storage:
            raise FormatError(f"has a tensor in a {type(storage).__name__}, which is no storage")
        shape, strides = _counts(shape), _counts(strides)
        _counts((offset,))
        if len(shape) != len(strides):
            raise FormatError(f"has a tensor of shape {shape} with strides {strides}")
        dtype = dtype or storage.dtype or "U8"
        item = itemsize_bytes(dtype)
        span = 0 if 0 in shape else 1 + sum((extent - 1) * step for extent, step in zip(shape, strides, strict=True))
        if (offset + span) * item > storage.extent.size_bytes:
            raise FormatError(
                f"has a tensor of shape {shape} that ends beyond its storage of {storage.extent.size_bytes:,} bytes"
            )
        found = Located(self._files, self.path, storage.extent.begin_byte + offset * item, dtype, shape, strides)
        size = found.numel * item
        if size > max(span * item, MAX_EXPANDED_BYTES):
            raise FormatError(
                f"has a tensor of shape {shape} with strides {strides}: {size:,} bytes, of which {span * item:,} are in the "
                f"file. Expanded tensors are read up to {MAX_EXPANDED_BYTES:,} bytes; call contiguous() on it and save it again"
            )
        return found


def _counts(values: Any) -> tuple[int, ...]:
    """Extents or strides. Raises FormatError for anything else."""
    if type(values) not in (tuple, list) or len(values) > 64 or any(type(n) is not int or not 0 <= n < 1 << 62 for n in values):
        raise FormatError(f"has a tensor of shape, strides or offset {reprlib.repr(values)[:80]}")
    return tuple(values)


# ---------------------------------------------------------------- constructors: pure functions of checked arguments


def _first(data: Any, *_more: Any) -> Any:
    return data


def _of(*kinds: type) -> Any:
    """The one argument of a call, if it is of one of these types."""

    def check(value: Any) -> Any:
        if type(value) not in kinds:
            raise FormatError(f"makes a {kinds[0].__name__} of a {type(value).__name__}")
        return value

    return check


def _items(values: Any = ()) -> list[Any]:
    listed: list[Any] = list(_of(list, tuple, set, frozenset, deque)(values))
    return listed


def _mapping(values: Any = ()) -> Mapping[Any, Any]:
    if type(values) in (dict, OrderedDict):
        return dict(values)
    pairs = _items(values)
    keyed((_of(tuple, list)(pair)[0] for pair in pairs), set)
    return dict(pairs)


def _no_factory(*factory: Any) -> dict[Any, Any]:
    """A ``defaultdict``, as a plain dictionary."""
    _of(Name, type(None))(factory[0] if factory else None)
    return _mapping(*factory[1:]) if len(factory) > 1 else {}  # type: ignore[return-value]


def _deque(values: Any = (), _limit: Any = None) -> deque[Any]:
    return deque(_items(values))


def _latin1(text: Any, encoding: Any = "latin1") -> bytes:
    if type(text) is not str or encoding not in ("latin1", "latin-1", "ascii", "utf-8"):
        raise FormatError(f"encodes a {type(text).__name__} as {reprlib.repr(encoding)[:40]}")
    return text.encode(encoding)


def _bytes(data: Any = b"") -> bytes:
    """Protocol 2 writes empty bytes as a call."""
    return bytes(_of(bytes, bytearray)(data))


def _bytearray(data: Any = b"", encoding: Any = "latin1") -> bytearray:
    return bytearray(_latin1(data, encoding) if type(data) is str else _of(bytes, bytearray)(data))


def _timedelta(*numbers: Any) -> timedelta:
    return timedelta(*(_of(int)(number) for number in numbers))


def _complex(*parts: Any) -> complex:
    return complex(*(_of(float, int)(part) for part in parts))


def _set(values: Any = ()) -> set[Any]:
    found: set[Any] = keyed(_items(values), set)
    return found


def _frozenset(values: Any = ()) -> frozenset[Any]:
    found: frozenset[Any] = keyed(_items(values), frozenset)
    return found


def _list(values: Any = ()) -> list[Any]:
    return _items(values)


def _tuple(values: Any = ()) -> tuple[Any, ...]:
    return tuple(_items(values))


def _ordered(values: Any = ()) -> OrderedDict[Any, Any]:
    return OrderedDict(_mapping(values))


_MAKERS = {
    "collections.OrderedDict": _ordered, "collections.defaultdict": _no_factory, "collections.deque": _deque,
    "builtins.set": _set, "builtins.frozenset": _frozenset, "builtins.list": _list, "builtins.tuple": _tuple,
    "builtins.dict": _mapping, "builtins.int": _of(int, bool), "builtins.float": _of(float, int), "builtins.bool": _of(bool),
    "builtins.str": _of(str), "builtins.complex": _complex, "builtins.bytearray": _bytearray,
    "builtins.bytes": _bytes, "datetime.timedelta": _timedelta, "_codecs.encode": _latin1, "torch.Size": _tuple,
    "torch.serialization._get_layout": _of(str),
}  # fmt: skip
_ARRAYS = ("numpy.core.multiarray", "numpy._core.multiarray")


def _records(full: Iterable[str], kind: str = "") -> dict[str, Name]:
    return {each: Name(kind or each) for each in full}


_KNOWN: Mapping[str, Name] = {
    **{full: Name(full, make) for full, make in _MAKERS.items()},
    "torch.storage.UntypedStorage": _StorageType("torch.storage.UntypedStorage", None),
    "torch.UntypedStorage": _StorageType("torch.UntypedStorage", None),
    **_records(("_io.BytesIO", "torch.device", "torch.Tensor", "numpy.dtype", "numpy.ndarray")),
    **_records(("torch.nn.parameter.Parameter",), "torch.Parameter"),
    **_records((f"{module}._reconstruct" for module in _ARRAYS), "numpy.array"),
    **_records((f"{module}.scalar" for module in _ARRAYS), "numpy.scalar"),
}
