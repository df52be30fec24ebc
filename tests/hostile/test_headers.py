"""False headers of safetensors files. See attacks.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.attacks import DATA, INDEX, Attack, Reasons, cases, on_index, reason, refused
from tests.support.handmade import join_safetensors, replace_file, split_safetensors


def _header(edit: Callable[[dict[str, Any]], Any], path: str = INDEX) -> Attack:
    """Change the JSON header of a file; ``edit`` may return the header's bytes instead."""

    def attack(directory: Path) -> None:
        header, data = split_safetensors((directory / path).read_bytes())
        length = (directory / path).stat().st_size - len(data) - 8
        changed = edit(header)
        text = changed if isinstance(changed, bytes) else json.dumps(header, separators=(",", ":")).encode()
        replace_file(directory, path, join_safetensors(text.ljust(length), data))  # the data does not move

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
    "column missing": lambda d: on_index(lambda parts: parts.columns.pop("checksum"))(d),
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
    "header: not JSON": ["length 0", "not UTF-8", "nested 100000 deep"],
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
    "begins at byte": ["offsets overlap", "offsets leave a hole"],
    "an object has a duplicate key": ["column given twice"],
    "header describes": ["bytes behind the last column"],
    "rank00000.safetensors: header claims": ["data length 2**63"],
    "rank00000.safetensors: header: not JSON": ["data length 16", "data header not JSON"],
    "rank00000.safetensors: at byte": ["data header of another dtype", "data header of another shape"],
}  # fmt: skip


@pytest.mark.parametrize("name", cases(HEADER_ATTACKS))
def test_a_false_header_is_refused(victim: Path, name: str) -> None:
    HEADER_ATTACKS[name](victim)
    assert reason(HEADER_REASONS, name) in refused(victim)[0]
