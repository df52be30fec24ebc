"""Faults for jobs of a framework: what is done, which hosts must be left, and how the hosts come back."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

from evidence.steering.cluster import LIMIT_S, Cluster, View
from unickpt.cli.main import main as unickpt

WATCH_S = 20.0  # for which a job must go on as it is
SAVE_STEPS = 10


@dataclass
class Case:
    """One run of a scenario.

    Attributes:
        job: the job, whose hosts all run.
        view: its round.
        source: random numbers.
        hosts: hosts at fault.
        ranks: one rank of each of them.
        left: processes that a killed agent has left behind.
    """

    job: Cluster
    view: View
    source: random.Random
    hosts: list[str] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    left: list[psutil.Process] = field(default_factory=list)

    @property
    def rank(self) -> int:
        """The rank at fault."""
        return self.ranks[0]

    @property
    def host(self) -> str:
        """The host at fault."""
        return self.hosts[0]

    @property
    def pid(self) -> int:
        """The worker at fault."""
        return self.view.pids[self.rank]

    def rest(self) -> set[str]:
        """Return the hosts that are not at fault."""
        return self.view.members() - set(self.hosts)


Act = Callable[[Case], None]


def _nothing(_: Case) -> None:
    pass


@dataclass(frozen=True)
class Scenario:
    """A kind of fault.

    Attributes:
        title: for the table.
        act: makes the fault.
        back: lets the hosts at fault return.
        out: whether they must be out. Otherwise the workers start again in place.
        stays: the round must go on as it is.
        orders: how orders may begin.
        several: number of hosts at fault.
        pick: which rank is at fault; None: any.
        kind: jobs that the scenario runs in: a scenario of ``plain`` jobs runs in a row with others, others have a job each.
    """

    title: str
    act: Act
    back: Act = _nothing
    out: bool = False
    stays: bool = False
    orders: tuple[str, ...] = ()
    several: int = 1
    pick: Callable[[Cluster, View], int] | None = None
    kind: str = "plain"


# ---------------------------------------------------------------- faults


def _told(kind: str, **more: int) -> Act:
    return lambda case: case.job.fault(kind=kind, rank=case.rank, step=case.job.step() + 1, **more)


def _lasting(kind: str, ms: int) -> Act:
    return lambda case: case.job.fault(kind=kind, host=case.host, ms=ms)


def _signalled(number: signal.Signals) -> Act:
    return lambda case: os.kill(case.pid, number)


def _lost(case: Case) -> None:
    for host in case.hosts:
        case.job.lose(host)


def _agent(case: Case) -> None:
    case.left = case.job.kill_agent(case.host)


def _down(case: Case) -> None:
    case.job.network.down(case.host)


def _slow_link(case: Case) -> None:
    case.job.network.slow(case.host, 3.0)


def _in_save(case: Case) -> None:
    case.job.fault(kind="kill in save", rank=case.rank, step=case.job.step(), ms=case.source.randint(0, 60))


def _in_load(case: Case) -> None:
    """A rank is killed. When the workers have started again, a rank is killed while it loads."""
    case.job.fault(kind="kill in load", rank=case.source.randrange(len(case.view.pids)), step=0, ms=case.source.randint(0, 150))
    os.kill(case.pid, signal.SIGKILL)


def _in_rendezvous(case: Case) -> None:
    """A rank of another host is killed. While the next round is being opened, a host is lost."""
    other = case.source.choice([rank for rank, host in enumerate(case.view.hosts) if host != case.host])
    os.kill(case.view.pids[other], signal.SIGKILL)
    time.sleep(case.source.uniform(0.1, 1.5))
    _lost(case)


def _in_assignment(case: Case) -> None:
    """A rank of another host is killed. Rank 0's host loses its power while the agents ask its store for their ranks."""
    output = next(path for path in reversed(case.job.outputs) if path.name.startswith(f"{case.host}-"))
    rounds = output.read_bytes().count(b"steering: round ")
    other = case.source.choice([rank for rank, host in enumerate(case.view.hosts) if host != case.host])
    os.kill(case.view.pids[other], signal.SIGKILL)
    deadline = time.monotonic() + LIMIT_S
    while output.read_bytes().count(b"steering: round ") == rounds and time.monotonic() < deadline:
        time.sleep(0.0005)
    os.kill(case.job.running[case.host].pid, signal.SIGSTOP)  # the store is in this process; its rank 0 assigns the ranks
    _lost(case)


def _three(case: Case) -> None:
    """A rank is killed. While the workers start again, a rank is stopped, and then a host is lost."""
    others = [rank for rank, host in enumerate(case.view.hosts) if host != case.host]
    os.kill(case.view.pids[case.source.choice(others)], signal.SIGKILL)
    later = case.job.until(lambda: case.job.view(case.view.epoch))
    if later:
        os.kill(later.pids[later.hosts.index(case.host)], signal.SIGSTOP)
    time.sleep(case.source.uniform(0.5, 3.0))
    _lost(case)


