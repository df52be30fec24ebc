"""Saves into the memory of the hosts, with copies on other hosts behind training.

    token, hosts, keepers -> plan -> save as on disk, but into memory -> commit -> copies -> confirmation

The commit record of a generation lies on the host of rank 0 and, with copies, on the host after it.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from unickpt.base.errors import CoordinationError, StorageError, UnickptError
from unickpt.base.logs import logger
from unickpt.base.memory_status import HostUsage, MemoryStatus
from unickpt.base.options.job import MemoryOptions
from unickpt.checkpoint.checkpoint_folder import read_manifest
from unickpt.checkpoint.coordination.message_exchange import Message, MessageExchange
from unickpt.checkpoint.format.checksums import digest
from unickpt.checkpoint.format.layout import RankFiles
from unickpt.checkpoint.format.manifest import MANIFEST_FILE, Manifest
from unickpt.checkpoint.memory.generations import (
    ABOUT_FILE,
    folder_of,
    kept,
    number_of,
    passed,
    passed_or_none,
    sources,
)
from unickpt.checkpoint.memory.host_folder import write_about
from unickpt.checkpoint.memory.hosts import JobHosts
from unickpt.checkpoint.memory.keeper_client import CopyOrder, KeeperClient, WantedFile
from unickpt.checkpoint.memory.mapped_staging import MappedSlots
from unickpt.checkpoint.memory.peer_storage import PeerStorage
from unickpt.checkpoint.save.requests import PendingSave, SaveOptions, SaveRequest, SaveResult
from unickpt.checkpoint.save.saver import Saver
from unickpt.checkpoint.save.shards import Contribution
from unickpt.checkpoint.save.task import SaveTask
from unickpt.checkpoint.save.upload import UploadRequest
from unickpt.checkpoint.storage.base import Storage, split

_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.002, 0.5
_POLL_SHARE = 0.02  # of the time that a copy has taken: it is found complete that much later at most
_MOST_OWED = 64
_COME_S = 2.0  # within which the ranks of a job that is ended receive the signal


@dataclass(frozen=True)
class _Generation:
    """A generation that this job has committed.

    Attributes:
        request: the framework's request.
        task: its save on this rank.
        begun_s: when the save began, in seconds on the monotonic clock.
    """

    request: SaveRequest
    task: SaveTask
    begun_s: float


class MemorySaver(Saver):
    """Saver of one save directory into memory. Every rank makes the same calls.

    Args:
        save_options: options of saves to disk.
        options: options of the memory tier.
        hosts: hosts of the job.
        exchange: message exchange of all ranks that does not end with a save.
        note: receives the state of the tier on rank 0 whenever it has changed, in any thread.

    Attributes:
        status: on rank 0, that state.
        confirmed: on rank 0, number of the newest generation whose copies are complete; 0 before.
        owed: on rank 0, number of saves that go to disk before memory is tried again. Each failure in a row doubles it.
    """

    def __init__(
        self,
        save_options: SaveOptions,
        options: MemoryOptions,
        hosts: JobHosts,
        exchange: MessageExchange,
        note: Callable[[MemoryStatus], None],
    ) -> None:
        self.hosts, self._memory, self._of_job, self._note = hosts, options, exchange, note
        self.status = MemoryStatus()
        self._share = self._budget()
        self._slots = MappedSlots(hosts.folder, hosts.rank, self._share)
        self._request: SaveRequest | None = None
        self._keep: list[int] = []
        self._safe: list[int] = []  # generations whose copies are complete, newest first; the one of rank 0 counts
        self._steps: dict[int, tuple[int, int]] = {}  # on rank 0, of these: step, and what the witness had passed
        self._newest: _Generation | None = None  # not on disk
        self._warned: set[str] = set()
        self.confirmed = self.owed = 0
        self._failures = 0  # in a row, on rank 0
        self._last = hosts.newest
        self._deserted = False
        self._begun_s = 0.0
        super().__init__(
            replace(
                save_options, asynchronous=True, on_busy="wait", staging_bytes=None, pinned_staging=False, upload_to="",
                bandwidth_bytes_per_s=None, direct_io=False, retention=type(save_options.retention)(),
            ),
            pool=self._slots, opener=self._storage,
        )  # fmt: skip

    def adopt(self, options: MemoryOptions) -> None:
        """Continue with other options of the tier. Nothing is pending."""
        self._memory = options
        self._slots.budget_bytes = self._share = self._budget()

    def _budget(self) -> int | None:
        """Return the bytes that one generation of this rank may have; None for no limit."""
        if math.isinf(self._memory.gigabytes):
            return None
        here = len(self.hosts.ranks[self.hosts.here])
        return int(self._memory.gigabytes * 1e9) // (here * self._memory.generations * self._copies)

    @property
    def _copies(self) -> int:
        """Number of places of a file."""
        return 1 + min(self._memory.replicas, len(self.hosts.ranks) - 1)

    def _storage(self, where: str) -> Storage:
        number = number_of(split(where)[1])
        assert number is not None  # of a request of ``save_generation``
        name = RankFiles(self.hosts.rank, 0).data
        return PeerStorage(self.hosts.folder, number, self.hosts.peers, slots=self._slots, data_name=name)

    def save_generation(self, request: SaveRequest, exchange: MessageExchange, plan: Message) -> PendingSave:
        """Save one checkpoint into memory. The call returns after the copy of the state.

        Args:
            request: what the framework saves. ``save_dir`` and ``tag`` name the checkpoint on disk that this one stands for.
            exchange: message exchange of the ranks for this save only.
            plan: from ``plan`` on rank 0.

        Raises:
            CoordinationError: a rank did not arrive in time.
        """
        number, self._keep = plan["number"], plan["keep"]
        self._make_room()
        if self.hosts.keeper is not None and not self.hosts.keeper.runs:
            with contextlib.suppress(OSError):  # then this save has no copies, and says so
                self.hosts.keeper.start()
        self._request, self._begun_s = request, time.monotonic()

        def contribute(announced: Message) -> Contribution:
            if exchange.rank == 0:  # here, because all ranks learn of a failure to describe the state
                write_about(self.hosts.folder.generation(number), tag=request.tag)
            return request.contribute(announced)

        inner = SaveRequest(
            contribute, self.hosts.folder.url, folder_of(number), announce=request.announce, early=request.early,
            forget=request.forget,
            must_match={**request.must_match, "stands_for": request.place}, claim=request.claim, framework_stands_in=False,
            failed=request.failed, on_end=request.on_end,
        )  # fmt: skip
        save = self.save(inner, exchange.separate("generation"), asynchronous=True)
        if save.done and not save.background:  # it failed before any thread had begun
            self._failed()
            self.hosts.folder.give_up(number)
        return save

    def leave_out(self, request: SaveRequest, rank: int) -> PendingSave:
        """Return a save that is skipped, because the copies of the one before are not complete."""
        save = PendingSave(request.directory, rank, self.counts)
        save.agreed = True
        if request.forget is not None:
            request.forget()
        self._tell(replace(self.status, left_out=self.status.left_out + 1))
        if rank == 0 and self.status.left_out == 1:
            logger.warning(
                "unickpt: %s is left out: the copies of the checkpoint in memory before it are not complete "
                "(they took %.2f s the time before). Later ones are only counted.",
                request.directory,
                self.status.confirm_s,
            )
        save.end(SaveResult(committed=False, skipped=True))
        return save

    def wait(self) -> None:
        """Wait for the copies of the last generation: then two hosts hold it. Every rank calls this before it makes a plan."""
        for save in self.pending:
            save.wait()

    def plan(self) -> Message:
        """Return the number of the next generation, and those that stay meanwhile. Runs on rank 0."""
        self._last = max(time.time_ns(), self._last + 1)  # a clock may jump back, and that of another host may be behind
        steps = {number: self._steps[number] for number in self._safe if number in self._steps}
        needed = passed(steps)
        keep = kept(self._safe, self._memory.generations, needed)
        if needed is not None and needed not in keep:
            self._warn(
                f"the checkpoint of step {steps[needed][0]}, which the witness has passed, does not stay in memory: after a "
                "fault the job goes back to one on disk. memory.generations 3 keeps it"
            )
        self._steps = {number: steps[number] for number in keep if number in steps}
        return {"number": self._last, "keep": keep}

    def settle(self, complete: Mapping[int, tuple[int, int]]) -> None:
        """Note which generations of an earlier process stay.

        Args:
            complete: by number, newest first: the one that was loaded, and older ones. The step of each, and what the witness
                had passed (``generations.passed_or_none``).
        """
        self._safe, self._steps = list(complete), dict(complete)

    def give_up_others(self) -> None:
        """Remove the generations of this host that do not stay. They would be loaded after the next restart."""
        for number in self.hosts.folder.inventory().files if self.hosts.leads else ():
            if number not in self._safe:
                self.hosts.folder.give_up(number)

    def _make_room(self) -> None:
        """Give up the generations that do not stay. The pages of this rank's file serve the next one."""
        folder, world = self.hosts.folder, sum(map(len, self.hosts.ranks))
        own = RankFiles(self.hosts.rank, 0).data
        of_ranks = frozenset(RankFiles(rank, 0).data for rank in range(world))
        for number in folder.inventory().files:
            if number not in self._keep:
                self._slots.set_aside(number, own)
                if self.hosts.leads:
                    folder.give_up(number, but=of_ranks)  # each has its owner: a rank of this host, or the keeper

    def end_task(self, task: SaveTask, result: SaveResult | None) -> None:
        """End a task; copy a committed generation to other hosts. Runs in the thread of the save."""
        super().end_task(task, result)
        self._recovering = False  # the next save is on disk; the one after it is tried in memory, in the background as ever
        self._unreported.clear()  # ``on_end`` reports it
        number = number_of(split(task.save.directory)[1]) or 0
        if result is None or not result.committed:
            self._failed()
            self.hosts.folder.give_up(number)
            return
        assert self._request is not None
        self._newest = _Generation(self._request, task, self._begun_s)
        try:
            self._confirm(task)
        except CoordinationError as err:
            self._failed(committed=True)
            self._warn(f"rank {self.hosts.rank}: it is unknown whether {task.save.directory} has copies ({err})")

    def _failed(self, *, committed: bool = False) -> None:
        """Note that a generation is incomplete, or that a committed one has no copies."""
        self._failures += 1
        self.owed = min(1 << (self._failures - 1), _MOST_OWED)
        now = self.status
        self._tell(replace(now, uncopied=now.uncopied + committed, failed=now.failed + (not committed)))

    def skipped(self) -> None:
        """Note on rank 0 that a save goes to disk because of a failure."""
        self._tell(replace(self.status, skipped=self.status.skipped + 1))

    def _tell(self, status: MemoryStatus) -> None:
        self.status = status
        if self.hosts.rank == 0:
            self._note(status)

    def _confirm(self, task: SaveTask) -> None:
        """Copy the files of other hosts to this one, and learn whether all hosts have done so."""
        begin, problem, size = time.monotonic(), "", 0
        try:
            if self._copies > 1 and self.hosts.leads:
                size = self._copy(task)
        except (UnickptError, OSError) as err:
            problem = f"{self.hosts.names[self.hosts.here]}: {err}"
        held, refused = self._held() if self.hosts.leads else (0, 0)
        told = {"problem": problem, "bytes": size, "held": held, "refused": refused}
        messages = task.exchange.gather("memory-copied", told)
        if messages is not None:
            self.status = replace(
                self.status,
                hosts=tuple(
                    HostUsage(name, ranks[0], messages[ranks[0]]["held"], messages[ranks[0]]["refused"])
                    for name, ranks in zip(self.hosts.names, self.hosts.ranks, strict=True)
                ),
            )
            problems = [message["problem"] for message in messages if message["problem"]]
            if problems:
                self._failed(committed=True)
                self._warn(
                    f"a checkpoint in memory is not copied to other hosts ({'; '.join(problems)}). The next save goes to disk"
                )
            else:
                self._failures, seconds = 0, time.monotonic() - self._begun_s
                self._tell(
                    replace(
                        self.status,
                        generation=number_of(split(task.save.directory)[1]) or 0,
                        confirm_s=seconds,
                        step=0 if task.part.prepared is None else task.part.prepared.step or 0,
                        begun_s=time.time() - seconds,
                        longest_s=max(self.status.longest_s, seconds),
                        confirmed=self.status.confirmed + 1,
                    )
                )
                self.confirmed = number_of(split(task.save.directory)[1]) or 0
                self._safe = [self.confirmed, *self._keep]
                if task.part.prepared is not None:
                    self._steps[self.confirmed] = task.part.prepared.step, passed_or_none(task.part.prepared.witness)
            if self._copies > 1 and not problems:
                logger.info(
                    "unickpt: %s copied to other hosts: %s bytes in %.2f s",
                    task.save.directory,
                    f"{sum(message['bytes'] for message in messages):,}",
                    time.monotonic() - begin,
                )

    def _held(self) -> tuple[int, int]:
        """Return the bytes that this host holds, and the connections that its keeper has refused."""
        held = sum(sum(files.values()) for files in self.hosts.folder.inventory().files.values())
        client = KeeperClient(self.hosts.addresses[self.hosts.here])
        try:
            return held, client.copied().refused
        except StorageError:
            return held, 0
        finally:
            client.close()

    def _copy(self, task: SaveTask) -> int:
        """Order the keeper of this host to copy the files of the hosts before it, and wait. Return the number of bytes.

        Raises:
            StorageError: a keeper does not answer, or a copy is incomplete.
        """
        number, size = number_of(split(task.save.directory)[1]) or 0, 0
        storage = PeerStorage(self.hosts.folder, number, self.hosts.peers)
        manifest = read_manifest(storage)
        limit = self._memory.copy_megabytes_per_second
        limit = 0.0 if math.isinf(limit) else limit * 1e6
        client = KeeperClient(self.hosts.addresses[self.hosts.here])
        try:
            for source in sources(self.hosts.here, len(self.hosts.ranks), self._memory.replicas):
                files = self._wanted(storage, manifest, self.hosts.ranks[source])
                total = sum(file.size_bytes for file in files)
                share = None if self._share is None else self._share * len(self.hosts.ranks[self.hosts.here])
                if share is not None and total > share:
                    raise StorageError(f"{total:,} bytes exceed the {share:,} that memory.gigabytes leaves for copies")
                order = CopyOrder(number, self.hosts.addresses[source], files, (*self._keep, number), limit)
                client.copy(order)
                begun = time.monotonic()
                while not (state := client.copied()).done:
                    if state.number != number:  # the keeper has died, and the one in its place knows nothing of the order
                        client.copy(order)
                    time.sleep(min(max((time.monotonic() - begun) * _POLL_SHARE, _SHORTEST_POLL_S), _LONGEST_POLL_S))
                if state.problem:
                    raise StorageError(state.problem)
                size += state.size_bytes
        finally:
            client.close()
        return size

    def _wanted(self, storage: Storage, manifest: Manifest, ranks: Sequence[int]) -> tuple[WantedFile, ...]:
        """Return the files of a host with these ranks. The host of rank 0 also has the commit record."""
        names = {RankFiles(rank, 0).data for rank in ranks}
        with_commit = RankFiles(0, 0).data in names
        if with_commit:
            names.add(manifest.index)
        files = [WantedFile(r.path, r.size_bytes, r.checksum) for r in manifest.files if r.path in names]
        if with_commit:
            files += [_as_read(storage, name) for name in (ABOUT_FILE, MANIFEST_FILE)]
        return tuple(files)

    def on_disk(self, begun_s: float) -> None:
        """Note that a checkpoint is on disk, so that the end of the process does not write an older generation.

        Args:
            begun_s: when its save began, in seconds on the monotonic clock.
        """
        self.owed = max(self.owed - 1, 0)
        newest = self._newest
        if newest is not None and newest.begun_s < begun_s:
            self._newest = None

    def closing(self, *, signalled: bool) -> None:
        """Write the newest generation to disk, because the job ends.

        Not after a crash, or if not all ranks come here in time: then the job starts again without some of them, and finds the
        generation in memory.
        """
        self._deserted = False
        if self._newest is None and not self.pending:
            return
        within_s = _COME_S if signalled else self.options.grace_s
        crashed = "" if signalled else _uncaught()
        # not the exchange of a save: some ranks may have begun another save when the end comes, and others not
        exchange = self._of_job.separate("closing")
        self._deserted = bool(crashed) or bool(exchange.ended()) or not self._all_come(exchange, within_s)
        if self._deserted:
            if crashed:
                self._warn(f"the newest checkpoint stays in memory: the program ended with {crashed}")
            else:
                self._warn(f"the newest checkpoint stays in memory: not all ranks ended in order within {within_s:g} s")
            self._newest = None
            return
        for save in self.pending:
            save.wait(self.options.grace_s)
        newest, self._newest = self._newest, None
        record = None if newest is None else newest.task.record
        if newest is None or record is None:
            return
        request, task = newest.request, newest.task
        upload = UploadRequest(
            task.storage, request.save_dir, request.tag, record, request.save_latest, task.exchange.separate("flush"),
            request.on_commit, request.one_writer, request.claim,
        )  # fmt: skip
        self.upload(upload)

    def _all_come(self, exchange: MessageExchange, within_s: float) -> bool:
        """Return whether all ranks call this within a number of seconds."""
        exchange.timeout_s = within_s
        try:
            exchange.combined("closing", {}, lambda _: {})
        except CoordinationError:
            return False
        return True

    def leave(self, timeout_s: float) -> bool:
        """As ``Saver.leave``. A save that misses a rank cannot end, so nothing is waited for then."""
        return super().leave(0.0 if self._deserted else timeout_s)

    def _warn(self, text: str) -> None:
        """Log a warning on rank 0, the first time."""
        if text not in self._warned and self.hosts.rank == 0:
            logger.warning("unickpt: %s", text)
        self._warned.add(text)


def _uncaught() -> str:
    """Return the type of the exception that ends this process; '' if it ends in order.

    In an interactive session, such as a notebook, an exception ends a cell and not the process.
    """
    found = getattr(sys, "last_value", None)
    return "" if found is None or hasattr(sys, "ps1") else type(found).__qualname__


def _as_read(storage: Storage, name: str) -> WantedFile:
    """Return a small file that no manifest lists, with the checksum of what this host has read of it."""
    data = storage.read(name, 0, storage.size_bytes(name) or 0)
    return WantedFile(name, len(data), digest(data))
