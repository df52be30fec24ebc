"""An untrusted checkpoint cannot run code, reach outside its directory, or exhaust memory by lying about sizes.

Every attack is signed: the manifest vouches for what was tampered with, because an attacker
can compute checksums too. Whatever is then done with the checkpoint ends well or in an
``UnickptError``, within a fixed amount of memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import handmade
from tests.faults.mutation import Attacker, limited_memory, load_everything, text_of
from tests.handmade import IndexParts, edit_manifest, join_safetensors, replace_file, split_safetensors
from tests.launch import REPO, environment
from unickpt import manifest
from unickpt.cli.main import main
from unickpt.errors import FormatError, NotACheckpointError, UnickptError, UnsafePathError
from unickpt.loading import Checkpoint
from unickpt.verification import verify

INDEX = "index.safetensors"
DATA = "data/rank00000.safetensors"

Attack = Callable[[Path], None]


def cases(names: Iterable[str]) -> list[Any]:
    """Names of attacks as pytest parameters."""
    return [pytest.param(name, id=name[:40]) for name in names]


Reasons = dict[str, list[str]]  # words of the refusal -> attacks that must be refused with them


def reason(reasons: Reasons, name: str) -> str:
    """The words with which an attack must be refused, so that no other check can hide that the right one is gone."""
    (words,) = [words for words, names in reasons.items() if name in names]
    return words


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return handmade.save_ranks(tmp_path_factory.mktemp("sound") / "global_step3", world=2)


@pytest.fixture
def victim(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "victim"))


@pytest.fixture
def old_victim(victim: Path) -> Path:
    """Of format version 1."""
    return handmade.to_version_1(victim)


def refused(directory: Path) -> list[str]:
    """Load, verify and inspect it; what each of the first two had against it. Nothing but UnickptError may come out."""
    found = []
    with limited_memory():
        try:
            load_everything(directory)
        except UnickptError as err:
            found.append(f"{type(err).__name__}: {err}")
        try:
            found += verify(directory).problems
        except UnickptError as err:
            found.append(f"{type(err).__name__}: {err}")
        for arguments in ([], ["--all", "--objects"], ["--json"], ["--tensor", "layer.weight"]):
            assert main(["inspect", str(directory), *arguments]) in (0, 1, 2)
    return found


def test_a_sound_checkpoint_passes_all_of_it(victim: Path) -> None:
    assert refused(victim) == []
    for tamper in (lambda _: None, lambda body: body.update(step=4)):  # the tampering itself does no harm
        edit_manifest(victim, tamper)
        assert refused(victim) == []
    IndexParts(victim).write()
    replace_file(victim, DATA, (victim / DATA).read_bytes())
    assert refused(victim) == []


# ---------------------------------------------------------------- the manifest

UNSAFE_PATHS = [
    "../victim2", "data/../../x", "/etc/passwd", "//x", "", ".", "..", "./data", "data/", "data//x", "a\\b", "C:x", "a\0b", 
    "\ud800",
]  # fmt: skip


@pytest.mark.parametrize("path", cases(UNSAFE_PATHS))
def test_a_path_that_leaves_the_checkpoint_is_refused(victim: Path, path: str) -> None:
    edit_manifest(victim, lambda body: body["files"][0].update(path=path))
    with pytest.raises(UnsafePathError):
        Checkpoint.open(victim)
    assert refused(victim)


def test_a_path_that_no_system_can_hold_is_refused(victim: Path) -> None:
    edit_manifest(victim, lambda body: body["files"][0].update(path="x" * 5000))
    assert refused(victim)


WRONG_VALUES = [None, True, -1, 2**63, 10**400, 1.5, "x", "../x", [], [[]], {}, {"": None}, [None, 1, "x"]]


def test_no_member_of_the_manifest_is_taken_on_trust(victim: Path) -> None:
    """Every member, replaced by values of every type, and removed."""
    original = handmade.read_manifest(victim)
    for path in _paths(original):
        for value in [*WRONG_VALUES, _REMOVE]:
            body = json.loads(json.dumps(original))
            _put(body, path, value)
            handmade.write_manifest(victim, body)
            with contextlib.suppress(UnickptError):
                load_everything(victim)
            with contextlib.suppress(UnickptError):
                verify(victim)


_REMOVE = object()


def _paths(value: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all members; of a list only the first entry, of the objects only the outermost."""
    if prefix:
        yield prefix
    if prefix[:1] in (("objects",), ("checksum",)):
        return
    members = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, item in members:
        yield from _paths(item, (*prefix, key))


def _put(body: Any, path: tuple[Any, ...], value: Any) -> None:
    *parents, last = path
    for key in parents:
        body = body[key]
    if value is _REMOVE:
        del body[last]
    else:
        body[last] = value


def _sized(path: str, **members: Any) -> Attack:
    def attack(directory: Path) -> None:
        edit_manifest(directory, lambda body: next(r for r in body["files"] if r["path"] == path).update(members))

    return attack


def _sparse(path: str, size_bytes: int) -> Attack:
    """A file that is huge, costs its sender nothing, and claims to be all header."""

    def attack(directory: Path) -> None:
        os.truncate(directory / path, size_bytes)
        _sized(path, size_bytes=size_bytes, header_bytes=size_bytes)(directory)

    return attack


