"""The faults of the soak, and a schedule of them from a seed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from evidence.sixty_four.soak.hosts import CLOCKS, ENDPOINT, NAMES, Soaked, waited
from unickpt.cli.main import main as unickpt

STAYS_S = 25.0  # for which a job is watched that must go on as it is
FILLED_S = 20.0  # for which a disk or a memory is full


@dataclass
class Case:
    """A fault that is being made.

    Attributes:
        job: the job, on all of its hosts.
        source: random numbers.
        hosts: hosts at fault, the first one and in a pair the second one.
        rank, pid: one rank of the first host.
        seen: what was noted on the way, for the row.
        left: processes that must end by themselves.
        wrong: what was wrong on the way.
    """

    job: Soaked
    source: random.Random
    hosts: list[str]
    rank: int
    pid: int
    seen: list[str] = field(default_factory=list)
    left: list[psutil.Process] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def host(self) -> str:
        """The first host at fault."""
        return self.hosts[0]

    def tell(self, kind: str, **more: object) -> None:
        """Ask a rank for a fault."""
        self.job.fault(kind=kind, rank=self.rank, step=self.job.step() + 1, **more)

    def of(self, host: str) -> Case:
        """Return this case for a rank of another host."""
        ranks = [each for each in self.job.ranks() if each[1] == host]
        rank, _, pid = self.source.choice(ranks)
        return Case(self.job, self.source, [host], rank, pid, self.seen, self.left, self.wrong)


Act = Callable[[Case], None]


def _nothing(_: Case) -> None:
    pass


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        title: for the table.
        act: makes it.
        back: what is done when the others work without the hosts, or when a fault that stays is over.
        after: ``same``: the round goes on; ``restart``: a round on the same hosts; ``out``: one without the hosts at fault, and
            then one with all; ``all``: only the round with all is waited for.
        orders: how orders may begin.
        named: words of which the verdict or the order must have one; () for none.
        said: words of which a line of the log must have one; () for none.
        pick: which host is at fault.
        several: number of hosts at fault.
    """

    title: str
    act: Act
    back: Act = _nothing
    after: str = "restart"
    orders: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    said: tuple[str, ...] = ()
    pick: Callable[[Soaked], str] | None = None
    several: int = 1


# ---------------------------------------------------------------- processes


def _told(kind: str, **more: object) -> Act:
    return lambda case: case.tell(kind, **more)


def _signalled(number: signal.Signals) -> Act:
    return lambda case: os.kill(case.pid, number)


def _slow(case: Case) -> None:
    case.job.fault(kind="slow", rank=case.rank, ms=600)


def _no_fault(case: Case) -> None:
    case.job.no_fault()


def _agent(case: Case) -> None:
    case.left += case.job.kill_agent(case.host)


def _started(case: Case) -> None:
    case.job.run(case.host)


def _orphan(case: Case) -> None:
    """The agent is killed while one of its ranks is stopped, which cannot end by itself."""
    os.kill(case.pid, signal.SIGSTOP)
    case.left += case.job.kill_agent(case.host)


def _child(case: Case) -> None:
    """The agent is killed while a rank has a child, which waits for ever."""
    case.tell("child")
    waited(lambda: any(each["what"] == "child" for each in case.job.events()), 20)
    case.left += case.job.kill_agent(case.host)


def _helper(words: str) -> Act:
    def act(case: Case) -> None:
        for pid in case.job.pids(case.host, words):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            case.seen.append(f"killed {pid}")

    return act


def _drained(case: Case) -> None:
    case.job.running[case.host].send_signal(signal.SIGTERM)


def _again(case: Case) -> None:
    code = case.job.running.pop(case.host).wait(60)
    case.wrong += [] if code in (143, -15) else [f"the agent ended with {code}"]
    case.job.run(case.host)


def _parked(case: Case) -> None:
    _asked(case, "park")


def _admitted(case: Case) -> None:
    _asked(case, "admit")


def _asked(case: Case, what: str) -> None:
    if unickpt(["hosts", what, case.host, "--rdzv-endpoint", case.job.endpoint, "--rdzv-id", case.job.identifier]):
        case.wrong.append(f"unickpt hosts {what} failed")


