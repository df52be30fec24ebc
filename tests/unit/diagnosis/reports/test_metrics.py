"""Measurements of a job for Prometheus and TensorBoard."""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path

import pytest

from tests.support.report_records import by_label, hostile
from tests.unit.diagnosis.reports.jobs import job_of_four
from unickpt.base.errors import ConfigError
from unickpt.base.installation import extra_command
from unickpt.diagnosis.detectors.verdicts import Syndrome, Verdict
from unickpt.diagnosis.recording.ring_folder import read_folder
from unickpt.diagnosis.reports import metrics


def test_measurements_equal_the_records(tmp_path: Path) -> None:
    job = job_of_four(tmp_path)
    verdict = Verdict(Syndrome.COMMUNICATION_HANG, (1, 2), 0)
    found = metrics.measurements([job], [verdict])
    late = [m.value for m in found if m.name == "unickpt_rank_lateness_seconds" and m.labels == {"rank": "2"}]
    assert late == [0.032, 0.012]
    of_running_jobs = ("unickpt_link_", "unickpt_memory_", "unickpt_host_events", "unickpt_witness_")
    assert {m.name for m in found} == {name for name in metrics.HELP if not name.startswith(of_running_jobs)}


def test_prometheus_parses_the_exposition(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="the extra 'metrics' is not installed")
    from prometheus_client.parser import text_string_to_metric_families

    job = job_of_four(tmp_path, host=hostile("host"))
    text = metrics.exposition(metrics.measurements([job], [Verdict(Syndrome.COMMUNICATION_HANG, (1, 2), 0)]))
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert by_label(families["unickpt_rank_lateness_seconds"].samples, rank="2") == [0.012]  # the newest step
    assert by_label(families["unickpt_rank_own_seconds"].samples, rank="2") == [0.062]
    assert by_label(families["unickpt_rank_waiting_seconds"].samples, rank="2") == [0.038]
    assert families["unickpt_collectives"].type == "counter"
    assert by_label(families["unickpt_collectives"].samples, group="data parallel") == [4]
    assert by_label(families["unickpt_recorded_calls"].samples, op="all_reduce") == [16]
    assert by_label(families["unickpt_recorded_bytes"].samples, op="all_reduce") == [16 * 1024]
    assert by_label(families["unickpt_verdicts"].samples, syndrome="communication hang", rank="1") == [1]
    assert by_label(families["unickpt_rank_state"].samples, rank="0", state="unknown", host=hostile("host")[:64]) == [1]
    assert by_label(families["unickpt_rank_step"].samples, rank="3") == [2]


def test_tensorboard_reads_the_scalars(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra 'metrics' is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    job_of_four(tmp_path)
    count = metrics.write_scalars(metrics.measurements([read_folder(tmp_path)], []), tmp_path / "board")
    assert count == 4 * 2 * 6
    found = EventAccumulator(str(tmp_path / "board"))
    found.Reload()
    series = found.Tensors("lateness_seconds/rank 2")
    assert [(event.step, round(event.tensor_proto.float_val[0], 6)) for event in series] == [(0, 0.032), (1, 0.012)]


@pytest.mark.parametrize("package", ["prometheus_client", "tensorboard"])
def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = metrics.measurements([job_of_four(tmp_path)], [])
    monkeypatch.setitem(sys.modules, package, None)
    export = metrics.exposition if package == "prometheus_client" else functools.partial(metrics.write_scalars, folder=tmp_path)
    with pytest.raises(ConfigError, match=package.replace("_", "-") + ".*" + re.escape(extra_command("metrics"))):
        export(measured)
