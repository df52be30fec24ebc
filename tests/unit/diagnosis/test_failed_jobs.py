"""The end of a job: the first cause, its consequences, and what helps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.unit.diagnosis.agent.made import S, made_up
from unickpt.base.failure_kinds import FailureKind, Remedy
from unickpt.base.round_folder import Failed
from unickpt.diagnosis.detectors.examine import examine
from unickpt.diagnosis.detectors.failed_jobs import failed_job
from unickpt.diagnosis.detectors.hints import Helps
from unickpt.diagnosis.detectors.observations import EndsAlike
from unickpt.diagnosis.detectors.verdicts import Syndrome, Verdict
from unickpt.diagnosis.host.process_exits import ExitStatus
from unickpt.diagnosis.host.process_state import State
from unickpt.diagnosis.reports.verdict_line import parse_line
from unickpt.diagnosis.reports.verdict_text import render
from unickpt.diagnosis.snapshot.codec import decode_snapshot, encode_snapshot
from unickpt.diagnosis.snapshot.snapshot import RankSnapshot, Snapshot

TERM, KILL, ABORT, ONE, SOUND = ExitStatus(15), ExitStatus(9), ExitStatus(6), ExitStatus(0, 1), ExitStatus()
BUG = Failed("KeyError a.py:40", "KeyError: 'x' (a.py:40)", True, FailureKind.PROGRAM, Remedy.STOP, "KeyError", 0)
LOST = Failed("RuntimeError x.py:1", "RuntimeError: Connection closed by peer (x.py:1)", True, FailureKind.CONNECTION,
              Remedy.RESTART, "RuntimeError", 0)  # fmt: skip


def job(ends: Sequence[tuple[float, ExitStatus | None, Failed | None]], **more: Any) -> Snapshot:
    """A job whose ranks have ended: at a second, with a status, by an exception."""
    ranks = {
        rank: RankSnapshot(
            100 + rank, f"node{rank // 2}", State.DEAD, True, 20, 0, heard_ns=int(at_s * S), exit=status,
            failure=failure, raised=failure is not None, **more,
        )
        for rank, (at_s, status, failure) in enumerate(ends)
    }  # fmt: skip
    seen = made_up([], 30 * S)
    return Snapshot(seen.now_ns, ranks, seen.groups, seen.rows, seen.steps, seen.calls)


def of(snapshot: Snapshot) -> Verdict:
    (verdict,) = failed_job(snapshot)
    return verdict


def test_the_first_cause_is_named_and_the_rest_follows() -> None:
    seen = job([(9.0, ONE, LOST), (9.2, ONE, BUG), (9.0, ONE, LOST), (9.3, TERM, None)])
    verdict = of(seen)
    assert (verdict.syndrome, verdict.ranks, verdict.victims) == (Syndrome.FAILED, (1,), 0)
    assert verdict.next == Helps(1, "node0", FailureKind.PROGRAM, Remedy.STOP)
    cause, lost, asked = [item for item in verdict.evidence if isinstance(item, EndsAlike)]
    assert (cause.ranks, lost.ranks, asked.ranks, asked.asked) == ((1,), (0, 2), (3,), True)
    (examined,) = examine(seen).end
    text = render(examined, seen)
    line = parse_line(text.line)
    assert (line.ranks.ranks, line.host, line.error, line.helps) == ((1,), "node0", "KeyError", "stop")
    assert "first rank 1 on node0" in text.sentence
    assert "KeyError: 'x' (a.py:40) (exit code 1); as a consequence ranks 0, 2: RuntimeError: Connection" in text.sentence
    assert "rank 3: SIGTERM, asked to end by the launcher" in text.sentence
    assert text.next == "rank 1 on node0: mend the program; a restart meets the same error"


def test_ranks_with_the_same_error_are_one_cause() -> None:
    verdict = of(job([(9.0, ONE, BUG), (9.1, ONE, BUG), (9.1, TERM, None), (9.2, ONE, BUG)]))
    assert verdict.ranks == (0, 1, 3)
    assert len(verdict.evidence) == 2


@pytest.mark.parametrize(
    ("first", "remedy"), [((8.0, KILL, None), Remedy.RESTART), ((8.0, ExitStatus(11), None), Remedy.RESTART),
                          ((8.0, ExitStatus(0, 3), None), Remedy.RESTART)],
    ids=["SIGKILL", "SIGSEGV", "exit code 3"],
)  # fmt: skip
def test_a_process_without_an_exception_is_a_cause(first: Any, remedy: Remedy) -> None:
    verdict = of(job([(8.1, ABORT, None), first, (8.1, ONE, LOST), (8.2, TERM, None)]))
    assert verdict.ranks == (1,)
    assert isinstance(verdict.next, Helps)
    assert verdict.next.remedy is remedy


def test_a_rank_that_has_ended_in_order_before_changes_nothing() -> None:
    assert of(job([(7.0, SOUND, None), (8.0, KILL, None), (8.2, TERM, None)])).ranks == (1,)


def test_without_a_cause_no_rank_is_at_fault() -> None:
    verdict = of(job([(8.0, ABORT, None), (8.0, ONE, LOST), (8.2, TERM, None), (8.1, ABORT, None)]))
    assert (verdict.ranks, verdict.next) == ((), None)
    assert "no rank shows a cause of its own" in render(verdict, job([])).sentence


@pytest.mark.parametrize(
    "ends",
    [
        [(8.0, SOUND, None)] * 4,
        [(8.0, TERM, None)] * 4,
        [(8.0, TERM, None), (8.0, TERM, None), (38.0, KILL, None), (38.0, KILL, None)],
        [(8.0, KILL, None), (8.0, KILL, None), (8.01, KILL, None)],
        [(8.0, None, None)] * 4,
        [(8.0, SOUND, None)] * 3 + [(8.0, None, None)],
    ],
    ids=["in order", "asked", "asked, and killed later", "killed", "unknown", "in order and unknown"],
)  # fmt: skip
def test_a_job_that_has_ended_in_order_or_was_ended_has_not_failed(ends: Any) -> None:
    assert failed_job(job(ends)) == []


@pytest.mark.parametrize(("failure", "says"), [(BUG, True), (LOST, False)])
def test_a_job_that_runs_has_not_failed_unless_its_launcher_ends_it(failure: Failed, says: bool) -> None:
    seen = job([(8.0, ONE, failure), (8.0, TERM, None)])
    ranks = {**seen.ranks, 2: RankSnapshot(7, "node1", State.RUNNING, False, 20, 0)}
    seen = Snapshot(seen.now_ns, ranks, seen.groups, seen.rows, seen.steps, seen.calls)
    assert failed_job(seen) == []
    assert [each.ranks for each in failed_job(seen, ends=True)] == [(0,)] * says


def test_exceptions_travel_between_hosts() -> None:
    seen = job([(8.0, ONE, BUG), (8.0, TERM, None)])
    assert decode_snapshot(encode_snapshot(seen)).ranks == seen.ranks
