"""Pictures of a job, by their numbers: made-up records with known lateness and transfers, hostile names, many ranks."""

from __future__ import annotations

import base64
import functools
import gzip
import html.parser
import json
import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.launch import REPO, environment, torchrun
from tests.views_records import MS, by_label, call, group, hostile, moment, ring
from unickpt.cli.main import main
from unickpt.diagnosis.verdicts import Syndrome, Verdict
from unickpt.errors import ConfigError
from unickpt.timing.folder import Job, read_folder
from unickpt.timing.processes import State
from unickpt.timing.records import Flag, Op, Phase
from unickpt.timing.ring import RingReader, Snapshot
from unickpt.views import metrics
from unickpt.views.gathering import View, coordinates, gathered
from unickpt.views.lateness import arrivals, by_step
from unickpt.views.report import contents, page, write_report
from unickpt.views.timeline import KINDS, timeline
from unickpt.views.trace import write_trace
from unickpt.views.transfers import delay_matrix, transfers
from unickpt.views.waiting import elsewhere, waiting_now

WORLD = group("data parallel", range(4))


def job_of_four(folder: Path, **more: Any) -> Job:
    """Two steps of 100 ms. In each all reduce twice; rank 2 comes 30 ms late to the first call, 10 ms in step 1.

    Rank 1 waits 4 ms for data and collects garbage for 2 ms in step 0.
    """
    for rank in range(4):
        rows, seq = [moment(Op.CHECKPOINT, 990, 995, step=0)], 0  # the first step is whole: something was before
        for step, late in ((0, 30.0), (1, 10.0)):
            begin = 1000.0 + 100 * step
            if rank == 1 and step == 0:
                rows += [moment(Op.DATA, begin + 1, begin + 5, step=0), moment(Op.GARBAGE, begin + 6, begin + 8, step=0)]
            came = begin + 20 + rank + (late if rank == 2 else 0)
            rows.append(call(Op.ALL_REDUCE, 0, seq + 1, came, begin + 60, step=step))
            rows.append(call(Op.ALL_REDUCE, 0, seq + 2, begin + 80, begin + 90, step=step, phase=Phase.OPTIMIZER))
            rows.append(moment(Op.STEP, begin, begin + 100, step=step))
            seq += 2
        ring(folder, rank, 4, [WORLD], rows, step=2, **more)
    return read_folder(folder)


def view_of(folder: Path, **offsets: int) -> View:
    return gathered([read_folder(folder)], offsets)


# ---------------------------------------------------------------- lateness


def test_lateness_is_after_the_first_and_after_the_median_member(tmp_path: Path) -> None:
    job_of_four(tmp_path)
    came = arrivals(view_of(tmp_path))
    rows = zip(came.rank.tolist(), came.seq.tolist(), came.behind_first_ns, came.behind_median_ns, strict=True)
    assert {rank: behind for rank, seq, *behind in rows if seq == 1} == {
        0: [0, -2 * MS], 1: [1 * MS, -1 * MS], 2: [32 * MS, 30 * MS], 3: [3 * MS, 1 * MS],
    }  # fmt: skip
    assert len(came.rank) == 16


def test_by_rank_and_step(tmp_path: Path) -> None:
    job_of_four(tmp_path)
    table = by_step(view_of(tmp_path))
    assert (table.ranks.tolist(), table.steps.tolist()) == ([0, 1, 2, 3], [0, 1])
    assert (table.values["behind_first"] / MS).tolist() == [[0, 0], [1, 1], [32, 12], [3, 3]]  # not the punctual second calls
    # of 100 ms: 10 for the second call, and for the first from its arrival to 60
    assert (table.values["waiting"] / MS).tolist() == [[50, 50], [49, 49], [18, 38], [47, 47]]
    assert (table.values["own"] / MS).tolist() == [[50, 50], [51, 51], [82, 62], [53, 53]]
    assert (table.values["data"][1] / MS).tolist() == [4, 0]
    assert (table.values["garbage"][1] / MS).tolist() == [2, 0]


