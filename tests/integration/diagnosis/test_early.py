"""A real pipeline: a slow stage is named in its first steps, by the times that an earlier job has left."""

from __future__ import annotations

from pathlib import Path

from tests.jobs.diagnosis.early import SLOW, ran
from tests.support.extent import in_full

JOB = ("deepspeed", "pipeline2x2", 2)


@in_full
def test_a_slow_stage_is_named_in_the_first_steps_after_an_earlier_job(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    sound = ran(JOB, tmp_path / "first", cache, layer_s=0.01, steps=28)
    assert sound["named"] == []
    assert (cache / "unickpt" / "layer-times.jsonl").is_file()
    slow = ran(JOB, tmp_path / "second", cache, 1, layer_s=0.01, factor=2.0, steps=20)
    assert [each[:2] for each in slow["named"]] == [[SLOW, [1]]]
    assert "times as long as in earlier jobs on such a device" in slow["sentence"]
    assert slow["named"][0][2] < 20
