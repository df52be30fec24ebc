"""Chunks of the stages of a pipeline: what the interleaved schedule would gain."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.replay_traces import write_rings
from unickpt.base.errors import FormatError
from unickpt.cli.main import main
from unickpt.planning.replay.price import Questions, analyse
from unickpt.testing.simulation import calls
from unickpt.testing.simulation.layout import ParallelLayout
from unickpt.testing.simulation.traces import simulated_trace

BOTH_S = (calls.FORWARD_NS + calls.BACKWARD_NS) * 1e-9


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_chunks_make_the_filling_and_draining_shorter(stages: int, chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With messages of 1 ns: ``m`` microbatches, and ``p - 1`` of ``1 / chunks`` of the length."""
    monkeypatch.setattr(calls, "TRANSFER_NS", 1)
    found = analyse(simulated_trace(ParallelLayout(1, stages, 2), 4, 8), questions=Questions(chunks=(chunks,)))
    assert found.answers[0].gain_s == pytest.approx((stages - 1) * BOTH_S * (1 - 1 / chunks), rel=1e-5, abs=1e-7)


def test_collectives_within_a_stage_are_part_of_its_chunks() -> None:
    plain, split = (
        analyse(simulated_trace(ParallelLayout(tensor, 2, 1), 4, 8), questions=Questions(chunks=(2,))).answers[0].gain_s
        for tensor in (1, 2)
    )
    collectives_s = calls.TENSOR_CALLS * 2 * calls.TRANSFER_NS * 1e-9
    assert split - plain == pytest.approx(collectives_s / 2, rel=1e-6)


def test_a_slow_stage_has_slow_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "TRANSFER_NS", 1)
    trace = simulated_trace(ParallelLayout(1, 2, 1), 4, 8, slow={1: 1.5})
    found = analyse(trace, questions=Questions(chunks=(2,)))
    # the first stage's part of one microbatch is outside of the slow stage's time: half of it is
    assert found.answers[0].gain_s == pytest.approx(BOTH_S / 2, rel=1e-5)


def test_jobs_that_cannot_be_interleaved_are_refused() -> None:
    with pytest.raises(FormatError, match="a multiple of 4 microbatches, and a step has 6"):
        analyse(simulated_trace(ParallelLayout(1, 4, 1), 4, 6), questions=Questions(chunks=(2,)))
    unnamed = replace(simulated_trace(ParallelLayout(1, 2, 1), 4, 8), places=({}, {}))
    with pytest.raises(FormatError, match="its stages are unknown"):
        analyse(unnamed, questions=Questions(chunks=(2,)))
    with pytest.raises(FormatError, match="the job has no pipeline"):
        analyse(simulated_trace(ParallelLayout(1, 1, 2), 4, 8), questions=Questions(chunks=(2,)))


def test_the_command_takes_chunks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rings = write_rings(simulated_trace(ParallelLayout(1, 2, 1), 3, 4), tmp_path / "rings")
    assert main(["whatif", str(rings), "--chunks", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["answers"]
    assert [each["question"] for each in found] == ["2 chunks of each stage, interleaved"]
    assert found[0]["gain_s"] > 0
