"""The layers of a host's ranks beside those of earlier jobs, and what is kept of them for later ones."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.diagnosis.agent.made import S, call, ring
from unickpt.diagnosis.agent.layer_prior import SETTLED, LayerPrior, RankSample, usual_layers
from unickpt.diagnosis.agent.loop import Agent
from unickpt.diagnosis.layer_costs.compute import ComputeCosts
from unickpt.diagnosis.layer_costs.measured import LAYER, MeasuredLayer
from unickpt.diagnosis.layer_costs.store import remember, remembered
from unickpt.diagnosis.recording.ring_folder import read_folder

DEVICE = "cpu x"


def layer(seconds: float, *, kind: str = "Block", tokens: int = 64, parameters: int = 100) -> MeasuredLayer:
    return MeasuredLayer("h.0", LAYER, seconds / 3, seconds * 2 / 3, parameters, 0, 0, tokens, kind, DEVICE)


def write(
    folder: Path, rank: int, seconds: float, *, recent: float | None = None, steps: int = 3, layers: int = 2, **row: Any
) -> None:
    """Layers that were called twice in a step."""
    rows = [
        {
            "number": at, "name": f"h.{at}", "role": LAYER, "kind": "Block", "forward_s": seconds / 3,
            "backward_s": seconds * 2 / 3, "recent_s": seconds if recent is None else recent, "calls": 2 * steps,
            "parameters": 100, "shape": [8, 8, 16], "input_bytes": 64, "activation_bytes": 64, **row,
        }
        for at in range(layers)
    ]  # fmt: skip
    path = folder / f"{rank:05d}.layers.json"
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps({"rank": rank, "device": DEVICE, "steps": steps, "total": layers, "layers": rows}))
    fresh.replace(path)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    place = tmp_path / "cache" / "layers.jsonl"
    remember(place, [layer(0.010), layer(0.011), layer(0.009)])
    return place


def test_times_of_a_step_are_beside_those_of_earlier_jobs(tmp_path: Path, store: Path) -> None:
    write(tmp_path, 0, 0.010)
    write(tmp_path, 3, 0.012, recent=0.025, steps=5)
    found = LayerPrior(tmp_path, store).look()
    assert found[0].took_s == pytest.approx(0.040)  # two layers, two calls in a step
    assert found[3].took_s == pytest.approx(0.100)  # of the newest samples, not of all
    assert found[0].expected_s == found[3].expected_s == pytest.approx(0.040)
    assert (found[0].steps, found[3].steps) == (3, 5)
    assert found[0].error == pytest.approx(1.4826 * 0.1)


def test_layers_of_another_size_are_on_the_line(tmp_path: Path, store: Path) -> None:
    write(tmp_path, 0, 0.020, shape=[16, 8, 16])
    assert LayerPrior(tmp_path, store).look()[0].expected_s == pytest.approx(0.080)


def test_layers_that_no_job_has_measured_do_not_count(tmp_path: Path, store: Path) -> None:
    prior = LayerPrior(tmp_path, store)
    write(tmp_path, 0, 0.5, kind="Other")
    assert prior.look() == {}
    assert LayerPrior(tmp_path, tmp_path / "none").look() == {}


def test_a_file_is_read_when_it_changes(tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prior = LayerPrior(tmp_path, store)
    assert prior.look() == {}
    write(tmp_path, 0, 0.010)
    assert prior.look()[0].took_s == pytest.approx(0.040)
    (tmp_path / "00001.layers.json").write_text("{")
    write(tmp_path, 0, 0.020)
    assert prior.look()[0].took_s == pytest.approx(0.080)
    monkeypatch.setattr(json, "loads", lambda _: pytest.fail("a file that has not changed was read"))
    assert prior.look()[0].took_s == pytest.approx(0.080)


@pytest.mark.parametrize(
    "change",
    [
        {"rank": -1}, {"rank": True}, {"rank": "0"}, {"rank": 1 << 40}, {"steps": 0}, {"steps": None}, {"layers": []},
        {"layers": 3},
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_one_is_left_out(tmp_path: Path, store: Path, change: dict[str, Any]) -> None:
    write(tmp_path, 0, 0.010)
    path = tmp_path / "00000.layers.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert LayerPrior(tmp_path, store).look() == {}


@pytest.mark.parametrize(
    "row", [{"calls": 0}, {"calls": "2"}, {"recent_s": -1.0}, {"recent_s": None}, {"recent_s": 1e400}, {"forward_s": {}}]
)
def test_a_row_that_cannot_be_one_is_left_out(tmp_path: Path, store: Path, row: dict[str, Any]) -> None:
    write(tmp_path, 0, 0.010, **row)
    assert LayerPrior(tmp_path, store).look() == {}


def test_the_layers_of_a_job_are_kept_once_it_has_settled(tmp_path: Path) -> None:
    store = tmp_path / "cache" / "layers.jsonl"
    prior = LayerPrior(tmp_path, store)
    for rank, seconds in enumerate((0.010, 0.011, 0.012, 0.030)):
        write(tmp_path, rank, seconds)
    prior.look()
    prior.remember(SETTLED - 1)
    assert remembered(store) == []
    prior.remember(SETTLED)
    (kept,) = remembered(store)  # both layers of a rank are alike, and rank 3 is slow
    assert kept.forward_s + kept.backward_s == pytest.approx(0.011)
    assert (kept.kind, kept.device, kept.tokens, kept.parameters) == ("Block", DEVICE, 64, 100)
    write(tmp_path, 0, 0.020)
    prior.look()
    prior.remember(SETTLED + 1)
    assert len(remembered(store)) == 1
    assert prior.look() == {}  # this job is not an earlier one


def test_all_ranks_of_a_host_that_is_slower_than_before_are_left_out(tmp_path: Path, store: Path) -> None:
    for each in range(6):
        remember(store, [layer(0.010 + each * 1e-4)])
    before = len(remembered(store))
    write(tmp_path, 0, 0.040)
    prior = LayerPrior(tmp_path, store)
    prior.look()
    prior.remember(SETTLED)
    assert len(remembered(store)) == before


def test_the_line_is_not_moved_by_a_few_odd_jobs() -> None:
    costs = ComputeCosts([*(layer(0.010) for _ in range(5)), layer(0.050), layer(0.002)])
    assert costs.expected(layer(1.0)) == pytest.approx(0.010)
    assert costs.error(layer(1.0)) == 0.0
    assert costs.expected(layer(1.0, kind="Other")) is None
    assert costs.expected(layer(1.0, tokens=0)) is None


def test_layers_of_another_data_type_are_not_compared() -> None:
    half, whole = replace(layer(0.010), dtype="bfloat16"), replace(layer(0.020), dtype="float32")
    costs = ComputeCosts([half, whole])
    assert [costs.expected(each) for each in (half, whole)] == [pytest.approx(0.010), pytest.approx(0.020)]
    assert costs.expected(replace(half, dtype="float16")) is None
    ranks = [RankSample(3, [half, whole], [0.010, 0.020], [1, 1])]
    assert {each.dtype: each.forward_s + each.backward_s for each in usual_layers(ranks, [])} == {
        each.dtype: each.forward_s + each.backward_s for each in (half, whole)
    }


def settled(folder: Path, step: int) -> None:
    now, made = time.monotonic_ns(), ring(folder, 0, 1)
    call(made, 1, now - S, now - S // 2)
    made.state(heartbeat_ns=now, step=step, newest=1, phase=0)


def test_the_agent_sends_and_keeps_them(tmp_path: Path, store: Path) -> None:
    settled(tmp_path, SETTLED)
    write(tmp_path, 0, 0.010)
    agent, before = Agent(tmp_path, print, store=store), len(remembered(store))
    look = agent.look(read_folder(tmp_path))
    assert look is not None
    found = look.snapshot.ranks[0].layers
    assert found is not None
    assert found.expected_s == pytest.approx(0.040)
    assert len(remembered(store)) == before  # it has this very time
    write(tmp_path, 0, 0.0105)
    agent = Agent(tmp_path, print, store=store)
    agent.look(read_folder(tmp_path))
    assert len(remembered(store)) == before + 1


def test_a_store_that_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    settled(tmp_path, SETTLED)
    write(tmp_path, 0, 0.010)
    (tmp_path / "file").touch()
    lines: list[str] = []
    agent = Agent(tmp_path, lines.append, store=tmp_path / "file" / "layers.jsonl")
    for _ in range(3):
        agent.look(read_folder(tmp_path))
    (line,) = lines
    assert "the times of layers are not kept for later jobs, training is not affected" in line


def test_the_store_of_the_user_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settled(tmp_path, SETTLED)
    write(tmp_path, 0, 0.010)
    Agent(tmp_path, print).look(read_folder(tmp_path))
    assert os.listdir(tmp_path / "cache" / "unickpt") == ["layer-times.jsonl"]
