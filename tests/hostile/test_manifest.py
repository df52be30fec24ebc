"""False manifests, and files that are not manifests. See attacks.py."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.attacks import DATA, INDEX, Attack, Reasons, cases, reason, refused
from tests.hostile.mutation import load_everything
from tests.support import handmade
from tests.support.handmade import IndexParts, edit_manifest, join_safetensors, replace_file, split_safetensors
from unickpt.base.errors import FormatError, UnickptError, UnsafePathError
from unickpt.checkpoint.format import manifest
from unickpt.checkpoint.format.checksums import RunningDigest, digest
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.verify import verify_checkpoint


def test_a_sound_checkpoint_passes_all_of_it(victim: Path) -> None:
    assert refused(victim) == []
    for tamper in (lambda _: None, lambda body: body.update(step=4)):  # the change itself is harmless
        edit_manifest(victim, tamper)
        assert refused(victim) == []
    IndexParts(victim).write()
    replace_file(victim, DATA, (victim / DATA).read_bytes())
    assert refused(victim) == []


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


def test_every_member_of_the_manifest_is_validated(victim: Path) -> None:
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
                verify_checkpoint(victim)


_REMOVE = object()


def _paths(value: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return the paths of all members: the first entry of a list, and the outermost of the objects."""
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
    """A huge sparse file that claims to be all header."""

    def attack(directory: Path) -> None:
        os.truncate(directory / path, size_bytes)
        _sized(path, size_bytes=size_bytes, header_bytes=size_bytes)(directory)

    return attack


def _sparse_index(size_bytes: int, columns: bool) -> Attack:
    """A sparse index of gigabytes with a valid checksum. With ``columns`` its header covers all bytes."""

    def attack(directory: Path) -> None:
        path = directory / INDEX
        header, _ = split_safetensors(path.read_bytes())
        if columns:
            header["padding"] = {"dtype": "U8", "shape": [size_bytes], "data_offsets": [0, size_bytes]}
            for name in [name for name in header if name not in ("padding", "__metadata__")]:
                del header[name]
        head = join_safetensors(json.dumps(header).encode(), b"")
        path.write_bytes(head)
        os.truncate(path, len(head) + size_bytes)
        running = RunningDigest()
        with path.open("rb") as file:
            while block := file.read(1 << 24):
                running.update(block)
        members = {
            "size_bytes": len(head) + size_bytes, "checksum": running.value(), "header_bytes": len(head),
            "header_checksum": digest(head),
        }  # fmt: skip
        _sized(INDEX, **members)(directory)

    return attack


MANIFEST_ATTACKS: dict[str, Attack] = {
    "index of 2**61 bytes": _sized(INDEX, size_bytes=2**61),
    "index of 1 TiB": _sized(INDEX, size_bytes=2**40),
    "data of 1 TiB": _sized(DATA, size_bytes=2**40),
    "header longer than its file": _sized(DATA, header_bytes=2**40),
    "table longer than its file": _sized(DATA, table_bytes=2**40),
    "table below zero": _sized(DATA, table_bytes=-8),
    "header of no bytes": _sized(DATA, header_bytes=0),
    "header one byte short": _sized(DATA, header_bytes=100),
    "header checksum of another file": _sized(DATA, header_checksum="xxh3_128:" + "0" * 32),
    "checksum of an unknown kind": _sized(DATA, checksum="md5:0"),
    "sparse data file that is all header": _sparse(DATA, 1 << 32),
    "sparse index that is all header": _sparse(INDEX, 1 << 33),
    "sparse index, signed": _sparse_index(1 << 29, columns=False),
    "sparse index, signed, of columns": _sparse_index(1 << 29, columns=True),
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
    "header describes": ["sparse index, signed"],
    "not enough memory": ["sparse index, signed, of columns"],
    "the header has": [
        "header longer than its file", "sparse data file that is all header", "sparse index that is all header",
    ],
    "the table has": ["table longer than its file"],
    "'table_bytes' is -8": ["table below zero"],
    "header differs": ["header of no bytes", "header one byte short", "header checksum of another file"],
    "unknown checksum": ["checksum of an unknown kind"],
    "a file is listed twice": ["a file twice"],
    "is not among the files": ["index that is no file"],
    "not a unickpt index": ["index that is a data file"],
    "nested too deeply": ["objects nested 900 deep under long keys"],
}  # fmt: skip


@pytest.mark.parametrize("name", cases(MANIFEST_ATTACKS))
def test_a_false_manifest_is_refused(victim: Path, name: str) -> None:
    MANIFEST_ATTACKS[name](victim)
    assert reason(MANIFEST_REASONS, name) in refused(victim)[0]


