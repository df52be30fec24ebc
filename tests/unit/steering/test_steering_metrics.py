"""Metrics of the steering, as a Prometheus server reads them."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

from tests.unit.steering.made import running
from unickpt.base.options.steering import SteeringOptions
from unickpt.steering.publishing.metrics import steering_measurements
from unickpt.steering.publishing.observers import Observers
from unickpt.steering.state.history import HistoryEntry, Kind
from unickpt.steering.state.membership import Lost, Ordered, Park
from unickpt.steering.state.transitions import transition
from unickpt.testing.launch import free_port


def samples(text: str) -> dict[str, float]:
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if not line.startswith("#")}


def test_the_endpoint_counts_orders_hosts_and_rounds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    common = {"history": str(tmp_path / "history"), "metrics_port": port, "metrics_targets": str(tmp_path / "targets")}
    made, second = Observers(SteeringOptions(**common), "secret"), Observers(SteeringOptions(**common, job="llama"), "secret")
    assert f": port {port} is taken" in caplog.text
    targets = [json.loads(path.read_text())[0] for path in sorted((tmp_path / "targets").iterdir())]
    assert [each["labels"] for each in targets] == [{}, {"job_name": "llama"}], "without secret_file the --rdzv-id is a secret"
    text = urllib.request.urlopen(f"http://{targets[1]['targets'][0]}/metrics", timeout=10).read().decode()
    assert samples(text)['unickpt_steering_rounds_total{job_name="llama"}'] == 0
    second.close()
    assert len(list((tmp_path / "targets").iterdir())) == 1
    before = running(4, spares=1)
    made.chronicle.changed(None, before)
    after = before
    for event in (Ordered("x", "park h1", (), "park", "STOPPED_OUT"), Park("h1", "x"), Lost("h2", "1")):
        after = transition(after, event, 0.0)
    made.chronicle.changed(before, after)
    found = samples(urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode())
    assert found["unickpt_steering_rounds_total"] == 1
    assert found["unickpt_steering_restarts_total"] == 0
    assert found['unickpt_steering_orders_total{kind="park"}'] == 1
    assert found['unickpt_steering_orders_total{kind="restart"}'] == 0
    assert found['unickpt_steering_hosts{state="parked"}'] == 1
    assert found['unickpt_steering_hosts{state="gone"}'] == 1
    assert 'unickpt_steering_downtime_seconds_total{cause="STOPPED_OUT"}' in found
    with pytest.raises(OSError, match="404"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/other", timeout=10)
    made.close()


def test_downtime_and_the_last_repair_are_those_of_the_report() -> None:
    history = [
        HistoryEntry(Kind.BEGIN, 100.0),
        HistoryEntry(Kind.RUNNING, 105.0, (1, 1), ("a", "b"), 4),
        HistoryEntry(Kind.STEP, 110.0, (1, 1), step=1, moved_s=110.0),
        HistoryEntry(Kind.STEP, 150.0, (1, 1), step=9, moved_s=150.0),
        HistoryEntry(Kind.ENDED, 160.0, (1, 1), cause="host lost"),
        HistoryEntry(Kind.RUNNING, 162.0, (1, 2), ("a",), 2),
        HistoryEntry(Kind.STEP, 168.0, (1, 2), step=10, furthest=9, moved_s=168.0),
    ]
    found = {(each.name, *each.labels.values()): each.value for each in steering_measurements(None, history, 0.0, 200.0)}
    assert found["unickpt_steering_last_repair_seconds",] == 18
    assert found["unickpt_steering_downtime_seconds_total", "host lost"] == 18
    assert found["unickpt_steering_downtime_seconds_total", "start of the job"] == 10
    assert found["unickpt_steering_downtimes_total", "host lost"] == 1
    assert found["unickpt_steering_effective_training_ratio",] == 0.72
    assert found["unickpt_steering_ranks",] == 2