def test_a_call_that_a_known_member_has_not_entered_tells_nothing(tmp_path: Path) -> None:
    for rank in range(3):
        rows = [call(Op.BARRIER, 0, 1, 10.0 + rank, 20, step=5)]
        rows += [call(Op.BARRIER, 0, 2, 30.0 + 2 * rank, None, step=6)] if rank < 2 else []
        ring(tmp_path, rank, 4, [WORLD], rows)
    view = view_of(tmp_path)  # rank 3 has no ring, so that what the others have entered counts
    assert set(arrivals(view).seq.tolist()) == {1}
    table = by_step(view)
    assert table.steps.tolist() == [5]
    assert np.isnan(table.values["own"]).all()


def test_hosts_are_put_on_one_clock(tmp_path: Path) -> None:
    """Host b's wall clock is 5 ms behind: without the offset its rank seems to be early."""
    pair = group("data parallel", [0, 1])
    ring(tmp_path / "a", 0, 2, [pair], [call(Op.BARRIER, 0, 1, 10, 20)], host="a", wall_ms=1000)
    ring(tmp_path / "b", 1, 2, [pair], [call(Op.BARRIER, 0, 1, 510, 516)], host="b", wall_ms=500 - 5)
    jobs = [read_folder(tmp_path / name) for name in "ab"]
    assert arrivals(gathered(jobs)).rank.tolist() == [1, 0]
    came = arrivals(gathered(jobs, {"b": 7 * MS}))
    assert came.rank.tolist() == [0, 1]
    assert came.behind_first_ns.tolist() == [0, 2 * MS]


def test_coordinates_are_those_of_the_groups_labels(tmp_path: Path) -> None:
    groups = [
        group("tensor model parallel", [4, 5]), group("pipeline parallel", [1, 5]), group("data parallel", [5]),
        group("default_pg", range(8)),
    ]  # fmt: skip
    path = ring(tmp_path, 5, 8, groups, [])
    assert coordinates(RingReader(path).snapshot()) == {"tp": 1, "pp": 1}
    assert view_of(tmp_path).ranks[5].place == "host a, tp 1 pp 1"


def test_records_that_make_no_sense_are_left_out(tmp_path: Path) -> None:
    bad = {**call(Op.BARRIER, 0, 1, 10, 20), "op": 77}
    alien = call(Op.BARRIER, 9, 2, 30, 40)  # of a communicator that is not in the table
    entry = {"name": "g", "label": 5, "ranks": [[0, 1, 10**15]]}
    ring(tmp_path, 0, 2, [entry], [bad, alien])
    ring(tmp_path, 1, 2, [{"name": "h", "ranks": "nonsense"}, {"name": "i", "ranks": [[0, 0, 1 << 21]]}], [bad])
    view = view_of(tmp_path)
    assert [len(rank.records) for rank in view.ranks.values()] == [1, 0]
    assert not any(len(found.ranks) for found in view.groups)
    page(contents(view, []))
    write_trace(view, tmp_path / "trace.json")
    metrics.measurements([read_folder(tmp_path)], [])


# ---------------------------------------------------------------- transfers


def pipeline(folder: Path, **more: Any) -> View:
    """Rank 0 sends 1 KiB to rank 1 three times, and 4 KiB once; each takes 1 to 3 ms and 7 ms from when both have entered."""
    stages = group("pipeline parallel", [0, 1])
    sends = [call(Op.SEND, 0, n, 100.0 * n, 100.0 * n + 9, peer=1, elements=256) for n in (1, 2, 3)]
    gets = [call(Op.RECEIVE, 0, n, 100.0 * n - 50, 100.0 * n + n, peer=0, elements=256) for n in (1, 2, 3)]
    sends.append(call(Op.SEND, 0, 4, 400, 410, peer=1, elements=1024))
    gets.append(call(Op.RECEIVE, 0, 4, 420, 427, peer=0, elements=1024))
    sends.append(call(Op.SEND, 0, 5, 500, 501, peer=1))  # its receive is not there
    gets.append(call(Op.RECEIVE, 0, 6, 600, None, peer=0))  # nor is this one's send
    ring(folder, 0, 2, [stages], sends, **more)
    ring(folder, 1, 2, [stages], gets, heartbeat_ms=650, **more)
    return view_of(folder)


