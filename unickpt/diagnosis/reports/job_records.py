"""Records of the ranks of all hosts on one clock, with their groups.

Rings are untrusted. Records with an unknown operation or type, and groups with more members than the job has ranks, are left
out here, so later code need not check.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unickpt.base.arrays import Ints
from unickpt.diagnosis.host.process_state import State
from unickpt.diagnosis.recording.rank_ranges import MOST_MEMBERS, count_of, expanded, members_in
from unickpt.diagnosis.recording.rank_ranges import coordinates as place_among
from unickpt.diagnosis.recording.records import DTYPES, Flag, Op, Records
from unickpt.diagnosis.recording.ring import RingContents
from unickpt.diagnosis.recording.ring_folder import HostRings

_OPS = np.array([int(op) for op in Op])
OP_NAMES = {int(op): op.name.lower() for op in Op}  # ``all_reduce``
_ON_HOST = ("gloo", "mpi")  # calls of these end on the host, so that their end is known (``recording.recorder``)


@dataclass(frozen=True, slots=True)
class JobGroup:
    """A communicator of the job.

    Attributes:
        number: number in the job, from 0. It differs from the number in a rank's table.
        name: name of the process group, equal on all members.
        label: name in the framework, or ``name``.
        backend: torch backend.
        ranks: int64, global ranks by their rank in the group.
    """

    number: int
    name: str
    label: str
    backend: str
    ranks: Ints

    @property
    def ends_known(self) -> bool:
        """Whether a call without an end has not ended. The end of a call on a device may not be recorded."""
        return self.backend in _ON_HOST


@dataclass(frozen=True, slots=True)
class RankRecords:
    """One rank.

    Attributes:
        number: global rank.
        ring: contents of its ring, including invalid records.
        records: ``RECORD`` array of the valid records, by number.
        group: int64, number of the communicator of each record; -1 for events.
        to_clock_ns: nanoseconds to add to its monotonic clock to get the job's clock.
        until_ns: time of reading on the job's clock, or of the process's last sign of life. For another host, the last sign of
            life of any of its ranks.
        state: state of the process.
        place: host and known coordinates, ``host b, tp 1 pp 0 dp 2``.
    """

    number: int
    ring: RingContents
    records: Records
    group: Ints
    to_clock_ns: int
    until_ns: int
    state: State
    place: str

    @property
    def alive(self) -> bool:
        return self.state is not State.DEAD and not self.ring.closed


@dataclass(frozen=True, slots=True)
class JobRecords:
    """Records of a job.

    Attributes:
        name: name of the job.
        world: number of ranks. Rings may be missing.
        ranks: known ranks, by global rank.
        groups: communicators, by number.
        read_ns: time of reading on the job's clock, or of the last sign of life of any host.
        unreadable: files that could not be read, with the reason.
    """

    name: str
    world: int
    ranks: dict[int, RankRecords]
    groups: list[JobGroup]
    read_ns: int
    unreadable: tuple[str, ...]


def gather_records(jobs: Sequence[HostRings], clock_offsets_ns: Mapping[str, int] | None = None) -> JobRecords:
    """Combine the rings of all hosts of a job.

    Args:
        jobs: one for each host. A rank in several of them is taken from its last start.
        clock_offsets_ns: nanoseconds to add to the wall clock of each host; default 0.
    """
    offsets = clock_offsets_ns or {}
    found: dict[int, tuple[RingContents, State, int, int]] = {}
    for job in jobs:
        for number, ring in job.ranks.items():
            before = found.get(number)
            if before is None or before[0].identity.wall_ns < ring.identity.wall_ns:
                read_ns = job.now_ns + offsets.get(ring.identity.host, 0)
                to_clock_ns = job.offsets_ns[number] + offsets.get(ring.identity.host, 0)
                found[number] = (ring, job.states.get(number, State.UNKNOWN), read_ns, to_clock_ns)
    seen_ns: dict[str, int] = {}  # host -> last sign of life of any rank
    for ring, _, _, to_clock_ns in found.values():
        host = ring.identity.host
        seen_ns[host] = max(seen_ns.get(host, 0), _last_sign_ns(ring) + to_clock_ns)
    groups: dict[str, JobGroup] = {}
    ranks = {}
    reads_ns = []
    for number, (ring, state, read_ns, to_clock_ns) in sorted(found.items()):
        if state is State.UNKNOWN:  # rings of another host may have been copied from there long ago
            read_ns = min(seen_ns[ring.identity.host], read_ns)
        reads_ns.append(read_ns)
        records, at = _sound(ring.records), _listed(ring, groups)
        alive = state is not State.DEAD and not ring.closed
        ranks[number] = RankRecords(
            number, ring, records, _numbers(records, at, number, groups), to_clock_ns,
            read_ns if alive else min(_last_sign_ns(ring) + to_clock_ns, read_ns), state, _place(ring),
        )  # fmt: skip
    newest = max((rank.ring.identity for rank in ranks.values()), key=lambda who: who.wall_ns, default=None)
    return JobRecords(
        name=newest.job if newest else "",
        world=max([newest.world if newest else 0, *(number + 1 for number in ranks)]),
        ranks=ranks,
        groups=list(groups.values()),
        read_ns=max(reads_ns, default=0),
        unreadable=tuple(problem for job in jobs for problem in job.unreadable),
    )


def _last_sign_ns(ring: RingContents) -> int:
    """Return the last sign of life of a rank, on its own clock."""
    records = _sound(ring.records)
    return max(ring.heartbeat_ns, int(records["call_ns"].max(initial=0)), int(records["end_ns"].max(initial=0)))


def _sound(records: Records) -> Records:
    sound = np.isin(records["op"], _OPS) & (records["dtype"] <= len(DTYPES)) & (records["call_ns"] > 0)
    part: Records = records if sound.all() else records[sound]
    return part


def _listed(ring: RingContents, groups: dict[str, JobGroup]) -> list[int]:
    """Return the numbers in the job of a rank's communicators; new ones are added to ``groups``."""
    numbers = []
    left = MOST_MEMBERS - sum(len(group.ranks) for group in groups.values())
    for at, entry in enumerate(ring.communicators):
        name = str(entry.get("name", f"?{ring.identity.rank}/{at}"))
        if name not in groups:
            label = str(entry.get("label") or name)
            parts = members_in(entry, ring.identity.world)
            left -= count_of(parts)
            ranks = expanded(parts if left >= 0 else ())
            groups[name] = JobGroup(len(groups), name, label, str(entry.get("backend", _ON_HOST[0])), ranks)
        numbers.append(groups[name].number)
    return numbers


