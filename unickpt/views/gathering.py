"""The ranks of all hosts on one clock, with the groups that they are in.

Rings are files that anybody may have written: records with an operation or a type that does not exist, and groups with
more members than the job has ranks, are left out here, so that nobody after this has to look.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from unickpt.timing.folder import Job
from unickpt.timing.processes import State
from unickpt.timing.ranks import MOST_MEMBERS, Progressions, believable, count_of, expanded
from unickpt.timing.ranks import coordinates as place_among
from unickpt.timing.records import DTYPES, Flag, Op, Records
from unickpt.timing.ring import Snapshot

Ints = npt.NDArray[np.int64]
_OPS = np.array([int(op) for op in Op])
OP_NAMES = {int(op): op.name.lower() for op in Op}  # ``all_reduce``
_ON_HOST = ("gloo", "mpi")  # calls of these end on the host, so that their end is known (``unickpt.timing.recorder``)


@dataclass(frozen=True, slots=True)
class Group:
    """A communicator of the job.

    Attributes:
        number: in the job, from 0; a rank's own table counts otherwise.
        name: of the process group, the same on all its members.
        label: what the framework calls it, or its name.
        backend: of torch.
        ranks: int64, its members, by their rank in it.
    """

    number: int
    name: str
    label: str
    backend: str
    ranks: Ints

    @property
    def ends_known(self) -> bool:
        """Whether a call without an end has not ended; of calls on a device no end may have been noted."""
        return self.backend in _ON_HOST


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank.

    Attributes:
        number: of the rank.
        ring: what it has noted; ``ring.records`` may hold what ``records`` does not.
        records: ``RECORD`` array of those that make sense, by number.
        group: int64, of each of them the number of its communicator in the job; -1 for moments.
        to_clock_ns: what its monotonic clock is behind the job's clock.
        until_ns: on the job's clock: when it was read, or when its process was last seen alive; of another host, whose
            processes cannot be asked, when any of its ranks last gave a sign of life.
        state: of its process.
        place: ``host b, tp 1 pp 0 dp 2``, with what is known.
    """

    number: int
    ring: Snapshot
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
class View:
    """All that is known of a job.

    Attributes:
        job, world: its name, and how many ranks it has; rings may be missing.
        ranks: by number.
        groups: by number.
        read_ns: when it was read, on the job's clock, or when the last of its hosts gave a sign of life.
        unreadable: what could not be read, and why.
    """

    job: str
    world: int
    ranks: dict[int, Rank]
    groups: list[Group]
    read_ns: int
    unreadable: tuple[str, ...]


def gathered(jobs: Sequence[Job], clock_offsets_ns: Mapping[str, int] | None = None) -> View:
    """The rings of all hosts of a job as one.

    Args:
        jobs: one for each host. A rank that is in several is taken from where it started last.
        clock_offsets_ns: host -> what its wall clock is behind the job's; 0 for hosts that are not in it.
    """
    offsets = clock_offsets_ns or {}
    found: dict[int, tuple[Snapshot, State, int, int]] = {}
    for job in jobs:
        for number, ring in job.ranks.items():
            before = found.get(number)
            if before is None or before[0].identity.wall_ns < ring.identity.wall_ns:
                read_ns = job.now_ns + offsets.get(ring.identity.host, 0)
                to_clock_ns = job.offsets_ns[number] + offsets.get(ring.identity.host, 0)
                found[number] = (ring, job.states.get(number, State.UNKNOWN), read_ns, to_clock_ns)
    seen_ns: dict[str, int] = {}  # host -> the last sign of life of any of its ranks
    for ring, _, _, to_clock_ns in found.values():
        host = ring.identity.host
        seen_ns[host] = max(seen_ns.get(host, 0), _last_sign_ns(ring) + to_clock_ns)
    groups: dict[str, Group] = {}
    ranks = {}
    reads_ns = []
    for number, (ring, state, read_ns, to_clock_ns) in sorted(found.items()):
        if state is State.UNKNOWN:  # rings of another host may have been copied from there long ago
            read_ns = min(seen_ns[ring.identity.host], read_ns)
        reads_ns.append(read_ns)
        records, at = _sound(ring.records), _listed(ring, groups)
        alive = state is not State.DEAD and not ring.closed
        ranks[number] = Rank(
            number, ring, records, _numbers(records, at, number, groups), to_clock_ns,
            read_ns if alive else min(_last_sign_ns(ring) + to_clock_ns, read_ns), state, _place(ring),
        )  # fmt: skip
    newest = max((rank.ring.identity for rank in ranks.values()), key=lambda who: who.wall_ns, default=None)
    return View(
        job=newest.job if newest else "",
        world=max([newest.world if newest else 0, *(number + 1 for number in ranks)]),
        ranks=ranks,
        groups=list(groups.values()),
        read_ns=max(reads_ns, default=0),
        unreadable=tuple(problem for job in jobs for problem in job.unreadable),
    )