def _flapping(case: Case) -> None:
    """The link of a host fails three times, for longer than ``expiry_seconds``."""
    for _ in range(3):
        case.job.network.down(case.host)
        time.sleep(9.0)
        case.job.network.up(case.host)
        time.sleep(4.0)


# ---------------------------------------------------------------- returns


def _restored(case: Case) -> None:
    for host in case.hosts:
        case.job.restore(host)


def _started(case: Case) -> None:
    case.job.run(case.host)


def _admitted(case: Case) -> None:
    given = ["--rdzv-endpoint", case.job.endpoint, "--rdzv-id", case.job.identifier]
    for name in case.hosts:
        if unickpt(["hosts", "admit", name, *given]):
            raise RuntimeError(f"{name} was not admitted")


def _up(case: Case) -> None:
    case.job.network.up(case.host)


def _mended(case: Case) -> None:
    case.job.network.slow(case.host, 0)
    case.job.no_fault()


def _of_host(name: str) -> Callable[[Cluster, View], int]:
    return lambda _, view: view.hosts.index(name)


ENDPOINT = "n2"

DARK = ("restart",)  # the others may start again while a host that cannot be reached is not out yet

SCENARIOS = {
    "kill": Scenario("SIGKILL of a rank", _signalled(signal.SIGKILL)),
    "crash": Scenario("an exception in a rank, once", _told("crash")),
    "agent": Scenario("SIGKILL of a torchrun agent", _agent, _started, out=True),
    "machine": Scenario("a host loses its power", _lost, _restored, out=True, orders=DARK),
    "rank0": Scenario("rank 0's host loses its power", _lost, _restored, out=True, orders=DARK, pick=lambda *_: 0),
    "endpoint": Scenario(
        "the endpoint's host loses its power", _lost, _restored, out=True, orders=DARK, pick=_of_host(ENDPOINT)
    ),
    "stop": Scenario("SIGSTOP of a rank", _signalled(signal.SIGSTOP), _admitted, out=True, orders=("park",)),
    "loop": Scenario("endless loop of a rank", _told("loop"), _admitted, out=True, orders=("park",)),
    "sleep": Scenario("a rank sleeps for ever", _told("sleep"), _admitted, out=True, orders=("park",)),
    "skip": Scenario("a rank leaves out a collective", _told("skip"), orders=("restart",)),
    "link": Scenario("the link of a host fails", _down, _up, out=True, orders=(*DARK, "park")),
    "slow-link": Scenario("the link of a host is slow (3 Mbit/s)", _slow_link, _mended, stays=True),
    "slow": Scenario("a rank is slow, no spare", _lasting("slow", 400), _mended, stays=True),
    "data": Scenario("a rank's data is slow", _lasting("data", 100), _mended, stays=True),
    "alone": Scenario("rank 0 works alone, again and again", _lasting("save alone", 4000), _mended, stays=True),
    "save": Scenario("a rank dies while it saves", _in_save),
    "load": Scenario("a rank dies while it loads", _in_load),
    "rendezvous": Scenario("a host dies while a round opens", _in_rendezvous, _restored, out=True, orders=DARK),
    "assign": Scenario(
        "rank 0's host goes dark while ranks are assigned", _in_assignment, _restored, out=True, orders=DARK, pick=lambda *_: 0
    ),
    "three": Scenario("three faults in a row", _three, _restored, out=True, orders=("park", "restart")),
    "flap": Scenario("the link of a host fails three times", _flapping, orders=(*DARK, "park")),
    "spare": Scenario("a rank is slow, a spare waits", _lasting("slow", 400), out=True, orders=("park",), kind="spare"),
    "spare-link": Scenario("the link of a host is slow, a spare waits", _slow_link, out=True, orders=("park",), kind="spare"),
    "always": Scenario("a rank fails at the same step in every round", _told("always"), kind="always"),
    "two": Scenario("two hosts lose their power at once", _lost, _restored, out=True, orders=DARK, several=2, kind="two"),
    "batch": Scenario("4 -> 3 hosts that cannot make the batch", _lost, _restored, out=True, orders=DARK, kind="batch"),
}
RETURN = "return"
RETURNED = "a host returns, and the job grows"


def choose(scenario: Scenario, job: Cluster, view: View, source: random.Random) -> Case:
    """Choose the hosts and ranks at fault."""
    case = Case(job, view, source)
    names = sorted(view.members())
    for name in source.sample(names, scenario.several):
        case.hosts.append(name)
        case.ranks.append(source.choice([rank for rank, host in enumerate(view.hosts) if host == name]))
    if scenario.pick is not None:
        case.ranks = [scenario.pick(job, view)]
        case.hosts = [view.hosts[case.rank]]
    return case


def after(seconds: float, what: Callable[[], None]) -> threading.Timer:
    """Do something later, in another thread."""
    timer = threading.Timer(seconds, what)
    timer.start()
    return timer