MANIFEST_ATTACKS: dict[str, Attack] = {
    "index of 2**61 bytes": _sized(INDEX, size_bytes=2**61),
    "index of 1 TiB": _sized(INDEX, size_bytes=2**40),
    "data of 1 TiB": _sized(DATA, size_bytes=2**40),
    "header longer than its file": _sized(DATA, header_bytes=2**40),
    "header of no bytes": _sized(DATA, header_bytes=0),
    "header one byte short": _sized(DATA, header_bytes=100),
    "header checksum of another file": _sized(DATA, header_checksum="xxh3_128:" + "0" * 32),
    "checksum of an unknown kind": _sized(DATA, checksum="md5:0"),
    "sparse data file that is all header": _sparse(DATA, 1 << 32),
    "sparse index that is all header": _sparse(INDEX, 1 << 33),
    "a file twice": lambda d: edit_manifest(d, lambda body: body["files"].append(body["files"][0])),
    "index that is no file": lambda d: edit_manifest(d, lambda body: body.update(index="nowhere.safetensors")),
    "index that is a data file": lambda d: edit_manifest(d, lambda body: body.update(index=DATA)),
    "objects nested 900 deep under long keys": lambda d: edit_manifest(d, lambda b: b.update(objects=_nested(900, 10_000))),
}


def _nested(depth: int, key_characters: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"k" * key_characters: value}
    return value


MANIFEST_REASONS: Reasons = {
    "bytes, expected": ["index of 2**61 bytes", "index of 1 TiB", "data of 1 TiB"],
    "header of": [
        "header longer than its file", "sparse data file that is all header", "sparse index that is all header",
    ],
    "header differs": ["header of no bytes", "header one byte short", "header checksum of another file"],
    "unknown checksum": ["checksum of an unknown kind"],
    "lists a file twice": ["a file twice"],
    "is not among the files": ["index that is no file"],
    "not a unickpt index": ["index that is a data file"],
    "nested too deeply": ["objects nested 900 deep under long keys"],
}  # fmt: skip


@pytest.mark.parametrize("name", cases(MANIFEST_ATTACKS))
def test_a_manifest_that_lies_is_refused(victim: Path, name: str) -> None:
    MANIFEST_ATTACKS[name](victim)
    assert reason(MANIFEST_REASONS, name) in refused(victim)[0]


RAW_MANIFESTS: dict[str, bytes] = {
    "empty": b"",
    "not UTF-8": b'{"format": "unickpt", "version": 1, "x": "\xff\xfe"}',
    "UTF-16": '{"format": "unickpt", "version": 1}'.encode("utf-16"),
    "a list": b"[1, 2]",
    "another format": b'{"format": "web", "version": 1}',
    "NaN": b'{"format": "unickpt", "version": 1, "step": NaN}',
    "infinite": b'{"format": "unickpt", "version": 1, "step": 1e999}',
    "integer of 5000 digits": b'{"format": "unickpt", "version": 1, "step": ' + b"1" * 5000 + b"}",
    "nested 960 deep": b'{"format": "unickpt", "version": 1, "x": ' + b"[" * 960 + b"]" * 960 + b"}",
    "nested 100000 deep": b'{"format": "unickpt", "version": 1, "x": ' + b'{"":' * 100_000,
    "version 0": b'{"format": "unickpt", "version": 0}',
    "version true": b'{"format": "unickpt", "version": true}',
    "version of 10**400": b'{"format": "unickpt", "version": 1' + b"0" * 400 + b"}",
    "no checksum": b'{"format": "unickpt", "version": 1}',
    "checksum of another type": b'{"format": "unickpt", "version": 1, "checksum": [[]]}',
}


RAW_REASONS: Reasons = {
    "not JSON": ["empty", "not UTF-8", "UTF-16", "NaN", "integer of 5000 digits", "nested 960 deep", "nested 100000 deep"],
    "not JSON compliant": ["infinite"],
    "not a unickpt manifest": ["a list", "another format"],
    "is not a positive integer": ["version 0", "version true"],
    "upgrade unickpt": ["version of 10**400"],
    "its checksum does not match": ["no checksum", "checksum of another type"],
}


@pytest.mark.parametrize("name", cases(RAW_MANIFESTS))
def test_bytes_that_are_no_manifest_are_refused(victim: Path, name: str) -> None:
    (victim / "manifest.json").write_bytes(RAW_MANIFESTS[name])
    with pytest.raises(FormatError, match=reason(RAW_REASONS, name)):
        Checkpoint.open(victim)
    assert refused(victim)


def test_a_manifest_that_is_too_large_is_not_read(victim: Path) -> None:
    os.truncate(victim / "manifest.json", 2 << 30)
    assert all("too many for a manifest" in reason for reason in refused(victim))


# ---------------------------------------------------------------- files that are not plain files


def _outside(directory: Path, name: str) -> None:
    """Move a file out of the checkpoint and leave a symbolic link to it."""
    away = directory.parent / "away"
    shutil.move(directory / name, away)
    (directory / name).symlink_to(away)


def _instead(name: str, make: Callable[[Path], None]) -> Attack:
    def attack(directory: Path) -> None:
        path = directory / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        make(path)

    return attack


