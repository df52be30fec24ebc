"""Selects between persistent and non-persistent checkpoints (``--non-persistent-ckpt-type``) when a job resumes.

Megatron's scripts save non-persistent checkpoints between the persistent ones, in another folder, and resume from the newer of
the two (``megatron/training/checkpointing.py``, ``_load_base_checkpoint``). Those of type ``global`` are ordinary checkpoints.
Those of type ``local`` belong to NVIDIA's resiliency extension, which keeps them on each node in its own format.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any

from megatron_unickpt.framework.marks import BACKEND
from megatron_unickpt.pretraining.choices import Choices
from unickpt.base.errors import UnickptError
from unickpt.checkpoint.checkpoint_folder import tracked_iteration
from unickpt.checkpoint.load.resume import Offer
from unickpt.checkpoint.storage.base import absolute

SUBDIRECTORY = "non_persistent"  # _NON_PERSISTENT_CKPT_SUBDIR in Megatron's checkpointing.py
GLOBAL, LOCAL = "global", "local"


def kind_of(options: Any) -> str | None:
    """Return ``--non-persistent-ckpt-type``; None for a job or a version without it."""
    return getattr(options, "non_persistent_ckpt_type", None)


def folder_of(options: Any, load_dir: str) -> str | None:
    """Return the folder of a job's global non-persistent checkpoints; None if it has none.

    Args:
        options: the scripts' arguments.
        load_dir: ``--load``.
    """
    if kind_of(options) != GLOBAL:
        return None
    return getattr(options, "non_persistent_global_ckpt_dir", None) or os.path.join(load_dir, SUBDIRECTORY)


def save_folder(options: Any, arguments: Mapping[str, Any]) -> str:
    """Return the folder into which a ``save_checkpoint`` call saves, given its arguments."""
    other = folder_of(options, str(options.save)) if arguments.get("non_persistent_ckpt") else None
    return other or str(options.save)


def save_folders(options: Any) -> list[str]:
    """Return the folders into which a job saves with unickpt; () if it does not."""
    save = getattr(options, "save", None) if getattr(options, BACKEND, False) else None
    return [absolute(each) for each in (save, folder_of(options, save)) if each] if save else []


def newest_local(options: Any, context: Any) -> int:
    """Return the iteration of the newest local checkpoint that is complete on all ranks; -1 if there is none. A collective.

    Args:
        options: the scripts' arguments.
        context: ``checkpointing_context`` of the load.
    """
    manager = (context or {}).get("local_checkpoint_manager") if kind_of(options) == LOCAL else None
    return -1 if manager is None else int(manager.find_latest())


def is_local_save(options: Any, arguments: Any) -> bool:
    """Whether the arguments of a ``save_checkpoint`` call are those of a local checkpoint."""
    return bool(arguments.get("non_persistent_ckpt")) and kind_of(options) == LOCAL


class BothChoices:
    """The checkpoints of a ``--load`` folder and of its non-persistent folder, in the order in which a job tries them.

    The first is the one of the higher iteration, or the non-persistent one if they are equal, as in Megatron. If it is damaged,
    the next is the newest remaining one of both folders. ``--ckpt-step`` names an iteration in either folder. Megatron would
    load a newer non-persistent one instead.
    """

    def __init__(self, persistent: str, other: str, step: int | None) -> None:
        """``persistent`` is ``--load``, ``other`` the non-persistent folder, ``step`` ``--ckpt-step``."""
        self._step = step
        self._folders = (persistent, other)
        self._choices = (Choices(persistent, step), Choices(other, step))
        self._heads: list[Offer | None] = [None, None]
        self._begun = False

    def next(self) -> Offer:
        """Return the checkpoint to try now. Empty at the first call if the newest is in Megatron's format, or there is none."""
        for at, choices in enumerate(self._choices):
            if self._heads[at] is None:
                self._heads[at] = choices.next()
        heads = [head for head in self._heads if head is not None]
        refused = next((head for head in heads if head.refused), None)
        if refused is not None:
            return refused
        native = -1 if self._begun else self._newest_native()
        self._begun = True
        at = max(range(len(heads)), key=lambda each: (bool(heads[each].directory), heads[each].step, each))
        if not heads[at].directory or native >= heads[at].step + (at == 1):
            lacks = [head.missing for head in heads if head.missing]
            notes = tuple(note for head in heads if not head.directory for note in head.notes)
            if notes and not heads[at].directory:
                return Offer(notes=notes)
            nothing = len(lacks) == len(heads) if self._step else native < 0
            return Offer(missing=" ".join(lacks)) if nothing else Offer()
        self._heads[at] = None
        return heads[at]

    def _newest_native(self) -> int:
        """Return the highest iteration of a tracker file whose checkpoint is not in unickpt's format; -1 if there is none."""
        found = -1
        for folder, head in zip(self._folders, self._heads, strict=True):
            if head is not None and not head.directory and not head.missing and not head.notes and not self._step:
                with contextlib.suppress(UnickptError, OSError):
                    found = max(found, tracked_iteration(folder) or -1)
        return found


def choices_of(options: Any, load_dir: str, step: int | None) -> Callable[[], Offer]:
    """Return a function that returns the next checkpoint to try on each call.

    Args:
        options: the scripts' arguments.
        load_dir: ``--load``.
        step: ``--ckpt-step``.
    """
    other = folder_of(options, load_dir)
    return Choices(load_dir, step).next if other is None else BothChoices(load_dir, other, step).next
