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

from unickpt.base.round_folder import Failed
from unickpt.diagnosis.hardware.events import HostHardware
from unickpt.diagnosis.hardware.kept import moved
from unickpt.diagnosis.host.process_exits import ExitStatus, ProcessExit
from unickpt.diagnosis.host.process_state import State
from unickpt.diagnosis.host.stack_dumps import Frame
from unickpt.diagnosis.recording.launched import AbsentRank
from unickpt.diagnosis.recording.rank_ranges import MOST_MEMBERS, Progressions, coordinates, count_of, expanded, members_in
from unickpt.diagnosis.recording.records import Flag, Op, Records, begins_ns, bytes_in, bytes_out, ends_of
from unickpt.diagnosis.recording.ring import RingContents
from unickpt.diagnosis.recording.ring_folder import HostRings
from unickpt.diagnosis.snapshot.progress import PROGRESS, ProgressTable, number_groups, rank_progress
from unickpt.diagnosis.snapshot.steps import STEP, StepRows, steps_of
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
) -> Snapshot:
    """Take a snapshot of one host.

    Args:
        job: contents of its rings.
        stacks: stack of each rank that was asked for it.
        exits: end of each watched process that has ended.
        newest_steps: steps of each rank.
        hardware: what each host of the folder says of its hardware.
    """
    known: dict[str, int] = {}
    groups: list[GroupInfo] = []
    ranks, rows, steps, calls = {}, [np.zeros(0, PROGRESS)], [np.zeros(0, STEP)], [np.zeros(0, CALL)]
    longest = 0
    for rank, ring in job.ranks.items():
        table = [_group(entry, at, ring.identity.world) for at, entry in enumerate(ring.communicators)]
        numbers = number_groups([group.name for group in table], known)
        groups += [group for group, number in zip(table, numbers.tolist(), strict=True) if number >= len(groups)]
        offset = job.offsets_ns[rank]
        made = ring.records[(ring.records["op"] <= Op.RECEIVE) & (ring.records["comm"] < len(table))]
        rows.append(rank_progress(rank, made, numbers, offset_ns=offset))
        steps.append(steps_of(rank, ring.records, offset_ns=offset)[-newest_steps:])
        newest = made[-NEWEST_CALLS:]
        calls.append(calls_of(rank, newest, numbers[newest["comm"]], offset))
        longest = max(longest, _longest_wait_ns(made))
        ranks[rank] = _rank(rank, ring, table, made, job, (stacks or {}).get(rank, ()), exits or {})
    return Snapshot(
        job.now_ns, ranks, limit_members(groups), np.concatenate(rows), np.concatenate(steps), np.concatenate(calls),
        longest_wait_ns=longest,
        problems=job.unreadable,
        absent=job.absent,
        hardware=hardware or {},
    )  # fmt: skip


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


def calls_of(rank: int, records: Records, comms: npt.NDArray[Any], offset_ns: int) -> Calls:
    """Return the calls of a rank.

    Args:
        rank: global rank.
        records: its records of calls.
        comms: number of the communicator of each of them.
        offset_ns: nanoseconds to add to their times.
    """
    out = np.zeros(len(records), CALL)
    out["rank"], out["comm"] = rank, comms
    out["source"], out["destination"] = ends_of(rank, records)
    for name in ("seq", "op", "dtype", "shape"):
        out[name] = records[name]
    out["bytes"] = np.maximum(bytes_in(records), bytes_out(records))
    out["call_ns"] = begins_ns(records) + offset_ns
    for name in ("wait_ns", "end_ns"):
        out[name] = np.where(records[name] > 0, records[name] + offset_ns, 0)
    return out


def _longest_wait_ns(calls: Records) -> int:
    over = calls[(calls["end_ns"] > 0) & (calls["wait_ns"] > 0) & (calls["step"] > WARM_UP)]
    return int((over["end_ns"] - over["wait_ns"]).max(initial=0))


def _rank(
    rank: int,
    ring: RingContents,
    table: Sequence[GroupInfo],
    made: Records,
    job: HostRings,
    stack: tuple[Frame, ...],
    exits: Mapping[int, ProcessExit],
) -> RankSnapshot:
    last = None
    done = made[made["end_ns"] > 0]
    if len(done):
        call = done[np.argmax(done["end_ns"])]
        label, end_ns = table[call["comm"]].label, int(call["end_ns"]) + job.offsets_ns[rank]
        last = FinishedCall(Op(call["op"]), int(call["seq"]), label, end_ns)
    who, state, heard_ns, status = ring.identity, job.states.get(rank, State.UNKNOWN), ring.heartbeat_ns, None
    end = exits.get(who.pid)
    if state is State.DEAD and end is not None and end.at_ns > who.monotonic_ns:  # not of an earlier process of this number
        heard_ns, status = end.at_ns, end.status
    return RankSnapshot(
        who.pid, who.host, state, ring.closed, ring.step, ring.phase, heard_ns + job.offsets_ns[rank],
        tuple(coordinates(rank, ((group.label, group.ranks) for group in table)).items()),
        last, stack, status, failed=bool(len(made)) and bool(made["flags"][np.argmax(made["call_ns"])] & int(Flag.FAILED)),
        raised=ring.raised, failure=job.failures.get(rank),
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