FILE_ATTACKS: dict[str, Attack] = {
    "data file linked from outside": lambda d: _outside(d, DATA),
    "index linked from outside": lambda d: _outside(d, INDEX),
    "data folder linked from outside": lambda d: _outside(d, "data"),
    "link to itself": _instead(DATA, lambda path: path.symlink_to(path.name)),
    "folder that is a link to itself": _instead("data", lambda path: path.symlink_to(path.name)),
    "named pipe": _instead(DATA, lambda path: os.mkfifo(path)),
    "index a named pipe": _instead(INDEX, lambda path: os.mkfifo(path)),
    "device": _instead(DATA, lambda path: path.symlink_to("/dev/zero")),
    "folder": _instead(DATA, lambda path: path.mkdir()),
}


FILE_REASONS: Reasons = {
    "leads outside": [
        "data file linked from outside",
        "index linked from outside",
        "data folder linked from outside",
        "device",
    ],
    "leads nowhere": ["link to itself", "folder that is a link to itself"],
    "is missing": ["named pipe", "index a named pipe", "folder"],
}


@pytest.mark.parametrize("name", cases(FILE_ATTACKS))
def test_a_file_that_is_not_a_plain_one_inside_is_refused(victim: Path, name: str) -> None:
    FILE_ATTACKS[name](victim)
    assert reason(FILE_REASONS, name) in refused(victim)[0]


NO_PLAIN_FILES: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "folder": os.mkdir,
    "loop": lambda path: path.symlink_to(path.name),
}


@pytest.mark.parametrize("name", cases(NO_PLAIN_FILES))
def test_a_manifest_that_is_not_a_plain_file_is_no_checkpoint(victim: Path, name: str) -> None:
    _instead("manifest.json", NO_PLAIN_FILES[name])(victim)
    with pytest.raises((NotACheckpointError, UnsafePathError)):
        Checkpoint.open(victim)
    assert refused(victim)


# ---------------------------------------------------------------- safetensors headers


def _header(edit: Callable[[dict[str, Any]], Any], path: str = INDEX) -> Attack:
    """Change the JSON header of a file; ``edit`` may return the header's bytes instead."""

    def attack(directory: Path) -> None:
        header, data = split_safetensors((directory / path).read_bytes())
        length = (directory / path).stat().st_size - len(data) - 8
        changed = edit(header)
        text = changed if isinstance(changed, bytes) else json.dumps(header, separators=(",", ":")).encode()
        replace_file(directory, path, join_safetensors(text.ljust(length), data))  # data stays where it was

    return attack


def _slot(**members: Any) -> Attack:
    return _header(lambda header: header["checksum"].update(members))


def _prefix(length: int, path: str = INDEX) -> Attack:
    def attack(directory: Path) -> None:
        data = (directory / path).read_bytes()
        header_bytes = 8 + int.from_bytes(data[:8], "little")
        replace_file(directory, path, length.to_bytes(8, "little") + data[8:], header_bytes=header_bytes)

    return attack


def _twice(header: dict[str, Any]) -> bytes:
    text = json.dumps(header)[:-1]
    return f'{text}, "file": {json.dumps(header["offset_bytes"])}}}'.encode()


def _rename(header: dict[str, Any]) -> None:
    header["layer.weight:mastes[0:2,0:6]"] = header.pop("layer.weight:master[0:2,0:6]")


HEADER_ATTACKS: dict[str, Attack] = {
    "no bytes": lambda d: replace_file(d, INDEX, b""),
    "seven bytes": lambda d: replace_file(d, INDEX, b"\1" * 7),
    "length 0": _prefix(0),
    "length 2**64-1": _prefix(2**64 - 1),
    "length 2**63": _prefix(2**63),
    "length of 100 MB": _prefix(100_000_000),
    "length that takes in data": _prefix(2000),
    "data length 2**63": _prefix(2**63, DATA),
    "data length 16": _prefix(16, DATA),
    "not UTF-8": _header(lambda _: b'{"\xff": 1}'),
    "nested 100000 deep": _header(lambda _: b"[" * 100_000),
    "a list": _header(lambda _: b"[]"),
    "metadata of numbers": _header(lambda header: header["__metadata__"].update(format=1)),
    "metadata a list": _header(lambda header: header.update(__metadata__=[])),
    "another kind of file": _header(lambda header: header["__metadata__"].update(format="unickpt-data")),
    "no metadata": _header(lambda header: header.pop("__metadata__") and None),
    "column missing": lambda d: _index(lambda parts: parts.columns.pop("checksum"))(d),
    "bytes behind the last column": lambda d: replace_file(d, INDEX, (d / INDEX).read_bytes() + b"12345678"),
    "data key of another tensor": _header(_rename, DATA),
    "column of another name": _header(lambda header: header.update(checksums=header.pop("checksum"))),
    "column a number": _header(lambda header: header.update(checksum=1)),
    "column with a further member": _slot(more=1),
    "column given twice": _header(_twice),
    "dtype unknown": _slot(dtype="U65"),
    "dtype a list": _slot(dtype=[1]),
    "dtype another": _slot(dtype="F64"),
    "shape huge": _slot(shape=[2**62, 2**62]),
    "shape of 10**6 dimensions": _slot(shape=[1] * 10**6),
    "shape negative": _slot(shape=[-13]),
    "shape of booleans": _slot(shape=[True]),
    "shape of floats": _slot(shape=[13.0]),
    "shape a number": _slot(shape=13),
    "shape shorter": _slot(shape=[1]),
    "offsets huge": _slot(data_offsets=[0, 2**62]),
    "offsets negative": _slot(data_offsets=[-104, 0]),
    "offsets overlap": _header(lambda header: header["offset_bytes"].update(data_offsets=[0, 26])),
    "offsets leave a hole": _slot(data_offsets=[1000, 1104]),
    "offsets reversed": _slot(data_offsets=[104, 0]),
    "offsets of one": _slot(data_offsets=[0]),
    "offsets of floats": _slot(data_offsets=[0.0, 104.0]),
    "data header of another dtype": _header(lambda header: header["layer.weight:master[0:2,0:6]"].update(dtype="I32"), DATA),
    "data header of another shape": _header(lambda header: header["layer.weight:master[0:2,0:6]"].update(shape=[12]), DATA),
    "data header not JSON": _header(lambda _: b"x" * 64, DATA),
}


