"""What agents send each other: views as bytes, and bytes that are none."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.agent.made import hung
from unickpt.diagnosis.examining import examine
from unickpt.diagnosis.view import Group, view_of
from unickpt.diagnosis.wire import packed, unpacked
from unickpt.errors import FormatError
from unickpt.timing.folder import read_folder
from unickpt.timing.records import Op


def test_a_view_survives_its_bytes(tmp_path: Path) -> None:
    hung(tmp_path)
    view = view_of(read_folder(tmp_path), {2: "loop (a.py:3)"})
    again = unpacked(packed(view))
    for name in ("rows", "steps", "calls", "windows"):
        assert np.array_equal(getattr(again, name), getattr(view, name)), name
    assert dict(again.ranks) == dict(view.ranks)
    assert list(again.groups) == list(view.groups)
    assert examine(again, after_s=5).lines == examine(view, after_s=5).lines != []


@pytest.mark.parametrize("seed", range(40))
def test_bytes_that_are_no_view_are_refused(tmp_path: Path, seed: int) -> None:
    hung(tmp_path)
    good = packed(view_of(read_folder(tmp_path)))
    chance = np.random.default_rng(seed)
    bad = bytearray(good)
    for _ in range(int(chance.integers(1, 6))):
        bad[int(chance.integers(0, 8 + 1500))] = int(chance.integers(0, 256))
    data = bytes(bad[: int(chance.integers(0, len(bad)))]) if seed % 3 == 0 else bytes(bad)
    try:
        view = unpacked(data)
    except FormatError:
        return
    examine(view, after_s=5)  # what is let in does no harm


@pytest.mark.parametrize(
    ("table", "field", "value"),
    [
        ("rows", "rank", 4),
        ("rows", "comm", 1),
        ("rows", "comm", -1),
        ("rows", "op", 77),
        ("calls", "op", int(Op.STEP)),
        ("calls", "comm", 9),
    ],
)
def test_rows_of_what_a_view_does_not_have_are_refused(tmp_path: Path, table: str, field: str, value: int) -> None:
    hung(tmp_path)
    view = view_of(read_folder(tmp_path))
    rows = getattr(view, table).copy()
    assert len(rows)
    rows[field][-1] = value
    with pytest.raises(FormatError, match=table):
        unpacked(packed(dataclasses.replace(view, **{table: rows})))


@pytest.mark.parametrize("ranks", [[[0, 1, 1 << 40]], [[0, -1, 3]], [[-5, 1, 2]], [[0, 1, 1 << 23], [0, 1, 1 << 24]]])
def test_a_group_that_would_fill_memory_is_refused(tmp_path: Path, ranks: Any) -> None:
    hung(tmp_path)
    view = view_of(read_folder(tmp_path))
    head = packed(dataclasses.replace(view, groups=[Group("g", "data parallel", ranks)]))
    with pytest.raises(FormatError):
        unpacked(head)
