"""History of a job: entries from states, files of several agents, and the times of rounds."""

from __future__ import annotations

import json
import random
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.steering.peers import Job, begin_round, hosts, until
from unickpt.base.options.steering import SteeringOptions
from unickpt.cli.main import main
from unickpt.steering.policy.decisions import Decisions
from unickpt.steering.publishing.chronicle import SUFFIX, Chronicle, HistoryFile, read_history
from unickpt.steering.publishing.observers import Observers
from unickpt.steering.state.history import HistoryEntry, Kind, entries, entry_of, line_of, merged
from unickpt.steering.state.limits import Limits
from unickpt.steering.state.membership import (
    Arrived,
    JobPhase,
    Joined,
    Left,
    Lost,
    Membership,
    Opened,
    Ordered,
    Park,
    Reached,
    Ready,
    Restart,
)
from unickpt.steering.state.timeline import START, JobTimes, as_json, job_times
from unickpt.steering.state.transitions import transition

BEGIN_S = 1_700_000_000.0


class Simulated:
    """A job of hosts ``h0``, ``h1``, ... with two workers each, and the entries that its leader makes."""

    def __init__(self, count: int) -> None:
        self.now_s = 0.0
        self.state = Membership(Limits(1, count, join_s=1e6, expiry_s=1e6, settle_s=0.0), "h0", gathering_s=-60.0)
        self.found = entries(None, self.state, 0.0, BEGIN_S)
        for number in range(count):
            self.apply(Joined(f"h{number}", "1", f"h{number}:1", 2))

    def apply(self, *events: object) -> None:
        """Apply events and make entries of what they change together."""
        before = self.state
        for event in events:
            self.state = transition(self.state, event, self.now_s)  # type: ignore[arg-type]
        self.found += entries(before, self.state, self.now_s, BEGIN_S + self.now_s)

    def start(self) -> None:
        """Let all hosts arrive at the next round, and connect two seconds later."""
        last = self.state.round.epoch if self.state.round is not None else (0, 0)
        for name in self.state.hosts:
            self.apply(Arrived(name, "1", last))
        assert self.state.round is not None
        epoch, members = self.state.round.epoch, self.state.round.members
        self.now_s += 2
        self.apply(Opened(*members[0], epoch, "s:1", "m:1"))
        for name, incarnation in members[1:]:
            self.apply(Ready(name, incarnation, epoch))
        assert self.state.phase is JobPhase.RUNNING

    def step(self, at_s: float, step: int) -> None:
        """Report a step."""
        self.now_s = at_s
        assert self.state.round is not None
        self.apply(Reached(self.state.round.epoch, step))
        self.found.append(HistoryEntry(Kind.STEP, BEGIN_S + at_s, self.state.round.epoch, step=step, moved_s=BEGIN_S + at_s))


def simulated() -> Simulated:
    """Three rounds: a host is parked after a stall of 30 s, workers crash, the program finishes."""
    job = Simulated(3)
    job.now_s = 10
    job.start()  # workers can start at 12
    job.step(20, 1)
    job.step(100, 81)
    job.now_s = 130
    job.apply(
        Ordered("o", "park h2 for 300 s: STOPPED_OUT: rank 5", (5,), "park", "STOPPED_OUT"),
        Park("h2", "STOPPED_OUT: rank 5", 1e6),
    )
    job.now_s = 133
    job.start()  # at 135
    job.step(145, 61)  # from the checkpoint of step 60
    job.step(165, 82)
    job.step(200, 117)
    job.now_s = 201
    epoch = job.state.round.epoch if job.state.round is not None else (0, 0)
    job.apply(Arrived("h1", "1", epoch))  # its workers have failed
    job.now_s = 202
    job.start()  # at 204
    job.step(210, 101)
    job.step(226, 118)
    job.step(300, 192)
    job.now_s = 302
    job.apply(Left("h0", "1", finished=True))
    return job


