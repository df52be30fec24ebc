"""The manifest: the commit record. A checkpoint without a valid manifest does not exist.

It is readable JSON: the writer, every file with its size and checksum, the hyperparameters of the optimizer by
parameter name, and the non-tensor state of the job. It contains its own checksum, which detects any flipped bit.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from unickpt.base.errors import FormatError, NewerFormatError, UnsafePathError
from unickpt.checkpoint.format.checksums import PREFIX, digest
from unickpt.checkpoint.format.dtype_names import itemsize_bytes
from unickpt.checkpoint.format.file_names import MANIFEST_FILE as MANIFEST_FILE
from unickpt.checkpoint.format.json_text import parse_json
from unickpt.checkpoint.format.safetensors_header import MAX_HEADER_BYTES
from unickpt.checkpoint.format.witnessed import Passed, passed_of

FORMAT_NAME = "unickpt"
FORMAT_VERSION, OLDEST_VERSION = 3, 2  # written; the oldest that is read
MAX_MANIFEST_BYTES = 256 << 20  # the manifest of 100,000 ranks has 30 MB
COUNT_END = 2**62  # counts, such as the step, are below

JSONValue = Any  # a value encoded by ``unickpt.checkpoint.format.objects``


@dataclass(frozen=True, slots=True)
class Writer:
    """The software and the job that wrote the checkpoint.

    Attributes:
        framework: ``deepspeed``, ``megatron``, ...
        framework_version, unickpt_version, torch_version: versions as the packages report them.
        dialect: dialect of the parameter names and layouts, e.g. ``huggingface``.
        topology: parallel degrees and modes, e.g. ``{"world_size": 4, "zero_stage": 2}``.
        model: facts about the model beyond its tensors, see ``unickpt.transform.dialects.model_facts``; may be empty.
        origin: which model the state is of, see ``unickpt.checkpoint.coordination.owners``; may be empty.
    """

    framework: str
    framework_version: str
    unickpt_version: str
    torch_version: str
    dialect: str
    topology: dict[str, JSONValue]
    model: dict[str, JSONValue] = field(default_factory=dict)
    origin: dict[str, JSONValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of the checkpoint.

    Attributes:
        path: relative to the checkpoint directory, ``/`` separated.
        size_bytes: exact size.
        checksum: xxh3_128 of the whole file.
        header_bytes, header_checksum: length and xxh3_128 of the safetensors prefix and header. A partial
            read checks the header without reading the rest.
        table_bytes: size of the table of block checksums at the end of the file; 0 for none.
    """

    path: str
    size_bytes: int
    checksum: str
    header_bytes: int
    header_checksum: str
    table_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Hyperparameters and the parameters that they apply to.

    Attributes:
        hyperparameters: encoded objects by the optimizer's own keys.
        parameters: names of the parameters.
        tensors: dtype, shape and device type of every hyperparameter that is a one-element tensor, by key. The
            others are plain values. None if the writer did not record it.
        repeated: keys of the parameter group that also appear among the scalars of its parameters.
        left_out: keys of values that cannot be stored.
    """

    hyperparameters: dict[str, JSONValue]
    parameters: tuple[str, ...]
    tensors: dict[str, tuple[str, tuple[int, ...], str]] | None = None
    repeated: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    def identity(self) -> str:
        """Return a text that is equal for groups with the same values of the same types."""
        return json.dumps([self.hyperparameters, self.tensors, self.repeated, self.left_out], sort_keys=True)


@dataclass(frozen=True, slots=True)
class OptimizerRecord:
    """The state of the optimizer without its tensors.

    Attributes:
        name: class name of the innermost optimizer, the one that computes the step.
        groups: parameter groups. Every optimized parameter is in exactly one.
        scalars: scalar state of parameters (such as ``step``), grouped by equal values.
        stepped: False: it had no state yet, because it had not stepped. True: it had. None: the writer did not record it, or
            an optimizer of this kind never has any.
    """

    name: str
    groups: tuple[ParameterGroup, ...]
    scalars: tuple[ParameterGroup, ...]
    stepped: bool | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint's commit record.

    Attributes:
        step: step count of the framework.
        created: UTC time, ISO 8601.
        writer: the software and the job that wrote the checkpoint.
        files: all files except the manifest.
        index: path of the index file, which is also in ``files``.
        optimizer: state of the optimizer without its tensors, or None.
        aliases: further names of tied parameters, mapped to the stored name.
        excluded: names of parameters that the caller excluded.
        objects: non-tensor state of the whole job, encoded by ``unickpt.checkpoint.format.objects``.
        generation: 0 for the first save under a tag, incremented by every later save under the same tag.
        version: format version of the file.
        notes: remarks of the writer for the reader, one sentence each.
        witness: what the job had passed at the save; None without a witness.
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
    witness: Passed | None = None

    def file(self, path: str) -> FileRecord:
        """Return the record of one file. Raises FormatError if the manifest does not list it."""
        for record in self.files:
            if record.path == path:
                return record
        raise FormatError(f"the manifest does not list the file {path!r}")


def to_bytes(manifest: Manifest) -> bytes:
    """Serialise a manifest. The checksum of all other members is the last member.

    Raises:
        FormatError: the manifest is nested too deeply or larger than ``MAX_MANIFEST_BYTES``.
    """
    try:
        body: dict[str, Any] = {"format": FORMAT_NAME, **asdict(manifest), "version": FORMAT_VERSION}
        del body["witness"]
        if manifest.witness is not None:
            body["witness"] = manifest.witness.as_json()
        body["checksum"] = digest(_canonical(body))
        text = json.dumps(body, indent=1, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise FormatError("the objects of the manifest are nested too deeply") from None
    data = text.encode("utf-8", "backslashreplace")  # a lone surrogate (from a file name that is not UTF-8) as a JSON escape
    if len(data) > MAX_MANIFEST_BYTES:
        raise FormatError(
            f"the manifest has {len(data):,} bytes, the limit is {MAX_MANIFEST_BYTES:,}; store large state as tensors or "
            "numpy arrays, which are not part of the manifest, instead of lists of numbers"
        )
    return data


def _canonical(body: Mapping[str, Any]) -> bytes:
    rest = {key: value for key, value in body.items() if key != "checksum"}
    return json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def from_bytes(data: bytes, *, where: str) -> Manifest:
    """Parse and validate a manifest.

    Args:
        data: bytes of the manifest file.
        where: name of the file in messages.

    Raises:
        NewerFormatError: the format version is newer than this release.
        UnsafePathError: a file path is absolute or leaves the checkpoint directory.
        FormatError: the file is too large or not JSON, a member is missing or has a wrong type, or the
            checksum does not match.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise FormatError(f"{where}: {len(data):,} bytes are too many for a manifest; the limit is {MAX_MANIFEST_BYTES:,}")
    body = parse_json(data, where=where)
    if not isinstance(body, dict) or body.get("format") != FORMAT_NAME:
        raise FormatError(f"{where}: not a unickpt manifest")
    version = body.get("version")
    if type(version) is not int or version < OLDEST_VERSION:
        raise FormatError(f"{where}: format version {version!r}, expected {OLDEST_VERSION} to {FORMAT_VERSION}")
    if version > FORMAT_VERSION:
        if _is_altered_version(body):
            raise FormatError(f"{where}: format version {version} does not match the checksum; the file is damaged")
        raise NewerFormatError(
            f"{where}: format version {version}, this release reads up to {FORMAT_VERSION}; upgrade unickpt to load it"
        )
    try:
        expected = digest(_canonical(body))
    except (ValueError, RecursionError) as err:  # a number that overflowed to infinity; very deep nesting
        raise FormatError(f"{where}: {err}") from None
    if body.get("checksum") != expected:
        raise FormatError(f"{where}: the checksum does not match the content; the file is damaged")
    return _ManifestParser(where).manifest(body)


