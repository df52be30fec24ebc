"""What a host knows of its ranks, small enough to be sent once a second, and what a job is when these are put together.

A rank's ring holds tens of thousands of records. Of these a view has where the rank is in every communicator, its newest
steps, and its newest calls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from unickpt.diagnosis.steps import STEP, Steps, steps_of
from unickpt.diagnosis.summaries import SUMMARY, Summaries, numbered, summary
from unickpt.diagnosis.transport import WINDOW, Windows
from unickpt.timing.endings import Ending
from unickpt.timing.folder import Job
from unickpt.timing.processes import State
from unickpt.timing.ranks import MOST_MEMBERS, Progressions, believable, coordinates, count_of, expanded, members
from unickpt.timing.records import Op, Records, bytes_in, bytes_out
from unickpt.timing.ring import Snapshot

CALL = np.dtype(
    [
        ("rank", "i4"),
        ("comm", "i4"),  # position in the view's groups
        ("source", "i4"),  # of point-to-point calls; -1 for collectives
        ("destination", "i4"),
        ("seq", "u8"),
        ("op", "u1"),
        ("dtype", "u1"),
        ("shape", "u4"),  # hash of it
        ("bytes", "i8"),  # the larger of what the rank gives and gets
        ("call_ns", "i8"),
        ("wait_ns", "i8"),  # since when somebody waits for it; 0 if nobody has
        ("end_ns", "i8"),  # 0 until it has ended
    ]
)
Calls = npt.NDArray[Any]  # of dtype ``CALL``
_LABEL, _NAME = 128, 256  # characters of what a ring says a group is called
WARM_UP = 5  # steps that allocate and compile
NEWEST_CALLS, NEWEST_STEPS = 256, 32  # of a rank


@dataclass(frozen=True, slots=True)
class Group:
    """A communicator of the job.

    Attributes:
        name: unique in the job.
        label: what the framework calls groups of its kind.
        ranks: as ``progressions`` makes them short.
        on_device: its calls end on a device, and only their beginnings are known.
    """

    name: str
    label: str
    ranks: Progressions
    on_device: bool = False

    def members(self) -> npt.NDArray[np.int64]:
        """int64: global ranks, in the order of the group."""
        return expanded(self.ranks)

    @property
    def count(self) -> int:
        """How many members it has."""
        return count_of(self.ranks)

    def told(self) -> str:
        """For a person."""
        if self.count > 2:
            first, step, count = self.ranks[-1]
            of = f"{self.ranks[0][0]} to {first + step * (count - 1)}"
        else:
            of = ", ".join(map(str, members(self.ranks)))
        return f"the {self.label or repr(self.name)} group of ranks {of}"


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank.

    Attributes:
        pid, host, state: of its process.
        closed: it ended in order.
        heard_ns: when it last gave a sign of life, to 10 ms; when it ended, if somebody has seen that.
        step, phase: of training, as the rank last told.
        place: its coordinates, such as ``tp 1 pp 0 dp 2``; '' if the groups' names do not tell them.
        last: the call that ended last, for a person; '' if none has.
        last_ns: when that was.
        stack: where its main thread is, innermost first; '' if that was not asked.
        ended: by what: ``SIGKILL``, ``exit code 1``; '' if it has not, or nobody knows.
        crowded: part of the last seconds in which its main thread wanted a processor and had none, 0 to 1.
    """

    pid: int
    host: str
    state: State
    closed: bool
    step: int
    phase: int
    heard_ns: int = 0
    place: str = ""
    last: str = ""
    last_ns: int = 0
    stack: str = ""
    ended: str = ""
    crowded: float = 0.0

    @property
    def condition(self) -> str:
        """Of its process, for a person."""
        return f"{self.state.value} ({self.ended})" if self.ended else self.state.value


@dataclass(frozen=True, slots=True)
class View:
    """Of one host, or of a job.

    Attributes:
        now_ns: when it was taken. All times of a view are on one clock.
        ranks: that are known.
        groups: communicators; ``comm`` of rows and calls is a position here.
        rows: where every rank is in every communicator.
        steps: the newest of every rank.
        calls: the newest of every rank.
        windows: what its connections have carried lately; none, if nobody has looked more than once.
        longest_wait_ns: that any call of these ranks has taken since the first steps.
        problems: what could not be read, and why.
    """

    now_ns: int
    ranks: Mapping[int, RankView]
    groups: Sequence[Group]
    rows: Summaries
    steps: Steps
    calls: Calls
    windows: Windows = field(default_factory=lambda: np.zeros(0, WINDOW))
    longest_wait_ns: int = 0
    problems: Sequence[str] = field(default_factory=tuple)


def view_of(job: Job, stacks: Mapping[int, str] | None = None, endings: Mapping[int, Ending] | None = None) -> View:
    """Of the rings of one host.

    Args:
        job: as they were read.
        stacks: rank -> its stack, of ranks whose was asked.
        endings: process -> how it ended, of those that were watched and have.
    """
    known: dict[str, int] = {}
    groups: list[Group] = []
    ranks, rows, steps, calls = {}, [np.zeros(0, SUMMARY)], [np.zeros(0, STEP)], [np.zeros(0, CALL)]
    longest = 0
    for rank, ring in job.ranks.items():
        table = [_group(entry, at, ring.identity.world) for at, entry in enumerate(ring.communicators)]
        numbers = numbered([group.name for group in table], known)
        groups += [group for group, number in zip(table, numbers.tolist(), strict=True) if number >= len(groups)]
        offset = job.offsets_ns[rank]
        made = ring.records[(ring.records["op"] <= Op.RECEIVE) & (ring.records["comm"] < len(table))]
        rows.append(summary(rank, made, numbers, offset_ns=offset))
        steps.append(steps_of(rank, ring.records, offset_ns=offset)[-NEWEST_STEPS:])
        calls.append(_calls(rank, made[-NEWEST_CALLS:], numbers, offset))
        longest = max(longest, _longest_wait_ns(made))
        ranks[rank] = _rank(rank, ring, table, made, job, (stacks or {}).get(rank, ""), endings or {})
    return View(
        job.now_ns, ranks, believed(groups), np.concatenate(rows), np.concatenate(steps), np.concatenate(calls),
        longest_wait_ns=longest,
        problems=job.unreadable,
    )  # fmt: skip