def check(times: JobTimes) -> None:
    assert (times.wall_s, times.finished, times.closed) == (302, True, "the program has finished on h0")
    assert [(each.epoch, each.world, each.step, each.cause) for each in times.rounds] == [
        ((1, 1), 6, 81, "STOPPED_OUT"), ((1, 2), 4, 117, "workers failed"), ((1, 3), 4, 192, "finished"),
    ]  # fmt: skip
    parts = [(each.cause, each.stalled_s, each.regrouping_s, each.starting_s, each.repeating_s) for each in times.downtimes]
    assert parts == [
        (START, 0, 12, 8, 0), ("STOPPED_OUT", 30, 5, 10, 20), ("workers failed", 1, 3, 6, 16),
    ]  # fmt: skip
    assert [each.training_s for each in times.rounds] == [80, 35, 76]
    assert times.training_s + sum(each.seconds for each in times.downtimes) == times.wall_s, "every second is accounted for"
    assert times.by_cause() == {"STOPPED_OUT": (1, 65), "workers failed": (1, 26), START: (1, 20)}
    assert [order.text for order in times.orders] == ["park h2 for 300 s: STOPPED_OUT: rank 5"]


def test_every_second_of_a_job_is_training_or_downtime_with_a_cause() -> None:
    check(job_times(merged([simulated().found])))


def test_the_history_survives_the_loss_of_a_host_and_events_count_once() -> None:
    """One agent has seen the first half, another the second half and everything twice in between."""
    found = simulated().found
    cut = len(found) // 2
    check(job_times(merged([found[:cut], found[cut - 5 :], [replace(entry, at_s=entry.at_s + 0.2) for entry in found[3:cut]]])))


def test_without_steps_only_the_time_between_rounds_is_known() -> None:
    found = [replace(entry, step=0, moved_s=0.0) for entry in simulated().found]
    times = job_times(merged([found]))
    assert not times.steps_known
    assert [(each.cause, each.seconds) for each in times.downtimes] == [(START, 12), ("STOPPED_OUT", 5), ("workers failed", 3)]


def test_rounds_that_get_nowhere_belong_to_the_first_cause() -> None:
    """After a lost host, a round ends before its first step and another one before it passes the furthest step."""
    job = Simulated(3)
    job.start()
    job.step(10, 5)
    job.now_s = 20
    job.apply(Lost("h2", "1"))
    job.now_s = 21
    job.start()
    job.now_s = 30
    assert job.state.round is not None
    job.apply(Restart(job.state.round.epoch, "PROGRAM"))
    job.start()
    job.step(35, 3)
    job.now_s = 40
    job.apply(Restart(job.state.round.epoch, "PROGRAM"))
    job.start()
    job.step(50, 6)
    job.step(60, 16)
    times = job_times(merged([job.found]))
    assert [(each.cause, each.seconds) for each in times.downtimes] == [(START, 10), ("host lost", 40)]
    assert (times.training_s, times.wall_s) == (10, 60)
    assert times.closed == ""


def test_empty_and_unfinished_histories_have_times() -> None:
    assert job_times([]).effective == 0
    job = Simulated(2)
    assert job_times(merged([job.found])).rounds == ()
    job.start()
    alive = HistoryEntry(Kind.ALIVE, BEGIN_S + 50, (1, 1))
    times = job_times(merged([[*job.found, alive]]))
    assert (times.wall_s, times.training_s, times.rounds[0].cause) == (50, 48, "")
    json.dumps(as_json(times))


# ---------------------------------------------------------------- files