def test_a_transfer_begins_when_both_have_entered(tmp_path: Path) -> None:
    made = transfers(pipeline(tmp_path))
    assert sorted(zip(made.size_bytes.tolist(), (made.took_ns / MS).tolist(), strict=True)) == [
        (1024, 1.0), (1024, 2.0), (1024, 3.0), (4096, 7.0),
    ]  # fmt: skip
    found = {(d.source, d.destination, d.size_class): (d.median_ns / MS, d.count) for d in delay_matrix(made)}
    assert found == {(0, 1, -1): (2.5, 4), (0, 1, 11): (2.0, 3), (0, 1, 13): (7.0, 1)}


# ---------------------------------------------------------------- waiting, timeline


def test_who_waits_for_whom(tmp_path: Path) -> None:
    """TP pairs (0, 1) and (2, 3): 2 waits for 3 there, and 0 for 2 in data parallel; 1 is busy beside."""
    tensor, data = [group("tensor parallel", pair) for pair in ([0, 1], [2, 3])], group("data parallel", [0, 2])
    ring(tmp_path, 0, 4, [tensor[0], data], [call(Op.ALL_REDUCE, 1, 7, 50, None)])
    ring(tmp_path, 1, 4, [tensor[0]], [call(Op.ALL_REDUCE, 0, 1, 50, 60)])
    ring(tmp_path, 2, 4, [tensor[1], data], [call(Op.ALL_REDUCE, 1, 6, 10, 20), call(Op.ALL_REDUCE, 0, 4, 50, None)])
    ring(tmp_path, 3, 4, [tensor[1]], [call(Op.ALL_REDUCE, 0, 3, 10, 20)])
    job = read_folder(tmp_path)
    living = Job(job.ranks, dict.fromkeys(range(4), State.RUNNING), (), 100 * MS, job.offsets_ns)
    view = gathered([living])
    calls = waiting_now(view)
    assert [(c.what, c.ranks, c.waited_for, c.since_ns) for c in calls] == [
        ("all_reduce #7", (0,), (2,), 50 * MS), ("all_reduce #4", (2,), (3,), 50 * MS),
    ]  # fmt: skip
    assert [other.rank for other in elsewhere(view, calls)] == [1, 3]
    shown = contents(view, [])["waiting"]["rows"]
    assert [(row["ranks"], row["kind"], row["for"], row["to"]) for row in shown] == [
        ("0", "waits", "2", [2]), ("1", "runs", "", []), ("2", "waits", "3", [3]), ("3", "held", "", []),
    ]  # fmt: skip
    assert shown[0]["since"] == 50 * MS


def test_the_timeline_shows_what_took_most_of_each_part(tmp_path: Path) -> None:
    job_of_four(tmp_path)
    drawn = timeline(view_of(tmp_path), range(4), parts=100)  # of 2 ms each
    assert drawn.end_ns - drawn.begin_ns == 200 * MS
    names = [[KINDS[kind] for kind in line] for line in drawn.kinds.tolist()]
    assert names[1][:5] == ["own time", "waits for data", "own time", "garbage collection", "own time"]
    assert [line.count("communication") for line in names] == [50, 48, 28, 46]  # half a part is own time
    assert [number for number, _ in drawn.steps] == [0, 1]


def test_the_optimizers_own_time_is_seen_between_its_calls(tmp_path: Path) -> None:
    rows = [call(Op.ALL_REDUCE, 0, n, 100.0 * n, 100.0 * n + 50, phase=Phase.OPTIMIZER) for n in (1, 2)]
    ring(tmp_path, 0, 1, [WORLD], [*rows, moment(Op.STEP, 50, 250, step=0)])
    names = [KINDS[kind] for kind in timeline(view_of(tmp_path), [0], parts=4).kinds[0].tolist()]
    assert names == ["own time", "communication", "optimizer", "communication"]


