"""What ``torch.save`` has written, read without running anything of it.

A restricted unpickler in the manner of the standard library's documentation ("Restricting Globals"): a pickle may name what
is on the list below and nothing else, and of that only what makes plain containers is called. Tensors are not read, but
told where they lie (``Located``), so that a file of any size costs what its small part costs. Classes of frameworks become
``Record``s: what was stored of them, without their code.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch

from unickpt.dtypes import itemsize_bytes, name_of, names, torch_dtype
from unickpt.errors import FormatError
from unickpt.foreign.located import Files, Located

# Of these, whatever they are, only what was stored of them is taken; their modules are not imported.
RECORDS = (
    "deepspeed.", "megatron.", "transformer_engine.", "argparse.Namespace", "torch.distributed.", "pathlib.", "signal.Signals",
)  # fmt: skip
MAX_PICKLE_BYTES = 1 << 30
_LOCAL_HEADER_BYTES = 30


class UnsafePickleError(FormatError):
    """A pickle names something that is not on the list of what may be read."""


class Record:
    """What was stored of an object of some class; nothing of the class itself.

    Attributes:
        kind: the class, with its module.
        arguments: it was made from.
        state: its attributes.
        items, entries: what it held as a list or as a mapping.
    """

    kind = ""

    def __new__(cls, *arguments: Any, **_named: Any) -> Record:
        made = super().__new__(cls)
        made.arguments = arguments
        made.state = {}
        made.items = []
        made.entries = {}
        return made

    arguments: tuple[Any, ...]
    state: dict[str, Any]
    items: list[Any]
    entries: dict[Any, Any]

    def __init__(self, *_arguments: Any, **_named: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) == 2 and all(isinstance(each, (dict, type(None))) for each in state):
            state = {**(state[0] or {}), **(state[1] or {})}  # of classes with slots
        self.state = state if isinstance(state, dict) else {"": state}

    def append(self, value: Any) -> None:
        """For the pickle of a list."""
        self.items.append(value)

    def extend(self, values: Any) -> None:
        """For the pickle of a list."""
        self.items.extend(values)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.entries[key] = value

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, Record) and self.kind == other.kind and self.arguments == other.arguments
        return same and isinstance(other, Record) and self.state == other.state

    def __hash__(self) -> int:
        """Of what it is when it becomes a key: what a million keys of one class have to differ in."""
        try:
            return hash((self.kind, self.arguments, frozenset(self.state.items())))
        except TypeError:
            return hash(self.kind)

    def __repr__(self) -> str:
        return f"<{self.kind} {self.arguments or self.state or self.entries or self.items}>"


@dataclass(frozen=True, slots=True)
class _Storage:
    """Where a storage lies: file, first byte, bytes."""

    path: Path
    begin_byte: int
    size_bytes: int
    dtype: str | None  # None: of bytes, whose tensors bring their own


@dataclass(frozen=True, slots=True)
class _StorageType:
    dtype: str | None


_STORAGES = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16", "LongStorage": "I64",
    "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8", "BoolStorage": "BOOL",
    "ComplexFloatStorage": "C64",
}  # fmt: skip
_PLAIN = (set, frozenset, list, tuple, dict, int, float, bool, str, complex)
_RENAMED = {"__builtin__": "builtins"}  # as protocol 2, which torch.save uses, names it
_DTYPES = {str(torch_dtype(name)).removeprefix("torch."): torch_dtype(name) for name in names()}


def load(path: Path, files: Files, *, also: Sequence[str] = ()) -> Any:
    """The object in a file of ``torch.save``; its tensors are ``Located``.

    Args:
        path: of the file.
        files: through which tensors are read later.
        also: names (``module.Class``, or ``module.`` for all of it) of more classes that may be taken as records.

    Raises:
        UnsafePickleError: the pickle names something that may not be read.
        FormatError: not such a file, or damaged.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return load_archive(file, path, 0, path.stat().st_size, files, also=also)


def load_archive(file: IO[bytes], path: Path, begin: int, size: int, files: Files, *, also: Sequence[str] = ()) -> Any:
    """As ``load``, of an archive that is ``size`` bytes of a file from ``begin`` on."""
    archive = _Archive(_Window(file, begin, size), path, begin)
    return _load(archive.pickle(), _Unpickling(path, files, also, archive))


def load_plain(data: bytes, path: Path, files: Files, *, also: Sequence[str] = ()) -> Any:
    """The object in a plain pickle, without tensors. Raises as ``load``."""
    return _load(data, _Unpickling(path, files, also, None))