HEADER_REASONS: Reasons = {
    "the header has": ["data key of another tensor"],
    "too few for a safetensors file": ["no bytes", "seven bytes"],
    "header claims": ["length 2**64-1", "length 2**63", "length of 100 MB", "length that takes in data"],
    "header is not JSON": ["length 0", "not UTF-8", "nested 100000 deep"],
    "header is a list, expected an object": ["a list"],
    "__metadata__ must map strings to strings": ["metadata of numbers", "metadata a list"],
    "not a unickpt index": ["another kind of file", "no metadata"],
    "index columns are": ["column missing", "column of another name"],
    "needs exactly dtype, shape and data_offsets": ["column a number", "column with a further member"],
    "unknown dtype": ["dtype unknown", "dtype a list"],
    "column 'checksum' is F64": ["dtype another"],
    "has shape": [
        "shape of 10**6 dimensions", "shape negative", "shape of booleans", "shape of floats", "shape a number",
        "offsets negative", "offsets of one", "offsets of floats",
    ],
    "its offsets": ["shape huge", "shape shorter", "offsets huge", "offsets reversed"],
    "begins at byte": ["offsets overlap", "offsets leave a hole", "column given twice"],
    "header describes": ["bytes behind the last column"],
    "rank00000.safetensors: header claims": ["data length 2**63"],
    "rank00000.safetensors: header is not JSON": ["data length 16", "data header not JSON"],
    "rank00000.safetensors: at byte": ["data header of another dtype", "data header of another shape"],
}  # fmt: skip


@pytest.mark.parametrize("name", cases(HEADER_ATTACKS))
def test_a_header_that_lies_is_refused(victim: Path, name: str) -> None:
    HEADER_ATTACKS[name](victim)
    assert reason(HEADER_REASONS, name) in refused(victim)[0]


# ---------------------------------------------------------------- the index


def _index(edit: Callable[[IndexParts], Any]) -> Attack:
    def attack(directory: Path) -> None:
        parts = IndexParts(directory)
        edit(parts)
        parts.write()

    return attack


def _cell(column: str, value: int, at: Any = 1) -> Attack:
    return _index(lambda parts: parts.columns[column].__setitem__(at, value))


def _tensor(member: int, value: Any, name: str = "layer.weight", state: str = "master") -> Attack:
    def edit(parts: IndexParts) -> None:
        next(t for t in parts.tensors if t[:2] == [name, state])[member] = value

    return _index(edit)


def _add_tensor(*members: Any) -> Attack:
    """One more tensor behind all others, without fragments."""
    return _index(lambda parts: parts.add_tensor("zz", *members))


def _overlap_and_hole(parts: IndexParts) -> None:
    """Two fragments of a tensor on the same box: the count of elements is right, half of them are nowhere."""
    number = next(at for at, t in enumerate(parts.tensors) if t[0] == "embed.weight")
    first, second = np.flatnonzero(parts.columns["tensor"] == number)[:2]
    parts.columns["start"][second] = parts.columns["start"][first]


def _same_bytes(parts: IndexParts) -> None:
    """All fragments of a file on the same bytes: a small file that fills any amount of memory."""
    for file in (0, 1):
        rows = parts.columns["file"] == file
        parts.columns["offset_bytes"][rows] = parts.columns["offset_bytes"][rows].min()


def _drop_row(parts: IndexParts) -> None:
    parts.columns = {name: column[1:] for name, column in parts.columns.items()}


def _reverse(parts: IndexParts) -> None:
    parts.columns = {name: column[::-1] for name, column in parts.columns.items()}


def _more_dimensions(parts: IndexParts) -> None:
    for name, fill in (("start", 0), ("shape", 1)):
        parts.columns[name] = np.pad(parts.columns[name], ((0, 0), (0, 40)), constant_values=fill)


COLUMN_ATTACKS_1: dict[str, Attack] = {  # on the columns of version 1
    "tensor number too high": _cell("tensor", 1000, -1),
    "tensor number negative": _cell("tensor", -1, 0),
    "file number too high": _cell("file", 2),
    "file number negative": _cell("file", -1),
    "start negative": _cell("start", -1, (1, 0)),
    "start outside": _cell("start", 2**40, (1, 0)),
    "start and shape wrap": _cell("start", 2**63 - 1, (1, 0)),
    "shape 0": _cell("shape", 0, (1, 0)),
    "shape negative": _cell("shape", -4, (1, 0)),
    "shape huge": _cell("shape", 2**62, (1, 0)),
    "shape in a padding dimension": _cell("shape", 2, (-1, 1)),
    "offset negative": _cell("offset_bytes", -8),
    "offset outside the file": _cell("offset_bytes", 2**40),
    "offset that wraps": _cell("offset_bytes", 2**63 - 8),
    "offset in the header": _cell("offset_bytes", 0),
    "offset off by one": _index(lambda parts: parts.columns["offset_bytes"].__iadd__(1)),
    "checksum wrong": _cell("checksum", 1),
    "fragments on the same bytes": _index(_same_bytes),
    "fragments overlap and leave a hole": _index(_overlap_and_hole),
    "fragment missing": _index(_drop_row),
    "fragments in another order": _index(_reverse),
    "41 dimensions": _index(_more_dimensions),
}