# ---------------------------------------------------------------- trace


def checked(path: Path) -> list[dict[str, Any]]:
    """The events of a trace that keeps to the format: complete events nested or apart, in order, flows that bind."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    threads: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    flows: dict[int, dict[str, dict[str, Any]]] = defaultdict(dict)
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    for event in events:
        assert event["ph"] in "MXsf"
        if event["ph"] != "M":
            assert event["ts"] >= 0
            threads[event["pid"], event["tid"]].append(event)
        if event["ph"] in "sf":
            flows[event["id"]][event["ph"]] = event
    assert set(threads) <= named
    for found in threads.values():
        assert [e["ts"] for e in found] == sorted(e["ts"] for e in found)
        open_until: list[float] = []
        for event in found:
            if event["ph"] == "X":
                assert event["dur"] >= 0
                while open_until and open_until[-1] <= event["ts"]:
                    open_until.pop()
                assert not open_until or event["ts"] + event["dur"] <= open_until[-1]
                open_until.append(event["ts"] + event["dur"])
            else:
                spans = [e for e in found if e["ph"] == "X" and e["ts"] <= event["ts"] <= e["ts"] + e["dur"]]
                assert spans, "a flow that binds to nothing"
    for ends in flows.values():
        assert set(ends) == {"s", "f"}
        assert ends["s"]["ts"] <= ends["f"]["ts"]
        assert ends["f"]["bp"] == "e"
    return events


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_has_every_call_and_arrows_from_send_to_receive(tmp_path: Path, name: str) -> None:
    view = pipeline(tmp_path)
    count = write_trace(view, tmp_path / name)
    events = checked(tmp_path / name)
    assert len(events) == count
    calls = [e for e in events if e["ph"] == "X" and e["cat"] == "call"]
    assert len(calls) == 10
    first = next(e for e in calls if e["pid"] == 1 and e["args"]["seq"] == 1)
    assert first["dur"] == 9000.0
    assert first["args"] == {
        "op": "send", "seq": 1, "step": 0, "bytes_in": 1024, "bytes_out": 1024, "dtype": "F32", "peer": 1, "phase": "forward",
        "waited_ms": 9.0, "group": "pipeline parallel", "communicator": "pipeline parallel-[0, 1]", "ranks": 2,
    }  # fmt: skip
    (going,) = [e for e in calls if "end" in e["args"]]
    assert (going["pid"], going["dur"], going["args"]["end"]) == (2, 50_000.0, "has not ended when the job was read")
    assert len([e for e in events if e["ph"] == "s"]) == 4
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == [
        "rank 0 (host a, pp 0)", "rank 1 (host a, pp 1)",
    ]  # fmt: skip


def test_calls_that_overlap_are_on_threads_of_their_own(tmp_path: Path) -> None:
    asynchronous = [call(Op.ALL_GATHER, 0, n, 10.0 * n, 10.0 * n + 25, wait_ms=-1, flags=int(Flag.ASYNC)) for n in range(1, 9)]
    ring(tmp_path, 0, 2, [group("data parallel", [0, 1])], asynchronous)
    write_trace(view_of(tmp_path), tmp_path / "trace.json")
    assert len({e["tid"] for e in checked(tmp_path / "trace.json") if e.get("cat") == "call"}) == 3


def test_steps_moments_and_phases_are_in_the_trace(tmp_path: Path) -> None:
    job_of_four(tmp_path)
    write_trace(view_of(tmp_path), tmp_path / "trace.json")
    events = [e for e in checked(tmp_path / "trace.json") if e["ph"] == "X" and e["pid"] == 2]
    assert [e["name"] for e in events if e["cat"] == "moment"] == ["step 0", "step 1", "checkpoint", "data", "garbage"]
    assert [e["name"] for e in events if e["cat"] == "phase"] == ["forward", "optimizer"] * 2


def test_steps_that_follow_each_other_do_not_overlap_by_rounding(tmp_path: Path) -> None:
    """Readers add beginnings and durations as floats: speedscope leaves steps open that end 1e-10 us after the next began."""
    rows = [moment(Op.STEP, 1000 + 7.000333 * n, 1000 + 7.000333 * (n + 1), step=n) for n in range(50)]
    ring(tmp_path, 0, 1, [WORLD], rows)
    write_trace(view_of(tmp_path), tmp_path / "trace.json")
    assert len([e for e in checked(tmp_path / "trace.json") if e["ph"] == "X"]) == 50


def test_a_call_on_a_device_without_an_end_does_not_go_on_for_ever(tmp_path: Path) -> None:
    rows = [call(Op.ALL_REDUCE, 0, 1, 10, None, wait_ms=-1)]
    ring(tmp_path, 0, 2, [group("data parallel", [0, 1], backend="nccl")], rows, heartbeat_ms=900)
    write_trace(view_of(tmp_path), tmp_path / "trace.json")
    (event,) = [e for e in checked(tmp_path / "trace.json") if e["ph"] == "X" and e["cat"] == "call"]
    assert (event["dur"], event["args"]["end"]) == (0, "not noted")


# ---------------------------------------------------------------- report


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


def hostile_job(folder: Path) -> tuple[Job, list[tuple[Verdict, str]]]:
    entry = group(hostile("label"), range(2), name=hostile("name"), backend=hostile("backend"))
    for rank in range(2):
        rows = [call(Op.ALL_REDUCE, 0, n, 10.0 * n + rank, 10.0 * n + 5, step=n) for n in range(1, 5)]
        ring(folder, rank, 2, [entry], rows, host=hostile("host"), job=hostile("job"), step=4)
    (folder / f"{hostile('file').replace('/', '_')}.ring").write_bytes(b"none")
    verdict = Verdict(Syndrome.NON_COMMUNICATION_HANG, (1,), 0, evidence=(hostile("evidence"),))
    return read_folder(folder), [(verdict, hostile("told"))]


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    job, verdicts = hostile_job(tmp_path)
    write_report(gathered([job]), verdicts, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    found = Markup(text)
    assert not [tag for tag, _ in found.tags if tag in ("img", "iframe", "object", "embed")]
    assert not [name for _, attributes in found.tags for name in attributes if name.startswith("on")]
    assert "onerror" not in re.sub(r"\\u003cimg src=x onerror", "", text)
    data = json.loads(found.scripts[0])
    assert data["verdicts"][0]["told"] == hostile("told")
    assert data["groups"]["rows"][0]["label"] == hostile("label")


def test_the_page_asks_for_nothing_else(tmp_path: Path) -> None:
    job_of_four(tmp_path)
    text = page(contents(view_of(tmp_path), []))
    assert not re.findall(r"(?:src|href)=\"(?!data:)", text)
    assert not re.findall(r"url\(|@import|fetch\(|XMLHttpRequest|innerHTML|insertAdjacent|document\.write|eval\(", text)
    assert [scheme for scheme in re.findall(r"https?://[^\s\"']+", text) if "www.w3.org/2000/svg" not in scheme] == []


def matrix(measure: dict[str, Any], rows: int) -> Any:
    whole = np.frombuffer(base64.b64decode(measure["data"]), "<u2").reshape(rows, -1)
    return np.where(whole == 65535, np.nan, whole * measure["unit"])


def test_the_heat_map_has_the_numbers(tmp_path: Path) -> None:
    job_of_four(tmp_path)
    data = json.loads(json.dumps(contents(view_of(tmp_path), [])))
    assert np.allclose(matrix(data["heat"]["measures"]["behind_first"], 4) / MS, [[0, 0], [1, 1], [32, 12], [3, 3]], atol=0.01)
    assert (data["heat"]["ranks_per_row"], data["heat"]["steps_per_column"]) == (1, 1)
    assert data["missing"] == ""


def large(ranks: int, steps: int) -> Job:
    """A pipeline of 8 stages, whose ranks of one stage reduce in every step; rank 700 comes 5 ms late."""
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
        snapshots[rank] = made_snapshot(rank, ranks, groups, rows)
    return Job(
        snapshots, dict.fromkeys(snapshots, State.RUNNING), (), int((1000 + 50 * steps) * MS), dict.fromkeys(snapshots, 0)
    )  # fmt: skip


def made_snapshot(rank: int, world: int, groups: list[dict[str, Any]], rows: list[dict[str, Any]]) -> Snapshot:
    """As a ring would be read, without its file."""
    from unickpt.timing.records import RECORD
    from unickpt.timing.ring import Identity

    records = np.zeros(len(rows), RECORD)
    for name in ("call_ns", "wait_ns", "end_ns", "seq", "comm", "op", "flags", "phase", "peer", "step"):
        records[name] = [row[name] for row in rows]
    records["elements_in"] = records["elements_out"] = [row["elements"] for row in rows]
    records["begun"] = records["written"] = np.arange(1, len(rows) + 1)
    records["dtype"] = 2
    who = Identity(rank, world, 1000 + rank, f"host{rank // 8}", "large", 0, 0)
    return Snapshot(who, groups, records, int(rows[-1]["step"]), int(Phase.FORWARD), 0, False)


def test_a_thousand_ranks_stay_small_and_quick(tmp_path: Path) -> None:
    job = large(1024, 200)
    begin = time.monotonic()
    view = gathered([job])
    verdict = Verdict(Syndrome.NON_COMMUNICATION_SLOW, (700,), 0)
    write_report(view, [(verdict, "rank 700 is late")], tmp_path / "report.html")
    assert time.monotonic() - begin < 60
    assert (tmp_path / "report.html").stat().st_size < 5_000_000
    data = json.loads(Markup((tmp_path / "report.html").read_text()).scripts[0])
    assert data["heat"]["steps_per_column"] == 2
    late = matrix(data["heat"]["measures"]["behind_median"], 1024)
    assert np.argmax(late.sum(axis=1)) == 700
    assert len(data["timeline"]["ranks"]) <= 128
    assert 700 in data["timeline"]["ranks"]
    assert [(row["label"], row["groups"], row["members"]) for row in data["groups"]["rows"]] == [
        ("pipeline parallel", 128, 8), ("data parallel", 8, 128),
    ]  # fmt: skip


# ---------------------------------------------------------------- a real browser


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome is installed to open the page with")
@pytest.mark.parametrize("kind", ["plain", "hostile", "large"])
def test_a_browser_draws_it_without_complaint(tmp_path: Path, kind: str) -> None:
    job, verdicts = (
        hostile_job(tmp_path) if kind == "hostile" else (large(64, 8) if kind == "large" else job_of_four(tmp_path), [])
    )
    write_report(gathered([job]), verdicts, tmp_path / "report.html")
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0", "--dump-dom",
        f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=3000", (tmp_path / "report.html").as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr, done.stderr
    found = Markup(done.stdout)
    assert ("html", "yes") in [(tag, attributes.get("data-drawn")) for tag, attributes in found.tags], done.stdout[:2000]
    tags = [tag for tag, _ in found.tags]
    assert "img" not in tags
    assert tags.count("section") == 6
    assert tags.count("canvas") >= 3


# ---------------------------------------------------------------- a real job


def test_pictures_of_a_real_job(tmp_path: Path) -> None:
    """Two pipeline stages of two ranks: what is sent where, who waits for data, who computes longer."""
    torchrun(4, "tests.timing.pictures_worker", str(tmp_path), "8", "0", env={"GLOO_SOCKET_IFNAME": "lo"})
    view = view_of(tmp_path)
    assert [rank.place.split(", ")[1] for rank in view.ranks.values()] == ["pp 0 dp 0", "pp 0 dp 1", "pp 1 dp 0", "pp 1 dp 1"]
    assert {(d.source, d.destination) for d in delay_matrix(transfers(view))} == {(0, 2), (2, 0), (1, 3), (3, 1)}
    table = by_step(view)
    data = np.nanmedian(table.values["data"], axis=1) / MS
    assert data[1] >= 4 * 6 - 1  # micro-batches of 6 ms each
    assert data[3] >= 0
    own = np.nanmedian(table.values["own"], axis=1) / MS
    assert own[3] - own[2] > 3 * 4 * 4 / 2  # sleeps of 4 ms in 3 layers of 4 micro-batches
    write_trace(view, tmp_path / "trace.json.gz")
    events = checked(tmp_path / "trace.json.gz")
    assert len([e for e in events if e["ph"] == "f"]) == len(transfers(view).source)
    shown = contents(view, [])
    assert [row["what"].split(",")[0] for row in shown["waiting"]["rows"]] == ["ended in order"] * 4
    page(shown)


# ---------------------------------------------------------------- metrics


def test_measurements_are_those_of_the_records(tmp_path: Path) -> None:
    job = job_of_four(tmp_path)
    verdict = Verdict(Syndrome.COMMUNICATION_HANG, (1, 2), 0)
    found = metrics.measurements([job], [verdict])
    late = [m.value for m in found if m.name == "unickpt_rank_lateness_seconds" and m.labels == {"rank": "2"}]
    assert late == [0.032, 0.012]
    assert {m.name for m in found} == set(metrics.HELP) - {"unickpt_link_seconds_per_byte"}  # of running jobs alone


def test_prometheus_reads_the_exposition(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="the extra 'metrics' is not installed")
    from prometheus_client.parser import text_string_to_metric_families

    job = job_of_four(tmp_path, host=hostile("host"))
    text = metrics.exposition(metrics.measurements([job], [Verdict(Syndrome.COMMUNICATION_HANG, (1, 2), 0)]))
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert by_label(families["unickpt_rank_lateness_seconds"].samples, rank="2") == [0.012]  # of the newest step
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
    with pytest.raises(ConfigError, match=package.replace("_", "-") + r'.*pip install "unickpt\[metrics\]"'):
        export(measured)


# ---------------------------------------------------------------- command line


def commands(folder: Path) -> Iterator[tuple[list[str], Path]]:
    yield ["report", str(folder), "-o", str(folder / "r.html")], folder / "r.html"
    yield ["trace", str(folder), "-o", str(folder / "t.json.gz")], folder / "t.json.gz"


def test_the_commands_write_what_they_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job_of_four(tmp_path)
    for command, output in commands(tmp_path):
        assert main(command) == 0
        assert str(output) in capsys.readouterr().out
        assert output.stat().st_size > 500


def test_the_commands_put_hosts_on_one_clock(tmp_path: Path) -> None:
    """Host b's wall clock is 3 s ahead; no member of a barrier ends before the last has come, which tells by how much."""
    pair = group("data parallel", [0, 1])
    for rank, host, wall_ms in ((0, "a", 1000.0), (1, "b", 4000.0)):
        rows = [call(Op.BARRIER, 0, n, 100.0 * n + rank, 100.0 * n + 5) for n in range(1, 5)]
        ring(tmp_path / host, rank, 2, [pair], rows, host=host, wall_ms=wall_ms)
    assert main(["trace", str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(tmp_path / "t.json")]) == 0
    calls = [e for e in checked(tmp_path / "t.json") if e.get("cat") == "call"]
    begins = {(e["pid"], e["args"]["seq"]): e["ts"] for e in calls}
    assert all(abs(begins[1, n] - begins[2, n]) < 10_000 for n in range(1, 5))


def test_what_cannot_be_read_or_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job_of_four(tmp_path)
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert main(["trace", str(tmp_path), "-o", str(tmp_path / "no" / "t.json")]) == 2
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "no" / "r.html")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("unickpt: ") for line in lines)


def test_pictures_need_no_torch() -> None:
    modules = ["unickpt.views." + path.stem for path in (REPO / "unickpt" / "views").glob("[a-z]*.py")]
    modules += [f"unickpt.cli.{name}_command" for name in ("report", "trace", "metrics")]
    code = f"import importlib, sys; [importlib.import_module(n) for n in {modules!r}]; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), cwd=REPO)
    assert done.stdout.strip() == "False", done.stderr
