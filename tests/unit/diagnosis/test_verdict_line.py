"""The machine-readable line of a verdict: what it says, and that it can be parsed back, whatever names hold."""

from __future__ import annotations

import calendar
import dataclasses
import time
from collections.abc import Iterator

import numpy as np
import pytest

from unickpt.base.errors import FormatError
from unickpt.base.logs import printable
from unickpt.diagnosis import parse_line
from unickpt.diagnosis.detectors.verdicts import Cause, Syndrome, Verdict
from unickpt.diagnosis.host.process_state import State
from unickpt.diagnosis.host.stack_dumps import Frame
from unickpt.diagnosis.recording.rank_ranges import MOST_RANKS
from unickpt.diagnosis.recording.records import Op
from unickpt.diagnosis.reports.verdict_line import RankList, VerdictLine
from unickpt.diagnosis.reports.verdict_text import counted
from unickpt.diagnosis.reports.wording import clock_time
from unickpt.diagnosis.snapshot.snapshot import GroupInfo

HANG = Verdict(
    Syndrome.NON_COMMUNICATION_HANG, (2,), calendar.timegm((2026, 11, 22, 14, 3, 7)) * 10**9,
    GroupInfo("7", "data parallel", ((0, 1, 4),)), Op.ALL_REDUCE, 118, 4096, victims=3, cause=Cause.COMPUTE,
    state=State.RUNNING, at=Frame("lookup", "data/vocabulary.py", 33), hosts=("node02",),
)  # fmt: skip
LINE = (
    "unickpt HANG rank=2 host=node02 op=all_reduce seq=118 group=dp[0-3] blocked=3 since=2026-11-22T14:03:07+00:00 "
    "state=running at=data/vocabulary.py:33"
)
NAMES = [
    "two words", 'a "quote" \\ and more', "\x1b[2J\nunickpt HANG rank=0", "a=b", "größer", "[0-3]", "x] rank=5", "\ud800",
    "a" * 4000,
]  # fmt: skip


def zone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("TZ", name)
    time.tzset()


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        zone(patch, "UTC")
        yield
    time.tzset()


def test_the_time_has_its_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    zone(monkeypatch, "CET-1")
    assert VerdictLine.of(HANG).since == "2026-11-22T15:03:07+01:00"
    assert clock_time(HANG.since_ns) == "15:03:07+01:00"


def test_hosts_that_do_not_fit_are_counted() -> None:
    verdict = dataclasses.replace(HANG, hosts=tuple(f"n{number}" for number in range(11)))
    assert parse_line(str(VerdictLine.of(verdict))).host == "n0,n1,n2,n3,n4,n5,n6,n7,+3"


def test_the_line_of_a_hang() -> None:
    assert str(VerdictLine.of(HANG)) == LINE
    line = parse_line(f"[rank0]: {LINE}\n")
    assert line == VerdictLine.of(HANG)
    assert (line.group, line.members.ranks, line.link) == ("dp", (0, 1, 2, 3), None)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("syndrome", Syndrome)
def test_any_name_survives_the_line(syndrome: Syndrome, name: str) -> None:
    group = GroupInfo(name, name, ((0, 2, 3), (9, 1, 1)))
    verdict = dataclasses.replace(
        HANG, syndrome=syndrome, group=group, link=(5, 1), at=Frame(name, name, 1), state=State.STUCK, cause=Cause.GARBAGE,
        hosts=(name,),
    )  # fmt: skip
    text = str(VerdictLine.of(verdict))
    assert text == printable(text)
    assert len(text) < 4096
    line = parse_line(text)
    assert line == VerdictLine.of(verdict)
    assert (line.group, line.members.ranks, line.link) == (name[:96], (0, 2, 4, 9), (5, 1))
    assert (line.state, line.cause) == ("in uninterruptible sleep", "garbage collection")


@pytest.mark.parametrize("seed", range(20))
def test_any_ranks_survive_the_line(seed: int) -> None:
    chance = np.random.default_rng(seed)
    size = int(chance.integers(1, 3000))
    ranks = sorted(chance.choice(MOST_RANKS, size, replace=False).tolist())
    verdict = dataclasses.replace(HANG, ranks=tuple(ranks))
    text = str(VerdictLine.of(verdict))
    line = parse_line(text)
    assert len(text) < 4096
    assert list(line.ranks.ranks) == ranks[: len(line.ranks.ranks)]
    assert len(line.ranks.ranks) + line.ranks.more == size


@pytest.mark.parametrize(
    ("ranks", "text"),
    [((3,), "3"), ((0, 1), "0,1"), ((0, 1, 2), "0-2"), ((0, 8, 16), "0-16:8"), ((0, 1, 2, 8), "0-2,8"), ((5, 9), "5,9")],
)
def test_ranks_are_written_as_ranges(ranks: tuple[int, ...], text: str) -> None:
    assert str(RankList.of(ranks)) == text
    assert RankList.parse(text).ranks == ranks


@pytest.mark.parametrize(
    "text",
    [
        "", "unickpt", "unickpt: rank 2 has not entered", "unickpt LOST rank=2", "unickpt HANG rank", "unickpt HANG rank=two",
        "unickpt HANG rank=2 op=a b", 'unickpt HANG group="dp', "unickpt HANG seq=x", "unickpt HANG link=3",
        "unickpt HANG rank=0-999999999", "unickpt HANG rank=5-2", "unickpt HANG rank=0-9:0",
        "unickpt: the unickpt HANG rank=0 group", 'unickpt HANG group="\\x"', f"unickpt HANG seq={'9' * 5000}",
    ],
)  # fmt: skip
def test_other_lines_are_refused(text: str) -> None:
    with pytest.raises(FormatError):
        parse_line(text)


def test_unknown_keys_are_ignored() -> None:
    assert parse_line(f"{LINE} weather=fine").ranks == RankList((2,))


def test_ranks_are_counted() -> None:
    assert counted([3]) == "rank 3"
    assert counted([3], "wait") == "rank 3 waits"
    assert counted([3, 1], "wait") == "ranks 1, 3 wait"
    assert counted(list(range(10))) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