def _is_altered_version(body: Mapping[str, Any]) -> bool:
    """Return whether the checksum of a manifest of a newer version matches a known version: the number is damaged."""
    known = range(OLDEST_VERSION, FORMAT_VERSION + 1)
    try:
        return body.get("checksum") in [digest(_canonical({**body, "version": version})) for version in known]
    except (ValueError, RecursionError):
        return False


def optimizer_from_json(body: Any, *, where: str = "optimizer") -> OptimizerRecord:
    """Return the ``OptimizerRecord`` of a JSON value made by ``asdict``. Raises FormatError."""
    return _ManifestParser(where).optimizer(body)


def merge_optimizers(first: OptimizerRecord | None, others: Sequence[OptimizerRecord]) -> OptimizerRecord | None:
    """Merge the optimizer records of several ranks.

    Groups with equal hyperparameters become one. A parameter that appears several times stays in its first group.
    """
    records = [record for record in (first, *others) if record is not None]
    if not records:
        return None
    return OptimizerRecord(
        name=records[0].name,
        groups=merge_groups([group for record in records for group in record.groups]),
        scalars=merge_groups([group for record in records for group in record.scalars]),
        stepped=next((value for value in (True, False) if any(record.stepped is value for record in records)), None),
    )


def merge_groups(groups: Iterable[ParameterGroup]) -> tuple[ParameterGroup, ...]:
    """Return groups in which those with equal values are one. A parameter stays in the first group that has it."""
    merged: dict[str, tuple[ParameterGroup, list[str]]] = {}
    seen: set[str] = set()
    for group in groups:
        names = merged.setdefault(group.identity(), (group, []))[1]
        names += [name for name in group.parameters if name not in seen]
        seen.update(group.parameters)
    return tuple(replace(group, parameters=tuple(names)) for group, names in merged.values())