# ---------------------------------------------------------------- machines and links


def _lost(case: Case) -> None:
    for host in case.hosts:
        case.job.lose(host)


def _restored(case: Case) -> None:
    for host in case.hosts:
        case.job.restore(host)


def _outage(case: Case) -> None:
    """All hosts lose their power at once, and start again."""
    case.hosts = list(NAMES)
    for host in NAMES:
        case.job.network.down(host)
    _lost(case)
    case.job.era += 1
    time.sleep(3.0)
    _restored(case)


def _half(case: Case) -> None:
    """Two hosts lose their power at once, and return."""
    _lost(case)
    time.sleep(20.0)
    _restored(case)


def _down(case: Case) -> None:
    case.job.network.down(case.host)


def _up(case: Case) -> None:
    case.job.network.up(case.host)


def _flapping(case: Case) -> None:
    for _ in range(3):
        _down(case)
        time.sleep(11.0)
        _up(case)
        time.sleep(4.0)


def _divided(case: Case) -> None:
    case.job.network.divide(case.hosts)
    time.sleep(20.0)
    case.job.network.unite(case.hosts)


def _slow_link(case: Case) -> None:
    case.job.network.slow(case.host, 8.0)


def _mended(case: Case) -> None:
    case.job.network.slow(case.host, 0)


def _first(job: Soaked) -> str:
    return job.ranks()[0][1]


def _endpoint(_: Soaked) -> str:
    return ENDPOINT


# ---------------------------------------------------------------- storage


def fill(folder: Path) -> None:
    """Fill a file system."""
    with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))


def _full_disk(case: Case) -> None:
    begin = time.time()
    fill(case.job.place.disk)
    waited(lambda: any(each["what"] == "not saved" and each["at"] > begin for each in case.job.events()), 200)
    time.sleep(FILLED_S / 4)


def _free_disk(case: Case) -> None:
    (case.job.place.disk / "filler").unlink(missing_ok=True)


def _full_shm(case: Case) -> None:
    fill(case.job.place.of(case.host, "shm"))
    case.job.go_on(30, 200)  # past two saves into memory


def _free_shm(case: Case) -> None:
    for host in NAMES:
        (case.job.place.of(host, "shm") / "filler").unlink(missing_ok=True)


def _restart_while_full(case: Case) -> None:
    fill(case.job.place.of(case.host, "shm"))
    os.kill(case.of(case.source.choice([each for each in NAMES if each != case.host])).pid, signal.SIGKILL)


def _restart_on_full_disk(case: Case) -> None:
    fill(case.job.place.disk)
    case.job.go_on(15, 60)
    os.kill(case.pid, signal.SIGKILL)


def _damage(path: Path, source: random.Random) -> str:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    at = source.randrange(len(data))
    data[at] ^= 1 << source.randrange(8)
    descriptor = os.open(path, os.O_WRONLY)
    os.pwrite(descriptor, bytes(data[at : at + 1]), at)
    os.close(descriptor)
    return f"{path.name}: bit of byte {at:,} of {len(data):,}"


def _damaged_memory(case: Case) -> None:
    """A bit of the newest file of a host's memory flips, and all ranks start again."""
    files = [each for each in case.job.place.of(case.host, "shm").glob("unickpt-memory-*/**/*.unickpt*") if each.is_file()]
    files = files or [each for each in case.job.place.of(case.host, "shm").glob("unickpt-memory-*/**/*") if each.is_file()]
    big = [each for each in files if each.stat().st_size > 2000]
    if big:
        newest = max(big, key=lambda each: each.stat().st_mtime)
        case.seen.append(_damage(newest, case.source))
    os.kill(case.pid, signal.SIGKILL)


