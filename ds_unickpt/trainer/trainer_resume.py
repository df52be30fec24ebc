"""Brings Trainer's checkpoints back from the memory of the hosts (``trainer_memory``).

Trainer reads its own files before the engine exists. They are written to a folder in memory on each host, with a note that
names the generation (``loops/memory_note.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from ds_unickpt.loops.memory_note import MemoryNote
from ds_unickpt.trainer import trainer_memory
from unickpt.base.errors import UnickptError
from unickpt.base.logs import logger, make_visible
from unickpt.checkpoint.checkpoint_folder import read_manifest
from unickpt.checkpoint.coordination.message_exchange import Message, MessageExchange
from unickpt.checkpoint.load.resume import AgreedFailureError, Together
from unickpt.checkpoint.memory.finding import FoundGeneration
from unickpt.checkpoint.memory.generations import folder_of
from unickpt.checkpoint.memory.tier import MemoryLoad, MemoryTier
from unickpt.checkpoint.storage.open import open_storage

_RESUME = "resume"


def newer_in_memory(
    tier: MemoryTier, exchange: MessageExchange, run: str, disk: str | None, disk_step: Callable[[str], int | None]
) -> str:
    """Return a folder with Trainer's files of the newest checkpoint in memory. Every rank calls this.

    Args:
        run: ``output_dir``.
        disk: newest usable ``checkpoint-N`` on disk; None if there is none.
        disk_step: returns the step of a folder on disk; called on rank 0.

    Returns:
        '' if no generation is newer than ``disk``.

    Raises:
        CoordinationError: a rank did not arrive in time.
    """
    load = tier.look(run, exchange)
    of_rank_0: Message | None = None
    if exchange.rank == 0:
        if load.problems:
            make_visible()
            logger.warning("unickpt: in the memory of the hosts: %s", "; ".join(load.problems))
        of_rank_0 = {"step": _step_of(disk, disk_step)}
    on_disk = exchange.broadcast("step-on-disk", of_rank_0)["step"]
    for found in load.found:
        if found.step <= on_disk:
            break
        for checked in (False, True):
            try:
                folder = _brought(tier, load, found, Together(exchange.separate("trainer-files"), run), run, checked=checked)
            except AgreedFailureError as err:
                if exchange.rank == 0 and checked:
                    logger.warning("unickpt: step %s in the memory of the hosts cannot be used: %s", found.step, err)
            else:
                if exchange.rank == 0:
                    make_visible()
                    instead = f"newer than {disk}" if disk else "no checkpoint is on disk"
                    logger.info("unickpt: resuming from step %s in the memory of the hosts: %s", found.step, instead)
                return folder
    return ""


def _step_of(disk: str | None, disk_step: Callable[[str], int | None]) -> int:
    try:
        step = None if disk is None else disk_step(disk)
    except (UnickptError, OSError):
        return sys.maxsize
    return -1 if step is None else step


def _brought(tier: MemoryTier, load: MemoryLoad, found: FoundGeneration, together: Together, run: str, *, checked: bool) -> str:
    """Write Trainer's files of a generation to this host. Raises ``AgreedFailureError`` on all ranks if one cannot."""
    if checked:
        together.step("check", lambda: tier.check(run, found.number))

    def bring() -> str:
        checkpoint = tier.open(run, load, found.number)
        rank, first = together.exchange.rank, trainer_memory.files_of(checkpoint, 0)
        place, first_of_host = tier.scratch(run, _RESUME, folder_of(found.number))
        folder = place / f"checkpoint-{trainer_memory.number_in(first)}"
        (folder / f"global_step{found.step}").mkdir(mode=0o700, parents=True, exist_ok=True)  # Trainer looks for it
        own = trainer_memory.files_of(checkpoint, rank) if rank else {}
        trainer_memory.write_files(folder, {name: data for name, data in own.items() if name not in first})
        if first_of_host:  # the ranks of a host share the folder, and must not replace each other's temporary files
            trainer_memory.write_files(folder, first)
            MemoryNote(run, found.number).leave_in(folder)
        return str(folder)

    return together.step("files", bring)


def step_on_disk(folder: str) -> int | None:
    """Return the step of the checkpoint of unickpt in a ``checkpoint-N`` folder; None if there is none."""
    place = open_storage(folder)
    steps = [read_manifest(place.subfolder(name)).step for name in place.folders() if name.startswith("global_step")]
    return max(steps, default=None)
