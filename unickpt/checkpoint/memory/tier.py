"""The memory tier of a job: which saves go into memory, and which generation a load tries. Adapters use this module."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from unickpt.base.errors import UnickptError
from unickpt.base.logs import logger
from unickpt.base.memory_status import MemoryStatus
from unickpt.base.options.job import MemoryOptions
from unickpt.base.step_replay import asked
from unickpt.checkpoint.coordination.message_exchange import Message, MessageExchange
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.memory.contact import publish
from unickpt.checkpoint.memory.finding import FoundGeneration, find, open_generation, remove_damaged, sources_read
from unickpt.checkpoint.memory.host_folder import make_token, read_token
from unickpt.checkpoint.memory.hosts import JobHosts, connect
from unickpt.checkpoint.memory.peer_storage import PeerStorage
from unickpt.checkpoint.memory.saver import MemorySaver
from unickpt.checkpoint.save.requests import PendingSave, SaveOptions, SaveRequest
from unickpt.checkpoint.storage.base import absolute

_MEMORY, _DISK, _NOWHERE = "memory", "disk", ""  # where a checkpoint goes
_FIRST_LINES, _LINE_S = 5, 10.0  # the log has a line for these saves, and then one in so many seconds


@dataclass
class _Folder:
    """The memory tier of one save directory.

    Attributes:
        hosts, saver: None if there is no tier.
        since_disk: saves since the last one on disk.
        failing: the last save into memory has failed, and a warning has said so.
        lines: of the log at info level on saves that have succeeded.
        last_line_s: when the last one was written, on the monotonic clock.
    """

    hosts: JobHosts | None
    saver: MemorySaver | None = None
    since_disk: int = 0
    failing: bool = False
    lines: int = 0
    last_line_s: float = 0.0


@dataclass
class MemoryLoad:
    """Generations that a load may try, in order. The same on every rank.

    Attributes:
        found: newest first.
        problems: why other generations cannot be loaded.
        storage: the opened generation; None if a checkpoint on disk is loaded.
    """

    found: list[FoundGeneration] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    storage: PeerStorage | None = None


@dataclass(frozen=True)
class MemoryTurn:
    """The next checkpoint goes into memory.

    Attributes:
        folder, saver: memory tier of its save directory.
        plan: number of the generation, and those that stay; empty if the save is skipped.
        exchange: message exchange of the ranks for this save.
    """

    folder: _Folder
    saver: MemorySaver
    plan: Message
    exchange: MessageExchange

    def save(self, request: SaveRequest, on_end: Callable[[PendingSave], None] | None = None) -> PendingSave:
        """Save into memory. Every rank calls this.

        Args:
            request: what the framework saves. Its ``on_end`` belongs to a save to disk and is not called.
            on_end: called with the save into memory when it has ended.

        Returns:
            The save, pending, failed or skipped. ``agreed`` is the same on every rank; if it is false, the checkpoint has to go
            to disk.

        Raises:
            CoordinationError: a rank did not arrive in time.
        """

        def ended(save: PendingSave) -> None:
            _tell(save, self.folder)
            if on_end is not None:
                on_end(save)

        if not self.plan:
            return self.saver.leave_out(request, self.exchange.rank)
        save = self.saver.save_generation(replace(request, on_end=ended), self.exchange, self.plan)
        self.folder.since_disk += 1
        return save


class MemoryTier:
    """The memory tier of one engine. Every rank makes the same calls.

    Args:
        options: options of the tier. It is off if ``to_disk_every`` is 0.
        save_options: options of saves to disk.
        note: receives the state of the tier on rank 0, for metrics.

    Attributes:
        opened: the generation that the last load has read; None if it read a checkpoint on disk.
    """

    def __init__(
        self, options: MemoryOptions, save_options: SaveOptions, note: Callable[[MemoryStatus], None] = lambda _: None
    ) -> None:
        self.options, self._save_options, self._note = options, save_options, note
        self.opened: Checkpoint | None = None
        self._folders: dict[str, _Folder] = {}

    @property
    def enabled(self) -> bool:
        """Whether saves go into memory. A job that repeats a step saves nothing, and loads from disk."""
        return self.options.to_disk_every > 0 and asked() is None

    def save(
        self,
        request: SaveRequest,
        exchange: MessageExchange,
        on_end: Callable[[PendingSave], None] | None = None,
        *,
        never: bool = False,
    ) -> PendingSave | None:
        """Save into memory if it is the turn of the memory. Arguments and errors: as for ``turn`` and ``MemoryTurn.save``.

        Returns the save, pending or failed; None if this checkpoint has to go to disk. After a failure it goes to disk, too.
        """
        turn = self.turn(request.save_dir, exchange, never=never)
        return None if turn is None else turn.save(request, on_end)

    def turn(self, save_dir: str, exchange: MessageExchange, *, always: bool = False, never: bool = False) -> MemoryTurn | None:
        """Decide where the next checkpoint goes. Every rank calls this, and then ``MemoryTurn.save`` if it goes into memory.

        Args:
            save_dir: the directory in which it would be on disk.
            exchange: message exchange of all ranks.
            always: the framework itself decides which of its checkpoints go to disk, not ``to_disk_every``.
            never: this checkpoint has to go to disk. That of rank 0 counts.

        Returns:
            None if this checkpoint has to go to disk.

        Raises:
            CoordinationError: a rank did not arrive in time.
        """
        if asked() is not None:
            return None
        save_dir, exchange = absolute(save_dir), exchange.separate("memory")
        known = self._folders.get(save_dir)
        if known is None:
            known = self._connected(save_dir, exchange)
        saver, plan = known.saver, None
        if exchange.rank == 0:
            here = not never and (always or known.since_disk + 1 < self.options.to_disk_every)
            plan = self._plan(saver) if saver is not None and here else {"where": _DISK}
        plan = exchange.broadcast("memory-plan", plan)
        if plan["where"] == _DISK or saver is None:
            known.since_disk = 0
            return None
        if plan["where"] == _NOWHERE:
            known.since_disk += 1
            return MemoryTurn(known, saver, {}, exchange)
        saver.wait()
        return MemoryTurn(known, saver, plan, exchange)

    def _plan(self, saver: MemorySaver) -> Message:
        """Return where the next checkpoint goes, and the plan of a save into memory. Runs on rank 0."""
        if self.options.on_busy == "skip" and saver.pending:
            return {"where": _NOWHERE}
        saver.wait()
        if saver.owed:
            saver.skipped()
            return {"where": _DISK}
        return {"where": _MEMORY, **saver.plan()}

    def _connected(self, save_dir: str, exchange: MessageExchange) -> _Folder:
        """Start the tier of a save directory."""
        problems: list[str] = []
        hosts = connect(exchange, self.options.folder, lambda: make_token(save_dir), problems)
        if hosts is None and exchange.rank == 0:
            logger.warning("unickpt: saves go to disk, not into memory: %s", "; ".join(problems))
        known = self._folders[save_dir] = _Folder(hosts)
        if hosts is not None:
            publish(hosts, save_dir)
            known.saver = MemorySaver(self._save_options, self.options, hosts, exchange, self._note)
        return known

    def take_over(self, other: MemoryTier, save_dir: str) -> None:
        """Continue the tier of a save directory that had other options. Waits for its pending saves."""
        known = other._folders.pop(absolute(save_dir), None)
        if known is None:
            return
        if known.saver is not None:
            known.saver.wait()
        if other.options.folder == self.options.folder:
            self._folders[absolute(save_dir)] = known
            if known.saver is not None:
                known.saver.adopt(self.options)
        elif known.saver is not None:
            known.saver.on_disk(time.monotonic())  # or will be: its generations are older than those of the new folder

    def saved_to_disk(self, save_dir: str, seconds: float) -> None:
        """Note that a checkpoint is on disk, and how long ago its save began."""
        known = self._folders.get(absolute(save_dir))
        if known is not None and known.saver is not None:
            known.since_disk = 0
            known.saver.on_disk(time.monotonic() - seconds)

    def look(self, save_dir: str, exchange: MessageExchange) -> MemoryLoad:
        """Find the generations of a save directory. Every rank calls this before a load.

        Generations that may have traces of a fault that the witness has found are left out.
        """
        save_dir = absolute(save_dir)
        exchange = exchange.separate("memory-look")
        known = self._folders.get(save_dir)
        load = MemoryLoad()
        if known is None:
            hosts = connect(exchange, self.options.folder, lambda: read_token(save_dir), load.problems, needed=False)
            if hosts is None:
                return load
            publish(hosts, save_dir)
            known = self._folders[save_dir] = _Folder(
                hosts, MemorySaver(self._save_options, self.options, hosts, exchange, self._note)
            )
        if known.hosts is not None:
            load.found, load.problems = find(known.hosts, exchange, save_dir)
        return load

    def check(self, save_dir: str, number: int) -> None:
        """Remove the damaged files of a generation on this host. Other ranks may open it after all ranks have called this.

        Raises:
            UnickptError: the manifest cannot be read.
        """
        known = self._folders.get(absolute(save_dir))
        if known is not None and known.hosts is not None and known.hosts.leads:
            removed = remove_damaged(known.hosts, number)
            if removed:
                here = known.hosts.names[known.hosts.here]
                text = "unickpt: damaged in the memory of %s: %s. The copies on other hosts are read."
                logger.warning(text, here, ", ".join(removed))

    def open(self, save_dir: str, load: MemoryLoad, number: int) -> Checkpoint:
        """Open a generation that ``look`` has found.

        Raises:
            UnickptError: as ``Checkpoint.open``.
        """
        known = self._folders.get(absolute(save_dir))
        if known is None or known.hosts is None:
            raise UnickptError(f"generation {number} of {save_dir} is not in memory")
        self.opened, load.storage = open_generation(known.hosts, number)
        return self.opened

    def drop(self, save_dir: str, number: int) -> None:
        """Remove what this host holds of a damaged generation, so that it is not found again. Every rank calls this."""
        known = self._folders.get(absolute(save_dir))
        if known is not None and known.hosts is not None and known.hosts.leads:
            known.hosts.folder.give_up(number)

    def scratch(self, save_dir: str, kind: str, name: str) -> tuple[Path, bool]:
        """Return a folder on this host for files that a framework reads, and whether this rank is the first one of the host.

        The first rank removes other folders of that kind. Files that all ranks of the host share are its to write.

        Args:
            save_dir: a directory that ``look`` has found a generation of.
            kind: folder of a use.
            name: folder below it.

        Raises:
            UnickptError: the directory has no memory tier.
            OSError: the folder cannot be made.
        """
        known = self._folders.get(absolute(save_dir))
        if known is None or known.hosts is None:
            raise UnickptError(f"{save_dir} has no checkpoints in memory")
        return known.hosts.folder.scratch(kind, name, alone=known.hosts.leads), known.hosts.leads

    def loaded(self, save_dir: str, load: MemoryLoad, step: int, number: int) -> str:
        """Note what was loaded: newer generations belong to a course of training that was given up.

        Returns where the bytes came from; '' for a checkpoint on disk, whose number is 0.
        """
        known = self._folders.get(absolute(save_dir))
        self.opened = self.opened if number else None
        if known is not None and known.saver is not None:
            stay = [each for each in load.found if each.step < step or each.number == number]
            known.saver.settle({each.number: (each.step, each.passed_until) for each in stay})
            known.saver.give_up_others()
        return "" if load.storage is None or not number else sources_read(load.storage)


def _tell(save: PendingSave, known: _Folder) -> None:
    """Log the result of a save into memory. Runs in the thread that ended it."""
    if save.rank:
        return
    if save.result is not None and save.result.committed:
        known.failing = False
        now_s = time.monotonic()
        writes_line = known.lines < _FIRST_LINES or now_s - known.last_line_s >= _LINE_S  # not a line for each step
        if writes_line:
            known.lines, known.last_line_s = known.lines + 1, now_s
        logger.log(
            logging.INFO if writes_line else logging.DEBUG,
            "unickpt: saved in memory, %s: %s bytes in %.2f s; training paused for %.2f s",
            save.directory, f"{save.result.size_bytes:,}", save.result.seconds, save.result.stall_s,
        )  # fmt: skip
        return
    follows = "The next save goes to disk." if save.background else "This checkpoint goes to disk."
    level = logging.INFO if known.failing else logging.WARNING
    logger.log(level, "unickpt: %s is not saved in memory: %s. %s", save.directory, save.cause(), follows)
    known.failing = True


def choose(
    load: MemoryLoad, disk_step: Callable[[], int | None], tried: list[tuple[int, bool]]
) -> tuple[FoundGeneration, bool] | None:
    """Return the generation to try next, and whether to check its files first; None for the checkpoint on disk.

    A generation that is damaged is tried once more after each host has removed its damaged files.

    Args:
        disk_step: returns the step of the checkpoint on disk that would be tried next; None if there is none.
        tried: what was tried before. This function adds to it.
    """
    for found in load.found:
        for checked in (False, True):
            if (found.number, checked) in tried:
                continue
            step = disk_step()
            if step is not None and step >= found.step:
                return None
            tried.append((found.number, checked))
            return found, checked
    return None
