"""Snapshot of the ranks of a host, small enough to be sent once a second, and merged snapshots of a job.

A snapshot holds the progress of each rank in every communicator, its newest steps, and its newest calls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from unickpt.base.arrays import Ints
from unickpt.base.round_folder import Failed
from unickpt.diagnosis.hardware.events import HostHardware
from unickpt.diagnosis.hardware.kept import moved
from unickpt.diagnosis.host.process_exits import ExitStatus, ProcessExit
from unickpt.diagnosis.host.process_state import State
from unickpt.diagnosis.host.stack_dumps import Frame
from unickpt.diagnosis.recording.launched import AbsentRank
from unickpt.diagnosis.recording.rank_ranges import MOST_MEMBERS, Progressions, coordinates, count_of, expanded, members_in
from unickpt.diagnosis.recording.records import ByColumn, Flag, Op, begins_ns, bytes_in, bytes_out, ends_of
from unickpt.diagnosis.recording.ring import RingContents
from unickpt.diagnosis.recording.ring_folder import HostRings
from unickpt.diagnosis.snapshot.columns import AT, Columns, columns_of, largest, newest_places
from unickpt.diagnosis.snapshot.progress import PROGRESS, ProgressTable, number_groups, progress_of_ranks
from unickpt.diagnosis.snapshot.steps import STEP, StepRows, steps_of_ranks
from unickpt.diagnosis.snapshot.tcp_windows import WINDOW, Windows

CALL = np.dtype(
    [
        ("rank", "i4"),
        ("comm", "i4"),  # position in ``Snapshot.groups``
        ("source", "i4"),  # of point-to-point calls; -1 for collectives
        ("destination", "i4"),
        ("seq", "u8"),
        ("op", "u1"),
        ("dtype", "u1"),
        ("shape", "u4"),  # hash of it
        ("bytes", "i8"),  # larger of the bytes sent and received
        ("call_ns", "i8"),  # arrival at the call: of the host, or of the device where that is timed
        ("wait_ns", "i8"),  # begin of the wait; 0 without a wait
        ("end_ns", "i8"),  # 0 until it has ended
    ]
)
Calls = npt.NDArray[Any]  # of dtype ``CALL``
_LABEL, _NAME = 128, 256  # characters of a label and a name
WARM_UP = 5  # steps that allocate and compile
NEWEST_CALLS, NEWEST_STEPS = 256, 32  # of a rank
# steps of a rank, and of all ranks, that are kept over several looks: in small jobs, and in large ones
KEPT_STEPS, _KEPT_ROWS = 256, 1 << 16
_OF_LARGE, _ROWS_OF_LARGE = 64, 1 << 18


def kept_steps(ranks: int) -> int:
    """Return how many steps of each rank are kept over several looks."""
    ranks = max(ranks, 1)
    return max(NEWEST_STEPS, min(_OF_LARGE, _ROWS_OF_LARGE // ranks), min(KEPT_STEPS, _KEPT_ROWS // ranks))


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """A communicator of the job.

    Attributes:
        name: unique name in the job.
        label: name of its kind in the framework.
        ranks: members as progressions.
        on_device: whether its calls end on a device, so that their end is known late, or not at all.
    """

    name: str
    label: str
    ranks: Progressions
    on_device: bool = False

    def members(self) -> npt.NDArray[np.int64]:
        """Return the global ranks as int64, in the order of the group."""
        return expanded(self.ranks)

    @property
    def count(self) -> int:
        """Number of members."""
        return count_of(self.ranks)


@dataclass(frozen=True, slots=True)
class FinishedCall:
    """The last call that ended on a rank.

    Attributes:
        op: operation.
        seq: sequence number in its group, or in the pair of ranks and direction.
        label: name of the group in the framework.
        end_ns: time of its end.
    """

    op: Op
    seq: int
    label: str
    end_ns: int


@dataclass(frozen=True, slots=True)
class LayerSample:
    """Time of the layers of a rank in its newest sampled steps, beside that of earlier jobs.

    Attributes:
        took_s: seconds of a step.
        expected_s: seconds of a step that layers of the same classes and sizes took on such a device.
        error: spread of the times of earlier jobs, as a share of the expected time.
        steps: number of sampled steps so far.
    """

    took_s: float
    expected_s: float
    error: float
    steps: int


@dataclass(frozen=True, slots=True)
class RankSnapshot:
    """One rank.

    Attributes:
        pid: process number.
        host: host name.
        state: state of the process.
        closed: whether the process has ended recording: in order, or because of an exception.
        step: training step.
        phase: training phase, a value of ``Phase``.
        heard_ns: time of the last sign of life, to 10 ms; time of the end, if it was observed.
        coordinates: place in the parallel layout, such as ``(("tp", 1), ("dp", 2))``; empty if the groups do not show it.
        last: last call that ended; None if no call has.
        stack: frames of the main thread, innermost first; empty if not asked for.
        exit: status that the process ended with; None if it runs, or if unknown.
        cpu_wait: fraction of the last seconds in which the main thread waited for a processor, 0 to 1.
        still_s: seconds in which nothing has moved in the process (``host.movement``); 0 unless others wait for it.
        same_place_s: seconds in which its main thread was in the same functions.
        failed: whether its newest call raised, for example because the connection to another rank was lost.
        layers: times of its layers; None if they are not sampled, or unknown from earlier jobs.
        raised: whether an exception ends the process.
        failure: that exception; None if it is unknown.
    """

    pid: int
    host: str
    state: State
    closed: bool
    step: int
    phase: int
    heard_ns: int = 0
    coordinates: tuple[tuple[str, int], ...] = ()
    last: FinishedCall | None = None
    stack: tuple[Frame, ...] = ()
    exit: ExitStatus | None = None
    cpu_wait: float = 0.0
    still_s: float = 0.0
    same_place_s: float = 0.0
    failed: bool = False
    layers: LayerSample | None = None
    raised: bool = False
    failure: Failed | None = None

    @property
    def ended_in_order(self) -> bool:
        """Whether the rank makes no further call, without a fault that is known."""
        sound = self.exit is None or self.exit.sound
        return self.closed and not self.raised and self.failure is None and not self.failed and sound


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State of a host or a job at one time.

    Attributes:
        now_ns: time of the snapshot. All times of a snapshot are on one clock.
        ranks: known ranks.
        groups: communicators. ``comm`` in ``rows`` and ``calls`` is a position in this list.
        rows: progress of every rank in every communicator.
        steps: newest steps of every rank.
        calls: newest calls of every rank.
        windows: recent traffic of the TCP connections; empty after a single look.
        longest_wait_ns: longest wait of these ranks in a call after the first steps.
        problems: files that could not be read, with the reason.
        absent: ranks that were started and have not begun to record.
        cpu_waits: times of earlier looks, with the share of time, 0 to 1, in which the median rank waited for a processor;
            empty after a single look.
        hardware: what each host says of its hardware.
    """

    now_ns: int
    ranks: Mapping[int, RankSnapshot]
    groups: Sequence[GroupInfo]
    rows: ProgressTable
    steps: StepRows
    calls: Calls
    windows: Windows = field(default_factory=lambda: np.zeros(0, WINDOW))
    longest_wait_ns: int = 0
    problems: Sequence[str] = field(default_factory=tuple)
    absent: Mapping[int, AbsentRank] = field(default_factory=dict)
    cpu_waits: Sequence[tuple[int, float]] = ()
    hardware: Mapping[str, HostHardware] = field(default_factory=dict)

    def comm_of(self, name: str) -> int:
        """Return the number of a communicator; -1 if it is unknown."""
        return next((number for number, group in enumerate(self.groups) if group.name == name), -1)


