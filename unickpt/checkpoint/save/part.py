"""Part of one rank in a save: description, copy in host memory, and the shards written before training continues."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from unickpt.base.extensions import COPYING, Built
from unickpt.base.garbage import collection_paused
from unickpt.base.installation import build_command
from unickpt.base.logs import logger
from unickpt.checkpoint.coordination.failure import Failure, FailureKind
from unickpt.checkpoint.coordination.message_exchange import MessageExchange
from unickpt.checkpoint.format.casts import available
from unickpt.checkpoint.format.layout import RankFiles
from unickpt.checkpoint.save import staging
from unickpt.checkpoint.save.data_file import DataFile, Pace, create_data_file
from unickpt.checkpoint.save.failure import save_failure
from unickpt.checkpoint.save.opening import Opening, refusal
from unickpt.checkpoint.save.requests import SaveOptions, SaveRequest
from unickpt.checkpoint.save.shards import Prepared, Shard, prepare, resolve_conditions
from unickpt.checkpoint.save.staging import Staged, StagingBuffer
from unickpt.checkpoint.save.staging_pool import BufferPool
from unickpt.checkpoint.storage.base import Storage
from unickpt.checkpoint.storage.direct_io import BLOCK_BYTES


@dataclass
class OpenDataFile:
    """A data file that is still open. It holds the shards that did not fit into the staging budget."""

    stack: contextlib.ExitStack
    file: DataFile

    def abandon(self) -> None:
        with contextlib.suppress(Exception):
            self.stack.close()


@dataclass
class SavePart:
    """Part of this rank in one save, or its failure.

    Attributes:
        prepared: description of the part; None after a failure.
        failure: why this rank cannot take part, or None.
        interrupt: KeyboardInterrupt or SystemExit, raised again once the other ranks know of it.
        written: data file with the shards that were written ahead, or None.
        shards: shards that remain to be written.
        buffer: staging memory of this part, or None.
        staged: ``shards`` in the buffer, from which they are written, or None.
        conditional_bytes: size of the shards in the buffer that had a condition; None until it is known.
        stage_ns: time that this rank has spent on the part before all ranks agreed to it, and on its copy.
    """

    prepared: Prepared | None = None
    failure: Failure | None = None
    interrupt: BaseException | None = None
    written: OpenDataFile | None = None
    shards: list[Shard] = field(default_factory=list)
    buffer: StagingBuffer | None = None
    staged: Staged | None = None
    conditional_bytes: int | None = None
    stage_ns: int = 0

    def ready(self) -> None:
        """Wait until the shards are in the buffer, if this part has one.

        Raises:
            ChangedError: the state was changed meanwhile.
        """
        if self.staged is None:
            return
        self.staged.ready()
        self.shards = self.staged.shards
        if self.staged.late is not None and self.prepared is not None:
            self.prepared.shards = self.shards
        self.conditional_bytes = self.staged.conditional_bytes

    def check(self) -> None:
        """Raises ChangedError if the state was changed while it was copied."""
        if self.staged is not None and self.staged.late is not None:
            self.staged.late.check()

    @property
    def header_bytes(self) -> int:
        """Least size of the header of the data file. It is the place of the data in a buffer that becomes the file."""
        return 0 if self.buffer is None or self.written is not None else self.buffer.lead_bytes


class PartBuilder:
    """Describes and stages the parts of one rank, in the staging memory of a pool."""

    def __init__(self, options: SaveOptions, pool: BufferPool) -> None:
        self._options, self._pool = options, pool
        self._late = options.copy_behind_training and available()
        self._noted: set[object] = set()
        self._conditional_bytes: int | None = None  # of conditional shards in the last save; None before the first

    def describe(
        self, request: SaveRequest, opening: Opening, exchange: MessageExchange, interrupts: Sequence[BaseException] = ()
    ) -> SavePart:
        """Describe this rank's part. For a background save, also copy it if the copy fits into the budget.

        A failure is returned in the part, so that this rank takes part in the agreement. So is what has interrupted this rank.
        """
        part = SavePart()
        if request.failed is not None:
            part.failure = save_failure(request.failed, exchange.rank, describing=True)
        else:
            part.failure = refusal(request.arguments, opening.arguments, exchange.rank)
        if part.failure is not None:
            return part
        try:
            if interrupts:
                raise interrupts[0]
            with collection_paused():
                contribution = request.contribute(opening.announce)
                part.prepared = prepare(contribution, exchange.rank)
            if opening.background:
                self._note_at_once(contribution.unsteady)
            self._resolve(part, part.prepared, background=opening.background, exchange=exchange)
        except BaseException as err:  # torch's CheckpointException does not derive from Exception
            part.failure = save_failure(err, exchange.rank, describing=True)
            part.interrupt = err if part.failure.kind is FailureKind.INTERRUPTED else None
            logger.debug("unickpt: rank %d could not describe %s", exchange.rank, request.directory, exc_info=err)
        return part

    def _note_at_once(self, reason: str) -> None:
        """Log once why the state is copied before the call returns, although the option asks for later."""
        built = COPYING.built
        if built is Built.OLD and self._options.copy_behind_training and built not in self._noted:
            self._noted.add(built)
            logger.warning(
                "unickpt: the extension %s was built before its code was changed, and lacks a part: %s. Build it again: %s",
                COPYING.module, COPYING.without, build_command(),
            )  # fmt: skip
        elif not available():
            reason = f"the extension {COPYING.module} is not installed"
        if self._options.copy_behind_training and reason and reason not in self._noted:
            self._noted.add(reason)
            logger.info("unickpt: asynchronous saves copy the state before they return: %s", reason)

    def _resolve(self, part: SavePart, prepared: Prepared, *, background: bool, exchange: MessageExchange) -> None:
        """Decide which shards are written. For a background save, copy them if they fit into the budget."""
        if background and self._left(part, prepared, exchange):
            return
        prepared.bind()
        if not background or any(not shard.data.is_cpu for shard in prepared.shards):
            prepared.shards = resolve_conditions(prepared.shards)
        part.shards = prepared.shards
        if not background:
            return
        certain = staging.size_of([shard for shard in part.shards if shard.unless is None])
        late = self._late and self._conditional_bytes is not None  # the first save shows what is conditional
        wanted = certain + (self._conditional_bytes or 0) if late else certain
        part.buffer = part.buffer or self._buffer(wanted, exchange)
        with collection_paused():
            part.staged = part.buffer.fill(part.shards, late=late) if certain <= part.buffer.capacity_bytes else None
        if part.staged is None:
            prepared.shards = part.shards = resolve_conditions(part.shards)
        elif part.staged.late is None:
            prepared.shards = part.shards = part.staged.shards

    def _left(self, part: SavePart, prepared: Prepared, exchange: MessageExchange) -> bool:
        """Leave the copy of shards that an earlier save has described to the thread of the save. Return whether it pays."""
        if prepared.bound is None or not prepared.bound.kept.on_host or not self._late or self._conditional_bytes is None:
            return False
        certain = prepared.bound.kept.certain_bytes + staging.size_of(prepared.shards)
        part.buffer = self._buffer(certain + self._conditional_bytes, exchange)
        if certain <= part.buffer.capacity_bytes:
            part.staged = part.buffer.fill_kept(prepared.bound, prepared.shards)
        return part.staged is not None

    def stage(self, part: SavePart, storage: Storage, names: RankFiles, exchange: MessageExchange) -> None:
        """Copy this rank's shards into the budget. Shards beyond the budget are written now, from where they are."""
        assert part.prepared is not None
        assert part.buffer is not None
        try:
            if part.buffer.capacity_bytes < staging.size_of(part.shards):
                self._pool.release(part.buffer)
                part.buffer = None
                part.buffer = self._buffer(staging.size_of(part.shards), exchange)
            first = staging.first_that_fits(part.shards, part.buffer.capacity_bytes)
            if first:
                part.written = self._write_ahead(part.prepared, first, storage, names, exchange)
            lead = part.written.file.next_byte % BLOCK_BYTES if part.written is not None else 0
            with collection_paused():
                part.staged = part.buffer.fill(part.shards[first:], lead_bytes=lead)
            assert part.staged is not None  # all conditions are resolved and the shards fit
            part.shards = part.staged.shards
        except Exception as err:
            part.failure = save_failure(err, exchange.rank)

    def _write_ahead(
        self, prepared: Prepared, count: int, storage: Storage, names: RankFiles, exchange: MessageExchange
    ) -> OpenDataFile:
        """Write the first shards of the data file and keep it open."""
        stack = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            undo.push(stack)
            sink = stack.enter_context(create_data_file(storage, names.data, prepared.shards, direct=self._options.direct_io))
            pace = Pace(self._options.bandwidth_bytes_per_s)
            file = DataFile(sink, prepared.shards, rank=exchange.rank, step=prepared.step, pace=pace)
            file.write(prepared.shards[:count])
            undo.pop_all()
        return OpenDataFile(stack, file)

    def _buffer(self, size_bytes: int, exchange: MessageExchange) -> StagingBuffer:
        notice = partial(warn_of_waiting, "this one", "the saves before it", exchange)
        return self._pool.acquire(size_bytes, notice=notice, notice_s=exchange.notice_s)

    def release(self, part: SavePart) -> None:
        """Close the open data file of a part, and return its staging memory to the pool."""
        if part.staged is not None and part.staged.late is not None:
            part.staged.late.close()
            self._late = self._late and not part.staged.late.changed
        if part.conditional_bytes is not None:
            self._conditional_bytes = part.conditional_bytes
        if part.written is not None:
            part.written.abandon()
            part.written = None
        if part.buffer is not None:
            self._pool.release(part.buffer)
            part.buffer = None


def warn_of_waiting(directory: str, what: str, exchange: MessageExchange) -> None:
    """Log that training waits for an earlier save."""
    logger.warning(
        "unickpt: rank %d: training has waited %.0f s at the save of %s until %s is written. The storage may be stalled. "
        "on_busy 'skip' continues without a save.",
        exchange.rank, exchange.notice_s, directory, what,
    )  # fmt: skip
