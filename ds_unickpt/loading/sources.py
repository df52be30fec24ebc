"""Where a load finds checkpoints: in a folder on disk, in a folder of Trainer, in the memory of the hosts."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

from ds_unickpt.loops import trainer_folders
from ds_unickpt.loops.memory_note import MemoryNote
from unickpt.base.errors import CorruptCheckpointError, FormatError, NotACheckpointError, UnickptError, UnsafePathError
from unickpt.base.logs import logger
from unickpt.checkpoint.checkpoint_folder import complete_checkpoints, latest_tag, plain_tag, read_manifest
from unickpt.checkpoint.coordination.message_exchange import MessageExchange
from unickpt.checkpoint.load.candidates import Candidates, warn_of_suspicion, why_suspect
from unickpt.checkpoint.load.resume import Offer
from unickpt.checkpoint.load.validation import files_of_deepspeed, is_checkpoint, newer_of_deepspeed
from unickpt.checkpoint.memory.finding import FoundGeneration
from unickpt.checkpoint.memory.offers import MemoryResume
from unickpt.checkpoint.memory.tier import MemoryTier, choose
from unickpt.checkpoint.storage.base import Storage, is_url, join
from unickpt.checkpoint.storage.open import open_storage
from unickpt.checkpoint.witness_faults import read_faults


class Source:
    """Where a load finds checkpoints. A load asks its sources in turn."""

    def offer(self) -> Offer | None:
        """Return the checkpoint to try next; None if there is none here. Runs on the coordinator."""
        return None

    def loaded(self, offer: Offer, step: int) -> None:
        """Note on every rank which checkpoint was loaded, of this or another source, and its step."""

    def damaged(self, error: UnickptError) -> UnickptError:
        """Return the error to raise on every rank if the load has ended with damage."""
        return error


@dataclass
class OnDisk(Source):
    """A folder of checkpoints, or one checkpoint.

    Attributes:
        folder: path or URL.
        tag: name of a checkpoint; None for the one that ``latest`` names.
        newest: without a ``latest`` file the newest complete checkpoint is meant.
        first: this rank is the coordinator.
    """

    folder: str
    tag: Any
    newest: bool
    first: bool

    def __post_init__(self) -> None:
        self._candidates = Candidates(self.folder, newest=self.newest)

    def offer(self) -> Offer:
        """Return the checkpoint to try next. Reads manifests, no data."""
        place = open_storage(self.folder)
        if self.tag is not None:
            try:
                tag = plain_tag(str(self.tag), self.folder)
            except UnsafePathError as err:
                return Offer(refused=str(err))
            warn_of_suspicion(self.folder, tag)
            return Offer(join(self.folder, tag), tag, explicit=True, native=_is_native(place.subfolder(tag)))
        first, found = not self._candidates.begun, self._candidates.offer()
        if not found.directory and self.newest:
            return Offer(notes=(*found.notes, *unnamed(place)))
        return replace(found, native=True) if first and found.name and _is_native(place.subfolder(found.name)) else found

    def step(self) -> int | None:
        """Return the step of the checkpoint that ``latest`` names, or of the newest one. None if there is none.

        The step of a checkpoint of DeepSpeed itself is not known; it counts as newer than any in memory.
        """
        try:
            named = latest_tag(self.folder)
        except FormatError:  # the candidates on disk say so
            named = None
        faults = read_faults(self.folder)
        if named is not None and why_suspect(self.folder, named, faults):
            named = None
        if named is None:
            complete = complete_checkpoints(self.folder)
            return next((step for step, name in complete if not why_suspect(self.folder, name, faults)), None)
        try:
            return read_manifest(open_storage(self.folder).subfolder(named)).step
        except NotACheckpointError:
            return sys.maxsize if _is_native(open_storage(self.folder).subfolder(named)) else None
        except FormatError:
            return None

    def explain_nothing(self, offer: Offer) -> None:
        """Say why nothing is loaded from this folder.

        Raises:
            NotACheckpointError: DeepSpeed must not look there either.
        """
        if self.first and offer.present:
            logger.warning(
                "unickpt: %s has no 'latest' file, so nothing is loaded. It has these complete checkpoints: %s. "
                "To resume from one, pass its name as tag.",
                self.folder,
                ", ".join(offer.present),
            )
        elif self.first and is_url(self.folder):
            logger.warning("unickpt: %s has no 'latest' file and no checkpoint, so nothing is loaded", self.folder)


class InTrainerFolder(OnDisk):
    """A ``checkpoint-N`` folder of Trainer, which has read its own state there before DeepSpeed reads anything."""

    def loaded(self, offer: Offer, step: int) -> None:  # noqa: ARG002
        if self.first:
            trainer_folders.forget_damage(self.folder)

    def damaged(self, error: UnickptError) -> UnickptError:
        """Mark the folder as damaged: this load cannot fall back, because Trainer has read its own state from the folder."""
        if self.first:
            trainer_folders.note_damage(self.folder, str(error))
        advice = trainer_folders.advice(self.folder) or "No other folder of this run can be resumed: start anew without it."
        text = f"{error} {self.folder} is marked as damaged, so resume_from_checkpoint=True skips it from now on. {advice}"
        return type(error)(text).about(file=error.file, tensor=error.tensor)

    def explain_nothing(self, offer: Offer) -> None:
        super().explain_nothing(offer)
        if trainer_folders.has_our_files(self.folder):
            raise NotACheckpointError(f"{self.folder} has no 'latest' file, so its save did not finish")


class InMemory(MemoryResume, Source):
    """Checkpoints in the memory of the hosts.

    Args:
        tier, run, exchange: as in ``MemoryResume``.
        folder: directory that the caller names, for messages.
        disk: what may be newer; None if the caller names a checkpoint on disk.
    """

    def __init__(self, tier: MemoryTier, run: str, folder: str, exchange: MessageExchange, disk: OnDisk | None = None) -> None:
        super().__init__(tier, run, exchange)
        self.named, self.disk = folder, disk
        self._tried: list[tuple[int, bool]] = []

    def offer(self) -> Offer | None:
        found = None if self.disk is None else choose(self.load, self.disk.step, self._tried)
        return None if found is None else self._offered(*found)

    def _offered(self, found: FoundGeneration, checked: bool) -> Offer:
        return Offer(join(self.named, found.tag), found.tag, found.step, generation=found.number, checked=checked)

    def loaded(self, offer: Offer, step: int) -> None:
        super().loaded(offer, step)
        newer = [found.step for found in self.load.found if found.step > step]
        if newer and self.exchange.rank == 0:
            logger.warning("unickpt: checkpoints in memory of later steps (%s) were given up", ", ".join(map(str, newer)))


class Noted(InMemory):
    """The generation that a folder with a note stands for. No other one: Trainer has read its own state from the folder."""

    def __init__(self, tier: MemoryTier, note: MemoryNote, folder: str, exchange: MessageExchange) -> None:
        super().__init__(tier, note.run, folder, exchange)
        self.number = note.generation

    def offer(self) -> Offer:
        """Return the generation; after damage once more, with damaged files removed.

        Raises:
            CorruptCheckpointError: both were tried, or no host has it any more.
        """
        found = next((each for each in self.load.found if each.number == self.number), None)
        for checked in (False, True):
            if found is not None and (found.number, checked) not in self._tried:
                self._tried.append((found.number, checked))
                return self._offered(found, checked)
        raise CorruptCheckpointError(
            f"the checkpoint in the memory of the hosts that {self.named} stands for cannot be read. Start again: the next "
            f"start uses another one of {self.folder}."
        )

    def damaged(self, error: UnickptError) -> UnickptError:
        self.tier.drop(self.folder, self.number)
        return error


def unnamed(folder: Storage) -> list[str]:
    """Return why the checkpoints of a folder cannot be loaded, although neither ``latest`` nor a manifest names one.

    A save that did not finish is no checkpoint. One with a sound manifest was tried before, and its damage is known.
    """
    found = []
    for name in folder.folders():
        inside = folder.subfolder(name)
        if is_checkpoint(inside.where()):
            try:
                read_manifest(inside)
            except FormatError:
                found.append(f"{inside.where()} has a damaged manifest")
        elif files_of_deepspeed(inside):
            found.append(f"DeepSpeed wrote {inside.where()}, and no 'latest' file names it")
    return found


def _is_native(directory: Storage) -> bool:
    """Whether DeepSpeed itself made the last save under this tag."""
    if is_checkpoint(directory.where()):
        return bool(newer_of_deepspeed(directory))
    return bool(files_of_deepspeed(directory))
