"""The commands report and trace, and reports of a real job."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.forked_jobs import fork_ranks
from tests.support.needs import needs
from tests.support.report_records import MS, call, group, ring
from tests.support.repository import REPO
from tests.unit.diagnosis.reports.jobs import job_of_four, records_of, trace_events
from unickpt.cli.main import main
from unickpt.diagnosis.recording.records import Op
from unickpt.diagnosis.reports.arrivals import by_step
from unickpt.diagnosis.reports.html_report import contents, page
from unickpt.diagnosis.reports.perfetto import write_trace
from unickpt.diagnosis.reports.transfer_delays import delay_matrix, transfer_times
from unickpt.testing.launch import environment


@needs("deepspeed")
def test_reports_of_a_real_job(tmp_path: Path) -> None:
    """Two pipeline stages of two ranks: transfers, waits for data, and computation times."""
    fork_ranks(4, "tests.jobs.diagnosis.pictures_worker", str(tmp_path), "8", "0", env={"GLOO_SOCKET_IFNAME": "lo"})
    view = records_of(tmp_path)
    assert [rank.place.split(", ")[1] for rank in view.ranks.values()] == ["pp 0 dp 0", "pp 0 dp 1", "pp 1 dp 0", "pp 1 dp 1"]
    assert {(d.source, d.destination) for d in delay_matrix(transfer_times(view))} == {(0, 2), (2, 0), (1, 3), (3, 1)}
    table = by_step(view)
    data = np.nanmedian(table.values["data"], axis=1) / MS
    assert data[1] >= 4 * 6 - 1  # micro-batches of 6 ms each
    assert data[3] >= 0
    own = np.nanmedian(table.values["own"], axis=1) / MS
    assert own[3] >= 3 * 4 * 4  # sleeps of 4 ms in 3 layers of 4 micro-batches; a busy machine adds to every rank's own time
    write_trace(view, tmp_path / "trace.json.gz")
    events = trace_events(tmp_path / "trace.json.gz")
    assert len([e for e in events if e["ph"] == "f"]) == len(transfer_times(view).source)
    shown = contents(view, [])
    assert [row["what"].split(",")[0] for row in shown["waiting"]["rows"]] == ["ended in order"] * 4
    page(shown)


def commands(folder: Path) -> Iterator[tuple[list[str], Path]]:
    yield ["report", str(folder), "-o", str(folder / "r.html")], folder / "r.html"
    yield ["trace", str(folder), "-o", str(folder / "t.json.gz")], folder / "t.json.gz"


def test_the_commands_write_the_files_that_they_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job_of_four(tmp_path)
    for command, output in commands(tmp_path):
        assert main(command) == 0
        assert str(output) in capsys.readouterr().out
        assert output.stat().st_size > 500


def test_the_commands_align_the_clocks_of_hosts(tmp_path: Path) -> None:
    """Host b's wall clock is 3 s ahead. No rank leaves a barrier before the last one has entered it, which gives the offset."""
    pair = group("data parallel", [0, 1])
    for rank, host, wall_ms in ((0, "a", 1000.0), (1, "b", 4000.0)):
        rows = [call(Op.BARRIER, 0, n, 100.0 * n + rank, 100.0 * n + 5) for n in range(1, 5)]
        ring(tmp_path / host, rank, 2, [pair], rows, host=host, wall_ms=wall_ms)
    assert main(["trace", str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(tmp_path / "t.json")]) == 0
    calls = [e for e in trace_events(tmp_path / "t.json") if e.get("cat") == "call"]
    begins = {(e["pid"], e["args"]["seq"]): e["ts"] for e in calls}
    assert all(abs(begins[1, n] - begins[2, n]) < 10_000 for n in range(1, 5))


def test_invalid_paths_are_errors_of_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job_of_four(tmp_path)
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert main(["trace", str(tmp_path), "-o", str(tmp_path / "no" / "t.json")]) == 2
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "no" / "r.html")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("unickpt: ") for line in lines)


def test_reports_do_not_import_torch() -> None:
    modules = ["unickpt.diagnosis.reports." + path.stem for path in (REPO / "unickpt/diagnosis/reports").glob("[a-z]*.py")]
    modules += [f"unickpt.cli.{name}_command" for name in ("report", "trace", "metrics")]
    code = f"import importlib, sys; [importlib.import_module(n) for n in {modules!r}]; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), cwd=REPO)
    assert done.stdout.strip() == "False", done.stderr