def _damaged_disk(case: Case) -> None:
    """A bit of the newest checkpoint on disk flips, and all hosts lose their power."""

    def found() -> list[Path]:
        folders = [each.parent for each in case.job.checkpoints.glob("step*/manifest.json")]
        return sorted(folders, key=lambda each: int(each.name[4:]))

    waited(lambda: len(found()) > 1, 120)  # the only checkpoint of a folder is nothing that a job may replace by itself
    *older, newest = found()
    files = [each for each in newest.rglob("*") if each.is_file()]
    case.seen.append(f"{newest.name}/{_damage(case.source.choice(files), case.source)}, {len(older)} older ones")
    _outage(case)


# ---------------------------------------------------------------- in the midst of things


def _in_save(case: Case) -> None:
    case.job.fault(kind="kill in save", rank=case.rank, step=case.job.step(), ms=case.source.randint(0, 150))


def _in_load(case: Case) -> None:
    case.job.fault(kind="kill in load", rank=case.source.randrange(16), step=0, ms=case.source.randint(0, 1500))
    os.kill(case.pid, signal.SIGKILL)


def _other(case: Case) -> Case:
    return case.of(case.source.choice([each for each in NAMES if each not in case.hosts]))


def _in_round(case: Case) -> None:
    """A rank of another host is killed. While the next round opens, this host loses its power."""
    os.kill(_other(case).pid, signal.SIGKILL)
    time.sleep(case.source.uniform(0.1, 8.0))
    _lost(case)


def _kill_and_kill(case: Case) -> None:
    """Ranks of two hosts are killed at once."""
    other = _other(case)
    for pid in (case.pid, other.pid):
        os.kill(pid, signal.SIGKILL)


def _stop_and_kill(case: Case) -> None:
    """A rank is stopped, and one of another host is killed at once."""
    other = _other(case)
    os.kill(case.pid, signal.SIGSTOP)
    os.kill(other.pid, signal.SIGKILL)


def _dark_and_full(case: Case) -> None:
    """A host loses its power while the disk is full."""
    fill(case.job.place.disk)
    _lost(case)


def _back_and_free(case: Case) -> None:
    _free_disk(case)
    _restored(case)


def _dark_and_agent(case: Case) -> None:
    """A host loses its power, and the diagnosis of another host is killed at once."""
    other = _other(case)
    _helper("unickpt.steering.host.watcher")(other)
    _lost(case)


# ---------------------------------------------------------------- clocks


def _jumped(case: Case) -> None:
    """The wall clock of all processes of a host jumps."""
    by_s = case.source.choice((-3600, 3600))
    case.seen.append(f"{by_s:+} s")
    case.job.set_clock(case.host, by_s)
    time.sleep(3.0)


def _jumped_and_killed(case: Case) -> None:
    _jumped(case)
    os.kill(case.of(case.source.choice(NAMES)).pid, signal.SIGKILL)


def _right_again(case: Case) -> None:
    case.job.set_clock(case.host, 0)


DARK = ("restart",)  # the others may start again while a host that cannot be reached is not out yet
STOPPED = ("STOPPED_OUT", "HUNG_OUT")