def _rows_of(parts: IndexParts, name: str, state: str) -> tuple[slice, slice]:
    """Fragments and boxes of a tensor, in an index of version 2."""
    number = next(at for at, t in enumerate(parts.tensors) if t[:2] == [name, state])
    counts, same = parts.columns["fragments"].astype(int), parts.columns["same_boxes"]
    first, box = counts[:number].sum(), counts[:number][same[:number] == 0].sum()
    return slice(first, first + counts[number]), slice(box, box + counts[number])


def _box(column: str, value: int, name: str = "embed.weight", state: str = "weight") -> Attack:
    """Another number in the second box of a tensor; the column becomes as wide as it can be."""

    def edit(parts: IndexParts) -> None:
        parts.columns[column] = parts.columns[column].astype(np.uint64)
        parts.columns[column][_rows_of(parts, name, state)[1].start + 1] = value

    return _index(edit)


def _wide(column: str, value: int, at: Any = 0) -> Attack:
    def edit(parts: IndexParts) -> None:
        parts.columns[column] = parts.columns[column].astype(np.uint64)
        parts.columns[column][at] = value

    return _index(edit)


def _retyped(column: str, dtype: str) -> Attack:
    return _index(lambda parts: parts.columns.update({column: parts.columns[column].astype(dtype)}))


def _shorter(column: str) -> Attack:
    return _index(lambda parts: parts.columns.update({column: parts.columns[column][1:]}))


def _overlap_and_hole_2(parts: IndexParts) -> None:
    _, boxes = _rows_of(parts, "embed.weight", "weight")
    parts.columns["start.0"][boxes.start + 1] = parts.columns["start.0"][boxes.start]


def _reverse_2(parts: IndexParts) -> None:
    _, boxes = _rows_of(parts, "embed.weight", "weight")
    for column in (name for name in parts.columns if name.startswith(("start", "shape"))):
        parts.columns[column][boxes] = parts.columns[column][boxes][::-1].copy()


def _same_bytes_2(parts: IndexParts) -> None:
    parts.columns["offset_bytes"][:] = parts.columns["offset_bytes"].min()


def _many_fragments(parts: IndexParts) -> None:
    """Few bytes that ask for much memory: fragments that are only counted."""
    parts.columns["fragments"] = np.full(len(parts.tensors), 2**30, np.uint32)


def _share(name: str, state: str) -> Attack:
    def edit(parts: IndexParts) -> None:
        number = next(at for at, t in enumerate(parts.tensors) if t[:2] == [name, state])
        parts.columns["same_boxes"][number] = 1

    return _index(edit)


def _more_dimensions_2(parts: IndexParts) -> None:
    for dim in range(2, 42):
        for name, fill in (("start", 0), ("shape", 1)):
            parts.columns[f"{name}.{dim}"] = np.full(len(parts.columns["file"]), fill, np.uint8)


COLUMN_ATTACKS_2: dict[str, Attack] = {  # on the columns of version 2
    "more fragments than there are": _wide("fragments", 1000),
    "fragments that wrap": _wide("fragments", 2**64 - 1),
    "fragments without end": _index(_many_fragments),
    "fragments of a tensor fewer": _index(lambda parts: parts.columns["fragments"].__setitem__(0, 1)),
    "fragments for one tensor too few": _shorter("fragments"),
    "boxes of the tensor before the first": _wide("same_boxes", 1),
    "boxes of a tensor of another shape": _share("layer.weight", "exp_avg"),
    "same_boxes neither 0 nor 1": _wide("same_boxes", 2, 3),
    "file number too high": _wide("file", 2),
    "file number that wraps": _wide("file", 2**64 - 1),
    "one file number too few": _shorter("file"),
    "start outside": _box("start.0", 2**40),
    "start that wraps": _box("start.0", 2**64 - 4),
    "start and shape wrap": _box("start.0", 2**62 - 1),
    "shape 0": _box("shape.0", 0),
    "shape huge": _box("shape.0", 2**61),
    "shape that wraps": _box("shape.0", 2**64 - 4),
    "offset outside the file": _wide("offset_bytes", 2**40, 1),
    "offset that wraps": _wide("offset_bytes", 2**64 - 8, 1),
    "offset at 2**62": _wide("offset_bytes", 2**62 - 1, 1),
    "offset in the header": _wide("offset_bytes", 0, 1),
    "one offset too few": _shorter("offset_bytes"),
    "offsets signed": _retyped("offset_bytes", "int64"),
    "checksum wrong": _wide("checksum", 1, 1),
    "checksums narrow": _retyped("checksum", "uint32"),
    "boxes signed": _retyped("start.0", "int64"),
    "boxes in two dimensions": _index(lambda parts: parts.columns.update(file=parts.columns["file"].reshape(-1, 1))),
    "fragments on the same bytes": _index(_same_bytes_2),
    "fragments overlap and leave a hole": _index(_overlap_and_hole_2),
    "boxes in another order": _index(_reverse_2),
    "41 dimensions": _index(_more_dimensions_2),
    "starts without shapes": _index(lambda parts: parts.columns.pop("shape.1")),
    "a dimension skipped": _index(lambda parts: parts.columns.update({"start.7": parts.columns.pop("start.1")})),
    "own boxes, shape of more dimensions": _tensor(3, [1, 1, 8, 3], "embed.weight", "weight"),
    "own boxes, shape smaller": _tensor(3, [4, 3], "embed.weight", "weight"),
    "own boxes, shape larger": _tensor(3, [9, 3], "embed.weight", "weight"),
    "version 3": _index(lambda parts: parts.metadata.update(version="3")),
    "version 1": _index(lambda parts: parts.metadata.update(version="1")),
    "more elements together than any storage": _index(lambda parts: [
        parts.add_tensor("zz", f"weight{at}", "U8", [2**61], "buffer", None) for at in range(8)
    ]),
}  # fmt: skip