def _load(data: bytes, rules: _Unpickling) -> Any:
    try:
        return _Unpickler(io.BytesIO(data), rules).load()
    except (FormatError, OSError):
        raise
    except Exception as err:  # damaged pickles raise whatever their bytes lead to
        raise FormatError(f"{rules.path}: its pickle cannot be read ({type(err).__name__}: {err})") from None


class _Window(io.RawIOBase):
    """Part of a file, as a file."""

    def __init__(self, file: IO[bytes], begin: int, size: int) -> None:
        self._file, self._begin, self._size, self._at = file, begin, size, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max({io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence] + offset, 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(self._size - self._at, 0)
        self._file.seek(self._begin + self._at)
        data = self._file.read(left if size < 0 else min(size, left))
        self._at += len(data)
        return data


class _Archive:
    """The zip file that ``torch.save`` writes: a pickle, and every storage uncompressed beside it."""

    def __init__(self, window: _Window, path: Path, begin: int) -> None:
        self._window, self._path, self._begin = window, path, begin
        try:
            self._zip = zipfile.ZipFile(window)
        except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError) as err:
            raise FormatError(
                f"{path}: not a file that torch.save writes since torch 1.6 ({err}); an older one has to be saved anew"
            ) from None
        self._entries = {info.filename: info for info in self._zip.infolist()}
        pickles = [name for name in self._entries if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1:
            raise FormatError(f"{path}: holds {len(pickles)} pickles where torch.save writes one")
        self._folder = pickles[0].removesuffix("data.pkl")
        if self._small("byteorder", b"little") != b"little":
            raise FormatError(f"{path}: written on a machine of the other byte order")

    def pickle(self) -> bytes:
        info = self._entries[f"{self._folder}data.pkl"]
        if info.file_size > MAX_PICKLE_BYTES:
            raise FormatError(f"{self._path}: its pickle has {info.file_size:,} bytes")
        return self._read(info)

    def _small(self, name: str, default: bytes) -> bytes:
        info = self._entries.get(f"{self._folder}{name}")
        return default if info is None or info.file_size > 64 else self._read(info)

    def _read(self, info: zipfile.ZipInfo) -> bytes:
        try:
            return self._zip.read(info)
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError) as err:
            raise FormatError(f"{self._path}: {info.filename} cannot be read ({err})") from None

    def storage(self, key: str, dtype: str | None) -> _Storage:
        """Where the storage of a key lies."""
        info = self._entries.get(f"{self._folder}data/{key}")
        if info is None:
            raise FormatError(f"{self._path}: storage {key} is not there")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise FormatError(f"{self._path}: storage {key} is compressed or encrypted")
        self._window.seek(info.header_offset)
        head = self._window.read(_LOCAL_HEADER_BYTES)
        if len(head) != _LOCAL_HEADER_BYTES or head[:4] != b"PK\x03\x04":
            raise FormatError(f"{self._path}: storage {key} is not where the file's directory says")
        names_bytes = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
        begin = info.header_offset + _LOCAL_HEADER_BYTES + names_bytes
        if begin + info.file_size > self._window.seek(0, io.SEEK_END):
            raise FormatError(f"{self._path}: ends within storage {key}")
        return _Storage(self._path, self._begin + begin, info.file_size, dtype)


