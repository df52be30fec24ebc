"""Jobs that save into memory (ranks are processes, a host is a folder with a keeper), their resume, and the stage of a save."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from tests.jobs.faults import ranks
from tests.jobs.faults.killing import WORLD, Board
from tests.jobs.faults.ranks import KEEP, Meeting
from tests.jobs.faults.state import JOBS, Resumed, judged, resume
from tests.support.rank_threads import on_all_ranks
from unickpt.base.errors import CoordinationError, UnickptError
from unickpt.base.options.declared import UNLIMITED
from unickpt.base.options.job import MemoryOptions
from unickpt.checkpoint.checkpoint_folder import latest_tag, read_manifest
from unickpt.checkpoint.coordination.message_exchange import MessageExchange
from unickpt.checkpoint.load.failure import DAMAGE, failure_of
from unickpt.checkpoint.memory.generations import number_of
from unickpt.checkpoint.memory.hosts import JobHosts
from unickpt.checkpoint.memory.tier import MemoryTier, choose
from unickpt.checkpoint.save.requests import PendingSave, SaveOptions
from unickpt.checkpoint.save.saver import Saver
from unickpt.checkpoint.storage.open import open_storage

CONFIRMED, ON_DISK = (0, 1), (1, 1)  # places on the board: rank, column
_POLL_S = 0.0003
_ENDS_S = 150.0  # several waits of 20 s, for a rank and for a keeper, may follow each other
_STAGE_S = 4.0  # a stage that does not come in this time is not waited for


@dataclass(frozen=True, kw_only=True)
class Training:
    """What the ranks of a job do.

    Attributes:
        first: step of the first save.
        tag: name of all checkpoints; '' for a name of its own for each.
        to_disk_every: option of the tier.
        megabytes_per_s: limit of the copies. A slow copy is hit more often.
        clock_s: how far the clocks of all hosts are ahead.
        flips: share of the answers of keepers in which a bit is flipped on the way.
        resumes: the job loads before it trains.
    """

    first: int = 1
    tag: str = ""
    to_disk_every: int = 1 << 30
    megabytes_per_s: float = UNLIMITED
    clock_s: float = 0.0
    flips: float = 0.0
    resumes: bool = False


def options(folder: Path, host: int, training: Training) -> MemoryOptions:
    place = folder / f"host{host}"
    place.mkdir(exist_ok=True)
    return MemoryOptions(
        to_disk_every=training.to_disk_every, folder=str(place), copy_megabytes_per_second=training.megabytes_per_s
    )


def hosts_of(tier: MemoryTier) -> list[JobHosts]:
    """The hosts that a tier has found: none, or one value for the only save directory."""
    return [known.hosts for known in tier._folders.values() if known.hosts is not None]


def train(rank: int, host: int, folder: Path, board: Board, training: Training, meeting: Meeting) -> None:
    """One rank on a host of its own: save in a loop, into memory or to disk, until something is wrong."""
    if training.clock_s:
        real = time.time_ns
        time.time_ns = lambda: real() + int(training.clock_s * 1e9)
    timeout_s = 20.0 if training.flips else 3.0  # a damaged answer may cost the 20 s that a keeper waits for the rest of it
    exchange = MessageExchange(meeting.join(), rank=rank, world=WORLD, prefix="job", timeout_s=timeout_s)
    tier, disk = MemoryTier(options(folder, host, training), SaveOptions(grace_s=1.0)), Saver(SaveOptions(retention=KEEP))
    saves, first = folder / "saves", training.first

    def over(save: PendingSave, step: int) -> None:
        saver = next(iter(tier._folders.values())).saver
        if rank == 0 and saver is not None and save.directory.endswith(f"/g{saver.confirmed}"):
            board.put(*CONFIRMED, step)
            board.put(0, 2, board.read(0)[2] + 1)

    with contextlib.suppress(CoordinationError):
        if training.resumes:
            resume_rank(tier, exchange, saves)
        for step in itertools.count(first):
            board.put(rank, 0, step)
            wanted = ranks.request(saves, training.tag or f"step{step}", step, exchange)
            save = tier.save(wanted, exchange, lambda save, step=step: over(save, step))
            if save is None or (save.done and not save.committed):
                result = disk.save(wanted, exchange.separate("disk"), asynchronous=False).result
                if result is not None and result.complete:
                    tier.saved_to_disk(str(saves), result.seconds)
                    if rank == 0:
                        board.put(*ON_DISK, step)
                        board.put(0, 2, board.read(0)[2] + 1)
            if training.flips and step == first:
                tamper(tier, Flips(random.Random(training.first * 10 + rank), training.flips))


def disk_step(folder: Path) -> int | None:
    """Step of the checkpoint on disk that ``latest`` names, as the adapters find it."""
    with contextlib.suppress(UnickptError):
        named = latest_tag(folder)
        return None if named is None else read_manifest(open_storage(str(folder)).subfolder(named)).step
    return None


def resume_rank(tier: MemoryTier, exchange: MessageExchange, saves: Path, flips: Flips | None = None) -> Resumed:
    """Resume on this rank as the adapters do; every rank reads everything."""
    skipped, tried = list[str](), list[tuple[int, bool]]()
    load = tier.look(str(saves), exchange)
    if flips is not None:
        tamper(tier, flips)
        load = tier.look(str(saves), exchange)
    while (choice := choose(load, lambda: disk_step(saves), tried)) is not None:
        found, checked = choice
        step, wrong, problem = None, list[str](), ""
        try:
            if checked:
                tier.check(str(saves), found.number)
                exchange.agree("check", None)
            step, wrong = judged(tier.open(str(saves), load, found.number))
        except UnickptError as err:
            if failure_of(err, rank=0, where="").kind not in DAMAGE:
                raise
            problem = str(err)
        problems = exchange.agree("read", problem or None)
        if not problems:
            assert step is not None
            tier.loaded(str(saves), load, step, found.number)
            return Resumed(found.tag, step, tuple(skipped), tuple(wrong))
        skipped += problems.values()
    on_disk = resume(saves)
    if on_disk.step is not None:
        tier.loaded(str(saves), load, on_disk.step, 0)
    return Resumed(on_disk.tag, on_disk.step, (*skipped, *load.problems, *on_disk.skipped), on_disk.wrong)


def resumed(folder: Path, hosts: Sequence[int], flips: Flips | None = None) -> Resumed:
    """Resume on these hosts, one rank on each."""
    tiers = [MemoryTier(options(folder, host, Training(to_disk_every=2)), SaveOptions()) for host in hosts]
    try:
        results = on_all_ranks(
            lambda exchange: resume_rank(tiers[exchange.rank], exchange, folder / "saves", flips), world=len(hosts)
        )
    finally:
        for tier in tiers:
            stop(tier)
    for result in results:
        if isinstance(result, Exception):
            return Resumed("", None, (), (f"{type(result).__name__}: {result}",))
    steps = {each.step for each in results}
    if len(steps) > 1:
        return Resumed("", None, (), (f"ranks resumed from different steps {sorted(map(str, steps))}",))
    return next((each for each in results if each.wrong), results[0])


def stop(tier: MemoryTier) -> None:
    """End the keeper of a tier, as the end of its process does."""
    for hosts in hosts_of(tier):
        if hosts.keeper is not None:
            hosts.keeper.stop()


def other_job(folder: Path, first: int) -> None:
    """Another job saves into memory under the same name, and is gone."""
    tiers = [MemoryTier(options(folder, host, Training()), SaveOptions()) for host in range(WORLD)]

    def run(exchange: MessageExchange) -> None:
        for step in range(first, first + 2):
            save = tiers[exchange.rank].save(ranks.request(folder / "saves", f"step{step}", step, exchange), exchange)
            assert save is not None
            assert save.wait(20)
        saver = next(iter(tiers[exchange.rank]._folders.values())).saver
        assert saver is not None
        saver.on_disk(float("inf"))  # the end of this process has nothing to write

    assert first >= JOBS
    assert on_all_ranks(run) == [None] * WORLD
    for tier in tiers:
        stop(tier)


@dataclass(frozen=True)
class Running:
    """A job that runs: process numbers of its store and of its ranks, and the hosts that these are on."""

    board: Board
    store: int
    children: tuple[int, ...]
    hosts: tuple[int, ...]

    def keeper(self, at: int) -> psutil.Process | None:
        """The keeper that a rank has started."""
        with contextlib.suppress(psutil.Error):
            return next(iter(psutil.Process(self.children[at]).children(recursive=True)), None)
        return None


def started(folder: Path, scratch: Path, training: Training, hosts: Sequence[int] = tuple(range(WORLD))) -> Running:
    """Start a job."""
    scratch.mkdir()
    meeting, board = Meeting(scratch / "port", WORLD), Board(WORLD)
    store = ranks.fork(meeting.serve)
    children = [
        ranks.fork(lambda rank=rank, host=host: train(rank, host, folder, board, training, meeting))
        for rank, host in enumerate(hosts)
    ]
    return Running(board, store, tuple(children), tuple(hosts))


def wait_for_saves(job: Running, count: int) -> float:
    """Wait until a job has saved some checkpoints; return how long one takes, in seconds."""
    since = time.monotonic()
    while job.board.read(0)[2] < count and time.monotonic() < since + ranks.HANG_S / 3:
        time.sleep(0.002)
    return (time.monotonic() - since) / max(count, 1)


def kill(job: Running, victims: Sequence[int], chance: random.Random) -> list[str]:
    """Kill ranks, each with its keeper or without it. Return what is wrong with the end of the others."""
    early = [rank for rank, child in enumerate(job.children) if _has_ended(child)]
    for rank in victims:
        below = []
        with contextlib.suppress(psutil.Error):
            below = psutil.Process(job.children[rank]).children(recursive=True)
        with contextlib.suppress(ProcessLookupError):
            os.kill(job.children[rank], signal.SIGKILL)
        for keeper in below if chance.random() < 0.5 else ():
            with contextlib.suppress(psutil.Error):
                keeper.kill()
    problems = [f"rank {rank} had ended before the fault" for rank in early]
    for rank, child in enumerate(job.children):
        if rank in early:
            continue
        status = ranks.ended(child, timeout_s=_ENDS_S)
        if rank not in victims and status != 0:
            problems.append(f"rank {rank} ended with {status} after ranks {list(victims)} were killed")
    ranks.kill(job.store)
    return problems


def _has_ended(child: int) -> bool:
    with contextlib.suppress(ChildProcessError):
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return True


# ---------------------------------------------------------------- how far a save has come

COPYING, WRITING, COMMITTED, HALF, COPIED = STAGES = (
    "the state is copied", "files are written", "committed, no copy yet", "half replicated", "all copies made",
)  # fmt: skip


def stage_of(folder: Path, hosts: Sequence[int]) -> str:
    """How far the newest save has come, as the files on the hosts show it. Rank r is on ``hosts[r]``."""
    found = {host: list((folder / f"host{host}").glob("unickpt-memory-*/g*")) for host in hosts}
    newest = max((number_of(path.name) or 0 for paths in found.values() for path in paths), default=0)
    names: dict[int, set[str]] = {}
    for host, paths in found.items():
        names[host] = {name for path in paths if path.name == f"g{newest}" for _, _, inside in os.walk(path) for name in inside}
    data = [f"rank{rank:05d}.safetensors" for rank in range(len(hosts))]
    own = sum(name in names[host] for name, host in zip(data, hosts, strict=True))
    copies = sum(name in names[host] for at, name in enumerate(data) for host in hosts if host != hosts[at])
    if "manifest.json" not in names[hosts[0]]:
        return WRITING if own else COPYING
    whole = copies >= len(hosts) and "manifest.json" in names[hosts[1 % len(hosts)]]
    return COPIED if whole else HALF if copies else COMMITTED


def wait_for_stage(folder: Path, hosts: Sequence[int], wanted: str) -> None:
    """Wait until a save is at a stage."""
    end = time.monotonic() + _STAGE_S
    while stage_of(folder, hosts) != wanted and time.monotonic() < end:
        time.sleep(_POLL_S)


# ---------------------------------------------------------------- damage


def flip(path: Path, chance: random.Random) -> None:
    """Flip a bit of a file."""
    at = chance.randrange(path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << chance.randrange(8)]))


class Flips:
    """Which answers of a keeper are damaged on their way.

    Args:
        chance: source of all choices.
        share: share of the parts of answers in which a bit is flipped.
        most: number of bits that are flipped in all; None for no limit.
    """

    def __init__(self, chance: random.Random, share: float, most: int | None = None) -> None:
        self._chance, self._share, self._left = chance, share, most
        self._lock, self.count = threading.Lock(), 0

    def passed(self, data: bytes) -> bytes:
        """Return what arrives."""
        with self._lock:
            if not data or self._left == 0 or self._chance.random() >= self._share:
                return data
            self._left = None if self._left is None else self._left - 1
            self.count += 1
            damaged = bytearray(data)
            damaged[self._chance.randrange(len(data))] ^= 1 << self._chance.randrange(8)
            return bytes(damaged)


def tamper(tier: MemoryTier, flips: Flips) -> None:
    """Put a relay that flips bits in front of the keepers of all other hosts."""
    for hosts in hosts_of(tier):
        hosts.addresses[:] = [
            address if at == hosts.here else _relay(address, flips) for at, address in enumerate(hosts.addresses)
        ]


def _relay(address: str, flips: Flips) -> str:
    parts = urlsplit(address)
    listener = socket.create_server(("127.0.0.1", 0))

    def forward(source: socket.socket, target: socket.socket, *, damaged: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(flips.passed(data) if damaged else data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                try:
                    keeper = socket.create_connection((parts.hostname or "", parts.port or 0), timeout=20)
                except OSError:
                    client.close()
                    continue
                keeper.settimeout(None)
                for source, target, damaged in ((client, keeper, False), (keeper, client, True)):
                    threading.Thread(target=forward, args=(source, target), kwargs={"damaged": damaged}, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}{parts.path}"
