"""The checks for a GPU, run on the CPU: every step of them works, and nothing that fails is silent."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_checks import __main__ as command
from benchmarks.gpu_checks import faults, host, huggingface, megatron, staging, timing, witness, zero
from benchmarks.gpu_checks.place import Place
from benchmarks.gpu_checks.rows import FAILED, MEASURED, PASSED, SKIPPED, NotHereError, Row, Rows, read, table
from tests.support.extent import FULL
from tests.support.repository import REPO
from unickpt.testing.launch import environment

EXPECTED = {
    *(("staging", name) for name in staging.ROWS),
    *(("timing", name) for name in timing.ROWS),
    *(("faults", name) for name in faults.ROWS),
    *(("deepspeed", zero.save_row(kind)) for kind in zero.KINDS),
    *(("deepspeed", zero.load_row(kind, 1)) for kind in zero.KINDS),
    *(("deepspeed", zero.load_row(kind, 2)) for kind in list(zero.KINDS)[:3]),
    ("deepspeed", zero.LATE_ROW),
    *(("witness", name) for name in witness.ROWS),
    *(("host", name) for name in host.ROWS),
    *(("huggingface", name) for name in huggingface.ROWS),
    ("megatron", megatron.save_row(2)),
    ("megatron", megatron.load_row(1)),
}


@pytest.mark.skipif(not FULL, reason="takes a minute; UNICKPT_FULL_MATRIX=1 runs it")
def test_the_dry_run_makes_every_check(tmp_path: Path) -> None:
    out = tmp_path / "checks.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_checks", "--dry", "--out", str(out)],
        capture_output=True, text=True, env=environment(REPO), cwd=REPO, timeout=240,
    )  # fmt: skip
    document: dict[str, Any] = json.loads(out.read_text())
    rows = {(row["group"], row["name"]): row for row in document["rows"]}
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert document["dry"] is True
    assert rows.keys() == EXPECTED
    skipped = {row["name"]: row["reason"] for row in rows.values() if row["status"] == SKIPPED}
    assert {row["status"] for row in rows.values()} <= {PASSED, MEASURED, SKIPPED}
    needs_a_device = ("fp16", "offloaded", "cannot be locked")  # DeepSpeed's CPU accelerator has no fp16
    assert all(any(word in name for word in needs_a_device) for name in skipped), skipped
    assert all("dry" in row["on"] for row in rows.values())
    assert all(f"| {group}: {name} |" in done.stdout for group, name in rows)
    straggler = rows["faults", "straggler"]["values"]
    assert straggler["verdict"] == "non-communication slow"
    assert straggler["timed on the device"] > 0  # by device times, although they are the host's clock here
    assert rows["timing", "around a captured graph"]["values"] == {"calls": 4, "timed": 2}


def test_a_check_that_fails_is_a_row_with_the_reason(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows", "g", "dry")
    with rows.row("raises", "something") as row:
        row.values["ms"] = 3.0
        raise OSError("no room")
    with rows.row("not held", "something") as row:
        row.require(True, "this")
        row.require(False, "one")
        row.require(False, "two")
    with rows.row("not here"):
        raise NotHereError("needs a device")
    with rows.row("held", "something") as row:
        row.require(True, "this")
    with rows.row("only measured") as row:
        row.values["s"] = 1
    found = {row.name: (row.status, row.reason) for row in read(tmp_path / "rows")}
    assert found == {
        "raises": (FAILED, "OSError: no room"), "not held": (FAILED, "one; two"), "not here": (SKIPPED, "needs a device"),
        "held": (PASSED, ""), "only measured": (MEASURED, ""),
    }  # fmt: skip
    assert "| g: raises | dry | failed: OSError: no room | ms 3 | something |" in table(read(tmp_path / "rows"))


def crash(_place: Place, path: Path) -> None:
    with Rows(path, "staging", "dry").row(staging.ROWS[0]):
        pass
    os._exit(7)


def test_checks_of_a_process_that_ends_early_have_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "check", crash)
    arguments = argparse.Namespace(minutes=1.0, only=["staging"])
    run = command.Run(Place(True, "gloo", 2, False), arguments, tmp_path)
    run.all()
    assert [row.name for row in run.rows] == list(staging.ROWS)
    assert [row.status for row in run.rows] == [MEASURED, *[FAILED] * (len(staging.ROWS) - 1)]
    assert all("rank 0 ended with 7" in row.reason for row in run.rows[1:])


def test_checks_without_time_left_have_failed(tmp_path: Path) -> None:
    arguments = argparse.Namespace(minutes=0.0, only=["timing"])
    run = command.Run(Place(True, "gloo", 2, False), arguments, tmp_path)
    run.all()
    assert [(row.status, row.reason) for row in run.rows] == [(FAILED, "no time left")] * len(timing.ROWS)


def test_a_row_knows_its_result() -> None:
    row = Row("g", "n", "dry")
    assert row.status == FAILED  # until something else is known
