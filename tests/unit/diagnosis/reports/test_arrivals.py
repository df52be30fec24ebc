"""Lateness, transfers, waits and the timeline of a job, computed from its records."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.support.report_records import MS, call, group, moment, ring
from tests.unit.diagnosis.reports.jobs import WORLD, job_of_four, pipeline, records_of
from unickpt.diagnosis.host.process_state import State
from unickpt.diagnosis.recording.records import Op, Phase
from unickpt.diagnosis.recording.ring import RingReader
from unickpt.diagnosis.recording.ring_folder import HostRings, read_folder
from unickpt.diagnosis.reports import metrics
from unickpt.diagnosis.reports.arrivals import arrivals, by_step
from unickpt.diagnosis.reports.html_report import contents, page
from unickpt.diagnosis.reports.job_records import coordinates, gather_records
from unickpt.diagnosis.reports.perfetto import write_trace
from unickpt.diagnosis.reports.timeline import KINDS, timeline
from unickpt.diagnosis.reports.transfer_delays import delay_matrix, transfer_times
from unickpt.diagnosis.reports.wait_table import rank_activities, wait_rows


def test_lateness_is_relative_to_the_first_and_to_the_median_member(tmp_path: Path) -> None:
    job_of_four(tmp_path)
    found = arrivals(records_of(tmp_path))
    rows = zip(found.rank.tolist(), found.seq.tolist(), found.behind_first_ns, found.behind_median_ns, strict=True)
    assert {rank: behind for rank, seq, *behind in rows if seq == 1} == {
        0: [0, -2 * MS], 1: [1 * MS, -1 * MS], 2: [32 * MS, 30 * MS], 3: [3 * MS, 1 * MS],
    }  # fmt: skip
    assert len(found.rank) == 16


def test_values_by_rank_and_step(tmp_path: Path) -> None:
    job_of_four(tmp_path)
    table = by_step(records_of(tmp_path))
    assert (table.ranks.tolist(), table.steps.tolist()) == ([0, 1, 2, 3], [0, 1])
    assert (table.values["behind_first"] / MS).tolist() == [[0, 0], [1, 1], [32, 12], [3, 3]]  # the second calls are not late
    # of 100 ms: 10 ms in the second call, and from the arrival to 60 ms in the first
    assert (table.values["waiting"] / MS).tolist() == [[50, 50], [49, 49], [18, 38], [47, 47]]
    assert (table.values["own"] / MS).tolist() == [[50, 50], [51, 51], [82, 62], [53, 53]]
    assert (table.values["data"][1] / MS).tolist() == [4, 0]
    assert (table.values["garbage"][1] / MS).tolist() == [2, 0]


def test_a_call_that_a_known_member_has_not_entered_is_ignored(tmp_path: Path) -> None:
    for rank in range(3):
        rows = [call(Op.BARRIER, 0, 1, 10.0 + rank, 20, step=5)]
        rows += [call(Op.BARRIER, 0, 2, 30.0 + 2 * rank, None, step=6)] if rank < 2 else []
        ring(tmp_path, rank, 4, [WORLD], rows)
    view = records_of(tmp_path)  # rank 3 has no ring, so only the other ranks count
    assert set(arrivals(view).seq.tolist()) == {1}
    table = by_step(view)
    assert table.steps.tolist() == [5]
    assert np.isnan(table.values["own"]).all()


def test_offsets_align_the_clocks_of_hosts(tmp_path: Path) -> None:
    """Host b's wall clock is 5 ms behind, so without the offset its rank appears early."""
    pair = group("data parallel", [0, 1])
    ring(tmp_path / "a", 0, 2, [pair], [call(Op.BARRIER, 0, 1, 10, 20)], host="a", wall_ms=1000)
    ring(tmp_path / "b", 1, 2, [pair], [call(Op.BARRIER, 0, 1, 510, 516)], host="b", wall_ms=500 - 5)
    jobs = [read_folder(tmp_path / name) for name in "ab"]
    assert arrivals(gather_records(jobs)).rank.tolist() == [1, 0]
    found = arrivals(gather_records(jobs, {"b": 7 * MS}))
    assert found.rank.tolist() == [0, 1]
    assert found.behind_first_ns.tolist() == [0, 2 * MS]


def test_coordinates_come_from_the_labels_of_groups(tmp_path: Path) -> None:
    groups = [
        group("tensor model parallel", [4, 5]), group("pipeline parallel", [1, 5]), group("data parallel", [5]),
        group("default_pg", range(8)),
    ]  # fmt: skip
    path = ring(tmp_path, 5, 8, groups, [])
    assert coordinates(RingReader(path).read()) == {"tp": 1, "pp": 1}
    assert records_of(tmp_path).ranks[5].place == "host a, tp 1 pp 1"