def check_path(path: str, *, where: str) -> str:
    """Return ``path`` if it is a relative path that stays inside its directory; raise UnsafePathError otherwise."""
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


class _ManifestParser:
    """Typed access to untrusted JSON. Every error names the file and the member."""

    def __init__(self, where: str) -> None:
        self._where = where

    def _get(self, body: Any, key: str, kind: type | tuple[type, ...]) -> Any:
        value = body.get(key) if isinstance(body, dict) else None
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            raise FormatError(f"{self._where}: member {key!r} is {type(value).__name__}, expected {kind}")
        return value

    def _count(self, body: Any, key: str) -> int:
        value: int = self._get(body, key, int)
        if not 0 <= value < COUNT_END:
            raise FormatError(f"{self._where}: member {key!r} is {value}, expected 0 to 2**62 - 1")
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
            raise FormatError(f"{self._where}: a file is listed twice")
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
            witness=passed_of(body.get("witness"), where=self._where),
        )

    def _writer(self, body: dict[str, Any]) -> Writer:
        text = {key: self._get(body, key, str) for key in Writer.__slots__ if key not in ("topology", "model", "origin")}
        model, origin = (self._get(body, key, dict) if key in body else {} for key in ("model", "origin"))
        return Writer(**text, topology=self._get(body, "topology", dict), model=model, origin=origin)

    def _file(self, body: Any) -> FileRecord:
        record = FileRecord(
            path=check_path(self._get(body, "path", str), where=self._where),
            size_bytes=self._count(body, "size_bytes"),
            checksum=self._get(body, "checksum", str),
            header_bytes=self._count(body, "header_bytes"),
            header_checksum=self._get(body, "header_checksum", str),
            table_bytes=self._count(body, "table_bytes") if "table_bytes" in body else 0,
        )
        if not record.checksum.startswith(PREFIX) or not record.header_checksum.startswith(PREFIX):
            raise FormatError(f"{self._where}: {record.path}: unknown checksum {record.checksum!r}")
        if record.header_bytes > min(record.size_bytes, MAX_HEADER_BYTES + 8):
            raise FormatError(
                f"{self._where}: {record.path}: the header has {record.header_bytes} bytes, the file {record.size_bytes}"
            )
        if record.table_bytes > record.size_bytes - record.header_bytes:
            raise FormatError(
                f"{self._where}: {record.path}: the table has {record.table_bytes} bytes, the file {record.size_bytes}"
            )
        return record

    def _groups(self, body: Any, key: str) -> tuple[ParameterGroup, ...]:
        return tuple(self._group(entry) for entry in self._get(body, key, list))

    def _group(self, entry: Any) -> ParameterGroup:
        hyperparameters, parameters = self._get(entry, "hyperparameters", dict), self._strings(entry, "parameters")
        repeated, left_out = (self._strings(entry, key) if key in entry else () for key in ("repeated", "left_out"))
        tensors = entry.get("tensors")
        if tensors is not None:
            tensors = {name: self._scalar(value) for name, value in self._get(entry, "tensors", dict).items()}
        return ParameterGroup(hyperparameters, parameters, tensors, repeated, left_out)

    def _scalar(self, value: Any) -> tuple[str, tuple[int, ...], str]:
        """Return dtype, shape and device type of a one-element tensor."""
        known = isinstance(value, list) and len(value) == 3 and isinstance(value[1], list) and len(value[1]) <= 32
        if not known or any(type(extent) is not int or extent != 1 for extent in value[1]):
            raise FormatError(f"{self._where}: {str(value)[:80]} does not describe a tensor of one element")
        dtype, shape, device = value
        itemsize_bytes(dtype)
        if not isinstance(device, str):
            raise FormatError(f"{self._where}: {str(value)[:80]} does not describe a tensor of one element")
        return dtype, tuple(shape), device

    def optimizer(self, body: Any) -> OptimizerRecord:
        name, stepped = self._get(body, "name", str), body.get("stepped")
        if stepped is not None and type(stepped) is not bool:
            raise FormatError(f"{self._where}: member 'stepped' is {type(stepped).__name__}, expected a boolean or null")
        return OptimizerRecord(name, self._groups(body, "groups"), self._groups(body, "scalars"), stepped)
