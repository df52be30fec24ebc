"""A storage that says no: errors at every call, writes that are short, a disk that is gone, or full."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tests.jobs.faults import ranks
from tests.jobs.faults.calls import CALLS, CHANGING, Call, Refuse, short_writes, watched
from tests.jobs.faults.state import copied, files, resume
from tests.jobs.faults.tally import PREVIOUS, UNNAMED, Tally, spread

Case = TypeVar("Case")
REMOVING = ("unlink", "rmdir", "listdir", "scandir", "stat", "lstat")  # if these fail, files may stay


def _judge(tally: Tally, folder: Path, results: list[Any], before: dict[str, int] | None, where: str, *, step: int) -> None:
    """Of one save that met an error: ranks agree, nothing raised, nothing left, nothing lost."""
    if any(result is None or isinstance(result, Exception) for result in results):
        tally.deaths.append(f"{where}: {results}")
        return
    committed = {result.committed for result in results}
    if len(committed) > 1:
        tally.lost.append(f"{where}: the ranks do not agree")
    found = resume(folder)
    named = not (committed == {True} and found.step == step - 1)  # or only ``latest`` is that of before
    tally.judge(found, at_least=step if committed == {True} and named else step - 1, newest=step, where=where)
    if not named:
        tally.outcomes[UNNAMED] += 1
        tally.outcomes.subtract([PREVIOUS])
    if committed == {False} and before is not None and files(folder) != before:
        tally.lost.append(f"{where}: left {sorted(set(files(folder)) ^ set(before))}")


def rehearsed(base: Path, work: Path, tag: str, names: tuple[str, ...]) -> list[Call]:
    """The calls of a save, as a rehearsal makes them."""
    found: list[Call] = []
    with watched(copied(base, work), found.append, names):
        ranks.save_on_threads(work, tag, 3)
    return found


def some(cases: Sequence[Case], count: int, seed: int) -> list[Case]:
    """All of them, or so many at random in their order."""
    if count >= len(cases):
        return list(cases)
    return [cases[at] for at in sorted(random.Random(seed).sample(range(len(cases)), count))]


def errors(folder: Path, count: int, seed: int) -> list[Tally]:
    """One call fails: each in turn."""
    tally = Tally(
        "EIO at one system call",
        f"each call of {', '.join(CALLS)} in a save by 3 ranks (threads), in turn: it fails, or it succeeds and reports "
        "failure; saves to a new tag and to an existing tag",
    )
    base = ranks.sound(folder / "base")
    cases: list[tuple[str, str, int, bool]] = []
    for tag in ("step3", "best"):
        numbers: Counter[tuple[str, bool]] = Counter()
        for call in rehearsed(base, folder / "work", tag, CALLS):
            cases.append((tag, call.name, numbers[call.name, call.after], call.after))
            numbers[call.name, call.after] += 1
    for tag, name, number, after in some(cases, count, seed):
        work = copied(base, folder / "work")
        before = files(work)
        act = Refuse(number, errno.EIO, after=after)
        with watched(work, act, (name,)):
            results = ranks.save_on_threads(work, tag, 3)
        if act.hit is not None:  # the ranks' threads take turns as they like
            where = f"{tag}: {name} {number} {'after' if after else 'before'} {act.hit.path}"
            _judge(tally, work, results, before if name not in REMOVING else None, where, step=3)
    return [tally]


def gone(folder: Path, count: int, seed: int) -> list[Tally]:
    """From one call on, everything fails: the disk is gone. It comes back, and the next save is tried."""
    tally = Tally(
        "EIO from one system call onwards",
        "from each call onwards, all calls that change the file system fail, as if the disk were gone; then the disk returns, "
        "and the next save must be committed",
    )
    base = ranks.sound(folder / "base")
    cases = [
        (tag, call.number)
        for tag in ("step3", "best")
        for call in rehearsed(base, folder / "work", tag, CHANGING)
        if not call.after
    ]
    for tag, number in some(cases, count, seed):
        work = copied(base, folder / "work")
        act = Refuse(number, errno.EIO, for_ever=True)
        with watched(work, act, CHANGING):
            results = ranks.save_on_threads(work, tag, 3)
        if act.hit is None:
            continue
        where = f"{tag}, from call {number} on: {act.hit.place}"
        _judge(tally, work, results, None, where, step=3)
        if not all(r.committed for r in ranks.save_on_threads(work, tag, 4)) or resume(work).step != 4:
            tally.lost.append(f"{where}: the next save failed")
    return [tally]


def short(folder: Path, count: int, seed: int) -> list[Tally]:
    """Writes that take less than they are given."""
    how = "every `writev` and `pwrite` writes at most n bytes: 1, 511, 512, 4096, and random values up to 5,000"
    tally = Tally("short writes", how)
    base = ranks.sound(folder / "base")
    chance = random.Random(seed)
    for limit in [1, 511, 512, 4096][:count] + [int(5000 ** chance.random()) for _ in range(count - 4)]:
        work = copied(base, folder / "work")
        with short_writes(limit):
            results = ranks.save_on_threads(work, "best", 3, rows=60)
        _judge(tally, work, results, None, f"{limit} bytes", step=3)
    return [tally]


@contextlib.contextmanager
def disk(folder: Path, size_bytes: int) -> Iterator[bool]:
    """A small disk at a folder: a tmpfs. Whether this machine lets us mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def full(folder: Path, count: int, seed: int) -> list[Tally]:
    """A disk with less room than the save needs, by a random amount; then room is made."""
    tally = Tally("full disk", "a tmpfs on which other files leave a random amount of space, from none to more than the save "
                  "needs; then they are removed, and the next save must be committed")  # fmt: skip
    chance = random.Random(seed)
    given_back: Counter[str] = Counter()
    with disk(folder / "disk", 4 << 20) as mounted:
        if not mounted:
            tally.notes.append("not done: this machine does not permit to mount a tmpfs")
            return [tally]
        saves = folder / "disk" / "saves"
        ranks.sound(saves)
        ballast = folder / "disk" / "ballast"
        for number in range(count):
            step = 3 + 2 * number
            tag = "best" if number % 3 == 0 else f"step{step}"
            room = int(chance.uniform(0, 60)) * 4096
            before = files(saves)
            with ballast.open("wb") as file, contextlib.suppress(OSError):
                os.posix_fallocate(file.fileno(), 0, max(_free(saves) - room, 1))
            free = _free(saves)
            results = ranks.save_on_threads(saves, tag, step)
            _judge(tally, saves, results, before, f"{tag} with {room} bytes", step=step)
            if not any(getattr(result, "committed", True) for result in results):
                given_back["all of it" if _free(saves) >= free else f"{free - _free(saves)} bytes short"] += 1
            ballast.unlink()
            if not all(result.committed for result in ranks.save_on_threads(saves, f"step{step + 1}", step + 1)):
                tally.lost.append(f"save {number}: no save although there was room again")
            if resume(saves).step != step + 1:
                tally.lost.append(f"save {number}: the save after it is not what is resumed")
    tally.notes.append(f"released space of failed saves: {spread(given_back)}")
    return [tally]


def _free(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