def take_snapshot(
    job: HostRings,
    stacks: Mapping[int, tuple[Frame, ...]] | None = None,
    exits: Mapping[int, ProcessExit] | None = None,
    *,
    newest_steps: int = NEWEST_STEPS,
    hardware: Mapping[str, HostHardware] | None = None,
    tables: RankTables | None = None,
) -> Snapshot:
    """Take a snapshot of one host.

    Args:
        job: contents of its rings.
        stacks: stack of each rank that was asked for it.
        exits: end of each watched process that has ended.
        newest_steps: steps of each rank.
        hardware: what each host of the folder says of its hardware.
        tables: communicators that a caller who looks again keeps.
    """
    of_ranks = (RankTables() if tables is None else tables).of(job.ranks)
    known: dict[str, int] = {}
    groups: list[GroupInfo] = []
    numbers = [np.zeros(0, np.int32)]
    for table in of_ranks:
        own = number_groups([group.name for group in table.groups], known)
        groups += [group for group, number in zip(table.groups, own.tolist(), strict=True) if number >= len(groups)]
        numbers.append(own)
    offsets_ns = np.array([job.offsets_ns[rank] for rank in job.ranks], np.int64)
    records = columns_of({rank: ring.records for rank, ring in job.ranks.items()})
    counts = np.array([len(table.groups) for table in of_ranks], np.int64)
    made = records.where((records["op"] <= Op.RECEIVE) & (records["comm"] < counts[records[AT]]))
    comms = np.concatenate(numbers)[(np.cumsum(counts) - counts)[made[AT]] + made["comm"]]
    newest = newest_places(made[AT], NEWEST_CALLS, len(of_ranks))
    calls = made.take(newest)
    ranks = _ranks(job, of_ranks, made, stacks or {}, exits or {})
    return Snapshot(
        job.now_ns, ranks, limit_members(groups), progress_of_ranks(made, comms, offsets_ns),
        steps_of_ranks(records, offsets_ns, newest=newest_steps),
        calls_of(calls.ranks[calls[AT]], calls, comms[newest], offsets_ns[calls[AT]]),
        longest_wait_ns=_longest_wait_ns(made),
        problems=job.unreadable,
        absent=job.absent,
        hardware=hardware or {},
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RankTable:
    """Communicators of a rank.

    Attributes:
        entries: table of its ring.
        groups: the same, checked.
        coordinates: place in the parallel layout.
    """

    entries: Sequence[Mapping[str, Any]]
    groups: Sequence[GroupInfo]
    coordinates: tuple[tuple[str, int], ...]


class RankTables:
    """Communicators of the ranks of a host, which are kept as long as their rings list the same."""

    def __init__(self) -> None:
        self._known: dict[int, RankTable] = {}

    def of(self, rings: Mapping[int, RingContents]) -> list[RankTable]:
        """Return the communicators of ranks in this order."""
        known = self._known
        self._known = {
            rank: known[rank]
            if rank in known and known[rank].entries is ring.communicators
            else _table(rank, ring.communicators, ring.identity.world)
            for rank, ring in rings.items()
        }
        return list(self._known.values())


def _table(rank: int, entries: Sequence[Mapping[str, Any]], world: int) -> RankTable:
    groups = [_group(entry, at, world) for at, entry in enumerate(entries)]
    return RankTable(entries, groups, tuple(coordinates(rank, ((group.label, group.ranks) for group in groups)).items()))


def _group(entry: Mapping[str, Any], at: int, world: int) -> GroupInfo:
    name = str(entry.get("name", f"?{at}"))[:_NAME]
    label, on_device = str(entry.get("label", ""))[:_LABEL], bool(entry.get("on_device", False))
    return GroupInfo(name, label, members_in(entry, world), on_device)


def limit_members(groups: Sequence[GroupInfo]) -> list[GroupInfo]:
    """Return the groups; once the total number of members is too large, further groups have none."""
    total, found = 0, []
    for group in groups:
        total += group.count
        found.append(group if total <= MOST_MEMBERS else dataclasses.replace(group, ranks=()))
    return found


def calls_of(rank: int | Ints, records: ByColumn, comms: npt.NDArray[Any], offset_ns: int | Ints) -> Calls:
    """Return calls.

    Args:
        rank: global rank of all of them, or of each.
        records: their records.
        comms: number of the communicator of each of them, ``[n]``.
        offset_ns: nanoseconds to add to their times, of all or of each.
    """
    out = np.zeros(len(comms), CALL)
    out["rank"], out["comm"] = rank, comms
    out["source"], out["destination"] = ends_of(rank, records)
    for name in ("seq", "op", "dtype", "shape"):
        out[name] = records[name]
    out["bytes"] = np.maximum(bytes_in(records), bytes_out(records))
    out["call_ns"] = begins_ns(records) + offset_ns
    for name in ("wait_ns", "end_ns"):
        out[name] = np.where(records[name] > 0, records[name] + offset_ns, 0)
    return out


def _longest_wait_ns(calls: Columns) -> int:
    over = np.flatnonzero((calls["end_ns"] > 0) & (calls["wait_ns"] > 0) & (calls["step"] > WARM_UP))
    return int((calls["end_ns"][over] - calls["wait_ns"][over]).max(initial=0))


def _ranks(
    job: HostRings,
    tables: Sequence[RankTable],
    made: Columns,
    stacks: Mapping[int, tuple[Frame, ...]],
    exits: Mapping[int, ProcessExit],
) -> dict[int, RankSnapshot]:
    done = np.flatnonzero(made["end_ns"] > 0)
    last = largest(made[AT][done], made["end_ns"][done], len(tables))
    newest = largest(made[AT], made["call_ns"], len(tables))
    failed = (newest >= 0) & (made["flags"][newest] & int(Flag.FAILED) > 0) if len(made) else newest >= 0
    found = {}
    for at, ((rank, ring), table) in enumerate(zip(job.ranks.items(), tables, strict=True)):
        call = _finished(made, int(done[last[at]]), table, job.offsets_ns[rank]) if last[at] >= 0 else None
        found[rank] = _rank(rank, ring, table, call, bool(failed[at]), job, stacks.get(rank, ()), exits.get(ring.identity.pid))
    return found


def _finished(made: Columns, place: int, table: RankTable, offset_ns: int) -> FinishedCall:
    op, seq, end_ns = (int(made[name][place]) for name in ("op", "seq", "end_ns"))
    return FinishedCall(Op(op), seq, table.groups[made["comm"][place]].label, end_ns + offset_ns)


def _rank(
    rank: int,
    ring: RingContents,
    table: RankTable,
    last: FinishedCall | None,
    failed: bool,
    job: HostRings,
    stack: tuple[Frame, ...],
    end: ProcessExit | None,
) -> RankSnapshot:
    who, state, heard_ns, status = ring.identity, job.states.get(rank, State.UNKNOWN), ring.heartbeat_ns, None
    if state is State.DEAD and end is not None and end.at_ns > who.monotonic_ns:  # not of an earlier process of this number
        heard_ns, status = end.at_ns, end.status
    return RankSnapshot(
        who.pid, who.host, state, ring.closed, ring.step, ring.phase, heard_ns + job.offsets_ns[rank], table.coordinates,
        last, stack, status, failed=failed, raised=ring.raised, failure=job.failures.get(rank),
    )  # fmt: skip


def merge_snapshots(snapshots: Sequence[Snapshot], offsets_ns: Sequence[int], now_ns: int) -> Snapshot:
    """Merge the snapshots of several hosts.

    Args:
        snapshots: one for each host.
        offsets_ns: nanoseconds to add to the times of each snapshot.
        now_ns: time of the merged snapshot.
    """
    known: dict[str, int] = {}
    groups: list[GroupInfo] = []
    ranks: dict[int, RankSnapshot] = {}
    rows, steps, calls = [np.zeros(0, PROGRESS)], [np.zeros(0, STEP)], [np.zeros(0, CALL)]
    for snapshot, offset in zip(snapshots, offsets_ns, strict=True):
        numbers = number_groups([group.name for group in snapshot.groups], known)
        groups += [group for group, number in zip(snapshot.groups, numbers.tolist(), strict=True) if number >= len(groups)]
        rows.append(_moved(snapshot.rows, offset, ("call_ns",), numbers))
        steps.append(_moved(snapshot.steps, offset, ("begin_ns", "end_ns")))
        calls.append(_moved(snapshot.calls, offset, ("call_ns", "wait_ns", "end_ns"), numbers))
        for rank, one in snapshot.ranks.items():
            last = dataclasses.replace(one.last, end_ns=one.last.end_ns + offset) if one.last is not None else None
            failure = one.failure and dataclasses.replace(one.failure, at_ns=one.failure.at_ns + offset)
            ranks[rank] = dataclasses.replace(one, heard_ns=one.heard_ns + offset, last=last, failure=failure)
    return Snapshot(
        now_ns, ranks, groups, np.concatenate(rows), np.concatenate(steps), np.concatenate(calls),
        np.concatenate([np.zeros(0, WINDOW), *(snapshot.windows for snapshot in snapshots)]),
        max([snapshot.longest_wait_ns for snapshot in snapshots], default=0),
        [text for snapshot in snapshots for text in snapshot.problems],
        {rank: one for snapshot in snapshots for rank, one in snapshot.absent.items() if rank not in ranks},
        hardware={
            host: one
            for snapshot, offset in zip(snapshots, offsets_ns, strict=True)
            for host, one in moved(snapshot.hardware, offset).items()
        },
    )  # fmt: skip


def _moved(
    table: npt.NDArray[Any], offset_ns: int, columns: Sequence[str], numbers: npt.NDArray[np.int32] | None = None
) -> npt.NDArray[Any]:
    """Return a copy on the job's clock, with the job's numbers of communicators."""
    out = table.copy()
    for name in columns:
        out[name] = np.where(table[name] != 0, table[name] + offset_ns, 0)
    if numbers is not None and len(out):
        out["comm"] = numbers[table["comm"]]
    return out