class _Unpickling:
    """What a pickle of one file may name, and what that is here."""

    def __init__(self, path: Path, files: Files, also: Sequence[str], archive: _Archive | None) -> None:
        self.path, self._files, self._archive = path, files, archive
        self._records = (*RECORDS, *also)

    def find(self, module: str, name: str) -> Any:
        full = f"{_RENAMED.get(module, module)}.{name}"
        if module == "torch" and name in _STORAGES:
            return _StorageType(_STORAGES[name])
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        known = self._known().get(full)
        if known is not None:
            return known
        if full.startswith(tuple(each for each in self._records if each.endswith("."))) or full in self._records:
            return _maker(full)
        raise UnsafePickleError(
            f"{self.path}: its pickle names {full}, which is not on the list of what is read; nothing of the file was run. If "
            f"you trust who wrote it, --take {full} reads what was stored of it, still without running it"
        )

    def _known(self) -> dict[str, Any]:
        return {
            "collections.OrderedDict": OrderedDict, "collections.defaultdict": _plain_dict, "collections.deque": deque,
            **{f"builtins.{kind.__name__}": kind for kind in _PLAIN}, "builtins.bytearray": _bytes,
            "datetime.timedelta": timedelta, "_codecs.encode": _encoded,
            "_io.BytesIO": _maker("_io.BytesIO"), "torch.Size": tuple, "torch.device": _maker("torch.device"),
            "torch.storage.UntypedStorage": _StorageType(None), "torch.UntypedStorage": _StorageType(None),
            "torch._utils._rebuild_tensor": self._tensor, "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch._utils._rebuild_tensor_v3": self._typed_tensor,
            "torch._utils._rebuild_parameter": _parameter, "torch._utils._rebuild_parameter_with_state": _parameter,
            "torch.serialization._get_layout": str,
            "torch._tensor._rebuild_from_type_v2": self._of_type, "torch.nn.parameter.Parameter": _maker("torch.Parameter"),
            **{full: _maker(full) for full in ("torch.Tensor", "numpy.dtype", "numpy.ndarray")},
            **{f"{module}.multiarray._reconstruct": _maker("numpy.array") for module in ("numpy.core", "numpy._core")},
            **{f"{module}.multiarray.scalar": _maker("numpy.scalar") for module in ("numpy.core", "numpy._core")},
        }  # fmt: skip

    def persistent(self, pid: Any) -> _Storage:
        """``("storage", type, key, device, elements)``."""
        if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage" or not isinstance(pid[1], _StorageType):
            raise FormatError(f"{self.path}: its pickle refers to {str(pid)[:80]}, which is no storage")
        if self._archive is None:
            raise FormatError(f"{self.path}: its pickle holds tensors, but no storages are there")
        found = self._archive.storage(str(pid[2]), pid[1].dtype)
        item = itemsize_bytes(pid[1].dtype) if pid[1].dtype else 1
        if type(pid[4]) is not int or pid[4] * item > found.size_bytes:
            raise FormatError(f"{self.path}: storage {pid[2]} has {found.size_bytes:,} bytes, not {pid[4]!r} elements")
        return found

    def _tensor(self, storage: _Storage, offset: int, shape: Sequence[int], strides: Sequence[int], *_more: Any) -> Located:
        return self._located(storage, offset, shape, strides, storage.dtype or "U8")

    def _typed_tensor(
        self, storage: _Storage, offset: int, shape: Sequence[int], strides: Sequence[int], _grad: Any, _hooks: Any,
        dtype: torch.dtype, *_more: Any,
    ) -> Located:  # fmt: skip
        return self._located(storage, offset, shape, strides, name_of(dtype))

    def _of_type(self, make: Any, _kind: Any, arguments: tuple[Any, ...], _state: Any) -> Located:
        """A tensor of a class, or with attributes: just the tensor."""
        if make not in (self._tensor, self._typed_tensor, _parameter):
            raise UnsafePickleError(f"{self.path}: its pickle wants a tensor made by {make!r}")
        found: Located = make(*arguments)
        return found

    def _located(self, storage: _Storage, offset: int, shape: Sequence[int], strides: Sequence[int], dtype: str) -> Located:
        numbers = (offset, *shape, *strides)
        if any(type(n) is not int or not 0 <= n < 1 << 62 for n in numbers) or len(shape) != len(strides):
            raise FormatError(f"{self.path}: a tensor of shape {tuple(shape)} with strides {tuple(strides)} at {offset}")
        last = offset + sum((extent - 1) * step for extent, step in zip(shape, strides, strict=True))
        item = itemsize_bytes(dtype)
        if 0 not in shape and (last + 1) * item > storage.size_bytes:
            raise FormatError(f"{self.path}: a tensor of shape {tuple(shape)} ends beyond its storage")
        return Located(self._files, storage.path, storage.begin_byte + offset * item, dtype, tuple(shape), tuple(strides))


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], rules: _Unpickling) -> None:
        super().__init__(file)
        self._rules = rules

    def find_class(self, module: str, name: str) -> Any:
        return self._rules.find(module, name)

    def persistent_load(self, pid: Any) -> Any:
        return self._rules.persistent(pid)


def _maker(kind: str) -> type[Record]:
    """What stands in a pickle for a class: it makes records."""
    return type(kind, (Record,), {"kind": kind})


def _plain_dict(*_factory: Any) -> defaultdict[Any, Any]:
    return defaultdict(None)


def _encoded(text: str, _encoding: str = "latin1") -> bytes:
    return text.encode("latin1")


def _bytes(data: Any = b"", *_more: Any) -> bytearray:
    return bytearray(_encoded(data) if isinstance(data, str) else bytes(data) if isinstance(data, bytes) else b"")


def _parameter(data: Any, *_more: Any) -> Any:
    return data