TABLE_ATTACKS: dict[str, Attack] = {
    "file given twice": _index(lambda parts: parts.files.__setitem__(1, parts.files[0])),
    "file not in the manifest": _index(lambda parts: parts.files.__setitem__(1, "data/other")),
    "file outside": _index(lambda parts: parts.files.__setitem__(1, "../../etc/passwd")),
    "file that is the index": _index(lambda parts: parts.files.__setitem__(1, INDEX)),
    "files no strings": _index(lambda parts: parts.files.__setitem__(1, 7)),
    "tensors reversed": _index(lambda parts: parts.tensors.reverse()),
    "tensor twice": _index(lambda parts: parts.tensors.append(parts.tensors[-1])),
    "tensor entry too short": _index(lambda parts: parts.tensors[0].pop()),
    "tensor entry a number": _index(lambda parts: parts.tensors.__setitem__(0, 5)),
    "dtype unknown": _tensor(2, "F31"),
    "dtype another": _tensor(2, "F64"),
    "dtype a list": _tensor(2, ["F32"]),
    "kind unknown": _tensor(4, "gradient"),
    "shape negative in the table": _tensor(3, [-4, 6]),
    "shape of booleans in the table": _tensor(3, [True, 6]),
    "shape of 10**400": _tensor(3, [10**400]),
    "shape of 2**60 x 2**60": _tensor(3, [2**60, 2**60]),
    "shape of 33 dimensions": _tensor(3, [1] * 33),
    "shape of more dimensions than the fragments": _tensor(3, [1, 1, 4, 6]),
    "shape smaller": _tensor(3, [2, 6]),
    "shape larger": _tensor(3, [5, 6]),
    "1 PiB without fragments": _add_tensor("weight", "U8", [2**50], "parameter", None),
    "1 PiB derived from what is stored": _index(lambda parts: (
        parts.add_tensor("zz", "master", "U8", [0], "parameter", None),
        parts.add_tensor("zz", "weight", "U8", [2**50], "parameter", "master"),
    )),
    "derived from itself": _tensor(5, "weight", state="weight"),
    "stored state derived from itself": _tensor(5, "master"),
    "derived in a circle": _tensor(5, "weight"),
    "derived from nothing": _tensor(5, "velocity", state="weight"),
    "derived and of another shape": _tensor(3, [8, 6], state="weight"),
    "object of 1 PiB": _index(lambda parts: next(t for t in parts.tensors if t[4] == "object").__setitem__(3, [2**50])),
    "rank objects derived from themselves": _tensor(5, "object", name="objects/rank00000", state="object"),
}  # fmt: skip


INDEX_REASONS: Reasons = {
    "a fragment names tensor": ["tensor number too high", "tensor number negative"],
    "a fragment names file": ["file number too high", "file number negative"],
    "fragment 1 of 'embed.weight' leaves its tensor": [
        "start negative", "start outside", "start and shape wrap", "shape 0", "shape negative", "shape huge",
    ],
    "fragment 12 of 'objects/rank00001/0' leaves its tensor": ["shape in a padding dimension"],
    "of 'layer.weight' leaves its tensor of shape (2, 6)": ["shape smaller"],
    "negative byte offset": ["offset negative"],
    "overlaps another one or leaves the data": [
        "offset outside the file", "offset that wraps", "offset in the header", "offset off by one",
        "fragments on the same bytes", "dtype another",
    ],
    "checksum of embed.weight (weight) [4:8,0:3] differs": ["checksum wrong"],
    "some of them twice": ["fragments overlap and leave a hole"],
    "cover 12 of 24 elements": ["fragment missing"],
    "cover 24 of 30 elements": ["shape larger"],
    "cover 0 of 1125899906842624 elements": ["1 PiB without fragments"],
    "cover 5 of 1125899906842624 elements": ["object of 1 PiB"],
    "not sorted by tensor": ["fragments in another order"],
    "do not belong together": ["41 dimensions"],
    "lists a data file twice": ["file given twice"],
    "which is not one of the manifest's": ["file not in the manifest", "file outside", "file that is the index"],
    "must be a list of strings": ["files no strings"],
    "not sorted, or names a tensor twice": ["tensors reversed", "tensor twice"],
    "malformed tensor entry": [
        "tensor entry too short", "tensor entry a number", "dtype a list", "shape of booleans in the table",
    ],
    "unknown dtype": ["dtype unknown"],
    "has kind": [
        "kind unknown", "shape negative in the table", "shape of 10**400", "shape of 33 dimensions",
    ],
    "larger than any storage": ["shape of 2**60 x 2**60"],
    "have 2 dimensions, it has 4": ["shape of more dimensions than the fragments"],
    "is derived from one of": ["1 PiB derived from what is stored", "derived and of another shape"],
    "which is not stored": [
        "derived from itself", "stored state derived from itself", "derived in a circle", "derived from nothing",
        "rank objects derived from themselves",
    ],
}  # fmt: skip


