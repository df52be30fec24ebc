"""Checkpoints in the memory of hosts: hosts lost at every stage, keepers that die, full memory, flipped bits, names."""

from __future__ import annotations

import ctypes
import json
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.jobs.faults import ranks
from tests.jobs.faults.killing import WORLD
from tests.jobs.faults.memory_job import (
    COMMITTED,
    CONFIRMED,
    COPIED,
    COPYING,
    HALF,
    ON_DISK,
    WRITING,
    Flips,
    Running,
    Training,
    flip,
    kill,
    other_job,
    resumed,
    stage_of,
    started,
    wait_for_saves,
    wait_for_stage,
)
from tests.jobs.faults.state import JOBS
from tests.jobs.faults.tally import Tally, spread
from unickpt.base.options.declared import UNLIMITED

LOST = ("", ", loss of one host", ", loss of one host, another number of ranks", ", a flipped bit", ", loss of two hosts")
NONE, ONE, RESHAPED, BIT, TWO = LOST
ALL = tuple(range(WORLD))
_SLOW_MBPS = (UNLIMITED, 0.05, 0.2)
_CLONE_NEWNS, _CLONE_NEWUSER, _MS_PRIVATE = 0x00020000, 0x10000000, (1 << 18) | 16384
_FULL_KIB = (16, 400)  # of a host's memory: between less than one file and all that is needed


class Case:
    """One fault: a job on fresh hosts, what ends it, and the resume of what is left.

    Args:
        folder: holds the hosts and the checkpoints on disk.
        number: of the case; names it and its scratch folder.
        tally: receives the outcome.
        chance: source of all choices.
        fresh: remove the hosts and checkpoints of the case before.
    """

    def __init__(self, folder: Path, number: int, tally: Tally, chance: random.Random, *, fresh: bool = True) -> None:
        self.folder, self.number, self.tally, self.chance, self.per_save_s = folder, number, tally, chance, 0.0
        for path in (*folder.glob("host*"), folder / "saves") if fresh else ():
            shutil.rmtree(path, ignore_errors=True)
        (folder / "saves").mkdir(exist_ok=True)

    def run(self, training: Training, *, hosts: Sequence[int] = ALL, saves: int = 2, name: str = "") -> Running:
        """Start a job, and wait until it has saved."""
        job = started(self.folder, self.folder / f"job{self.number}{name}", training, hosts)
        self.per_save_s = wait_for_saves(job, saves)
        return job

    def end(self, job: Running, *, together: float = 0.5, at_once: bool = False) -> None:
        """Kill all ranks, or one, at a random time."""
        if not at_once:
            time.sleep(self.chance.uniform(0.0, max(self.per_save_s, 0.05)))
        victims = list(ALL) if self.chance.random() < together else [self.chance.randrange(WORLD)]
        self.tally.deaths += [f"case {self.number}: {problem}" for problem in kill(job, victims, self.chance)]

    def lose(self, count: int, hosts: Sequence[int] = ALL) -> list[int]:
        """Lose hosts. Return those that are left."""
        gone = self.chance.sample(list(hosts), count)
        for host in gone:
            shutil.rmtree(self.folder / f"host{host}")
        return [host for host in hosts if host not in gone]

    def judge(self, job: Running, left: Sequence[int], *, only_disk: bool = False, flips: Flips | None = None) -> None:
        """Resume on hosts, and count the outcome. What was confirmed in memory or committed on disk must be there."""
        confirmed, on_disk = (job.board.read(rank)[column] for rank, column in (CONFIRMED, ON_DISK))
        at_least = int(on_disk) if only_disk else max(int(confirmed), int(on_disk))
        begun = max(job.board.read(rank)[0] for rank in ALL)
        found = resumed(self.folder, left, flips)
        self.tally.judge(found, at_least=at_least or None, newest=begun, where=f"case {self.number}, hosts {list(left)}")
        if found.step is not None and found.step >= JOBS:
            self.tally.wrong.append(f"case {self.number}: step {found.step} is of another job")

    def slow(self) -> float:
        """A bandwidth of the copies."""
        return self.chance.choice(_SLOW_MBPS)


Kind = tuple[str, str, Callable[[Case], None]]


def _counted(kinds: Sequence[Kind], folder: Path, count: int, seed: int) -> list[Tally]:
    chance = random.Random(seed)
    tallies = [Tally(f"in memory: {fault}", how) for fault, how, _ in kinds]
    for number in range(count):
        at = number % len(kinds)
        kinds[at][2](Case(folder, number, tallies[at], chance))
    return [tally for tally in tallies if tally.count]


_JOB = f"{WORLD} processes on hosts of their own save into memory in a loop"