def test_entries_are_lines_and_hostile_lines_are_refused() -> None:
    found = simulated().found
    assert [entry_of(line_of(entry)) for entry in found] == found
    source, refused = random.Random(1), 0
    for _ in range(2000):
        value = json.loads(line_of(source.choice(found)))
        value[source.choice([*value, "epoch", "hosts"])] = source.choice(
            [None, -2, "x", [], {}, [1, 2], [[]], float("nan"), float("inf"), 1e300, "x" * 5000, True, 1 << 70]
        )
        try:
            job_times(merged([[entry_of(json.dumps(value).encode())], found]))
        except ValueError:
            refused += 1
    assert 500 < refused < 2000
    for line in (b"", b"[]", b"1", b'{"kind": "x"}', b"[" * 100_000, b"\xff\n"):
        with pytest.raises(ValueError, match=r"entry|valid|decode|kind|Expecting"):
            entry_of(line)


def test_the_file_is_private_and_a_damaged_one_is_read_as_far_as_possible(tmp_path: Path) -> None:
    kept = HistoryFile("", tmp_path, "job/../42", "host/1", "abcd")
    for entry in simulated().found:
        kept.take(entry)
    kept.close()
    (path,) = kept.folder.iterdir()
    assert (stat.S_IMODE(kept.folder.stat().st_mode), stat.S_IMODE(path.stat().st_mode)) == (0o700, 0o600)
    assert path.name == f"host_1-abcd{SUFFIX}"
    with path.open("ab") as file:
        file.write(b'none\n{"kind": "clo')
    files, problems = read_history(kept.folder)
    assert len(files[0]) == len(simulated().found)
    assert problems == [f"{path}: 1 lines are not entries of a history"]
    check(job_times(merged(files)))
    (kept.folder / f"other{SUFFIX}").symlink_to(path)
    assert "link" in read_history(kept.folder)[1][-1]


def test_a_history_that_cannot_be_kept_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = HistoryFile(str(tmp_path / "history"), tmp_path, "job", "host", "abcd")
    (tmp_path / "history").rmdir()
    for entry in simulated().found:
        kept.take(entry)
    kept.close()
    assert caplog.text.count("keeping the history failed") == 1
    (tmp_path / "file").touch()
    observers = Observers(SteeringOptions(history=str(tmp_path / "file")), "job")
    observers.chronicle.changed(None, Membership(Limits(1, 1), "a"))
    observers.close()
    assert caplog.text.count("no history is kept") == 1


def test_a_chronicle_that_fails_never_raises(caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: HistoryEntry) -> None:
        raise ZeroDivisionError

    chronicle = Chronicle([broken])
    for _ in range(3):
        chronicle.changed(None, Membership(Limits(1, 1), "a"))
    assert caplog.text.count("the history has a gap") == 1


def test_all_agents_of_a_job_keep_the_same_history(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two agents over real connections, in one folder: each alone has the round, and the report shows it once."""
    job = Job(Limits(1, 4, join_s=1.0, expiry_s=60.0, settle_s=0.1), lambda: Decisions(SteeringOptions()))
    kept = [Observers(SteeringOptions(host=name, history=str(tmp_path / "history")), "job") for name in "ab"]
    try:
        a = job.start("a", kept[0].chronicle)
        until(lambda: a.leads)
        b = job.start("b", kept[1].chronicle)
        until(lambda: hosts(b) == {"a", "b"})
        begin_round(a, b)
        a.order([Ordered("x", "park b: asked", action="park", cause="PERSON"), Park("b", "asked")])
        until(lambda: (state := b.read()) and state.parked)
    finally:
        for peer in job.peers:
            peer.close()
        for each in kept:
            each.close()
    files, problems = read_history(tmp_path / "history")
    assert (len(files), problems) == (2, [])
    for found in [*files, merged(files)]:
        (round_,) = job_times(merged([found])).rounds
        assert (round_.epoch, round_.hosts, round_.cause) == ((1, 1), ("a", "b"), "PERSON")
    assert main(["report", str(tmp_path / "history"), "-o", str(tmp_path / "report.html")]) == 0
    assert "1 rounds (the job is not timed" in capsys.readouterr().out
    assert '"cause":"PERSON"' in (tmp_path / "report.html").read_text()
