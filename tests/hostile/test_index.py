"""False tables and columns of the index. See attacks.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.hostile.attacks import INDEX, Attack, Reasons, cases, on_index, reason, refused
from tests.support.handmade import IndexParts


def _tensor(member: int, value: Any, name: str = "layer.weight", state: str = "master") -> Attack:
    def edit(parts: IndexParts) -> None:
        next(t for t in parts.tensors if t[:2] == [name, state])[member] = value

    return on_index(edit)


def _add_tensor(*members: Any) -> Attack:
    """Append a tensor without fragments."""
    return on_index(lambda parts: parts.add_tensor("zz", *members))


def _rows_of(parts: IndexParts, name: str, state: str) -> tuple[slice, slice]:
    """Fragments and boxes of a tensor."""
    number = next(at for at, t in enumerate(parts.tensors) if t[:2] == [name, state])
    counts, same = parts.columns["fragments"].astype(int), parts.columns["same_boxes"]
    first, box = counts[:number].sum(), counts[:number][same[:number] == 0].sum()
    return slice(first, first + counts[number]), slice(box, box + counts[number])


def _box(column: str, value: int, name: str = "embed.weight", state: str = "weight") -> Attack:
    """Change a number in the second box of a tensor. The column gets its largest width."""

    def edit(parts: IndexParts) -> None:
        parts.columns[column] = parts.columns[column].astype(np.uint64)
        parts.columns[column][_rows_of(parts, name, state)[1].start + 1] = value

    return on_index(edit)


def _wide(column: str, value: int, at: Any = 0) -> Attack:
    def edit(parts: IndexParts) -> None:
        parts.columns[column] = parts.columns[column].astype(np.uint64)
        parts.columns[column][at] = value

    return on_index(edit)


def _retyped(column: str, dtype: str) -> Attack:
    return on_index(lambda parts: parts.columns.update({column: parts.columns[column].astype(dtype)}))


def _shorter(column: str) -> Attack:
    return on_index(lambda parts: parts.columns.update({column: parts.columns[column][1:]}))


def _overlap_and_hole(parts: IndexParts) -> None:
    _, boxes = _rows_of(parts, "embed.weight", "weight")
    parts.columns["start.0"][boxes.start + 1] = parts.columns["start.0"][boxes.start]


def _reverse(parts: IndexParts) -> None:
    _, boxes = _rows_of(parts, "embed.weight", "weight")
    for column in (name for name in parts.columns if name.startswith(("start", "shape"))):
        parts.columns[column][boxes] = parts.columns[column][boxes][::-1].copy()


def _same_bytes(parts: IndexParts) -> None:
    parts.columns["offset_bytes"][:] = parts.columns["offset_bytes"].min()


def _many_fragments(parts: IndexParts) -> None:
    """A few bytes that request much memory: fragments that are only counted."""
    parts.columns["fragments"] = np.full(len(parts.tensors), 2**30, np.uint32)


def _share(name: str, state: str) -> Attack:
    def edit(parts: IndexParts) -> None:
        number = next(at for at, t in enumerate(parts.tensors) if t[:2] == [name, state])
        parts.columns["same_boxes"][number] = 1

    return on_index(edit)


def _more_dimensions(parts: IndexParts) -> None:
    for dim in range(2, 42):
        for name, fill in (("start", 0), ("shape", 1)):
            parts.columns[f"{name}.{dim}"] = np.full(len(parts.columns["file"]), fill, np.uint8)


COLUMN_ATTACKS: dict[str, Attack] = {
    "more fragments than there are": _wide("fragments", 1000),
    "fragments that wrap": _wide("fragments", 2**64 - 1),
    "fragments without end": on_index(_many_fragments),
    "fragments of a tensor fewer": on_index(lambda parts: parts.columns["fragments"].__setitem__(0, 1)),
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
    "boxes in two dimensions": on_index(lambda parts: parts.columns.update(file=parts.columns["file"].reshape(-1, 1))),
    "fragments on the same bytes": on_index(_same_bytes),
    "fragments overlap and leave a hole": on_index(_overlap_and_hole),
    "boxes in another order": on_index(_reverse),
    "41 dimensions": on_index(_more_dimensions),
    "starts without shapes": on_index(lambda parts: parts.columns.pop("shape.1")),
    "a dimension skipped": on_index(lambda parts: parts.columns.update({"start.7": parts.columns.pop("start.1")})),
    "own boxes, shape of more dimensions": _tensor(3, [1, 1, 8, 3], "embed.weight", "weight"),
    "own boxes, shape smaller": _tensor(3, [4, 3], "embed.weight", "weight"),
    "own boxes, shape larger": _tensor(3, [9, 3], "embed.weight", "weight"),
    "version 4": on_index(lambda parts: parts.metadata.update(version="4")),
    "blocks without a size": on_index(lambda parts: parts.metadata.pop("block_bytes")),
    "blocks of a size in words": on_index(lambda parts: parts.metadata.update(block_bytes="²")),
    "blocks below zero": on_index(lambda parts: parts.metadata.update(block_bytes="-4096")),
    "blocks of a byte": on_index(lambda parts: parts.metadata.update(block_bytes="1")),
    "blocks of an odd size": on_index(lambda parts: parts.metadata.update(block_bytes="70000")),
    "blocks of any size": on_index(lambda parts: parts.metadata.update(block_bytes="9" * 5000)),
    "version 1": on_index(lambda parts: parts.metadata.update(version="1")),
    "more elements than any storage": on_index(lambda parts: [
        parts.add_tensor("zz", f"weight{at}", "U8", [2**61], "buffer", None) for at in range(8)
    ]),
}  # fmt: skip


TABLE_ATTACKS: dict[str, Attack] = {
    "file given twice": on_index(lambda parts: parts.files.__setitem__(1, parts.files[0])),
    "file not in the manifest": on_index(lambda parts: parts.files.__setitem__(1, "data/other")),
    "file outside": on_index(lambda parts: parts.files.__setitem__(1, "../../etc/passwd")),
    "file that is the index": on_index(lambda parts: parts.files.__setitem__(1, INDEX)),
    "files no strings": on_index(lambda parts: parts.files.__setitem__(1, 7)),
    "tensors reversed": on_index(lambda parts: parts.tensors.reverse()),
    "tensor twice": on_index(lambda parts: parts.tensors.append(parts.tensors[-1])),
    "tensor entry too short": on_index(lambda parts: parts.tensors[0].pop()),
    "tensor entry a number": on_index(lambda parts: parts.tensors.__setitem__(0, 5)),
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
    "1 PiB derived from what is stored": on_index(lambda parts: (
        parts.add_tensor("zz", "master", "U8", [0], "parameter", None),
        parts.add_tensor("zz", "weight", "U8", [2**50], "parameter", "master"),
    )),
    "derived from itself": _tensor(5, "weight", state="weight"),
    "stored state derived from itself": _tensor(5, "master"),
    "derived in a circle": _tensor(5, "weight"),
    "derived from nothing": _tensor(5, "velocity", state="weight"),
    "derived and of another shape": _tensor(3, [8, 6], state="weight"),
    "object of 1 PiB": on_index(lambda parts: next(t for t in parts.tensors if t[4] == "object").__setitem__(3, [2**50])),
    "rank objects derived from themselves": _tensor(5, "object", name="objects/rank00000", state="object"),
}  # fmt: skip


TABLE_REASONS: Reasons = {
    "overlaps another fragment or lies outside the data": ["dtype another"],
    "cannot share the boxes of the previous tensor": [
        "shape of more dimensions than the fragments", "shape smaller", "shape larger",
    ],
    "cover 0 of 1125899906842624 elements": ["1 PiB without fragments"],
    "cover 5 of 1125899906842624 elements": ["object of 1 PiB"],
    "lists a data file twice": ["file given twice"],
    "which the manifest does not list": ["file not in the manifest", "file outside", "file that is the index"],
    "must be a list of strings": ["files no strings"],
    "not sorted or lists a tensor twice": ["tensors reversed", "tensor twice"],
    "malformed tensor entry": [
        "tensor entry too short", "tensor entry a number", "dtype a list", "shape of booleans in the table",
    ],
    "unknown dtype": ["dtype unknown"],
    "has kind": [
        "kind unknown", "shape negative in the table", "shape of 10**400", "shape of 33 dimensions",
    ],
    "2**62 bytes or more": ["shape of 2**60 x 2**60"],
    "is derived from master of shape": ["1 PiB derived from what is stored", "derived and of another shape"],
    "which is not stored": [
        "derived from itself", "stored state derived from itself", "derived in a circle", "derived from nothing",
        "rank objects derived from themselves",
    ],
}  # fmt: skip


COLUMN_REASONS: Reasons = {
    "column 'file' is uint8 (11,), expected": ["more fragments than there are", "fragments of a tensor fewer"],
    "column 'fragments' has the value 18446744073709551615": ["fragments that wrap"],
    "are too many for an index": ["fragments without end"],
    "column 'fragments' is uint8 (10,), expected 11": ["fragments for one tensor too few"],
    "cannot share the boxes of the previous tensor": [
        "boxes of the tensor before the first", "boxes of a tensor of another shape",
    ],
    "column 'same_boxes' has the value 2": ["same_boxes neither 0 nor 1"],
    "column 'file' has the value": ["file number too high", "file number that wraps"],
    "column 'file' is uint8 (10,), expected 11": ["one file number too few"],
    "fragment 1 of 'embed.weight' is empty or leaves its tensor of shape (8, 3)": [
        "start outside", "start and shape wrap", "shape 0", "shape huge",
    ],
    "column 'start.0' has the value": ["start that wraps"],
    "column 'shape.0' has the value": ["shape that wraps"],
    "overlaps another fragment or lies outside the data": [
        "offset outside the file", "offset at 2**62", "offset in the header", "fragments on the same bytes",
    ],
    "column 'offset_bytes' has the value": ["offset that wraps"],
    "column 'offset_bytes' is uint16 (12,), expected 13": ["one offset too few"],
    "column 'offset_bytes' is I64": ["offsets signed"],
    "column 'start.0' is I64": ["boxes signed"],
    "column 'file' is uint8 (11, 1)": ["boxes in two dimensions"],
    "checksum of embed.weight (weight) [4:8,0:3] differs": ["checksum wrong"],
    "column 'checksum' is uint32": ["checksums narrow"],
    "some of them twice": ["fragments overlap and leave a hole"],
    "not sorted by tensor and start": ["boxes in another order"],
    "more than 32": ["41 dimensions"],
    "index columns are": ["starts without shapes", "a dimension skipped"],
    "index version '1', expected 2 or 3": ["version 1"],
    "have 2 dimensions, expected 4": ["own boxes, shape of more dimensions"],
    "of 'embed.weight' is empty or leaves its tensor of shape (4, 3)": ["own boxes, shape smaller"],
    "cover 24 of 27 elements": ["own boxes, shape larger"],
    "upgrade unickpt": ["version 4"],
    "expected 0 or a power of two": [
        "blocks without a size", "blocks of a size in words", "blocks below zero", "blocks of a byte", "blocks of an odd size",
        "blocks of any size",
    ],
    "2**62 elements or more": ["more elements than any storage"],
}  # fmt: skip


def _must_be_refused(directory: Path, words: str) -> None:
    found = refused(directory)
    assert words in found[0], found
    assert len(found) >= 2, f"only one of loading and verification noticed: {found}"


@pytest.mark.parametrize("name", cases(TABLE_ATTACKS))
def test_a_false_table_is_refused(victim: Path, name: str) -> None:
    TABLE_ATTACKS[name](victim)
    _must_be_refused(victim, reason(TABLE_REASONS, name))


@pytest.mark.parametrize("name", cases(COLUMN_ATTACKS))
def test_false_columns_are_refused(victim: Path, name: str) -> None:
    COLUMN_ATTACKS[name](victim)
    _must_be_refused(victim, reason(COLUMN_REASONS, name))
