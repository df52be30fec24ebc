"""Main loop of the agent: look at the own host, report to the job's first agent or judge the whole job, tell what is found."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from unickpt.base.errors import UnickptError
from unickpt.base.limited_http import RateLimitedLog
from unickpt.base.memory_status import read_status
from unickpt.base.private_files import read_text, replacing
from unickpt.base.process_identity import boot_id
from unickpt.base.witness_notes import read_notes
from unickpt.diagnosis.agent import server
from unickpt.diagnosis.agent.asked_ranks import AskedRanks
from unickpt.diagnosis.agent.own_host import OwnHost
from unickpt.diagnosis.agent.ring_looks import RingLooks, over
from unickpt.diagnosis.agent.server import AgentReply, Collector
from unickpt.diagnosis.agent.step_history import StepHistory
from unickpt.diagnosis.agent.telling import OF_PROGRAM, PREFIX, Tell, Telling, place_comes
from unickpt.diagnosis.detectors.examine import Examination, examine
from unickpt.diagnosis.detectors.places import with_places
from unickpt.diagnosis.detectors.tcp_links import LinkHistory
from unickpt.diagnosis.detectors.verdicts import Reach, Verdict
from unickpt.diagnosis.hardware.events import HostHardware
from unickpt.diagnosis.hardware.sampler import HardwareSampler
from unickpt.diagnosis.host.process_exits import ProcessExit
from unickpt.diagnosis.host.process_state import State
from unickpt.diagnosis.layer_costs.store import default_store
from unickpt.diagnosis.recording.ring_folder import HostRings
from unickpt.diagnosis.reports.verdict_line import parse_line
from unickpt.diagnosis.reports.verdict_text import one_as_json, render, render_all
from unickpt.diagnosis.snapshot.clocks import on_one_clock
from unickpt.diagnosis.snapshot.snapshot import Snapshot

EVERY_S = 1.0
_CALM_LOOKS = 2  # intervals after a look at a calm job
STARTED = "started"  # beside the rings: process number of the newest agent, by host
_WITHOUT_RANKS_S = 60.0  # wait for the first ring
_SILENT_S = 10.0  # after which the state of a silent host is unknown
_TOUCHED_S = 3600.0  # interval of updates of the folder's time; unused folders are removed
_LINGER_S = 30.0  # time that the server outlives its own ranks while other hosts have ranks

Address = Callable[[], str]


def watch(
    folder: Path,
    tell: Tell,
    *,
    collector: Collector | None = None,
    address: Address = lambda: "",
    every_s: float = EVERY_S,
    gives_way: bool = False,
) -> None:
    """Watch the ranks of this host until all have ended.

    Args:
        folder: folder of the rings.
        tell: writes a line to the log.
        collector: snapshots of the other hosts, if this is the job's first agent.
        address: returns the address of the first agent, '' if unknown, if this is another agent.
        every_s: seconds between two looks. After a look at a calm job the next one comes after twice as long: every rank of
            this host has made calls since the look before, and nothing was found.
        gives_way: whether to end when another such agent starts. A job that restarts in the same folder has its own agent.
    """
    agent, rings = Agent(folder, tell, collector, address, hardware=HardwareSampler()), RingLooks(folder)
    failures = RateLimitedLog(agent.tell, f"{PREFIX}looks at the rings that failed; the agent goes on")
    begin, ended, touched = time.monotonic(), 0.0, time.monotonic()
    started, own = folder / f"{STARTED}-{socket.gethostname()}", str(os.getpid())
    if gives_way:
        with contextlib.suppress(OSError), replacing(started) as file:
            file.write(own.encode())
    while True:
        if gives_way and read_text(started, 64) not in (own, ""):
            return
        try:
            job = rings.read()
        except (UnickptError, OSError):
            if time.monotonic() - begin > _WITHOUT_RANKS_S:
                return
            time.sleep(every_s)
            continue
        try:
            agent.look(job, rings.exits.known)
        except Exception as err:  # the data is untrusted
            failures.note(f"{type(err).__name__}: {err}")
        if time.monotonic() - touched > _TOUCHED_S:
            touched = time.monotonic()
            with contextlib.suppress(OSError):
                os.utime(folder)
        if over(job):
            last, ended = bool(ended), ended or time.monotonic()  # the statuses of the ends come after the first such look
            awaited = collector is not None and any(_lives(snapshot) for snapshot, age in collector.others() if age < _SILENT_S)
            if last and (not awaited or time.monotonic() - ended > _LINGER_S):
                return
        rings.exits.sleep(every_s * (_CALM_LOOKS if rings.moved and agent.calm else 1))


def _lives(snapshot: Snapshot) -> bool:
    return any(not rank.closed and rank.state is not State.DEAD for rank in snapshot.ranks.values())


def name_of(folder: Path) -> str:
    """Return the name of an agent for the server.

    The folder has the same name on all hosts of a job. The device distinguishes containers with the same host name.
    """
    try:
        device = folder.stat().st_dev
    except OSError:
        device = 0
    return f"{socket.gethostname()} {boot_id()} {device} {folder}"


@dataclass(frozen=True, slots=True)
class Look:
    """What the job's first agent has found at one look.

    Attributes:
        snapshot: state of the job.
        verdicts: findings that have lasted long enough to be told, and to be acted on.
        longest_wait_ns: longest wait that has ended, also if it was reported as a hang.
    """

    snapshot: Snapshot
    verdicts: list[Verdict]
    longest_wait_ns: int


class Agent:
    """State of the agent of one host between looks.

    Args:
        folder: folder of the rings.
        tell: writes a line to the log.
        collector: snapshots of the other hosts, if this is the job's first agent.
        address: as in ``watch``.
        name: name of this agent for the first one; default: made from host and folder.
        key: key that authenticates snapshots; empty for none.
        movement: whether to look at the movement of ranks that others wait for.
        store: file with the times of layers in earlier jobs; default: that of the user.
        host: name of this host in a job whose hosts ``unickpt hosts`` takes out; '' in other jobs.
        hardware: reads what the hardware of this host tells; None: nothing does.

    Attributes:
        calm: whether the last look has found nothing, not even what has not lasted long enough to be told.
    """

    def __init__(
        self, folder: Path, tell: Tell, collector: Collector | None = None, address: Address = lambda: "", *, name: str = "",
        key: bytes = b"", movement: bool = False, store: Path | None = None, host: str = "",
        hardware: HardwareSampler | None = None,
    ) -> None:  # fmt: skip
        self._folder, self._collector, self._address = folder, collector, address
        self._name, self._key = name or name_of(folder), key
        self._reach = Reach((str(folder),), steered=bool(host))
        self._telling, self._asked = Telling(folder, tell), AskedRanks(folder, movement=movement)
        self._own = OwnHost(folder, self._telling.tell, self._asked, store or default_store(), host, hardware)
        self._history, self._usual = StepHistory(), LinkHistory()
        self.calm = False

    def tell(self, line: str) -> None:
        """Write a line to the log. Names in it come from rings and from other hosts."""
        self._telling.tell(line)

    def look(self, job: HostRings, exits: Mapping[int, ProcessExit] | None = None, *, ends: bool = False) -> Look | None:
        """Process one look: the rings as read, and the processes that have ended.

        Args:
            job: the rings.
            exits: the processes.
            ends: whether the launcher ends the ranks, because some have failed.

        Returns:
            What the job's first agent has found; None from another agent that has reached it.
        """
        self.calm = False
        own = self._own.look(job, exits or {})
        if self._collector is None:
            said = self._sent(own)
            if said is not None:
                self._obey(said, own)
                return None
        return self._judge(own, ends=ends)

    def _obey(self, said: AgentReply, own: Snapshot) -> None:
        """Do what the job's first agent says."""
        self.calm = not said.ask and not said.notices
        self._asked.ask(said.ask, own)
        for notice in said.notices:
            line = parse_line(notice.text.line)
            asked = own.ranks.get(next(iter(line.ranks.ranks), -1)) if not line.at else None
            if self._telling.once(notice.key, notice.text, awaits=place_comes(line.syndrome, asked)):
                about = {"syndrome": line.syndrome.value, "ranks": line.ranks.ranks}
                self._telling.keep({**about, **notice.text.as_json()}, own.now_ns)

    def _sent(self, own: Snapshot) -> AgentReply | None:
        address = self._address()
        if not address:
            return None
        try:
            return server.send(address, self._name, own, self._key)
        except (OSError, UnickptError):
            return None

    def _judge(self, own: Snapshot, *, ends: bool) -> Look:
        """Examine the whole job, or this host alone if the first agent does not answer, and tell what lasts."""
        others = self._collector.others() if self._collector is not None else []
        merged = on_one_clock([own, *(aged(other, age) for other, age in others)])
        snapshot = self._history.with_more(merged)
        found = examine(snapshot, usual=self._usual, reach=self._reach, ends=ends).with_end()
        self._history.deadline_s = found.deadline_s
        if self._collector is not None:
            self._collector.publish(snapshot, found, read_status(self._folder), read_notes([self._folder]))
        if self._asked.ask(server.answer(found, render_all(found.verdicts, snapshot), own).ask, own):
            snapshot = self._asked.with_stacks(snapshot)
            found = dataclasses.replace(found, verdicts=[with_places(verdict, snapshot) for verdict in found.verdicts])
        self.calm = not found.verdicts and len(snapshot.steps) > 0
        newest = int(snapshot.steps["number"].max(initial=0))
        lasting = [verdict for verdict in found.verdicts if self._telling.lasts(verdict, newest)]
        acted_on = [verdict for verdict in lasting if self._told(verdict, own, found, snapshot)]
        self._telling.start(snapshot, whole=self._collector is not None)
        return Look(snapshot, acted_on, merged.longest_wait_ns)

    def _told(self, verdict: Verdict, own: Snapshot, found: Examination, snapshot: Snapshot) -> bool:
        """Tell a verdict, unless it was told; return whether it is to be acted on."""
        text = render(verdict, snapshot)
        far = verdict.at is None and bool(verdict.ranks) and verdict.ranks[0] not in own.ranks
        awaits = place_comes(verdict.syndrome, snapshot.ranks.get(verdict.ranks[0]) if far else None)
        if self._telling.once(verdict.key, text, awaits=awaits):
            self._telling.keep({**one_as_json(verdict, text), "deadline_s": found.deadline_s}, snapshot.now_ns)
        return verdict.syndrome not in OF_PROGRAM or not (awaits and self._telling.is_new(verdict.key))


def aged(snapshot: Snapshot, age_s: float) -> Snapshot:
    """Return the snapshot of a host with unknown process states, if it has been silent for too long."""
    if age_s <= _SILENT_S:
        return snapshot
    ranks = {
        rank: dataclasses.replace(one, state=State.UNKNOWN, still_s=0.0, same_place_s=0.0)
        for rank, one in snapshot.ranks.items()
    }
    hosts = ", ".join(sorted({one.host for one in snapshot.ranks.values()}))
    problems = [*snapshot.problems, f"no data from {hosts} for {age_s:.0f} s"]
    hardware = {host: HostHardware((), one.events) for host, one in snapshot.hardware.items()}
    return dataclasses.replace(snapshot, ranks=ranks, problems=problems, hardware=hardware)