def at_random(folder: Path, count: int, seed: int) -> list[Tally]:
    """Each job is killed at a random instant of its save loop; hosts are lost; the rest resumes."""
    bits: Counter[str] = Counter()

    def one(case: Case, lost: str) -> None:
        training = Training(to_disk_every=3) if lost == TWO else Training(megabytes_per_s=case.slow())
        job = case.run(training)
        case.end(job)
        left = case.lose({ONE: 1, RESHAPED: 1, TWO: 2}.get(lost, 0))
        if lost == BIT:
            bits[_flipped(case)] += 1
        if lost == RESHAPED:
            more = [case.chance.choice([*left, WORLD]) for _ in range(case.chance.choice((0, 1, 2, 3)))]
            left = sorted([*left, *more])
        case.judge(job, left, only_disk=lost == TWO)

    how = f"{_JOB}; one or all are killed at a random time; then the hosts that are left resume"
    also = {TWO: ". Each third save is on disk", RESHAPED: ", with two to five ranks, some on a new host"}
    kinds: list[Kind] = [
        (f"kill -9{lost}", how + also.get(lost, ""), lambda case, lost=lost: one(case, lost))  # type: ignore[misc]
        for lost in LOST
    ]
    tallies = _counted(kinds, folder, count, seed)
    for tally in tallies:
        if tally.fault.endswith(BIT):
            tally.notes.append(f"bits were flipped in: {spread(bits)}")
    return tallies


def _flipped(case: Case) -> str:
    """Flip a bit of any file that a host holds. Returns what was hit."""
    files = sorted((case.folder / f"host{case.chance.choice(ALL)}").glob("unickpt-memory-*/g*/**/*.*"))
    files = [path for path in files if path.is_file() and path.stat().st_size]
    if not files:
        return "nothing"
    path = case.chance.choice(files)
    flip(path, case.chance)
    return path.name if path.parent.name.startswith("g") else f"a file in {path.parent.name}"


def stages(folder: Path, count: int, seed: int) -> list[Tally]:
    """A host is lost while a save or its copies are at a certain stage."""
    found: dict[str, Counter[str]] = {}

    def one(case: Case, wanted: Sequence[str]) -> None:
        job = case.run(
            Training(megabytes_per_s=case.chance.choice((0.05, 0.2)), to_disk_every=case.chance.choice((4, 1 << 30)))
        )
        wait_for_stage(case.folder, ALL, case.chance.choice(wanted))
        time.sleep(case.chance.uniform(0.0, 0.003))
        case.end(job, together=0.8, at_once=True)
        found.setdefault(case.tally.fault, Counter())[stage_of(case.folder, ALL)] += 1
        case.judge(job, case.lose(1))

    saving, copying = (COPYING, WRITING), (COMMITTED, HALF, COPIED)
    kinds: list[Kind] = [
        ("a host is lost during a save", f"{_JOB}; a host is lost when the state is copied or files are written",
         lambda case: one(case, saving)),
        ("a host is lost during replication", f"{_JOB}; a host is lost between the commit and the confirmation",
         lambda case: one(case, copying)),
        ("a generation is half replicated", f"{_JOB}; a host is lost when some files have copies and others have none",
         lambda case: one(case, (HALF,))),
    ]  # fmt: skip
    tallies = _counted(kinds, folder, count, seed)
    for tally in tallies:
        tally.notes.append(f"stage of the newest save: {spread(found[tally.fault])}")
    return tallies


def flight(folder: Path, count: int, seed: int) -> list[Tally]:
    """Bits are flipped between hosts, in copies and in loads."""
    flipped: Counter[str] = Counter()

    def copies(case: Case) -> None:
        job = case.run(
            Training(flips=case.chance.choice((0.02, 0.1, 0.4)), to_disk_every=case.chance.choice((5, 1 << 30))), saves=4
        )
        case.end(job)
        case.judge(job, case.lose(1))

    def loads(case: Case) -> None:
        job = case.run(Training())
        case.end(job)
        flips = Flips(case.chance, 0.3, most=1)
        case.judge(job, case.lose(1), flips=flips)
        flipped["a bit was flipped" if flips.count else "no part of an answer was chosen"] += 1

    kinds: list[Kind] = [
        ("bits flipped in flight, copies", f"{_JOB}; relays flip bits in the answers of keepers; then a host is lost", copies),
        ("a bit flipped in flight, load", f"{_JOB}; a host is lost; a relay flips a bit in an answer during the resume", loads),
    ]
    tallies = _counted(kinds, folder, count, seed)
    if len(tallies) > 1:
        tallies[1].notes.append(f"of the resumes: {spread(flipped)}")
    return tallies


def keepers(folder: Path, count: int, seed: int) -> list[Tally]:
    """Keepers are killed while the job trains; training starts them again."""

    def one(case: Case) -> None:
        job = case.run(Training(megabytes_per_s=case.slow()))
        for _ in range(case.chance.randrange(1, 6)):
            keeper = job.keeper(case.chance.randrange(WORLD))
            if keeper is not None:
                keeper.kill()
            time.sleep(case.chance.uniform(0.0, 0.3))
        case.end(job)
        case.judge(job, case.lose(case.chance.randrange(2)))

    how = f"{_JOB}; keepers are killed, up to five times; then one or all ranks; at most one host is lost"
    return _counted([("a keeper is killed and started again", how, one)], folder, count, seed)


