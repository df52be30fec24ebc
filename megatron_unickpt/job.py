"""What saving, loading and looking share: the job's rendezvous, Megatron's terms for errors, the mark on a directory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import CheckpointingException

from megatron_unickpt import internals
from unickpt.coordination import Rendezvous
from unickpt.errors import UnickptError
from unickpt.load.failure import Failure
from unickpt.load.resume import AgreedFailureError
from unickpt.loading import is_checkpoint
from unickpt.saves import SaveOptions
from unickpt.saving import Saver
from unickpt.storage import open_storage, read_text

BACKEND, VERSION = "unickpt", 1
CONTENT_METADATA = "content_metadata"  # key in Megatron's common state dict
CONFIG_FILE = "metadata.json"  # by which Megatron knows that a directory is a distributed checkpoint

_meeting: tuple[Any, Rendezvous] | None = None
_saver: Saver | None = None


class MegatronCheckpointError(CheckpointingException, UnickptError):  # type: ignore[misc]
    """An error of unickpt that is one of Megatron's too.

    Attributes:
        failures: of all ranks, if they agreed on them; empty if this rank raises on its own.
    """

    failures: tuple[Failure, ...] = ()


class SaveFailedError(MegatronCheckpointError):
    """A checkpoint was not saved; every rank raises it, and nothing that was saved before is touched.

    Attributes:
        directory: of the checkpoint, or '' where this rank does not know it.
        framework_saves: another try would end the same way; Megatron's own format is what can still be written.
    """

    def __init__(self, text: str, *, directory: str = "", framework_saves: bool = False) -> None:
        super().__init__(text)
        self.directory, self.framework_saves = directory, framework_saves


@contextmanager
def in_megatrons_terms() -> Iterator[None]:
    """Errors of unickpt that leave this block are Megatron's too."""
    try:
        yield
    except UnickptError as err:
        if isinstance(err, CheckpointingException):
            raise
        raise MegatronCheckpointError(f"{type(err).__name__}: {err}") from err
    except AgreedFailureError as agreed:
        error = agreed.error
        if isinstance(error, UnickptError) and not isinstance(error, MegatronCheckpointError):
            error = MegatronCheckpointError(f"{type(error).__name__}: {error}")
            error.__cause__ = agreed.error
        if isinstance(error, MegatronCheckpointError):
            error.failures = agreed.failures
        raise error from error.__cause__


def rendezvous(*, timeout_s: float = 1800.0) -> Rendezvous:
    """The message exchange of the job's ranks; anew if the default process group is another one."""
    global _meeting
    world = torch.distributed.get_world_size()
    store = internals.default_store() if world > 1 else None
    if _meeting is None or _meeting[0] is not store or _meeting[1].world != world:
        meet = Rendezvous(store, rank=torch.distributed.get_rank(), world=world, prefix="unickpt/megatron", timeout_s=timeout_s)
        _meeting = (store, meet)
    return _meeting[1]


def saver(options: SaveOptions | None = None) -> Saver:
    """The one saver of this process: its staging memory is kept between saves. Other options take effect with none pending."""
    global _saver
    if _saver is None or (options is not None and options != _saver.options):
        if _saver is not None:
            _saver.finish()
        _saver = Saver(options)
    return _saver


def recognises(checkpoint_dir: str | Path | None) -> bool:
    """Whether a directory holds a unickpt checkpoint, or bears the mark of one whose manifest is gone.

    The latter is ours to refuse: Megatron would say that it knows no strategy for it.
    """
    return checkpoint_dir is not None and (is_checkpoint(str(checkpoint_dir)) or _marked(str(checkpoint_dir)))


def _marked(directory: str) -> bool:
    try:
        found = json.loads(read_text(open_storage(directory), CONFIG_FILE) or "null")
    except (UnickptError, OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("sharded_backend") == BACKEND


def mark(directory: str) -> None:
    """Megatron's own mark of a distributed checkpoint, so that its tools know whose it is. The manifest is what counts."""
    place = open_storage(directory)
    if place.size_bytes(CONFIG_FILE) is not None:
        return
    text = json.dumps(
        {
            "sharded_backend": BACKEND, "sharded_backend_version": VERSION,
            "common_backend": BACKEND, "common_backend_version": VERSION,
        }
    )  # fmt: skip
    place.write_atomic(CONFIG_FILE, text.encode())