KINDS: Mapping[str, Kind] = {
    "kill": Kind("SIGKILL of a rank", _signalled(signal.SIGKILL)),
    "crash": Kind("an exception in a rank", _told("crash")),
    "stop": Kind("SIGSTOP of a rank", _signalled(signal.SIGSTOP), _nothing, "out", ("park",), STOPPED),
    "loop": Kind("endless loop of a rank", _told("loop"), _nothing, "out", ("park",), ("HUNG_OUT",)),
    "sleep": Kind("a rank sleeps for ever", _told("sleep"), _nothing, "out", ("park",), ("HUNG_OUT",)),
    "skip": Kind("a rank leaves out a collective", _told("skip"), orders=("restart",)),
    "slow": Kind("a rank is slow", _slow, _no_fault, "out", ("park",), ("SLOW_OUT",)),
    "agent": Kind("SIGKILL of a torchrun agent", _agent, _started, "out"),
    "orphan": Kind("SIGKILL of an agent, one of whose ranks is stopped", _orphan, _started, "out"),
    "child": Kind("SIGKILL of an agent, one of whose ranks has a child", _child, _started, "out"),
    "watcher": Kind("SIGKILL of a diagnosis agent", _helper("unickpt.steering.host.watcher"), after="same"),
    "keeper": Kind("SIGKILL of a keeper of memory", _helper("unickpt.checkpoint.memory.keeper"), after="same"),
    "drain": Kind("SIGTERM to an agent", _drained, _again, "out"),
    "park": Kind("a person parks a host, and admits it", _parked, _admitted, "out", ("park", "admit"), ("park",)),
    "dark": Kind("a host loses its power", _lost, _restored, "out", DARK),
    "rank0": Kind("rank 0's host loses its power", _lost, _restored, "out", DARK, pick=_first),
    "endpoint": Kind("the endpoint's host loses its power", _lost, _restored, "out", DARK, pick=_endpoint),
    "half": Kind("two hosts lose their power at once", _half, _nothing, "all", DARK, several=2),
    "outage": Kind("all hosts lose their power at once", _outage, _nothing, "all", DARK),
    "link": Kind("the link of a host fails", _down, _up, "out", (*DARK, "park")),
    "flap": Kind("the link of a host fails three times", _flapping, _nothing, "all", (*DARK, "park")),
    "divided": Kind("two hosts cannot reach the other two", _divided, _nothing, "all", (*DARK, "park"), several=2),
    "slow-link": Kind("the link of a host is slow (8 Mbit/s)", _slow_link, _mended, "same"),
    "full-disk": Kind("the disk is full", _full_disk, _free_disk, "same", said=("No space",)),
    "full-shm": Kind("/dev/shm of a host is full", _full_shm, _free_shm, "same", said=("not saved in memory", "goes to disk")),
    "full-shm-kill": Kind("SIGKILL of a rank while /dev/shm of another host is full", _restart_while_full, _free_shm),
    "full-disk-kill": Kind("SIGKILL of a rank while the disk is full", _restart_on_full_disk, _free_disk),
    "damaged-memory": Kind("damaged file of the newest checkpoint in memory, and SIGKILL of a rank", _damaged_memory),
    "damaged-disk": Kind("damaged file of the newest checkpoint on disk, all hosts dark", _damaged_disk, _nothing, "all", DARK),
    "save": Kind("a rank dies while it saves", _in_save),
    "load": Kind("a rank dies while it loads", _in_load),
    "round": Kind("a host dies while a round opens", _in_round, _restored, "out", DARK),
    "kill-kill": Kind("two at once: SIGKILL of ranks of two hosts", _kill_and_kill),
    "stop-kill": Kind("two at once: SIGSTOP and SIGKILL of ranks", _stop_and_kill, _nothing, "all", ("park", "restart")),
    "dark-full": Kind("two at once: a host dark, and the disk full", _dark_and_full, _back_and_free, "out", DARK),
    "dark-watcher": Kind("two at once: a host dark, another's diagnosis killed", _dark_and_agent, _restored, "out", DARK),
    CLOCKS[0]: Kind("the clock of a host jumps by an hour, and back", _jumped, _right_again, "same"),
    CLOCKS[1]: Kind("SIGKILL of a rank while the clock of a host is wrong by an hour", _jumped_and_killed, _right_again),
}  # fmt: skip


def kind_of(number: int, seed: int, only: Sequence[str] = ()) -> str:
    """Return the kind of the n-th fault, counted from 0. Each kind comes once before any comes twice, those of clocks never.

    They need a library that gives all processes another clock, so they have a piece of their own (``only``).
    """
    names = list(only or [each for each in KINDS if each not in CLOCKS])
    cycle, at = divmod(number, len(names))
    random.Random(f"{seed} {cycle}").shuffle(names)
    return names[at]


def chosen(number: int, seed: int, job: Soaked, kind: Kind) -> Case:
    """Return the n-th fault with its hosts and rank."""
    source = random.Random(f"{seed} fault {number}")
    hosts = source.sample(NAMES, kind.several)
    if kind.pick is not None:
        hosts = [kind.pick(job)]
    rank, _, pid = source.choice([each for each in job.ranks() if each[1] == hosts[0]])
    return Case(job, source, hosts, rank, pid)