def _last_sign_ns(ring: Snapshot) -> int:
    """The last thing that is known of a rank, on its own clock."""
    records = _sound(ring.records)
    return max(ring.heartbeat_ns, int(records["call_ns"].max(initial=0)), int(records["end_ns"].max(initial=0)))


def _sound(records: Records) -> Records:
    sound = np.isin(records["op"], _OPS) & (records["dtype"] <= len(DTYPES)) & (records["call_ns"] > 0)
    part: Records = records if sound.all() else records[sound]
    return part


def _listed(ring: Snapshot, groups: dict[str, Group]) -> list[int]:
    """Numbers in the job of a rank's communicators; those that are new are added to ``groups``."""
    numbers = []
    left = MOST_MEMBERS - sum(len(group.ranks) for group in groups.values())
    for at, entry in enumerate(ring.communicators):
        name = str(entry.get("name", f"?{ring.identity.rank}/{at}"))
        if name not in groups:
            label = str(entry.get("label") or name)
            parts = _parts(entry, ring.identity.world)
            left -= count_of(parts)
            ranks = expanded(parts if left >= 0 else ())
            groups[name] = Group(len(groups), name, label, str(entry.get("backend", _ON_HOST[0])), ranks)
        numbers.append(groups[name].number)
    return numbers


def _numbers(records: Records, at: list[int], rank: int, groups: dict[str, Group]) -> Ints:
    """Of each record the number of its communicator."""
    calls = records["op"] <= Op.RECEIVE
    if calls.any() and int(records["comm"][calls].max()) >= len(at):  # its line in the table is not there
        name = f"?{rank}"
        group = groups.setdefault(name, Group(len(groups), name, "unknown", _ON_HOST[0], np.zeros(0, np.int64)))
        at = at + [group.number] * (int(records["comm"][calls].max()) + 1 - len(at))
    table = np.array([*at, -1], np.int64)
    numbers: Ints = np.where(calls, table[np.where(calls, records["comm"].astype(np.int64), -1)], -1)
    return numbers


def _parts(entry: Mapping[str, Any], world: int) -> Progressions:
    try:
        return believable(entry.get("ranks", []), world)
    except ValueError:
        return ()


def coordinates(ring: Snapshot) -> dict[str, int]:
    """A rank's place in the parallel layout, by the groups that it has called: ``{"tp": 1, "pp": 0, "dp": 2}``."""
    groups = ((str(entry.get("label", "")), _parts(entry, ring.identity.world)) for entry in ring.communicators)
    return place_among(ring.identity.rank, groups)


def _place(ring: Snapshot) -> str:
    return " ".join([f"host {ring.identity.host},", *(f"{axis} {at}" for axis, at in coordinates(ring).items())]).rstrip(",")


def unended(rank: Rank, ends_known: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """bool ``[records]``: calls that go on, or went on until the process was last seen.

    Args:
        rank: whose records.
        ends_known: bool ``[groups]``, ``Group.ends_known`` of all.
    """
    records = rank.records
    going: npt.NDArray[np.bool_] = (records["op"] <= Op.RECEIVE) & (records["end_ns"] == 0)
    going &= (records["flags"] & int(Flag.FAILED)) == 0
    known = np.append(ends_known, False)[rank.group]
    return going & (known | (records["wait_ns"] > 0))