RAW_MANIFESTS: dict[str, bytes] = {
    "empty": b"",
    "not UTF-8": b'{"format": "unickpt", "version": 2, "x": "\xff\xfe"}',
    "UTF-16": '{"format": "unickpt", "version": 2}'.encode("utf-16"),
    "a list": b"[1, 2]",
    "another format": b'{"format": "web", "version": 2}',
    "NaN": b'{"format": "unickpt", "version": 2, "step": NaN}',
    "infinite": b'{"format": "unickpt", "version": 2, "step": 1e999}',
    "integer of 5000 digits": b'{"format": "unickpt", "version": 2, "step": ' + b"1" * 5000 + b"}",
    "nested 960 deep": b'{"format": "unickpt", "version": 2, "x": ' + b"[" * 960 + b"]" * 960 + b"}",
    "nested 100000 deep": b'{"format": "unickpt", "version": 2, "x": ' + b'{"":' * 100_000,
    "a key twice": b'{"format": "unickpt", "version": 2, "format": "unickpt"}',
    "34 million values": b'{"format": "unickpt", "version": 2, "x": [' + b"[]," * 17_000_000 + b"1]}",
    "version 0": b'{"format": "unickpt", "version": 0}',
    "version true": b'{"format": "unickpt", "version": true}',
    "version of 10**400": b'{"format": "unickpt", "version": 2' + b"0" * 400 + b"}",
    "no checksum": b'{"format": "unickpt", "version": 2}',
    "checksum of another type": b'{"format": "unickpt", "version": 2, "checksum": [[]]}',
}


RAW_REASONS: Reasons = {
    "a duplicate key": ["a key twice"],
    "more than": ["34 million values"],
    "not JSON": ["empty", "not UTF-8", "UTF-16", "NaN", "integer of 5000 digits", "nested 960 deep", "nested 100000 deep"],
    "not JSON compliant": ["infinite"],
    "not a unickpt manifest": ["a list", "another format"],
    "format version 0, expected 2": ["version 0"],
    "format version True, expected 2": ["version true"],
    "upgrade unickpt": ["version of 10**400"],
    "the checksum does not match": ["no checksum", "checksum of another type"],
}


@pytest.mark.parametrize("name", cases(RAW_MANIFESTS))
def test_bytes_that_are_no_manifest_are_refused(victim: Path, name: str) -> None:
    (victim / "manifest.json").write_bytes(RAW_MANIFESTS[name])
    with pytest.raises(FormatError, match=reason(RAW_REASONS, name)):
        Checkpoint.open(victim)
    assert refused(victim)


@pytest.mark.parametrize("size", [300 << 20, 2 << 30])
def test_a_manifest_that_is_too_large_is_not_read(victim: Path, size: int) -> None:
    os.truncate(victim / "manifest.json", size)
    assert all("too many for a manifest" in reason for reason in refused(victim))


def test_a_manifest_that_would_not_be_read_is_not_written(victim: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = manifest.from_bytes((victim / "manifest.json").read_bytes(), where="x")
    monkeypatch.setattr(manifest, "MAX_MANIFEST_BYTES", 1000)
    with pytest.raises(FormatError, match="store large state as tensors"):
        manifest.to_bytes(found)


ALIASES: dict[str, tuple[dict[str, str], str]] = {
    "of nothing": ({"tied": "nowhere"}, "which is not stored"),
    "of itself": ({"tied": "tied"}, "which is an alias itself"),
    "in a circle": ({"a": "b", "b": "a"}, "which is an alias itself"),
    "in a chain": ({"a": "b", "b": "layer.weight"}, "which is an alias itself"),
    "that is stored": ({"layer.weight": "layer.weight"}, "and also a stored tensor"),
}


@pytest.mark.parametrize("name", cases(ALIASES))
def test_an_alias_that_is_not_sound_is_a_problem(victim: Path, name: str) -> None:
    aliases, words = ALIASES[name]
    edit_manifest(victim, lambda body: body.update(aliases=aliases))
    assert any(words in problem for problem in verify_checkpoint(victim).problems)
    refused(victim)


def test_an_alias_of_a_stored_or_excluded_tensor_is_valid(victim: Path) -> None:
    edit_manifest(victim, lambda body: body.update(aliases={"a": "layer.weight", "b": "frozen"}, excluded=["frozen"]))
    assert verify_checkpoint(victim).problems == ()
