"""The manifest: the commit record. A checkpoint without a sound manifest does not exist.

It is small JSON that a person can read: who wrote what when, every file with its size and
checksum, the optimizer's hyperparameters by parameter name, and the job's non-tensor state.
It carries a checksum of itself, so that no flipped bit in it is ever believed.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from unickpt.checksums import PREFIX, digest
from unickpt.dtypes import torch_dtype
from unickpt.errors import FormatError, NewerFormatError, UnsafePathError
from unickpt.json_text import parse_json
from unickpt.safetensors_io import MAX_HEADER_BYTES

FORMAT_NAME = "unickpt"
FORMAT_VERSION = 2
MANIFEST_FILE = "manifest.json"
MAX_MANIFEST_BYTES = 256 << 20  # of 100,000 ranks it has 30 MB

JSONValue = Any  # what ``unickpt.objects`` encodes to


@dataclass(frozen=True, slots=True)
class Writer:
    """Who wrote the checkpoint.

    Attributes:
        framework: ``deepspeed``, ``megatron``, ...
        framework_version, unickpt_version, torch_version: versions as their packages report them.
        dialect: how parameter names and layouts are to be read, e.g. ``huggingface``.
        topology: parallel degrees and modes, e.g. ``{"world_size": 4, "zero_stage": 2}``.
        model: what is known of the model beyond its tensors, as ``unickpt.language.facts`` has it; may be empty.
    """

    framework: str
    framework_version: str
    unickpt_version: str
    torch_version: str
    dialect: str
    topology: dict[str, JSONValue]
    model: dict[str, JSONValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of the checkpoint.

    Attributes:
        path: relative to the checkpoint directory, ``/`` separated.
        size_bytes: its exact size.
        checksum: xxh3_128 of all of it.
        header_bytes, header_checksum: length and xxh3_128 of its safetensors prefix and header, so
            that a partial read can check the header without reading the rest.
    """

    path: str
    size_bytes: int
    checksum: str
    header_bytes: int
    header_checksum: str


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Hyperparameters (encoded objects, by the optimizer's own keys) and the parameters they hold for.

    Attributes:
        tensors: of hyperparameters that are tensors of one element: key -> dtype, shape, and device type.
            The others are plain values. None if the writer did not record it.
        repeated: keys that belong to the parameter group, and are repeated among the scalars of its parameters.
    """

    hyperparameters: dict[str, JSONValue]
    parameters: tuple[str, ...]
    tensors: dict[str, tuple[str, tuple[int, ...], str]] | None = None
    repeated: tuple[str, ...] = ()

    def identity(self) -> str:
        """Equal for groups that have the same values of the same types."""
        return json.dumps([self.hyperparameters, self.tensors, self.repeated], sort_keys=True)


@dataclass(frozen=True, slots=True)
class OptimizerRecord:
    """The optimizer apart from its tensors.

    Attributes:
        name: class name of the optimizer that steps.
        groups: every optimized parameter appears in exactly one.
        scalars: per-parameter scalar state (such as ``step``), grouped by equal values.
    """

    name: str
    groups: tuple[ParameterGroup, ...]
    scalars: tuple[ParameterGroup, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint's commit record.

    Attributes:
        step: the framework's own step count.
        created: UTC time, ISO 8601.
        generation: 0 for the first save under a tag; a later save under the same tag counts up.
        index: the fragment table's file; it is listed in ``files`` too.
        aliases: further names of tied parameters, to the name that is stored.
        excluded: parameters that the caller asked to leave out.
        objects: non-tensor state of the whole job, encoded by ``unickpt.objects``.
        notes: what the writer noticed and a reader should know, one sentence each.
        version: of the format that it was read in; what is written is of the newest.
    """

    step: int
    created: str
    writer: Writer
    files: tuple[FileRecord, ...]
    index: str
    optimizer: OptimizerRecord | None = None
    aliases: dict[str, str] = field(default_factory=dict)
    excluded: tuple[str, ...] = ()
    objects: dict[str, JSONValue] = field(default_factory=dict)
    generation: int = 0
    version: int = FORMAT_VERSION
    notes: tuple[str, ...] = ()

    def file(self, path: str) -> FileRecord:
        """The record of one file. Raises FormatError if the manifest does not list it."""
        for record in self.files:
            if record.path == path:
                return record
        raise FormatError(f"manifest does not list {path!r}")


def to_bytes(manifest: Manifest) -> bytes:
    """Serialise, with the checksum of everything else as the last member.

    Raises:
        FormatError: it is nested too deeply, or larger than any that is read.
    """
    try:
        body: dict[str, Any] = {"format": FORMAT_NAME, **asdict(manifest), "version": FORMAT_VERSION}
        body["checksum"] = digest(_canonical(body))
        text = json.dumps(body, indent=1, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise FormatError("the manifest is nested too deeply to be written") from None
    data = text.encode("utf-8", "backslashreplace")  # a lone surrogate (from a file name that is no UTF-8) as JSON's escape
    if len(data) > MAX_MANIFEST_BYTES:
        raise FormatError(
            f"the manifest would have {len(data):,} bytes, and {MAX_MANIFEST_BYTES:,} are read; keep large state as tensors or "
            "numpy arrays, which are stored apart, instead of lists of numbers"
        )
    return data


def _canonical(body: Mapping[str, Any]) -> bytes:
    rest = {key: value for key, value in body.items() if key != "checksum"}
    return json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def from_bytes(data: bytes, *, where: str) -> Manifest:
    """Parse and validate.

    Args:
        data: the manifest file.
        where: names the file in messages.

    Raises:
        NewerFormatError: written in a later format version.
        UnsafePathError: a file path is absolute or leaves the checkpoint directory.
        FormatError: too large, not JSON, a member missing or of another type, checksum wrong.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise FormatError(f"{where}: {len(data):,} bytes are too many for a manifest; {MAX_MANIFEST_BYTES:,} are read")
    body = parse_json(data, where=where)
    if not isinstance(body, dict) or body.get("format") != FORMAT_NAME:
        raise FormatError(f"{where}: not a unickpt manifest")
    version = body.get("version")
    if type(version) is not int or version < 1:
        raise FormatError(f"{where}: format version {version!r} is not a positive integer")
    if version > FORMAT_VERSION:
        if _is_altered_version(body):
            raise FormatError(f"{where}: format version {version} does not belong to its checksum; the file is damaged")
        raise NewerFormatError(
            f"{where}: format version {version}, this release reads up to {FORMAT_VERSION}; upgrade unickpt to load it"
        )
    try:
        expected = digest(_canonical(body))
    except (ValueError, RecursionError) as err:  # a number that became infinite; nested as deeply as can just be read
        raise FormatError(f"{where}: {err}") from None
    if body.get("checksum") != expected:
        raise FormatError(f"{where}: its checksum does not match its content; the file is damaged")
    return _Reader(where).manifest(body)


def _is_altered_version(body: Mapping[str, Any]) -> bool:
    """Whether a manifest that claims a later version is one of a known version with another number in it: damage."""
    known = ({**body, "version": version} for version in range(1, FORMAT_VERSION + 1))
    try:
        return any(digest(_canonical(other)) == body.get("checksum") for other in known)
    except (ValueError, RecursionError):
        return False


def optimizer_from_json(body: Any, *, where: str = "optimizer") -> OptimizerRecord:
    """The record that ``asdict`` and JSON made of an ``OptimizerRecord``. Raises FormatError."""
    return _Reader(where).optimizer(body)


def merge_optimizers(first: OptimizerRecord | None, others: Sequence[OptimizerRecord]) -> OptimizerRecord | None:
    """One record of what several ranks know: equal hyperparameters make one group, and a parameter stays in the first."""
    records = [record for record in (first, *others) if record is not None]
    if not records:
        return None
    return OptimizerRecord(
        name=records[0].name,
        groups=_merge_groups([group for record in records for group in record.groups]),
        scalars=_merge_groups([group for record in records for group in record.scalars]),
    )


def _merge_groups(groups: Sequence[ParameterGroup]) -> tuple[ParameterGroup, ...]:
    merged: dict[str, tuple[ParameterGroup, list[str]]] = {}
    seen: set[str] = set()
    for group in groups:
        names = merged.setdefault(group.identity(), (group, []))[1]
        names += [name for name in group.parameters if name not in seen]
        seen.update(group.parameters)
    return tuple(replace(group, parameters=tuple(names)) for group, names in merged.values())


def check_path(path: str, *, where: str) -> str:
    """A relative path that stays inside its directory, or UnsafePathError."""
    unsafe = (
        path in ("", ".")
        or any("\ud800" <= character <= "\udfff" for character in path)
        or path.startswith("/")
        or "\\" in path
        or "\0" in path
        or re.match(r"^[A-Za-z]:", path)
        or posixpath.normpath(path) != path
        or ".." in path.split("/")
    )
    if unsafe:
        raise UnsafePathError(f"{where}: file path {path!r} is not a plain path inside the checkpoint directory")
    return path


class _Reader:
    """Typed access to untrusted JSON: every accessor names the file and the member that is wrong."""

    def __init__(self, where: str) -> None:
        self._where = where

    def _get(self, body: Any, key: str, kind: type | tuple[type, ...]) -> Any:
        value = body.get(key) if isinstance(body, dict) else None
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            raise FormatError(f"{self._where}: member {key!r} is {type(value).__name__}, expected {kind}")
        return value

    def _count(self, body: Any, key: str) -> int:
        value: int = self._get(body, key, int)
        if not 0 <= value < 2**62:
            raise FormatError(f"{self._where}: member {key!r} is {value}")
        return value

    def _strings(self, body: Any, key: str) -> tuple[str, ...]:
        value = self._get(body, key, list)
        if not all(isinstance(item, str) for item in value):
            raise FormatError(f"{self._where}: member {key!r} must hold strings")
        return tuple(value)

    def manifest(self, body: dict[str, Any]) -> Manifest:
        files = tuple(self._file(entry) for entry in self._get(body, "files", list))
        paths = [record.path for record in files]
        if len(set(paths)) != len(paths):
            raise FormatError(f"{self._where}: lists a file twice")
        index = self._get(body, "index", str)
        if index not in paths:
            raise FormatError(f"{self._where}: index {index!r} is not among the files")
        aliases = self._get(body, "aliases", dict)
        if not all(isinstance(name, str) for name in aliases.values()):
            raise FormatError(f"{self._where}: aliases must map names to names")
        optimizer = body.get("optimizer")
        return Manifest(
            step=self._count(body, "step"),
            created=self._get(body, "created", str),
            writer=self._writer(self._get(body, "writer", dict)),
            files=files,
            index=index,
            optimizer=None if optimizer is None else self.optimizer(optimizer),
            aliases=aliases,
            excluded=self._strings(body, "excluded"),
            objects=self._get(body, "objects", dict),
            generation=self._count(body, "generation"),
            version=self._count(body, "version"),
            notes=self._strings(body, "notes") if "notes" in body else (),
        )

    def _writer(self, body: dict[str, Any]) -> Writer:
        text = {key: self._get(body, key, str) for key in Writer.__slots__ if key not in ("topology", "model")}
        model = self._get(body, "model", dict) if "model" in body else {}
        return Writer(**text, topology=self._get(body, "topology", dict), model=model)

    def _file(self, body: Any) -> FileRecord:
        record = FileRecord(
            path=check_path(self._get(body, "path", str), where=self._where),
            size_bytes=self._count(body, "size_bytes"),
            checksum=self._get(body, "checksum", str),
            header_bytes=self._count(body, "header_bytes"),
            header_checksum=self._get(body, "header_checksum", str),
        )
        if not record.checksum.startswith(PREFIX) or not record.header_checksum.startswith(PREFIX):
            raise FormatError(f"{self._where}: {record.path}: unknown checksum {record.checksum!r}")
        if record.header_bytes > min(record.size_bytes, MAX_HEADER_BYTES + 8):
            raise FormatError(f"{self._where}: {record.path}: header of {record.header_bytes} in {record.size_bytes} bytes")
        return record

    def _groups(self, body: Any, key: str) -> tuple[ParameterGroup, ...]:
        return tuple(self._group(entry) for entry in self._get(body, key, list))

    def _group(self, entry: Any) -> ParameterGroup:
        hyperparameters, parameters = self._get(entry, "hyperparameters", dict), self._strings(entry, "parameters")
        repeated = self._strings(entry, "repeated") if "repeated" in entry else ()
        tensors = entry.get("tensors")
        if tensors is not None:
            tensors = {name: self._scalar(value) for name, value in self._get(entry, "tensors", dict).items()}
        return ParameterGroup(hyperparameters, parameters, tensors, repeated)

    def _scalar(self, value: Any) -> tuple[str, tuple[int, ...], str]:
        """Dtype, shape and device type of a tensor of one element."""
        known = isinstance(value, list) and len(value) == 3 and isinstance(value[1], list) and len(value[1]) <= 32
        if not known or any(type(extent) is not int or extent != 1 for extent in value[1]):
            raise FormatError(f"{self._where}: {str(value)[:80]} does not describe a tensor of one element")
        dtype, shape, device = value
        torch_dtype(dtype)
        if not isinstance(device, str):
            raise FormatError(f"{self._where}: {str(value)[:80]} does not describe a tensor of one element")
        return dtype, tuple(shape), device

    def optimizer(self, body: Any) -> OptimizerRecord:
        return OptimizerRecord(
            name=self._get(body, "name", str), groups=self._groups(body, "groups"), scalars=self._groups(body, "scalars")
        )
