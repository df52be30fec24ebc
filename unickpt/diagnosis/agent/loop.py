"""Main loop of the agent."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unickpt.base.errors import FormatError, UnickptError
from unickpt.base.limited_http import RateLimitedLog
from unickpt.base.logs import printable
from unickpt.base.memory_status import read_status
from unickpt.base.private_files import append, read_text, replacing
from unickpt.base.process_identity import boot_id
from unickpt.diagnosis.agent import server
from unickpt.diagnosis.agent.layer_prior import LayerPrior
from unickpt.diagnosis.agent.server import AgentReply, Collector
from unickpt.diagnosis.agent.step_history import StepHistory
from unickpt.diagnosis.detectors.examine import Examination, examine
from unickpt.diagnosis.detectors.places import with_places
from unickpt.diagnosis.detectors.tcp_links import LinkHistory
from unickpt.diagnosis.detectors.verdicts import Reach, Syndrome, Verdict
from unickpt.diagnosis.hardware.events import HostHardware
from unickpt.diagnosis.hardware.kept import keep
from unickpt.diagnosis.hardware.sampler import HardwareSampler
from unickpt.diagnosis.host import stack_dumps
from unickpt.diagnosis.host.movement import ProcessSample, Traffic, same_place_s, sample, still_s
from unickpt.diagnosis.host.process_exits import ExitWatcher, ProcessExit, append_exits
from unickpt.diagnosis.host.process_state import CpuWaitSampler, State
from unickpt.diagnosis.host.stack_dumps import Frame
from unickpt.diagnosis.host.tcp_counters import Sockets, connections_of
from unickpt.diagnosis.layer_costs.store import default_store
from unickpt.diagnosis.recording.records import Op, Records
from unickpt.diagnosis.recording.ring import RingReader
from unickpt.diagnosis.recording.ring_folder import HostRings, read_folder
from unickpt.diagnosis.reports.start_text import start_notices
from unickpt.diagnosis.reports.verdict_line import parse_line
from unickpt.diagnosis.reports.verdict_text import VerdictText, one_as_json, render, render_all
from unickpt.diagnosis.snapshot.clocks import on_one_clock
from unickpt.diagnosis.snapshot.snapshot import LayerSample, RankSnapshot, RankTables, Snapshot, take_snapshot
from unickpt.diagnosis.snapshot.stacks import can_answer, stacks_of, with_early_stacks
from unickpt.diagnosis.snapshot.tcp_windows import TcpSampler

EVERY_S = 1.0
_CALM_LOOKS = 2  # intervals after a look at a calm job
PREFIX = "unickpt: "  # of lines for a person
RECORDS, FEWEST = 16_384, 256  # newest records of every rank that are read: most, fewest
_WITHOUT_STEPS = 2048  # fewest, while the length of a step is unknown
_ALL_LOOKS = 10  # of so many looks without a whole step, one reads RECORDS: steps may have become longer
VERDICTS, STARTED = "verdicts.jsonl", "started"  # beside the rings: verdicts; process number of the newest agent, by host
_WITHOUT_RANKS_S = 60.0  # wait for the first ring
_AGAIN_S = 60.0  # a lasting verdict is written again
# Steps before a slow rank or link is reported. Links take longer: a late rank is known by then.
_LASTING_STEPS = {Syndrome.NON_COMMUNICATION_SLOW: 4, Syndrome.COMMUNICATION_SLOW: 8}
PLACE_S = 3.5  # that a verdict waits to be told for the stack of a rank on another host
_OF_PROGRAM = (Syndrome.MISMATCH, Syndrome.DEADLOCK)  # orders come at once, and end the ranks: not before their place is known
_GONE_S = 3.0  # a verdict that was absent for so long is new
_STACK_S, _EAGER_LOOKS = 10.0, 10  # interval between requests for the stack of a rank, after one at each of the first looks
_SAMPLES = 4096  # looks at the movement of a rank that are kept
_SILENT_S = 10.0  # after which the state of a silent host is unknown
_LONGEST = 4096  # characters of a line
_TOUCHED_S = 3600.0  # interval of updates of the folder's time; unused folders are removed
_LINGER_S = 30.0  # time that the server outlives its own ranks while other hosts have ranks

Tell = Callable[[str], None]
Address = Callable[[], str]


def tell(line: str) -> None:
    """Write a line to the training log, which is the standard error of an agent."""
    print(printable(line), file=sys.stderr, flush=True)


def with_role(line: str, role: str) -> str:
    """Return a line of the log with the role of the ranks that it is about; unchanged without one."""
    if not role:
        return line
    return f"unickpt ({role}): {line.removeprefix(PREFIX)}" if line.startswith(PREFIX) else f"{line} role={role}"


def notice(text: str) -> None:
    """Write a line for a person to the training log."""
    tell(f"{PREFIX}{text}")


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


class RingLooks:
    """Looks at the rings of a folder: each reads what may be new, and now and then more. Watches the processes, too.

    Attributes:
        exits: ends of the processes of the ranks.
        moved: whether every rank has made a call between the last look and the one before.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._looks, self.moved = folder, 0, False
        self._before: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        self._steps: deque[int] = deque(maxlen=_ALL_LOOKS)  # of each look: records of the longest step that was seen whole
        self._readers: dict[Path, RingReader] = {}
        self.exits = ExitWatcher()

    def read(self) -> HostRings:
        """Look once.

        Raises:
            UnickptError, OSError: there is no readable ring.
        """
        step = max(self._steps, default=0)
        whole = not step and self._looks % _ALL_LOOKS == 0
        last = RECORDS if whole else window(self._before, self._numbers, step)
        job = read_folder(self._folder, last=last, readers=self._readers)
        self._looks += 1
        self._steps.append(max((_longest_step(ring.records) for ring in job.ranks.values()), default=0))
        self.exits.watch(
            ring.identity.pid for rank, ring in job.ranks.items() if job.states[rank] not in (State.DEAD, State.UNKNOWN)
        )
        self._before = self._numbers
        self._numbers = {rank: int(ring.records["begun"].max(initial=0)) for rank, ring in job.ranks.items()}
        self.moved = all(number > self._before.get(rank, number) for rank, number in self._numbers.items())
        return job