def test_invalid_records_are_ignored(tmp_path: Path) -> None:
    bad = {**call(Op.BARRIER, 0, 1, 10, 20), "op": 77}
    alien = call(Op.BARRIER, 9, 2, 30, 40)  # of a communicator that is not in the table
    entry = {"name": "g", "label": 5, "ranks": [[0, 1, 10**15]]}
    ring(tmp_path, 0, 2, [entry], [bad, alien])
    ring(tmp_path, 1, 2, [{"name": "h", "ranks": "nonsense"}, {"name": "i", "ranks": [[0, 0, 1 << 21]]}], [bad])
    view = records_of(tmp_path)
    assert [len(rank.records) for rank in view.ranks.values()] == [1, 0]
    assert not any(len(found.ranks) for found in view.groups)
    page(contents(view, []))
    write_trace(view, tmp_path / "trace.json")
    metrics.measurements([read_folder(tmp_path)], [])


def test_a_transfer_begins_when_both_ranks_have_entered(tmp_path: Path) -> None:
    made = transfer_times(pipeline(tmp_path))
    assert sorted(zip(made.size_bytes.tolist(), (made.took_ns / MS).tolist(), strict=True)) == [
        (1024, 1.0), (1024, 2.0), (1024, 3.0), (4096, 7.0),
    ]  # fmt: skip
    found = {(d.source, d.destination, d.size_class): (d.median_ns / MS, d.count) for d in delay_matrix(made)}
    assert found == {(0, 1, -1): (2.5, 4), (0, 1, 11): (2.0, 3), (0, 1, 13): (7.0, 1)}


def test_wait_rows_name_the_ranks_that_others_wait_for(tmp_path: Path) -> None:
    """In the tensor parallel pair (2, 3), rank 2 waits for 3. In data parallel, rank 0 waits for 2. Rank 1 is busy."""
    tensor, data = [group("tensor parallel", pair) for pair in ([0, 1], [2, 3])], group("data parallel", [0, 2])
    ring(tmp_path, 0, 4, [tensor[0], data], [call(Op.ALL_REDUCE, 1, 7, 50, None)])
    ring(tmp_path, 1, 4, [tensor[0]], [call(Op.ALL_REDUCE, 0, 1, 50, 60)])
    ring(tmp_path, 2, 4, [tensor[1], data], [call(Op.ALL_REDUCE, 1, 6, 10, 20), call(Op.ALL_REDUCE, 0, 4, 50, None)])
    ring(tmp_path, 3, 4, [tensor[1]], [call(Op.ALL_REDUCE, 0, 3, 10, 20)])
    job = read_folder(tmp_path)
    living = HostRings(job.ranks, dict.fromkeys(range(4), State.RUNNING), (), 100 * MS, job.offsets_ns)
    view = gather_records([living])
    calls = wait_rows(view)
    assert [(c.what, c.ranks, c.waited_for, c.since_ns) for c in calls] == [
        ("all_reduce #7", (0,), (2,), 50 * MS), ("all_reduce #4", (2,), (3,), 50 * MS),
    ]  # fmt: skip
    assert [other.rank for other in rank_activities(view, calls)] == [1, 3]
    waiting = contents(view, [])["waiting"]
    shown = waiting["rows"]  # the rank that others wait for first, and rank 1 in no row
    assert [(row["ranks"], row["kind"], row["for"], row["to"]) for row in shown] == [
        ("3", "held", "", []), ("0", "waits", "2", [2]), ("2", "waits", "3", [0]),
    ]  # fmt: skip
    assert waiting["plain"] == 1
    assert shown[1]["since"] == 50 * MS


def test_the_timeline_shows_the_longest_activity_of_each_part(tmp_path: Path) -> None:
    job_of_four(tmp_path)
    drawn = timeline(records_of(tmp_path), range(4), parts=100)  # 2 ms each
    assert drawn.end_ns - drawn.begin_ns == 200 * MS
    names = [[KINDS[kind] for kind in line] for line in drawn.kinds.tolist()]
    assert names[1][:5] == ["own time", "waits for data", "own time", "garbage collection", "own time"]
    assert [line.count("communication") for line in names] == [50, 48, 28, 46]  # half a part is own time
    assert [number for number, _ in drawn.steps] == [0, 1]


def test_the_timeline_shows_the_optimizer_between_its_calls(tmp_path: Path) -> None:
    rows = [call(Op.ALL_REDUCE, 0, n, 100.0 * n, 100.0 * n + 50, phase=Phase.OPTIMIZER) for n in (1, 2)]
    ring(tmp_path, 0, 1, [WORLD], [*rows, moment(Op.STEP, 50, 250, step=0)])
    names = [KINDS[kind] for kind in timeline(records_of(tmp_path), [0], parts=4).kinds[0].tolist()]
    assert names == ["own time", "communication", "optimizer", "communication"]