COLUMN_REASONS_2: Reasons = {
    "column 'file' is uint8 (11,), expected": ["more fragments than there are", "fragments of a tensor fewer"],
    "column 'fragments' has 18446744073709551615": ["fragments that wrap"],
    "are too many for an index": ["fragments without end"],
    "column 'fragments' is uint8 (10,), expected 11": ["fragments for one tensor too few"],
    "cannot have the boxes of the tensor before it": [
        "boxes of the tensor before the first", "boxes of a tensor of another shape",
    ],
    "column 'same_boxes' has 2": ["same_boxes neither 0 nor 1"],
    "column 'file' has": ["file number too high", "file number that wraps"],
    "column 'file' is uint8 (10,), expected 11": ["one file number too few"],
    "fragment 1 of 'embed.weight' leaves its tensor of shape (8, 3)": [
        "start outside", "start and shape wrap", "shape 0", "shape huge",
    ],
    "column 'start.0' has": ["start that wraps"],
    "column 'shape.0' has": ["shape that wraps"],
    "overlaps another one or leaves the data": [
        "offset outside the file", "offset at 2**62", "offset in the header", "fragments on the same bytes",
    ],
    "column 'offset_bytes' has": ["offset that wraps"],
    "column 'offset_bytes' is uint16 (12,), expected 13": ["one offset too few"],
    "column 'offset_bytes' is int64": ["offsets signed"],
    "column 'start.0' is int64": ["boxes signed"],
    "column 'file' is uint8 (11, 1)": ["boxes in two dimensions"],
    "checksum of embed.weight (weight) [4:8,0:3] differs": ["checksum wrong"],
    "column 'checksum' is uint32": ["checksums narrow"],
    "some of them twice": ["fragments overlap and leave a hole"],
    "not sorted by tensor and start": ["boxes in another order"],
    "more than 32": ["41 dimensions"],
    "index columns are": ["starts without shapes", "a dimension skipped", "version 1"],
    "have 2 dimensions, it has 4": ["own boxes, shape of more dimensions"],
    "of 'embed.weight' leaves its tensor of shape (4, 3)": ["own boxes, shape smaller"],
    "cover 24 of 27 elements": ["own boxes, shape larger"],
    "upgrade unickpt": ["version 3"],
    "than any storage can hold": ["more elements together than any storage"],
}  # fmt: skip


# of a tensor whose boxes are those of the one before it, so that another check comes first
OF_SHARED_BOXES = {"shape of more dimensions than the fragments", "shape smaller", "shape larger"}


def _must_be_refused(directory: Path, words: str) -> None:
    found = refused(directory)
    assert words in found[0], found
    assert len(found) >= 2, f"only one of loading and verification noticed: {found}"


@pytest.mark.parametrize("name", cases(TABLE_ATTACKS))
def test_a_table_that_lies_is_refused(victim: Path, name: str) -> None:
    TABLE_ATTACKS[name](victim)
    shared = name in OF_SHARED_BOXES
    _must_be_refused(victim, "cannot have the boxes of the tensor before it" if shared else reason(INDEX_REASONS, name))


@pytest.mark.parametrize("name", cases(COLUMN_ATTACKS_2))
def test_columns_that_lie_are_refused(victim: Path, name: str) -> None:
    COLUMN_ATTACKS_2[name](victim)
    _must_be_refused(victim, reason(COLUMN_REASONS_2, name))


@pytest.mark.parametrize("name", cases({**TABLE_ATTACKS, **COLUMN_ATTACKS_1}))
def test_an_index_of_version_1_that_lies_is_refused(old_victim: Path, name: str) -> None:
    {**TABLE_ATTACKS, **COLUMN_ATTACKS_1}[name](old_victim)
    _must_be_refused(old_victim, reason(INDEX_REASONS, name))


# ---------------------------------------------------------------- objects

HOSTILE_OBJECTS: list[Any] = [
    {"$unknown": 1}, {"$tuple": 1, "x": 2}, {"$tuple": None}, {"$tuple": 5}, {"$set": [[1]]}, {"$frozenset": [{}]},
    {"$dict": 5}, {"$dict": [1]}, {"$dict": [[[1], 2]]}, {"$dict": [[1, 2, 3]]}, {"$ordered": [[{}, 1]]},
    {"$int": "x"}, {"$int": 5}, {"$int": "9" * 5000}, {"$float": "1"}, {"$float": []}, {"$complex": [1, 2, 3]},
    {"$bytes": "é"}, {"$bytes": "====="}, {"$bytes": 5}, {"$size": [2**70]}, {"$size": ["a"]}, {"$dtype": 5},
    {"$dtype": "save"}, {"$dtype": "torch.nn"}, {"$device": "frob"}, {"$device": 5}, {"$device": "cuda:99999999999999999"},
    {"$namespace": [1]}, {"$path": [1]}, {"$datetime": "yesterday"}, {"$datetime": 5},
    {"$numpy": ["<i8", 2**70]}, {"$numpy": ["i8,,", "1"]}, {"$numpy": ["<i1", 300]}, {"$numpy": ["O", 1]}, {"$numpy": []},
    {"$numpy": ["<U999999999", "x"]}, {"$numpy": ["(1000000000,)<f8", 1]}, {"$numpy": [{"names": ["a"], "formats": ["O"]}, 1]},
    {"$ndarray": 5}, {"$ndarray": ["<f4", 1]}, {"$ndarray": ["O", {"$tensor": "objects/job/0"}]},
    {"$tensor": "nowhere"}, {"$tensor": [1]}, {"$tensor": "objects/rank00000"},
    {"$opaque": {}}, {"$opaque": {"type": 1, "pickle": "x"}}, {"$opaque": "gASVAAAA"},
]  # fmt: skip