def _longest_step(records: Records) -> int:
    """Return the largest number of records from the end of one step to that of the next; 0 if none is whole."""
    ends = records["begun"][records["op"] == Op.STEP]
    return int(np.diff(ends).max(initial=0))


def window(before: dict[int, int], now: dict[int, int], step: int) -> int:
    """Return how many records the next look reads: twice the number that came since the last one, and two whole steps.

    Args:
        before: number of the newest record of each rank, at the look before the last.
        now: the same at the last look.
        step: records of the longest step; 0 if unknown.
    """
    new = max((number - before.get(rank, 0) for rank, number in now.items()), default=RECORDS)
    return min(max(2 * (new + step), FEWEST if step else _WITHOUT_STEPS), RECORDS)


def over(job: HostRings) -> bool:
    """Return whether all ranks of this host have ended."""
    return all(job.states[rank] is State.DEAD or ring.closed for rank, ring in job.ranks.items())


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
        self._folder, self._tell, self._collector, self._address = folder, tell, collector, address
        self._name, self._key, self._movement, self._host = name or name_of(folder), key, movement, host
        self._reach = Reach((str(folder),), steered=bool(host))
        self._last_told: dict[str, float] = {}
        self._last_found: dict[str, float] = {}
        self._first_found: dict[str, float] = {}
        self._slow: dict[str, tuple[int, float]] = {}
        self._seen_once: set[str] = set()
        self._stacks: dict[int, tuple[tuple[Frame, ...], float]] = {}
        self._moves: dict[int, deque[ProcessSample]] = {}
        self._noted: dict[int, ProcessExit] = {}
        self._history = StepHistory()
        self._sampler, self._usual, self._cpu_waits = TcpSampler(), LinkHistory(), CpuWaitSampler()
        self._traffic, self._sockets, self._tables = Traffic(), Sockets(), RankTables()
        self._prior = LayerPrior(folder, store or default_store())
        self._hardware, self._kept = hardware, HostHardware()
        self.calm = False
        self._dead: set[int] = set()  # ranks of this host at the last look
        self._told_of_start: set[str] = set()
        self._starting: tuple[float, dict[int, tuple[Frame, ...]]] = -_STACK_S, {}  # when stacks were asked for, by process

    def look(self, job: HostRings, exits: Mapping[int, ProcessExit] | None = None, *, ends: bool = False) -> Look | None:
        """Process one look: the rings as read, and the processes that have ended.

        Args:
            job: the rings.
            exits: the processes.
            ends: whether the launcher ends the ranks, because some have failed.

        Returns:
            What the job's first agent has found; None from another agent.
        """
        self.calm = False
        self._note_exits(exits or {})
        own = take_snapshot(job, {rank: text for rank, (text, _) in self._stacks.items()}, exits, tables=self._tables)
        pids = {rank: one.pid for rank, one in own.ranks.items() if one.state is not State.DEAD}
        shares = self._cpu_waits.shares(time.monotonic_ns(), pids)
        layers = self._prior.look()
        self._remember_layers(own)
        ranks = {
            rank: self._with_movement(rank, one, shares.get(rank, 0.0), layers.get(rank)) for rank, one in own.ranks.items()
        }
        connections = connections_of(pids, self._sockets)
        self._traffic.add(connections, time.monotonic())
        windows = self._sampler.window(time.monotonic_ns(), connections)
        own = self._with_early_stacks(dataclasses.replace(own, ranks=ranks, windows=windows))
        own = _named(self._with_hardware(own), self._host)
        if self._collector is None:
            said = self._sent(own)
            self.calm = said is not None and not said.ask and not said.notices
            if said is not None:
                self._ask(said.ask, own)
                for notice in said.notices:
                    line = parse_line(notice.text.line)
                    asked = own.ranks.get(next(iter(line.ranks.ranks), -1)) if not line.at else None
                    if self._once(notice.key, notice.text, awaits=_comes(line.syndrome, asked)):
                        about = {"syndrome": line.syndrome.value, "ranks": line.ranks.ranks}
                        self._write({**about, **notice.text.as_json()}, own.now_ns)
                return None
        others = self._collector.others() if self._collector is not None else []
        merged = on_one_clock([own, *(_aged(other, age) for other, age in others)])
        snapshot = self._history.with_more(merged)
        found = examine(snapshot, usual=self._usual, reach=self._reach, ends=ends).with_end()
        self._history.deadline_s = found.deadline_s
        if self._collector is not None:
            self._collector.publish(snapshot, found, read_status(self._folder))
        if self._ask(server.answer(found, render_all(found.verdicts, snapshot), own).ask, own):
            snapshot = self._with_stacks(snapshot)
            found = dataclasses.replace(found, verdicts=[with_places(verdict, snapshot) for verdict in found.verdicts])
        self.calm = not found.verdicts and len(snapshot.steps) > 0
        newest = int(snapshot.steps["number"].max(initial=0))
        lasting = [verdict for verdict in found.verdicts if self._lasts(verdict, newest)]
        acted_on = []
        for verdict in lasting:
            text = render(verdict, snapshot)
            far = verdict.at is None and bool(verdict.ranks) and verdict.ranks[0] not in own.ranks
            awaits = _comes(verdict.syndrome, snapshot.ranks.get(verdict.ranks[0]) if far else None)
            if self._once(verdict.key, text, awaits=awaits):
                self._note(verdict, text, found, snapshot)
            if verdict.syndrome not in _OF_PROGRAM or not (awaits and self._is_new(verdict.key)):
                acted_on.append(verdict)
        self._tell_of_start(snapshot)
        return Look(snapshot, acted_on, merged.longest_wait_ns)

    def _tell_of_start(self, snapshot: Snapshot) -> None:
        """Write once which ranks the others wait for that have not begun to record."""
        for key, (sentence, then) in start_notices(snapshot, whole=self._collector is not None).items():
            if key not in self._told_of_start:
                self._told_of_start.add(key)
                self.tell(f"{PREFIX}{sentence}")
                self.tell(f"{PREFIX}next: {then}")

    def _with_early_stacks(self, own: Snapshot) -> Snapshot:
        """Return the snapshot of this host with the stacks of ranks that have not begun, unless the job makes steps."""
        if not own.absent or len(own.steps):
            return own
        asked_s, before = self._starting
        if time.monotonic() - asked_s > _STACK_S:
            before = {one.pid: one.stack for one in with_early_stacks(own.absent).values()}
            self._starting = time.monotonic(), before
        absent = {rank: dataclasses.replace(one, stack=before.get(one.pid, ())) for rank, one in own.absent.items()}
        return dataclasses.replace(own, absent=absent)

    def _with_hardware(self, own: Snapshot) -> Snapshot:
        """Return the snapshot of this host with what its hardware tells, and keep that beside the rings."""
        if self._hardware is None:
            return own
        dead = {rank for rank, one in own.ranks.items() if one.state is State.DEAD}
        found = self._hardware.look(own.now_ns, [one.pid for one in own.ranks.values()], at_once=not dead <= self._dead)
        self._dead = dead
        hosts = {*(one.host for one in own.ranks.values()), *(one.host for one in own.absent.values())}
        if found.events != self._kept.events:
            self._kept = found
            with contextlib.suppress(OSError):
                for host in hosts:
                    keep(self._folder, host, found)
        return dataclasses.replace(own, hardware=dict.fromkeys(hosts, found))

    def _remember_layers(self, own: Snapshot) -> None:
        try:
            self._prior.remember(max((one.step for one in own.ranks.values()), default=0))
        except FormatError as err:
            self.tell(f"{PREFIX}the times of layers are not kept for later jobs, training is not affected ({err})")

    def _lasts(self, verdict: Verdict, step: int) -> bool:
        """Return whether a finding has lasted long enough: beside other work, every rank is slow for a moment."""
        equal_sides = verdict.syndrome is Syndrome.MISMATCH and verdict.confidence < 1.0
        if verdict.syndrome is Syndrome.FAILED or equal_sides:
            # the status of the last process to end comes after the look at which it is dead, as do the calls of other hosts
            again = verdict.key in self._seen_once
            self._seen_once.add(verdict.key)
            return again
        if verdict.syndrome not in _LASTING_STEPS:
            return True
        now, key = time.monotonic(), verdict.key
        first, seen = self._slow.get(key, (step, now))
        if now - seen > _GONE_S or step < first:
            first = step
        self._slow[key] = (first, now)
        return step - first >= _LASTING_STEPS[verdict.syndrome]

    def _with_stacks(self, snapshot: Snapshot) -> Snapshot:
        ranks = {
            rank: dataclasses.replace(one, stack=self._stacks[rank][0]) if rank in self._stacks else one
            for rank, one in snapshot.ranks.items()
        }
        return dataclasses.replace(snapshot, ranks=ranks)

    def _sent(self, own: Snapshot) -> AgentReply | None:
        address = self._address()
        if not address:
            return None
        try:
            return server.send(address, self._name, own, self._key)
        except (OSError, UnickptError):
            return None

    def _ask(self, ranks: list[int], own: Snapshot) -> bool:
        """Ask ranks of this host for their stacks; return whether any was asked."""
        self._stacks = {rank: found for rank, found in self._stacks.items() if rank in ranks}
        self._moves = {rank: found for rank, found in self._moves.items() if rank in ranks}
        wanted: dict[int, int] = {}
        for rank in ranks:
            one = own.ranks.get(rank)
            if one is None:
                continue
            eager = self._movement and len(self._moves.get(rank, ())) < _EAGER_LOOKS
            if eager or rank not in self._stacks or time.monotonic() - self._stacks[rank][1] > _STACK_S:
                wanted[rank] = one.pid
        if wanted:
            found = stacks_of(self._folder, own, wanted)
            self._stacks |= {rank: (stack, time.monotonic()) for rank, stack in found.items()}
        for rank in ranks if self._movement else ():
            if rank in own.ranks and can_answer(own.ranks[rank]):
                self._sample(rank, own.ranks[rank].pid)
        return bool(wanted)

    def _sample(self, rank: int, pid: int) -> None:
        """Look at the movement of a rank. What it writes because it is asked for its stack does not count."""
        try:
            written = stack_dumps.path_of(self._folder, rank).stat().st_size
        except OSError:
            written = 0
        taken = sample(pid, time.monotonic(), self._stacks[rank][0], written, self._traffic.of(rank))
        if taken is not None:
            self._moves.setdefault(rank, deque(maxlen=_SAMPLES)).append(taken)

    def _with_movement(self, rank: int, one: RankSnapshot, cpu_wait: float, layers: LayerSample | None) -> RankSnapshot:
        moves = self._moves.get(rank, ())
        still, same_place = (still_s(moves), same_place_s(moves)) if moves else (0.0, 0.0)
        return dataclasses.replace(one, cpu_wait=cpu_wait, still_s=still, same_place_s=same_place, layers=layers)

    def _once(self, key: str, text: VerdictText, *, awaits: bool = False) -> bool:
        """Write a verdict unless it was written lately, or ``awaits`` its place; return whether it was."""
        now = time.monotonic()
        if now - self._last_found.get(key, -_GONE_S) > _GONE_S:
            self._last_told.pop(key, None)
            self._first_found[key] = now
        self._last_found[key] = now
        if awaits and self._is_new(key):
            return False
        for old in [known for known, at in self._last_found.items() if now - at > _AGAIN_S]:
            self._last_found.pop(old)
            self._first_found.pop(old, None)
            self._last_told.pop(old, None)
        if now - self._last_told.get(key, -_AGAIN_S) < _AGAIN_S:
            return False
        self._last_told[key] = now
        self.tell(text.line)
        self.tell(f"{PREFIX}{text.sentence}")
        if text.next:
            self.tell(f"{PREFIX}next: {text.next}")
        return True

    def _is_new(self, key: str) -> bool:
        """Return whether there was no time yet to ask a rank on another host for its stack."""
        return time.monotonic() - self._first_found.get(key, 0.0) < PLACE_S

    def tell(self, line: str) -> None:
        """Write a line to the log. Names in it come from rings and from other hosts."""
        cut = line if len(line) <= _LONGEST else f"{line[:_LONGEST]}... ({len(line)} characters)"
        self._tell(printable(cut))

    def _note_exits(self, exits: Mapping[int, ProcessExit]) -> None:
        new = {pid: end for pid, end in exits.items() if self._noted.get(pid) != end}
        self._noted.update(new)
        with contextlib.suppress(OSError):
            append_exits(self._folder, new)

    def _note(self, verdict: Verdict, text: VerdictText, found: Examination, snapshot: Snapshot) -> None:
        self._write({**one_as_json(verdict, text), "deadline_s": found.deadline_s}, snapshot.now_ns)

    def _write(self, entry: Mapping[str, Any], at_ns: int) -> None:
        entry = {**entry, "at_ns": at_ns}
        with contextlib.suppress(OSError):
            append(self._folder / VERDICTS, f"{json.dumps(entry)}\n".encode())


def _comes(syndrome: Syndrome, asked: RankSnapshot | None) -> bool:
    """Return whether the place of a rank that is asked where it is will come."""
    has_place = syndrome in (Syndrome.NON_COMMUNICATION_HANG, Syndrome.NON_COMMUNICATION_SLOW, *_OF_PROGRAM)
    return has_place and asked is not None and can_answer(asked)


def _named(snapshot: Snapshot, host: str) -> Snapshot:
    """Return the snapshot of a host with the name that the job gives it; unchanged without one."""
    if not host:
        return snapshot
    ranks = {rank: dataclasses.replace(one, host=host) for rank, one in snapshot.ranks.items()}
    absent = {rank: dataclasses.replace(one, host=host) for rank, one in snapshot.absent.items()}
    hardware = dict.fromkeys([host], next(iter(snapshot.hardware.values()))) if snapshot.hardware else {}
    return dataclasses.replace(snapshot, ranks=ranks, absent=absent, hardware=hardware)


def _aged(snapshot: Snapshot, age_s: float) -> Snapshot:
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
