"""Reader for files of ``torch.save`` that runs no code of the file.

``pickle_opcodes`` interprets the stream. This module has the list of allowed names and the value of each. Tensors are not
read: a ``Located`` has the position of each, so the cost depends on the size of the pickle, not of the file. Objects of
framework classes become ``Record`` objects with the stored values.

Every value of a stream is a plain container or leaf, a ``Record``, a ``Name``, a ``StorageHandle`` or a ``Located``. A stream
cannot modify the last three.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from unickpt.base.errors import FormatError
from unickpt.checkpoint.format.dtype_names import itemsize_bytes
from unickpt.checkpoint.format.dtypes import name_of, torch_dtypes
from unickpt.checkpoint.format.tensor_table import collector_paused
from unickpt.transform.convert.pickles.lazy_tensor import Located, OpenFiles
from unickpt.transform.convert.pickles.nesting_limits import check_unfolding
from unickpt.transform.convert.pickles.pickle_callables import KNOWN, StorageType, first
from unickpt.transform.convert.pickles.pickle_opcodes import interpret
from unickpt.transform.convert.pickles.pickle_records import Name, Record, UnsafePickleError
from unickpt.transform.convert.pickles.torch_archive import MAX_PICKLE_BYTES, Archive, Extent

__all__ = ["MAX_PICKLE_BYTES", "Name", "Record", "StorageHandle", "UnsafePickleError", "load", "load_archive", "load_plain"]

# Objects of these classes become records; the modules are not imported.
RECORDS = (
    "deepspeed.",
    "megatron.",
    "transformer_engine.",
    "argparse.Namespace",
    "torch.distributed.",
    "pathlib.",
    "signal.Signals",
)
# A view may have more bytes than its span in the storage (an expanded tensor) up to this size.
MAX_EXPANDED_BYTES = 1 << 20
_STORAGES = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16", "LongStorage": "I64",
    "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8", "BoolStorage": "BOOL",
    "ComplexFloatStorage": "C64",
}  # fmt: skip
_RENAMED = {"__builtin__": "builtins"}  # the name in protocol 2, which torch.save uses
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in torch_dtypes().values()}


class StorageHandle(Record):
    """Position of a storage in the file.

    Attributes:
        extent: bytes of the storage.
        dtype: format name of the dtype, or None if each tensor has its own.
    """

    __slots__ = ("dtype", "extent")

    def __init__(self, extent: Extent, dtype: str | None) -> None:
        super().__init__("torch.storage")
        self.extent, self.dtype = extent, dtype


def load(path: Path, files: OpenFiles, *, also: Sequence[str] = ()) -> Any:
    """Return the object in a file of ``torch.save``. Its tensors are ``Located``.

    Args:
        path: path of the file.
        files: open files to read through, now and later.
        also: further classes that become records: ``module.Class``, or ``module.`` for all classes of a module.

    Raises:
        UnsafePickleError: the pickle names a class or function that is not allowed.
        FormatError: the file is not a torch file, damaged, or expands to far more memory or disk than its size.
        OSError: the file cannot be read.
    """
    return load_archive(path, 0, files.size_bytes(path), files, also=also)


def load_archive(path: Path, begin: int, size: int, files: OpenFiles, *, also: Sequence[str] = ()) -> Any:
    """Return the object in an archive inside a file: ``size`` bytes from ``begin`` on. Otherwise as ``load``."""
    archive = Archive(files, path, begin, size)
    return _load(archive.pickle(), _Rules(path, files, also, archive), size)


def load_plain(data: bytes, path: Path, files: OpenFiles, *, also: Sequence[str] = ()) -> Any:
    """Return the object in a plain pickle without tensors. Raises the errors of ``load``."""
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
    """Allowed names in the pickle of one file, and their values."""

    def __init__(self, path: Path, files: OpenFiles, also: Sequence[str], archive: Archive | None) -> None:
        self.path, self._files, self._archive = path, files, archive
        records = (*RECORDS, *also)
        self._prefixes, self._records = tuple(each for each in records if each.endswith(".")), frozenset(records)
        self._tensor = Name("torch._utils._rebuild_tensor_v2", self._plain_tensor)
        self._typed_tensor = Name("torch._utils._rebuild_tensor_v3", self._tensor_of_type)
        self._parameter = Name("torch._utils._rebuild_parameter", first)
        self._known = {
            **KNOWN,
            **dict.fromkeys(("torch._utils._rebuild_tensor", self._tensor.name), self._tensor),
            self._typed_tensor.name: self._typed_tensor,
            **dict.fromkeys((self._parameter.name, f"{self._parameter.name}_with_state"), self._parameter),
            "torch._tensor._rebuild_from_type_v2": Name("torch._tensor._rebuild_from_type_v2", self._of_type),
        }

    def find(self, module: str, name: str) -> Any:
        full = f"{_RENAMED.get(module, module)}.{name}"
        if module == "torch" and name in _STORAGES:
            return StorageType(full, _STORAGES[name])
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        known = self._known.get(full)
        if known is not None:
            return known
        if full.startswith(self._prefixes) or full in self._records:
            return Name(full)
        raise UnsafePickleError(
            f"names {full[:200]}, which is not on the list of allowed classes; no code of the file was run. If you trust "
            f"the file, --take {full[:200]} reads its stored values, still without running code"
        )

    def persistent(self, pid: Any) -> StorageHandle:
        """Return the storage of a persistent id ``("storage", type, key, device, number of elements)``."""
        if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage" or type(pid[1]) is not StorageType:
            raise FormatError(f"refers to {reprlib.repr(pid)[:80]}, which is not a storage")
        if self._archive is None:
            raise FormatError("has tensors, but the file has no storages")
        _, kind, key, _, count = pid
        if type(key) is not str or type(count) is not int or count < 0:
            raise FormatError(f"refers to {reprlib.repr(key)[:80]}, which is not a storage")
        found = self._archive.storage(key)
        if count * (itemsize_bytes(kind.dtype) if kind.dtype else 1) > found.size_bytes:
            raise FormatError(f"storage {key[:80]} has {found.size_bytes:,} bytes, too few for its {count:,} elements")
        return StorageHandle(found, kind.dtype)

    def _plain_tensor(self, storage: Any, offset: Any, shape: Any, strides: Any, *_more: Any) -> Located:
        return self._located(storage, offset, shape, strides, None)

    def _tensor_of_type(
        self, storage: Any, offset: Any, shape: Any, strides: Any, _grad: Any, _hooks: Any, dtype: Any, *_more: Any
    ) -> Located:
        if not isinstance(dtype, torch.dtype):
            raise FormatError(f"has a tensor of type {reprlib.repr(dtype)[:80]}")
        return self._located(storage, offset, shape, strides, name_of(dtype))

    def _of_type(self, make: Any, _kind: Any, arguments: Any, _state: Any) -> Any:
        """Return the tensor of a subclass or of a tensor with attributes."""
        if make not in (self._tensor, self._typed_tensor, self._parameter):
            raise UnsafePickleError(f"builds a tensor by {make!r:.80}, which is not allowed")
        return make.call(arguments)

    def _located(self, storage: Any, offset: Any, shape: Any, strides: Any, dtype: str | None) -> Located:
        if type(storage) is not StorageHandle:
            raise FormatError(f"has a tensor in a {type(storage).__name__}, which is not a storage")
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
                f"file. The limit for expanded tensors is {MAX_EXPANDED_BYTES:,} bytes; call contiguous() on it and save again"
            )
        return found


def _counts(values: Any) -> tuple[int, ...]:
    """Return extents or strides as a tuple. Raises FormatError for any other value."""
    if type(values) not in (tuple, list) or len(values) > 64 or any(type(n) is not int or not 0 <= n < 1 << 62 for n in values):
        raise FormatError(f"has a tensor of shape, strides or offset {reprlib.repr(values)[:80]}")
    return tuple(values)