def _numbers(records: Records, at: list[int], rank: int, groups: dict[str, JobGroup]) -> Ints:
    """Return the number of the communicator of each record."""
    calls = records["op"] <= Op.RECEIVE
    if calls.any() and int(records["comm"][calls].max()) >= len(at):  # its entry in the table is missing
        name = f"?{rank}"
        group = groups.setdefault(name, JobGroup(len(groups), name, "unknown", _ON_HOST[0], np.zeros(0, np.int64)))
        at = at + [group.number] * (int(records["comm"][calls].max()) + 1 - len(at))
    table = np.array([*at, -1], np.int64)
    numbers: Ints = np.where(calls, table[np.where(calls, records["comm"].astype(np.int64), -1)], -1)
    return numbers


def coordinates(ring: RingContents) -> dict[str, int]:
    """Return a rank's place in the parallel layout: ``{"tp": 1, "pp": 0, "dp": 2}``."""
    groups = ((str(entry.get("label", "")), members_in(entry, ring.identity.world)) for entry in ring.communicators)
    return place_among(ring.identity.rank, groups)


def _place(ring: RingContents) -> str:
    return " ".join([f"host {ring.identity.host},", *(f"{axis} {at}" for axis, at in coordinates(ring).items())]).rstrip(",")


def unended(rank: RankRecords, ends_known: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Return bool ``[records]``: calls that had not ended when the process was last seen.

    Args:
        rank: rank with its records.
        ends_known: bool ``[groups]``, ``JobGroup.ends_known`` of every group.
    """
    records = rank.records
    going: npt.NDArray[np.bool_] = (records["op"] <= Op.RECEIVE) & (records["end_ns"] == 0)
    going &= (records["flags"] & int(Flag.FAILED)) == 0
    known = np.append(ends_known, False)[rank.group]
    return going & (known | (records["wait_ns"] > 0))