def names(folder: Path, count: int, seed: int) -> list[Tally]:
    """The same tag again, another job under the same name, and clocks that jump back."""

    def tag(case: Case) -> None:
        job = case.run(
            Training(tag="best", to_disk_every=case.chance.choice((3, 1 << 30)), megabytes_per_s=case.slow()), saves=3
        )
        case.end(job)
        case.judge(job, case.lose(case.chance.randrange(2)))

    def other(case: Case) -> None:
        other_job(case.folder, 5 * JOBS)
        shutil.rmtree(case.folder / "saves")
        (case.folder / "saves").mkdir()
        job = case.run(Training(), saves=case.chance.choice((0, 1, 2)))
        case.end(job)
        case.judge(job, case.lose(case.chance.randrange(3)), only_disk=True)

    def clock(case: Case) -> None:
        job = case.run(Training())
        case.end(job)
        left = [host for host in ALL if host != 0]
        shutil.rmtree(case.folder / "host0")
        first = max(job.board.read(rank)[0] for rank in ALL) + 1
        behind = Training(first=first, clock_s=-case.chance.choice((60.0, 3600.0, 1e6)), resumes=True)
        hosts = [WORLD, *left] if case.chance.random() < 0.5 else [*left, WORLD]
        again = case.run(behind, hosts=hosts, saves=case.chance.choice((1, 2)), name="b")
        case.end(again)
        case.judge(again, case.lose(case.chance.randrange(2), hosts))

    kinds: list[Kind] = [
        ("the same tag saved again", f"{_JOB}, always under one tag; one or all are killed; at most one host is lost", tag),
        ("generations of another job under the same name",
         f"another job has saved into memory under the same name; its directory is removed; {_JOB}; up to two hosts are lost",
         other),
        ("a clock that jumps back",
         f"{_JOB}; host 0 is lost; the job goes on with a new host, and all clocks are a minute to days behind", clock),
    ]  # fmt: skip
    return _counted(kinds, folder, count, seed)


def full(folder: Path, count: int, seed: int) -> list[Tally]:
    """The memory of each host is a tmpfs of a random size, from less than one file to all that is needed."""
    why = ranks_in_namespace(lambda: None)

    def one(case: Case) -> None:
        sizes = [case.chance.randrange(*_FULL_KIB) for _ in ALL]
        result, state = case.folder / "result", case.chance.getrandbits(32)

        def inside() -> None:
            for host, size in enumerate(sizes):
                place = case.folder / f"host{host}"
                place.mkdir()
                _mount(b"tmpfs", place, 0, f"size={size}k".encode())
            inner = Case(case.folder, case.number, Tally("", ""), random.Random(state), fresh=False)
            job = inner.run(Training(to_disk_every=inner.chance.choice((4, 1 << 30))), saves=3)
            inner.end(job)
            left = inner.chance.sample(list(ALL), WORLD - inner.chance.randrange(2))
            inner.judge(job, sorted(left))
            result.write_text(json.dumps([inner.tally.to_json(), job.board.read(0)[1], job.board.read(1)[1]]))

        problem = ranks_in_namespace(inside)
        if problem or not result.exists():
            case.tally.deaths.append(f"case {case.number}, {sizes} KiB: {problem or 'no result'}")
            return
        said, confirmed, on_disk = json.loads(result.read_text())
        result.unlink()
        case.tally.outcomes.update(said["outcomes"])
        case.tally.wrong += said["wrong"]
        case.tally.deaths += said["deaths"]
        case.tally.lost += said["lost"]
        used["both" if confirmed and on_disk else "memory" if confirmed else "disk" if on_disk else "none"] += 1

    used: Counter[str] = Counter()
    how = f"{_JOB}, which is a tmpfs of {_FULL_KIB[0]} to {_FULL_KIB[1]} KiB; then kill -9; at most one host is lost"
    if why:
        return [Tally("in memory: shared memory is full", how, notes=[f"not done: {why}"])]
    tallies = _counted([("shared memory is full", how, one)], folder, count, seed)
    for tally in tallies:
        tally.notes.append(f"these jobs saved to: {spread(used)}")
    return tallies


def ranks_in_namespace(action: Callable[[], None]) -> str:
    """Run an action in a child with mounts of its own. Return what went wrong, or ''."""

    def run() -> None:
        libc, user, group = ctypes.CDLL(None, use_errno=True), os.geteuid(), os.getegid()
        if libc.unshare(_CLONE_NEWNS | (_CLONE_NEWUSER if user else 0)):
            raise OSError(ctypes.get_errno(), "no namespace")
        if user:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
            Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        _mount(b"none", Path("/"), _MS_PRIVATE, b"")
        action()

    status = ranks.ended(ranks.fork(run), 4 * ranks.HANG_S)
    return "" if status == 0 else f"a process with mounts of its own ended with {status}"


def _mount(kind: bytes, place: Path, flags: int, data: bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(kind, str(place).encode(), kind, flags, data or None):
        raise OSError(ctypes.get_errno(), f"{place} cannot be mounted")
