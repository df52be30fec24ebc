"""The agent's loop."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from unickpt.agent import hub as hubs
from unickpt.agent.crowding import Crowding
from unickpt.agent.hub import Answer, Hub
from unickpt.agent.serving import Seldom
from unickpt.diagnosis.clocks import on_one_clock
from unickpt.diagnosis.deadlines import LONGEST_S
from unickpt.diagnosis.examining import Examination, examine, told
from unickpt.diagnosis.steps import STEP
from unickpt.diagnosis.transport import Sampler, Usual
from unickpt.diagnosis.verdicts import Syndrome, Verdict
from unickpt.diagnosis.view import NEWEST_STEPS, View, view_of
from unickpt.errors import UnickptError
from unickpt.logs import printable
from unickpt.private_files import append, read_text, replacing
from unickpt.timing import stacks
from unickpt.timing.endings import Ending, Endings
from unickpt.timing.folder import Job, read_folder
from unickpt.timing.processes import State
from unickpt.timing.ring import boot_id
from unickpt.timing.sockets import connections_of

EVERY_S = 1.0
RECORDS, FEWEST = 16_384, 2048  # the newest of every rank that are looked at: at most, and at least
_ALL_LOOKS = 10  # every so many looks at most of them: a step may take longer than a look
VERDICTS, STARTED = "verdicts.jsonl", "started"  # in the folder of the rings: what was said; who was started last, by host
_WITHOUT_RANKS_S = 60.0  # that it waits for the first ring
_AGAIN_S = 60.0  # a verdict that stays is told again
# Steps that something is slow before it is told. Of links more: by then a rank that is late is known for it.
_LASTING_STEPS = {Syndrome.NON_COMMUNICATION_SLOW: 4, Syndrome.COMMUNICATION_SLOW: 8}
_GONE_S = 3.0  # one that has not been found for so long is a new one
_STACK_S = 10.0  # a rank that stays in question is asked again
_SILENT_S = 10.0  # after which nothing is known of a host any more
_LONGEST = 4096  # characters of a line
_TOUCHED_S = 3600.0  # its folder is marked as used so often: an unused one is removed after days
_LINGER_S = 30.0  # that the hub stays after its own ranks, while others have some

Tell = Callable[[str], None]
Address = Callable[[], str]


def watch(
    folder: Path,
    tell: Tell,
    *,
    hub: Hub | None = None,
    address: Address = lambda: "",
    every_s: float = EVERY_S,
    gives_way: bool = False,
) -> None:
    """Look until all ranks of this host have ended.

    Args:
        folder: of the rings.
        tell: what a person shall read.
        hub: where the other agents come to, if this is the first one.
        address: where the first one listens, if this is another one; '' as long as it is not known.
        every_s: seconds between two looks.
        gives_way: end when another one that does was started: a job that is started again in the same folder has its own.
    """
    agent, endings = Agent(folder, tell, hub, address), Endings()
    failures = Seldom(agent.tell, "looks at the rings that failed; the agent goes on")
    begin, ended, touched = time.monotonic(), 0.0, time.monotonic()
    started, own = folder / f"{STARTED}-{socket.gethostname()}", str(os.getpid())
    if gives_way:
        with contextlib.suppress(OSError), replacing(started) as file:
            file.write(own.encode())
    before: dict[int, int] = {}
    numbers: dict[int, int] = {}
    for look in itertools.count():
        if gives_way and read_text(started, 64) not in (own, ""):
            return
        try:
            job = read_folder(folder, last=RECORDS if look % _ALL_LOOKS == 0 else window(before, numbers))
        except (UnickptError, OSError):
            if time.monotonic() - begin > _WITHOUT_RANKS_S:
                return
            time.sleep(every_s)
            continue
        endings.watch(ring.identity.pid for rank, ring in job.ranks.items() if _is_alive(job, rank))
        before, numbers = numbers, {rank: int(ring.records["begun"].max(initial=0)) for rank, ring in job.ranks.items()}
        try:
            agent.look(job, endings.known)
        except Exception as err:  # what was read, or was sent, is not trusted
            failures.note(f"{type(err).__name__}: {err}")
        if time.monotonic() - touched > _TOUCHED_S:
            touched = time.monotonic()
            with contextlib.suppress(OSError):
                os.utime(folder)
        if over(job):
            ended = ended or time.monotonic()
            awaited = hub is not None and any(_lives(view) for view, age in hub.others() if age < _SILENT_S)
            if not awaited or time.monotonic() - ended > _LINGER_S:
                return
        endings.sleep(every_s)


def window(before: dict[int, int], now: dict[int, int]) -> int:
    """How many records the next look has to see: several times what has come since the last one.

    Args:
        before, now: rank -> number of its newest record, at the last look but one and at the last.
    """
    new = max((number - before.get(rank, 0) for rank, number in now.items()), default=RECORDS)
    return min(max(4 * new, FEWEST), RECORDS)


def _is_alive(job: Job, rank: int) -> bool:
    return job.states[rank] not in (State.DEAD, State.UNKNOWN)


def over(job: Job) -> bool:
    """No rank of this host is there any more."""
    return all(job.states[rank] is State.DEAD or ring.closed for rank, ring in job.ranks.items())


def _lives(view: View) -> bool:
    return any(not rank.closed and rank.state is not State.DEAD for rank in view.ranks.values())


def name_of(folder: Path) -> str:
    """What the hub knows an agent by: the folder has the same name on all hosts of a job.

    The device tells containers apart that have one name and a shared memory each.
    """
    try:
        device = folder.stat().st_dev
    except OSError:
        device = 0
    return f"{socket.gethostname()} {boot_id()} {device} {folder}"


class Agent:
    """Of one host.

    Args:
        folder: of the rings.
        tell: what a person shall read.
        hub: where the other agents come to, if this is the first one.
        address: as in ``watch``.
    """

    def __init__(self, folder: Path, tell: Tell, hub: Hub | None = None, address: Address = lambda: "") -> None:
        self._folder, self._tell, self._hub, self._address = folder, tell, hub, address
        self._name = name_of(folder)
        self._last_told: dict[object, float] = {}
        self._last_found: dict[object, float] = {}
        self._slow: dict[object, tuple[int, float]] = {}
        self._stacks: dict[int, tuple[str, float]] = {}
        self._memory = Memory()
        self._sampler, self._usual, self._crowding = Sampler(), Usual(), Crowding()

    def look(self, job: Job, endings: Mapping[int, Ending] | None = None) -> None:
        """At the rings as they were read, and at how processes ended."""
        own = view_of(job, {rank: text for rank, (text, _) in self._stacks.items()}, endings)
        pids = {rank: one.pid for rank, one in own.ranks.items() if one.state is not State.DEAD}
        shares = self._crowding.shares(time.monotonic_ns(), pids)
        ranks = {rank: dataclasses.replace(one, crowded=shares.get(rank, 0.0)) for rank, one in own.ranks.items()}
        windows = self._sampler.window(time.monotonic_ns(), connections_of(pids))
        own = dataclasses.replace(own, ranks=ranks, windows=windows)
        if self._hub is None:
            said = self._sent(own)
            if said is not None:
                self._ask(said.ask, own)
                for line in said.lines:
                    self._once(line.partition(" since ")[0], line)
                return
        others = self._hub.others() if self._hub is not None else []
        view = self._memory.with_more(on_one_clock([own, *(_aged(other, age) for other, age in others)]))
        found = examine(view, usual=self._usual)
        self._memory.deadline_s = found.deadline_s
        if self._hub is not None:
            self._hub.publish(view, found)
        if self._ask(hubs.answer(found, own).ask, own):  # say it with what the rank is in
            view = self._with_stacks(view)
            found = dataclasses.replace(found, lines=[told(verdict, view) for verdict in found.verdicts])
        newest = int(view.steps["number"].max(initial=0))
        for verdict, line in zip(found.verdicts, found.lines, strict=True):
            if self._lasts(verdict, newest) and self._once(
                (verdict.syndrome, verdict.ranks, verdict.communicator, verdict.link), line
            ):
                self._note(verdict, line, found, view)

    def _lasts(self, verdict: Verdict, step: int) -> bool:
        """What is slow is told when it still is some steps later: on a machine with other work everybody is for a moment."""
        if verdict.syndrome not in _LASTING_STEPS:
            return True
        now, key = time.monotonic(), (verdict.syndrome, verdict.ranks, verdict.link)
        first, seen = self._slow.get(key, (step, now))
        if now - seen > _GONE_S or step < first:
            first = step
        self._slow[key] = (first, now)
        return step - first >= _LASTING_STEPS[verdict.syndrome]

    def _with_stacks(self, view: View) -> View:
        ranks = {
            rank: dataclasses.replace(one, stack=self._stacks[rank][0]) if rank in self._stacks else one
            for rank, one in view.ranks.items()
        }
        return dataclasses.replace(view, ranks=ranks)

    def _sent(self, own: View) -> Answer | None:
        address = self._address()
        if not address:
            return None
        try:
            return hubs.send(address, self._name, own)
        except (OSError, UnickptError):
            return None

    def _ask(self, ranks: list[int], own: View) -> bool:
        """Where some ranks of this host are; whether anything was asked."""
        asked = False
        self._stacks = {rank: found for rank, found in self._stacks.items() if rank in ranks}
        for rank in ranks:
            one = own.ranks.get(rank)
            if one is None or one.state in (State.DEAD, State.STOPPED, State.UNKNOWN) or one.closed:
                continue
            if rank not in self._stacks or time.monotonic() - self._stacks[rank][1] > _STACK_S:
                self._stacks[rank] = (stacks.ask(one.pid, stacks.path_of(self._folder, rank)), time.monotonic())
                asked = True
        return asked

    def _once(self, key: object, line: str) -> bool:
        now = time.monotonic()
        if now - self._last_found.get(key, now) > _GONE_S:
            self._last_told.pop(key, None)
        self._last_found[key] = now
        for old in [known for known, at in self._last_found.items() if now - at > _AGAIN_S]:
            self._last_found.pop(old)
            self._last_told.pop(old, None)
        if now - self._last_told.get(key, -_AGAIN_S) < _AGAIN_S:
            return False
        self._last_told[key] = now
        self.tell(line)
        return True

    def tell(self, line: str) -> None:
        """Tell a person. The names in the line come from rings and from other hosts."""
        cut = line if len(line) <= _LONGEST else f"{line[:_LONGEST]}... ({len(line)} characters)"
        self._tell(printable(cut))

    def _note(self, verdict: Verdict, line: str, found: Examination, view: View) -> None:
        entry = {
            **dataclasses.asdict(verdict), "syndrome": verdict.syndrome.value, "told": line, "at_ns": view.now_ns,
            "deadline_s": found.deadline_s,
        }  # fmt: skip
        with contextlib.suppress(OSError):
            append(self._folder / VERDICTS, f"{json.dumps(entry)}\n".encode())


def _aged(view: View, age_s: float) -> View:
    """A view as it is worth after some time: of a host that is silent, nobody knows how its processes are."""
    if age_s <= _SILENT_S:
        return view
    ranks = {rank: dataclasses.replace(one, state=State.UNKNOWN) for rank, one in view.ranks.items()}
    hosts = ", ".join(sorted({one.host for one in view.ranks.values()}))
    problems = [*view.problems, f"nothing was heard of {hosts} for {age_s:.0f} s"]
    return dataclasses.replace(view, ranks=ranks, problems=problems)


class Memory:
    """The newest steps of every rank, and the longest wait: a look sees only the newest records.

    Attributes:
        deadline_s: that a call was last allowed to take. What has taken longer was told, and is no measure for what is usual.
    """

    def __init__(self) -> None:
        self.deadline_s = LONGEST_S
        self._steps = np.zeros(0, STEP)
        self._pids: dict[int, int] = {}
        self._longest_ns = 0

    def with_more(self, view: View) -> View:
        """A view, and what earlier ones have had."""
        pids = {rank: one.pid for rank, one in view.ranks.items()}
        if any(self._pids.get(rank, pid) != pid for rank, pid in pids.items()):  # another job in the same folder
            self._steps, self._longest_ns = self._steps[:0], 0
        self._pids = pids
        every = np.concatenate([self._steps, view.steps])
        every = every[np.lexsort((every["number"], every["rank"]))]
        if len(every):
            last = np.r_[(every["rank"][1:] != every["rank"][:-1]) | (every["number"][1:] != every["number"][:-1]), True]
            every = every[last]
            end = np.searchsorted(every["rank"], every["rank"], side="right")
            every = every[end - np.arange(len(every)) <= NEWEST_STEPS]
        self._steps = every
        if view.longest_wait_ns <= self.deadline_s * 1e9:
            self._longest_ns = max(self._longest_ns, view.longest_wait_ns)
        return dataclasses.replace(view, steps=every, longest_wait_ns=self._longest_ns)
