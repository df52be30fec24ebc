"""The HTML report: numbers, hostile names, many ranks, and a browser."""

from __future__ import annotations

import base64
import html
import html.parser
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.browser import drawn, needs_browser, wider_than_a_phone
from tests.support.report_records import MS, call, group, hostile, moment, ring
from tests.unit.diagnosis.reports.jobs import job_of_four, records_of
from unickpt.diagnosis.detectors.verdicts import Syndrome, Verdict
from unickpt.diagnosis.host.process_state import State
from unickpt.diagnosis.recording.records import Op, Phase
from unickpt.diagnosis.recording.ring import RingContents
from unickpt.diagnosis.recording.ring_folder import HostRings, read_folder
from unickpt.diagnosis.reports.html_report import contents, page, write_report
from unickpt.diagnosis.reports.job_records import gather_records
from unickpt.diagnosis.reports.verdict_text import VerdictText
from unickpt.steering.state.history import HistoryEntry, Kind
from unickpt.steering.state.timeline import as_json, job_times


class Markup(html.parser.HTMLParser):
    """Elements with their attributes, and the text of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script":
            self.scripts.append(data)


def hostile_job(folder: Path) -> tuple[HostRings, list[tuple[Verdict, VerdictText]]]:
    entry = group(hostile("label"), range(2), name=hostile("name"), backend=hostile("backend"))
    for rank in range(2):
        rows = [call(Op.ALL_REDUCE, 0, n, 10.0 * n + rank, 10.0 * n + 5, step=n) for n in range(1, 5)]
        ring(folder, rank, 2, [entry], rows, host=hostile("host"), job=hostile("job"), step=4)
    (folder / f"{hostile('file').replace('/', '_')}.ring").write_bytes(b"none")
    verdict = Verdict(Syndrome.NON_COMMUNICATION_HANG, (1,), 0)
    return read_folder(folder), [(verdict, VerdictText(hostile("line"), hostile("sentence")))]


def test_hostile_names_are_escaped(tmp_path: Path) -> None:
    job, verdicts = hostile_job(tmp_path)
    write_report(contents(gather_records([job]), verdicts), tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    found = Markup(text)
    assert not [tag for tag, _ in found.tags if tag in ("img", "iframe", "object", "embed")]
    assert not [name for _, attributes in found.tags for name in attributes if name.startswith("on")]
    assert "onerror" not in re.sub(r"\\u003cimg src=x onerror", "", text)
    data = json.loads(found.scripts[0])
    assert data["verdicts"][0]["sentence"] == hostile("sentence")
    assert data["verdicts"][0]["line"] == hostile("line")
    assert data["groups"]["rows"][0]["label"] == hostile("label")


def test_the_page_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    job_of_four(tmp_path)
    text = page(contents(records_of(tmp_path), []))
    assert not re.findall(r"(?:src|href)=\"(?!data:)", text)
    assert not re.findall(r"url\(|@import|fetch\(|XMLHttpRequest|innerHTML|insertAdjacent|document\.write|eval\(", text)
    assert [scheme for scheme in re.findall(r"https?://[^\s\"']+", text) if "www.w3.org/2000/svg" not in scheme] == []


def matrix(measure: dict[str, Any], rows: int) -> Any:
    whole = np.frombuffer(base64.b64decode(measure["data"]), "<u2").reshape(rows, -1)
    return np.where(whole == 65535, np.nan, whole * measure["unit"])


def test_the_heat_map_has_the_numbers(tmp_path: Path) -> None:
    job_of_four(tmp_path)
    data = json.loads(json.dumps(contents(records_of(tmp_path), [])))
    assert np.allclose(matrix(data["heat"]["measures"]["behind_first"], 4) / MS, [[0, 0], [1, 1], [32, 12], [3, 3]], atol=0.01)
    assert (data["heat"]["ranks_per_row"], data["heat"]["steps_per_column"]) == (1, 1)
    assert data["missing"] == ""


def large(ranks: int, steps: int) -> HostRings:
    """A pipeline of 8 stages. The ranks of a stage all-reduce in every step, and rank 700 is 5 ms late."""
    snapshots = {}
    width = ranks // 8
    for rank in range(ranks):
        stage, at = divmod(rank, width)
        groups = [
            group("data parallel", range(stage * width, (stage + 1) * width)),
            group("pipeline parallel", range(at, ranks, width)),
        ]
        rows = []
        for step in range(steps):
            begin = 1000.0 + 50 * step + (5 if rank == 700 else 0)
            if stage:
                rows.append(call(Op.RECEIVE, 1, step + 1, begin, begin + 4, peer=rank - width, step=step))
            if stage < 7:
                rows.append(call(Op.SEND, 1, step + 1, begin + 2, begin + 3, peer=rank + width, step=step))
            rows.append(call(Op.ALL_REDUCE, 0, step + 1, begin + 20, 1000.0 + 50 * step + 30, step=step))
            rows.append(moment(Op.STEP, 1000.0 + 50 * step, 1050.0 + 50 * step, step=step))
        rows.append(call(Op.SAVE_WRITE, 0, 0, 2000.0, 2010.0 + rank, step=steps, wait_ms=-1))
        snapshots[rank] = made_snapshot(rank, ranks, groups, rows)
    return HostRings(
        snapshots, dict.fromkeys(snapshots, State.RUNNING), (), int((1000 + 50 * steps) * MS), dict.fromkeys(snapshots, 0)
    )  # fmt: skip


def made_snapshot(rank: int, world: int, groups: list[dict[str, Any]], rows: list[dict[str, Any]]) -> RingContents:
    """Return the contents of a ring, without a file."""
    from unickpt.diagnosis.recording.records import RECORD
    from unickpt.diagnosis.recording.ring import Identity

    records = np.zeros(len(rows), RECORD)
    for name in ("call_ns", "wait_ns", "end_ns", "seq", "comm", "op", "flags", "phase", "peer", "step"):
        records[name] = [row[name] for row in rows]
    records["elements_in"] = records["elements_out"] = [row["elements"] for row in rows]
    records["begun"] = records["written"] = np.arange(1, len(rows) + 1)
    records["dtype"] = 2
    who = Identity(rank, world, 1000 + rank, f"host{rank // 8}", "large", 0, 0)
    return RingContents(who, groups, records, int(rows[-1]["step"]), int(Phase.FORWARD), 0, False)


def test_a_report_of_a_thousand_ranks_is_small(tmp_path: Path) -> None:
    job = large(1024, 200)
    view = gather_records([job])
    verdict = Verdict(Syndrome.NON_COMMUNICATION_SLOW, (700,), 0)
    verdicts = [(verdict, VerdictText("unickpt SLOW rank=700", "rank 700 is late"))]
    write_report(contents(view, verdicts), tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 2_200_000
    data = json.loads(Markup((tmp_path / "report.html").read_text()).scripts[0])
    assert data["heat"]["steps_per_column"] == 2
    late = matrix(data["heat"]["measures"]["behind_median"], 1024)
    assert np.argmax(late.sum(axis=1)) == 700
    assert len(data["timeline"]["ranks"]) <= 128
    assert 700 in data["timeline"]["ranks"]
    assert [(row["label"], row["groups"], row["members"]) for row in data["groups"]["rows"]] == [
        ("pipeline parallel", 128, 8), ("data parallel", 8, 128),
    ]  # fmt: skip


def history(host: str) -> dict[str, Any]:
    """Two rounds of 100 s: 72 s of training, then a cause of the same kind as the name of the host."""
    cause = hostile("cause") if host != "node1" else "host lost"
    rows = [
        HistoryEntry(Kind.BEGIN, 0.0),
        HistoryEntry(Kind.RUNNING, 5.0, (1, 1), (host, "b"), 4),
        HistoryEntry(Kind.STEP, 10.0, (1, 1), step=1, moved_s=10.0),
        HistoryEntry(Kind.STEP, 50.0, (1, 1), step=9, moved_s=50.0),
        HistoryEntry(Kind.ORDER, 55.0, (1, 1), number=1, action="admit", text=f"admit {host}"),
        HistoryEntry(Kind.ENDED, 60.0, (1, 1), cause=cause, text=f"{host} is gone"),
        HistoryEntry(Kind.RUNNING, 62.0, (1, 2), (host,), 2),
        HistoryEntry(Kind.STEP, 68.0, (1, 2), step=10, furthest=9, moved_s=68.0),
        HistoryEntry(Kind.CLOSED, 100.0, (1, 2), finished=True),
    ]
    return as_json(job_times(rows))


@needs_browser
@pytest.mark.parametrize("kind", ["plain", "hostile", "large", "rounds", "prices"])
def test_a_browser_draws_the_page_without_errors(tmp_path: Path, kind: str) -> None:
    """A hostile job has hostile rounds, too; with the rounds alone, nothing else is drawn."""
    job, verdicts = (
        hostile_job(tmp_path) if kind == "hostile" else (large(64, 8) if kind == "large" else job_of_four(tmp_path), [])
    )
    rounds = {"hostile": history(hostile("host")), "rounds": history("node1")}.get(kind)
    costs: dict[str, Any] = {"steps": [1, 3], "step_s": 0.02, "ideal_s": 0.01, "slowdown": 2.0, "error_s": 0.0, "left": 0}
    prices = {**costs, "rows": [["group", hostile("group"), 0.005]]} if kind == "prices" else None
    records = gather_records([] if kind == "rounds" else [job])
    write_report(contents(records, verdicts, rounds, prices=prices), tmp_path / "report.html")
    done = drawn(tmp_path / "report.html", tmp_path / "profile")
    assert "CONSOLE" not in done.stderr, done.stderr
    found = Markup(done.stdout)
    assert ("html", "yes") in [(tag, attributes.get("data-drawn")) for tag, attributes in found.tags], done.stdout[:2000]
    tags = [tag for tag, _ in found.tags]
    assert "img" not in tags
    assert tags.count("section") == {"hostile": 7, "large": 7, "rounds": 1, "prices": 7}.get(kind, 6)
    assert tags.count("canvas") >= (1 if kind == "rounds" else 3)
    if kind == "large":
        assert "<td>save: write</td>" in re.sub(r' class="[a-z]*"', "", done.stdout)
        assert "rank 63 (host host7, pp 7 dp 7)" in done.stdout
    if prices is not None:
        assert "slowdown 2.000" in done.stdout
        assert hostile("group") in html.unescape(done.stdout)
    if rounds is not None:
        assert "Effective training time 72.00%: " in done.stdout
        assert f"{hostile('cause') if kind == 'hostile' else 'host lost'}" in html.unescape(done.stdout)


@needs_browser
def test_no_report_scrolls_sideways_on_a_phone(tmp_path: Path) -> None:
    """Whatever the names and the number of ranks, wide parts scroll inside their box."""
    names, culprit = ["plain", "hostile", "large", "rounds"], Verdict(Syndrome.NON_COMMUNICATION_SLOW, (500,), 0)
    long = VerdictText("unickpt SLOW rank=500 host=" + "node" * 40, "rank 500 is late, " * 30)
    for name in names:
        folder = tmp_path / name
        folder.mkdir()
        made = {"hostile": lambda at: hostile_job(at)[0], "large": lambda _: large(512, 8)}.get(name, job_of_four)
        records = gather_records([] if name == "rounds" else [made(folder)])
        verdicts = [(culprit, long)] if name == "large" else []
        rounds = history(hostile("host")) if name in ("hostile", "rounds") else None
        write_report(contents(records, verdicts, rounds), tmp_path / f"{name}.html")
    assert wider_than_a_phone(tmp_path, [f"{name}.html" for name in names], tmp_path / "profile") == []
