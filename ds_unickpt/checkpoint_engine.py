"""The checkpoint engine of a job with the ``unickpt`` key: what saves and loads of one engine share."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from ds_unickpt.batch.config import read_options
from ds_unickpt.compressing.automatic import Automatic
from ds_unickpt.compressing.compression import CompressedEngine
from ds_unickpt.framework import internals
from ds_unickpt.held_state.beginning import Beginning
from ds_unickpt.held_state.kept_description import KnownState
from unickpt.base.logs import logger
from unickpt.base.options.job import Options
from unickpt.checkpoint.coordination.message_exchange import MessageExchange
from unickpt.checkpoint.coordination.owners import Owners
from unickpt.checkpoint.load.report import LoadReport
from unickpt.checkpoint.memory.tier import MemoryTier
from unickpt.checkpoint.save.requests import SaveResult, save_options
from unickpt.checkpoint.save.saver import Saver
from unickpt.diagnosis import session

if TYPE_CHECKING:
    from unickpt.api.acting import Recorded


@dataclass
class TrainerSave:
    """A call of ``Trainer._save_checkpoint`` in a job with a memory tier.

    Attributes:
        run: ``output_dir``, which is the save directory of the tier.
        collects: Trainer only writes its own files. The call to the engine is noted, and made later.
        calls: arguments of the noted calls.
    """

    run: str
    collects: bool = False
    calls: list[dict[str, Any]] = field(default_factory=list)


class UnickptCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """DeepSpeed's checkpoint engine of a job with the ``unickpt`` key.

    Wraps the checkpoint engine that DeepSpeed selected. DeepSpeed still uses that one for the files that it writes itself
    (``save_16bit_model``, and checkpoints of layouts that unickpt does not support).

    Attributes:
        native: wrapped checkpoint engine.
        options: options of the ``unickpt`` key.
        exchange: message exchange of the job's ranks.
        saver: makes the universal saves.
        last_save: result of the last universal save that ended; None before.
        last_report: report of the last load; None before.
        unsupported: why unickpt cannot save this job; '' if it can, or before the first save.
        warned: warnings that ``warn_once`` has logged.
        memory: checkpoints in the memory of the hosts.
        known: what the saves of this engine keep for each other.
        trainer: the call of Trainer that is being made, if it decides by itself where the checkpoint goes.
        choosing: choice of a compression by the job itself; None if the options name it.
        owners, owner: models of this process, and the model of this engine among them.
        beginning: small parts of the first state of the engine.
        recorded: what checkpoints say of the witness; None without one.
        features: ends what the engine began with, the last feature first.
    """

    def __init__(
        self, native: Any, options: Options, exchange: MessageExchange, owners: Owners, label: str, *,
        compressed: CompressedEngine | None = None, choosing: Automatic | None = None,
    ) -> None:  # fmt: skip
        self.native, self.options, self.exchange = native, options, exchange
        self.owners, self.owner = owners, owners.add(label, options.name)
        self.name = "unickpt"
        self.last_save: SaveResult | None = None
        self.last_report: LoadReport | None = None
        self.saver = Saver(save_options(options, asynchronous=options.async_save))
        self.memory = tier_of(options)
        self.known = KnownState()
        self.trainer: TrainerSave | None = None
        self.choosing, self._compressed = choosing, compressed
        self.beginning = Beginning()
        self.recorded: Recorded | None = None
        self.features = contextlib.ExitStack()
        self.unsupported = ""
        self.warned: set[str] = set()

    @property
    def compressed(self) -> CompressedEngine | None:
        """Compression of the gradients; None without."""
        return self._compressed if self.choosing is None else self.choosing.compressed

    def cleanup(self) -> None:
        """End the features. DeepSpeed calls it for engines that write apart from training (``is_decoupled``)."""
        self.features.close()
        if hasattr(self.native, "cleanup"):
            self.native.cleanup()

    def warn_once(self, message: str) -> None:
        """Log a warning on rank 0, once per message."""
        if message not in self.warned and self.exchange.rank == 0:
            logger.warning("unickpt: %s", message)
        self.warned.add(message)


def _delegate(name: str) -> Callable[..., Any]:
    def method(self: UnickptCheckpointEngine, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.native, name)(*args, **kwargs)

    method.__name__ = name
    return method


for _name in (
    "create", "save", "load", "commit", "makedirs", "is_data_parallel_writer", "is_decoupled", "set_commit_info",
    "get_commit_info", "preserves_storage_sharing",
):  # fmt: skip
    if hasattr(CheckpointEngine, _name):  # the methods of the base class differ between DeepSpeed versions
        setattr(UnickptCheckpointEngine, _name, _delegate(_name))
abc.update_abstractmethods(UnickptCheckpointEngine)


def tier_of(options: Options) -> MemoryTier:
    """Return the memory tier of a job."""
    return MemoryTier(options.memory, save_options(options, asynchronous=options.async_save), session.memory_status)


def ours_of(engine: Any) -> UnickptCheckpointEngine | None:
    found = getattr(engine, "checkpoint_engine", None)
    return found if isinstance(found, UnickptCheckpointEngine) else None


def ours_for(engine: Any) -> UnickptCheckpointEngine | None:
    """Return our checkpoint engine at a save or a load, which all ranks call; None without the ``unickpt`` key.

    DeepSpeed creates an engine without optimizer under ZeRO-3 without a checkpoint engine. It gets one here.
    """
    if getattr(engine, "checkpoint_engine", None) is None:
        options = read_options(internals.config_of(engine))
        if options is not None and options.enabled:
            internals.make_checkpoint_engine(engine)
    return ours_of(engine)