OBJECT_REASONS = {
    '{"$unknown": 1}': "unknown tag",
    '{"$tuple": 1, "x": 2}': "is not one tag",
    '{"$tensor": "nowhere"}': "is not stored",
    '{"$tensor": [1]}': "is not stored",
    '{"$tensor": "objects/rank00000"}': "is not stored",
    '{"$opaque": {}}': "malformed opaque value",
    '{"$opaque": {"type": 1, "pickle": "x"}}': "malformed opaque value",
    '{"$opaque": "gASVAAAA"}': "malformed opaque value",
}


@pytest.mark.parametrize("text", cases(map(json.dumps, HOSTILE_OBJECTS)))
def test_a_malformed_object_is_refused(victim: Path, text: str) -> None:
    value = json.loads(text)
    edit_manifest(victim, lambda body: body["objects"].update(evil={"list": [value]}))
    with pytest.raises(FormatError) as caught:
        Checkpoint.open(victim).objects()
    assert "evil.list[0]" in str(caught.value)
    assert OBJECT_REASONS.get(text, "cannot hold") in str(caught.value)
    refused(victim)


def test_no_pickle_of_a_checkpoint_is_ever_loaded(victim: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*arguments: Any) -> None:
        raise AssertionError("unpickled")

    monkeypatch.setattr("pickle.loads", forbidden)
    monkeypatch.setattr("pickle.Unpickler", forbidden)
    bomb = {"$opaque": {"type": "os.system", "pickle": "Y29zCnN5c3RlbQooUyd0cnVlJwp0Ui4="}}
    edit_manifest(victim, lambda body: body["objects"].update(bomb=bomb))
    assert refused(victim) == []
    decoded = Checkpoint.open(victim).objects()
    assert any(line.startswith("bomb: os.system") for line in decoded.left_out)


# ---------------------------------------------------------------- by chance: a few of what ``scripts/fuzz.py`` does

INPUTS = {"a checkpoint's directory": 60}  # it is slower


@pytest.fixture(scope="module")
def attacker(sound: Path, tmp_path_factory: pytest.TempPathFactory) -> Attacker:
    return Attacker(sound, tmp_path_factory.mktemp("attacked") / "global_step3")


@pytest.mark.parametrize("name", Attacker.NAMES)
def test_mutations(attacker: Attacker, name: str) -> None:
    target = attacker.targets[name]
    for number in range(INPUTS.get(name, 300)):
        made = target.make(random.Random(f"tests/{number}"))
        with limited_memory(), contextlib.suppress(UnickptError):
            target.use(made)


@pytest.mark.parametrize("version", [1, 2])
def test_random_cells_of_the_index(sound: Path, tmp_path: Path, version: int) -> None:
    victim = tmp_path / "victim"
    for number in range(60):
        chance = random.Random(f"cells/{version}/{number}")
        shutil.rmtree(victim, ignore_errors=True)
        shutil.copytree(sound, victim)
        if version == 1:
            handmade.to_version_1(victim)
        parts = IndexParts(victim)
        column = chance.choice(sorted(parts.columns))
        if version == 2 and chance.random() < 0.5:
            parts.columns[column] = parts.columns[column].astype(np.uint64)
        values = parts.columns[column].reshape(-1)
        limits = np.iinfo(values.dtype)
        for _ in range(chance.randint(1, 4)):
            small = chance.randint(max(-3, int(limits.min)), 30)
            values[chance.randrange(len(values))] = chance.choice([small, chance.randint(int(limits.min), int(limits.max))])
        parts.write()
        refused(victim)


def test_what_is_nested_at_the_limit_of_the_reader_is_refused_too(attacker: Attacker) -> None:
    """There is one depth, and it depends on the caller's, that can be read but not written for the checksum."""
    rest = {key: value for key, value in attacker.body.items() if key != "checksum"}
    for depth in range(800, 1001):
        text = text_of({**rest, "objects": {"deep": f"NEST:{depth}:0"}})
        signed = text[:-1] + f',"checksum":"{handmade.digest(text)}"'.encode() + b"}"
        with contextlib.suppress(UnickptError):
            manifest.from_bytes(signed, where="deep")


def test_no_name_of_a_dtype_makes_torch_import_its_parts() -> None:
    code = """
import sys, torch
from unickpt.objects import decode
for name in ("torch._dynamo", "torch.onnx", "torch._inductor"):
    sys.modules.pop(name, None)
    try:
        decode({"$dtype": name}, tensors={}, where="t")
    except Exception as err:
        assert "is no dtype" in str(err), err
    else:
        raise AssertionError(name)
    assert name not in sys.modules, name
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), cwd=REPO, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
