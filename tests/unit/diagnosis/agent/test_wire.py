"""What agents send each other: snapshots as bytes, and bytes that are none."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.diagnosis.agent.made import hung
from unickpt.base.errors import FormatError
from unickpt.diagnosis.detectors.examine import examine
from unickpt.diagnosis.host.stack_dumps import Frame
from unickpt.diagnosis.recording.records import Op
from unickpt.diagnosis.recording.ring_folder import read_folder
from unickpt.diagnosis.reports.verdict_text import render_all
from unickpt.diagnosis.snapshot.codec import decode_snapshot, encode_snapshot
from unickpt.diagnosis.snapshot.snapshot import GroupInfo, LayerSample, take_snapshot


def test_a_view_survives_its_bytes(tmp_path: Path) -> None:
    hung(tmp_path)
    snapshot = take_snapshot(read_folder(tmp_path), {2: (Frame("loop", "a.py", 3),)})
    layers = {1: dataclasses.replace(snapshot.ranks[1], layers=LayerSample(0.2, 0.1, 0.05, 3))}
    snapshot = dataclasses.replace(snapshot, ranks={**snapshot.ranks, **layers})
    again = decode_snapshot(encode_snapshot(snapshot))
    for name in ("rows", "steps", "calls", "windows"):
        assert np.array_equal(getattr(again, name), getattr(snapshot, name)), name
    assert dict(again.ranks) == dict(snapshot.ranks)
    assert list(again.groups) == list(snapshot.groups)
    verdicts = examine(snapshot, after_s=5).verdicts
    assert examine(again, after_s=5).verdicts == verdicts != []
    assert render_all(verdicts, again) == render_all(verdicts, snapshot)


@pytest.mark.parametrize("seed", range(40))
def test_bytes_that_are_no_view_are_refused(tmp_path: Path, seed: int) -> None:
    hung(tmp_path)
    good = encode_snapshot(take_snapshot(read_folder(tmp_path)))
    chance = np.random.default_rng(seed)
    bad = bytearray(good)
    for _ in range(int(chance.integers(1, 6))):
        bad[int(chance.integers(0, 8 + 1500))] = int(chance.integers(0, 256))
    data = bytes(bad[: int(chance.integers(0, len(bad)))]) if seed % 3 == 0 else bytes(bad)
    try:
        snapshot = decode_snapshot(data)
    except FormatError:
        return
    render_all(examine(snapshot, after_s=5).verdicts, snapshot)  # what is let in does no harm


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
def test_rows_of_unknown_ranks_are_refused(tmp_path: Path, table: str, field: str, value: int) -> None:
    hung(tmp_path)
    snapshot = take_snapshot(read_folder(tmp_path))
    rows = getattr(snapshot, table).copy()
    assert len(rows)
    rows[field][-1] = value
    with pytest.raises(FormatError, match=table):
        decode_snapshot(encode_snapshot(dataclasses.replace(snapshot, **{table: rows})))


@pytest.mark.parametrize("ranks", [[[0, 1, 1 << 40]], [[0, -1, 3]], [[-5, 1, 2]], [[0, 1, 1 << 23], [0, 1, 1 << 24]]])
def test_a_group_that_would_fill_memory_is_refused(tmp_path: Path, ranks: Any) -> None:
    hung(tmp_path)
    snapshot = take_snapshot(read_folder(tmp_path))
    head = encode_snapshot(dataclasses.replace(snapshot, groups=[GroupInfo("g", "data parallel", ranks)]))
    with pytest.raises(FormatError):
        decode_snapshot(head)
