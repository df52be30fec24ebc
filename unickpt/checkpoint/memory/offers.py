"""The order in which a load tries checkpoints in memory and on disk."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from unickpt.base.errors import UnickptError
from unickpt.base.logs import logger
from unickpt.checkpoint.checkpoint_folder import read_manifest
from unickpt.checkpoint.coordination.message_exchange import MessageExchange
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.failure import DAMAGE, failure_of
from unickpt.checkpoint.load.resume import Offer, gone_back
from unickpt.checkpoint.memory.host_folder import HostFolder, read_token
from unickpt.checkpoint.memory.tier import MemoryLoad, MemoryTier, choose
from unickpt.checkpoint.storage.base import join
from unickpt.checkpoint.storage.open import open_storage


class MemoryOffers:
    """Generations that are newer than the next checkpoint on disk, and that checkpoint after them. Used on the coordinator.

    Args:
        load: generations that may be tried.
        folder: directory in which their checkpoints would be on disk.
        disk: returns the next checkpoint on disk; empty if none is left that unickpt can load.
        native_step: returns the step of the framework's own checkpoint that would be loaded instead; -1 if there is none.
    """

    def __init__(self, load: MemoryLoad, folder: str, disk: Callable[[], Offer], native_step: Callable[[], int]) -> None:
        self._load, self._folder, self._disk, self._native_step = load, folder, disk, native_step
        self._tried: list[tuple[int, bool]] = []
        self._next: Offer | None = None

    def next(self) -> Offer:
        """Return the checkpoint to try now."""
        if self._next is None:
            self._next = self._disk()
        head = self._next
        found = None if head.refused or head.explicit else choose(self._load, lambda: self._step_of(head), self._tried)
        if found is not None:
            generation, checked = found
            where = join(self._folder, generation.tag)
            return Offer(where, generation.tag, generation.step, generation=generation.number, checked=checked)
        self._next = None
        if self._tried and not head.directory and not head.refused and not head.missing and self._native_step() >= 0:
            return Offer(self._folder, native=True, notes=head.notes)
        return head

    def _step_of(self, disk: Offer) -> int:
        if disk.missing:
            return -1
        return disk.step or _step_in(disk.directory) if disk.directory else self._native_step()


def _step_in(directory: str) -> int:
    """Return the step of a checkpoint on disk; 0 if it is damaged: then one in memory is tried first."""
    try:
        return read_manifest(open_storage(directory)).step
    except UnickptError as err:
        if failure_of(err, rank=0, where=directory).kind not in DAMAGE:
            raise  # an unavailable storage must not lead to an older checkpoint
        return 0


def warn_of_unseen(parent: str, folders: Sequence[str]) -> None:
    """Warn of checkpoints in the memory of this host that a job without a memory tier does not look at."""
    for folder in folders:
        with contextlib.suppress(UnickptError, OSError):
            token = read_token(folder)
            if token and HostFolder(parent, token).inventory().files:
                logger.warning(
                    "unickpt: there are checkpoints of %s in the memory of this host, and this job does not look there. If "
                    "they are newer ('unickpt hosts' lists them), start it with the options for memory with which it saved.",
                    folder,
                )


class MemoryResume:
    """What a load may take from memory. Every rank creates it before the load, and makes the same calls.

    Args:
        tier: memory tier of the job.
        folder: directory in which the checkpoints would be on disk.
        exchange: message exchange of all ranks.
        step: step of the only checkpoint that may be loaded; None: any.
        beside: other folders whose checkpoints in memory a job with other options would find, for a warning.
        continues: the job saves into the same folder. Otherwise it leaves all generations as they are.
    """

    def __init__(
        self, tier: MemoryTier, folder: str, exchange: MessageExchange, *, step: int | None = None, continues: bool = True,
        beside: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.tier, self.folder, self.exchange, self._continues = tier, folder, exchange, continues
        self.load = tier.look(folder, exchange) if tier.enabled else MemoryLoad()
        if not tier.enabled and exchange.rank == 0:
            warn_of_unseen(tier.options.folder, (folder, *beside))
        if step:
            self.load.found = [found for found in self.load.found if found.step == step]
        if self.load.problems and exchange.rank == 0:
            logger.warning("unickpt: in the memory of the hosts: %s", "; ".join(self.load.problems))

    def offers(self, disk: Callable[[], Offer], native_step: Callable[[], int]) -> MemoryOffers:
        """Return the order in which checkpoints are tried, given those on disk (``MemoryOffers``). Used on the coordinator."""
        return MemoryOffers(self.load, self.folder, disk, native_step)

    def check(self, offer: Offer) -> None:
        """Remove the damaged files of a generation on this host. Raises UnickptError if its manifest cannot be read."""
        self.tier.check(self.folder, offer.generation)

    def open(self, offer: Offer) -> Checkpoint:
        """Open a checkpoint in memory or on disk. Raises UnickptError, as ``Checkpoint.open``."""
        if offer.generation:
            return self.tier.open(self.folder, self.load, offer.generation)
        return Checkpoint.open(offer.directory)

    def loaded(self, offer: Offer, step: int) -> None:
        """Note which checkpoint was loaded, and its step. A job that continues gives up newer ones in memory."""
        if not self._continues or not self.tier.enabled:
            return
        if self.exchange.rank == 0:
            gone_back(self.folder)
        read = self.tier.loaded(self.folder, self.load, step, offer.generation)
        if read and self.exchange.rank == 0:
            logger.info("unickpt: %s was loaded from the memory of the hosts: rank 0 read %s", offer.directory, read)