def _group(entry: Mapping[str, Any], at: int, world: int) -> Group:
    name = str(entry.get("name", f"?{at}"))[:_NAME]
    try:
        ranks = believable(entry.get("ranks", []), world)
    except ValueError:  # whoever has written it
        ranks = ()
    return Group(name, str(entry.get("label", ""))[:_LABEL], ranks, bool(entry.get("on_device", False)))


def believed(groups: Sequence[Group]) -> list[Group]:
    """The same groups; those that no longer fit into what all members together may be have none."""
    total, found = 0, []
    for group in groups:
        total += group.count
        found.append(group if total <= MOST_MEMBERS else dataclasses.replace(group, ranks=()))
    return found


def _calls(rank: int, records: Records, numbers: npt.NDArray[np.int32], offset_ns: int) -> Calls:
    out = np.zeros(len(records), CALL)
    sends, receives = records["op"] == Op.SEND, records["op"] == Op.RECEIVE
    out["rank"], out["comm"] = rank, numbers[records["comm"]]
    out["source"] = np.where(sends, rank, np.where(receives, records["peer"], -1))
    out["destination"] = np.where(receives, rank, np.where(sends, records["peer"], -1))
    for name in ("seq", "op", "dtype", "shape"):
        out[name] = records[name]
    out["bytes"] = np.maximum(bytes_in(records), bytes_out(records))
    out["call_ns"] = records["call_ns"] + offset_ns
    for name in ("wait_ns", "end_ns"):
        out[name] = np.where(records[name] > 0, records[name] + offset_ns, 0)
    return out


def _longest_wait_ns(calls: Records) -> int:
    over = calls[(calls["end_ns"] > 0) & (calls["wait_ns"] > 0) & (calls["step"] > WARM_UP)]
    return int((over["end_ns"] - over["wait_ns"]).max(initial=0))


def _rank(
    rank: int, ring: Snapshot, table: Sequence[Group], made: Records, job: Job, stack: str,
    endings: Mapping[int, Ending],
) -> RankView:  # fmt: skip
    last, last_ns = "", 0
    done = made[made["end_ns"] > 0]
    if len(done):
        call = done[np.argmax(done["end_ns"])]
        last = f"{Op(call['op']).name.lower()} #{call['seq']} of its {table[call['comm']].label} group"
        last_ns = int(call["end_ns"]) + job.offsets_ns[rank]
    who, state, heard_ns, ended = ring.identity, job.states.get(rank, State.UNKNOWN), ring.heartbeat_ns, ""
    if state is State.DEAD and who.pid in endings:
        heard_ns, ended = endings[who.pid].at_ns, endings[who.pid].how
    return RankView(
        who.pid, who.host, state, ring.closed, ring.step, ring.phase, heard_ns + job.offsets_ns[rank], _place(rank, table),
        last, last_ns, stack, ended,
    )  # fmt: skip


def _place(rank: int, table: Sequence[Group]) -> str:
    found = coordinates(rank, ((group.label, group.ranks) for group in table))
    return " ".join(f"{axis} {at}" for axis, at in found.items())


def merged(views: Sequence[View], offsets_ns: Sequence[int], now_ns: int) -> View:
    """One view of several hosts.

    Args:
        views: of the hosts.
        offsets_ns: what each one's clock is behind the job's.
        now_ns: on the job's clock.
    """
    known: dict[str, int] = {}
    groups: list[Group] = []
    ranks: dict[int, RankView] = {}
    rows, steps, calls = [np.zeros(0, SUMMARY)], [np.zeros(0, STEP)], [np.zeros(0, CALL)]
    for view, offset in zip(views, offsets_ns, strict=True):
        numbers = numbered([group.name for group in view.groups], known)
        groups += [group for group, number in zip(view.groups, numbers.tolist(), strict=True) if number >= len(groups)]
        rows.append(_moved(view.rows, offset, ("call_ns",), numbers))
        steps.append(_moved(view.steps, offset, ("begin_ns", "end_ns")))
        calls.append(_moved(view.calls, offset, ("call_ns", "wait_ns", "end_ns"), numbers))
        for rank, one in view.ranks.items():
            ranks[rank] = dataclasses.replace(
                one, heard_ns=one.heard_ns + offset, last_ns=one.last_ns + offset if one.last_ns else 0
            )
    return View(
        now_ns, ranks, groups, np.concatenate(rows), np.concatenate(steps), np.concatenate(calls),
        np.concatenate([np.zeros(0, WINDOW), *(view.windows for view in views)]),
        max([view.longest_wait_ns for view in views], default=0), [text for view in views for text in view.problems],
    )  # fmt: skip


def _moved(
    table: npt.NDArray[Any], offset_ns: int, columns: Sequence[str], numbers: npt.NDArray[np.int32] | None = None
) -> npt.NDArray[Any]:
    """A copy on the job's clock, with the job's numbers of communicators."""
    out = table.copy()
    for name in columns:
        out[name] = np.where(table[name] != 0, table[name] + offset_ns, 0)
    if numbers is not None and len(out):
        out["comm"] = numbers[table["comm"]]
    return out
