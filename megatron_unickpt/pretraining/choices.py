"""Selects the checkpoint in ``--load`` that a job resumes from. Runs on the coordinator. Reads manifests, no data.

A folder of Megatron has a tracker file and ``iter_...`` directories. A folder of DeepSpeed has ``latest`` and tags. ``--load``
may also be a checkpoint itself.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from megatron_unickpt import tracker
from megatron_unickpt.framework import marks
from unickpt.base.errors import FormatError, StorageError, UnickptError
from unickpt.checkpoint.checkpoint_folder import (
    ITERATION,
    TRACKER,
    complete_checkpoints,
    iteration_name,
    latest_tag,
    read_manifest,
    tracked_iteration,
)
from unickpt.checkpoint.format.layout import LATEST_FILE
from unickpt.checkpoint.load.candidates import Candidates, loadable, warn_of_suspicion, why_suspect
from unickpt.checkpoint.load.resume import Offer
from unickpt.checkpoint.load.validation import is_checkpoint
from unickpt.checkpoint.storage.base import split
from unickpt.checkpoint.storage.open import open_storage
from unickpt.checkpoint.witness_faults import read_faults

_NOTHING = Offer()
_SHOWN = 8  # names in a message


class Choices:
    """The checkpoints of a ``--load`` folder in the order in which a job tries them. Call ``next`` again if one is damaged."""

    def __init__(self, load_dir: str, step: int | None) -> None:
        """``step``: ``--ckpt-step``."""
        self._folder, self._step = Path(load_dir), step
        self._tried: set[str] = set()
        self._candidates = Candidates(load_dir)

    @property
    def tried(self) -> bool:
        """Whether ``next`` was called before."""
        return bool(self._tried)

    def next(self) -> Offer:
        """Return the checkpoint to try now."""
        if self._step:
            choice = self._named(self._step)
        elif (self._folder / TRACKER).is_file():
            choice = self._megatrons()
        elif is_checkpoint(self._folder):
            choice = _NOTHING if self._tried else _explicit(self._folder, step_of(self._folder))
        else:
            choice = self._deepspeeds()
        if choice.directory:
            self._tried.add(choice.directory)
        return choice

    def _named(self, step: int) -> Offer:
        """Return the checkpoint of ``--ckpt-step``: Megatron's directory of that iteration, or a checkpoint of that step."""
        if self._tried:
            return _NOTHING
        directory = self._folder / iteration_name(step)
        if is_checkpoint(directory):
            return _explicit(directory, step, directory.name)
        if is_checkpoint(self._folder) and step_of(self._folder) == step:
            return _explicit(self._folder, step)
        if directory.is_dir() and not marks.is_unfinished(directory):
            return _NOTHING  # in Megatron's format
        if not self._folder.is_dir():
            return Offer(missing=f"--ckpt-step {step}: {self._folder} does not exist.")
        tags = [name for found, name in complete_checkpoints(self._folder) if found == step]
        if len(tags) > 1:
            reason = f"{self._folder} has several checkpoints of step {step}: {', '.join(tags)}. Pass one of them to --load."
            return Offer(refused=reason)
        if tags:
            return _explicit(self._folder / tags[0], step, tags[0])
        return Offer(missing=f"--ckpt-step {step}: {self._folder} has no checkpoint of this iteration. {_has(self._folder)}")

    def _megatrons(self) -> Offer:
        """Return the checkpoint of the tracker file, and on later calls the newest complete iteration before it."""
        tracked: int | None = None
        notes: list[str] = []
        suspect = ""
        try:
            tracked = tracked_iteration(self._folder)
        except FormatError as err:
            notes.append(str(err))
        if not self._tried and tracked is not None:
            directory = self._folder / iteration_name(tracked)
            suspect = why_suspect(str(self._folder), directory.name, read_faults(self._folder))
            if is_checkpoint(directory) and not suspect:
                later = self._later(tracked)
                return Offer(str(directory), directory.name, tracked, tuple(later))
            if not suspect and any(directory.glob("*")) and not marks.is_unfinished(directory):
                return _NOTHING
            what = "is not complete" if directory.exists() else "does not exist"
            notes.append(suspect or f"{self._folder / TRACKER} names iteration {tracked}, which {what}")
        if not self._tried and tracked is None and not notes:
            return _NOTHING  # "release"
        older = _iterations(self._folder, without={Path(tried).name for tried in self._tried})
        if not older and suspect:
            return Offer(notes=tuple(notes))  # neither Megatron's own function nor a start anew
        if not older:
            return Offer(missing="; ".join(notes) + f". {_has(self._folder)}") if notes else _NOTHING
        if notes and tracked is None:  # Megatron exits if it cannot parse the file; another number is not used
            with contextlib.suppress(StorageError):  # a full or read-only disk: Megatron reports it
                open_storage(self._folder).write_atomic(TRACKER, str(older[0]).encode())
        return Offer(str(self._folder / iteration_name(older[0])), iteration_name(older[0]), older[0], tuple(notes))

    def _later(self, tracked: int) -> list[str]:
        """Return a note if DeepSpeed saved a later checkpoint in the folder. The tracker file has precedence."""
        with contextlib.suppress(UnickptError, OSError):
            tag = latest_tag(self._folder)
            step = -1 if tag is None else step_of(self._folder / tag)
            if step > tracked:
                return [
                    f"{self._folder / LATEST_FILE} names {tag}, of step {step}, which is later. To resume from it, pass "
                    f"--load {self._folder / str(tag)}"
                ]
        return []

    def _deepspeeds(self) -> Offer:
        """Return the checkpoint of ``latest``, and on later calls the newest complete one. Empty without a ``latest`` file."""
        found = self._candidates.next()
        if found.tag is None:
            return Offer(notes=found.notes) if read_faults(self._folder) else _NOTHING
        directory = self._folder / found.tag
        if is_checkpoint(directory):
            return Offer(str(directory), found.tag, step_of(directory), found.notes)
        return Offer(
            refused=f"{directory}, which {self._folder / LATEST_FILE} names, is not a unickpt checkpoint. If it is one of "
            "DeepSpeed's own, convert it first (unickpt convert)."
        )


def _explicit(directory: Path, step: int, name: str = "") -> Offer:
    """Return a checkpoint that the user names."""
    warn_of_suspicion(*split(str(directory)))
    return Offer(str(directory), name, step, explicit=True)


def _has(folder: Path) -> str:
    """Return a sentence about the checkpoints in a folder, of any format."""
    names = sorted((path.name for path in folder.glob(f"{ITERATION}*") if tracker.is_complete(str(path))), reverse=True)
    return f"It has {', '.join(names[:_SHOWN])}." if names else "It has no complete checkpoint."


def step_of(directory: str | Path) -> int:
    """Return the step of a checkpoint; 0 if the manifest is damaged, because opening it gives the better error."""
    try:
        return read_manifest(open_storage(directory)).step
    except (UnickptError, OSError):
        return 0


def _iterations(folder: Path, *, without: set[str]) -> list[int]:
    """Return the iterations that may be loaded, newest first."""
    faults = read_faults(folder)
    found = [each for each in loadable(folder, without=without) if not why_suspect(str(folder), each[1], faults)]
    return sorted((number for _, name in found if (number := tracker.iteration_of(name)) is not None), reverse=True)
