"""``DeepSpeedEngine.load_checkpoint``. What DeepSpeed has saved is loaded by its own function."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from ds_unickpt.batch import batches
from ds_unickpt.checkpoint_engine import UnickptCheckpointEngine, ours_for
from ds_unickpt.edge import RUNTIME
from ds_unickpt.loading import other_layouts
from ds_unickpt.loading.restore import EngineRestore
from ds_unickpt.loading.restore_engine import restore_engine
from ds_unickpt.loading.restore_objects import LoadArguments
from ds_unickpt.loading.sources import InMemory, InTrainerFolder, Noted, OnDisk, Source
from ds_unickpt.loops import memory_note, trainer_folders
from ds_unickpt.saving import hints
from ds_unickpt.witnessing import replaying
from unickpt.base.errors import ConfigError, UnickptError
from unickpt.base.logs import logger
from unickpt.checkpoint.format.manifest import MANIFEST_FILE
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.failure import DAMAGE, failure_of
from unickpt.checkpoint.load.replayed import layout_of, replays
from unickpt.checkpoint.load.resume import Offer, Together, resume
from unickpt.checkpoint.save import shutdown
from unickpt.checkpoint.storage.base import absolute, is_url, join, split


def load_checkpoint(
    reader: Callable[..., UnickptCheckpointEngine | None],
    native: Callable[..., Any],
    engine: Any,
    load_dir: str,
    tag: Any = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: Any = None,
    *,
    newest: bool = False,
) -> Any:
    """Replace ``DeepSpeedEngine.load_checkpoint``. The arguments have the same meaning; the saved layout may differ.

    Args:
        reader: returns what loads a checkpoint into an engine without the ``unickpt`` key (``recognised.py``).
        newest: without a ``latest`` file load the newest complete checkpoint. Checkpoints that cannot be loaded are an error.
            ``ds_unickpt.resume_or_start`` passes it.

    Returns:
        ``(path of the manifest, client_state)``. ``(None, None)``, as DeepSpeed returns it, if there is no ``latest`` file
        and no tag is given.

    Raises:
        UnickptError: the checkpoint is damaged or does not fit, or a rank failed. All ranks raise.
    """
    ours = ours_for(engine)
    arguments = {
        "load_module_strict": load_module_strict,
        "load_optimizer_states": load_optimizer_states,
        "load_lr_scheduler_states": load_lr_scheduler_states,
        "load_module_only": load_module_only,
        "custom_load_fn": custom_load_fn,
    }
    natively = partial(
        _natively, partial(native, load_dir, tag=tag, **arguments), engine, load_dir, tag, enabled=ours is not None
    )
    ours = reader(engine, load_dir, tag) if ours is None else ours
    if ours is None:
        return natively()
    wanted = LoadArguments(
        strict=load_module_strict,
        optimizer=load_optimizer_states and not load_module_only,
        scheduler=load_lr_scheduler_states and not load_module_only,
        module_only=load_module_only,
        custom_load_fn=custom_load_fn,
    )
    shutdown.finish_all(ending=False)
    ours.exchange.begin("load")
    found = _Load(ours, engine, str(load_dir), wanted, natively, tag=tag, newest=newest).run()
    request = replays(str(load_dir))
    if request is not None and found[0] is not None:
        replaying.begin(RUNTIME, request, engine, layout_of(split(found[0])[0]))
    return found


def _natively(native: Callable[[], Any], engine: Any, load_dir: Any, tag: Any, *, enabled: bool) -> Any:
    """Run DeepSpeed's own function. Its error gets advice if the checkpoint needs unickpt, or another layout."""
    try:
        return native()
    except Exception as err:
        hint = "" if enabled else hints.switched_off(load_dir, tag)
        if hint:
            raise ConfigError(hint) from err
        told = other_layouts.with_advice(err, engine, load_dir, tag, enabled=enabled)
        if told is err:
            raise
        raise told from err.__cause__


class _Load:
    """A load by unickpt. It tries the checkpoints of its sources in turn."""

    def __init__(
        self, ours: UnickptCheckpointEngine, engine: Any, folder: str, wanted: LoadArguments, natively: Callable[[], Any], *,
        tag: Any, newest: bool,
    ) -> None:  # fmt: skip
        self.ours, self.engine, self.folder, self.wanted, self.natively = ours, engine, folder, wanted, natively
        self.of_trainer = "transformers.trainer" in sys.modules and not is_url(folder) and trainer_folders.is_one(folder)
        exchange, tier = ours.exchange, ours.memory
        self.disk = (InTrainerFolder if self.of_trainer else OnDisk)(folder, tag, newest, exchange.rank == 0)
        self.sources: list[Source] = [self.disk]
        self.memory: InMemory | None = None
        note = memory_note.noted_in(folder) if self.of_trainer and tier.enabled else None
        if note is not None:
            self.memory = Noted(tier, note, folder, exchange)
            self.sources = [self.memory]
        elif tier.enabled:
            run = trainer_folders.run_of(folder) if self.of_trainer else folder
            newer = self.disk if tag is None and not self.of_trainer else None
            self.memory = InMemory(tier, run, folder, exchange, newer)
            self.sources = [self.memory, self.disk]

    def run(self) -> Any:
        """Load, and return what DeepSpeed's function returns."""
        exchange, fall_back = self.ours.exchange, self.ours.options.fall_back
        try:
            return resume(exchange, self._offer, self._attempt, self._nothing, where=self.folder, fall_back=fall_back)
        except UnickptError as err:
            if failure_of(err, rank=exchange.rank, where=self.folder).kind not in DAMAGE:
                raise
            error = err
            for source in self.sources:
                error = source.damaged(error)
            if error is err:
                raise
            raise error from err.__cause__

    def _offer(self) -> Offer:
        """Return the checkpoint to try next. Runs on the coordinator."""
        return next(offer for source in self.sources if (offer := source.offer()) is not None)

    def _attempt(self, offer: Offer, skipped: tuple[str, ...]) -> Any:
        if offer.native:
            return self.natively()
        directory, exchange = join(self.folder, offer.name) if offer.name else self.folder, self.ours.exchange
        opener = partial(Checkpoint.open, directory)
        if offer.generation:
            assert self.memory is not None  # as on the coordinator
            opener = partial(self.memory.open, offer)
            if offer.checked:
                Together(exchange, directory).step("check", partial(self.memory.check, offer))
        loading, client_state = restore_engine(self.ours, self.engine, directory, opener, self.wanted, skipped)
        for source in self.sources:
            source.loaded(offer, loading.checkpoint.manifest.step)
        if self.ours.recorded is not None and not self.wanted.module_only and exchange.rank == 0:
            self.ours.recorded.folders.loaded(absolute(self.folder))
        if not self.wanted.module_only and exchange.rank == 0:
            _log_batch(self.engine, loading, self.of_trainer)
        return join(directory, MANIFEST_FILE), client_state

    def _nothing(self, offer: Offer) -> Any:
        self.disk.explain_nothing(offer)
        return (None, None) if self.disk.newest or is_url(self.folder) else self.natively()


def _log_batch(engine: Any, loading: EngineRestore, of_trainer: bool) -> None:
    """Log what changed since the checkpoint. Warn if the global batch size changed: DeepSpeed does not compare them."""
    before, now, step = loading.saved_batch(), batches.of_engine(engine), int(engine.global_steps)
    worlds = loading.checkpoint.manifest.writer.topology.get("world_size"), int(engine.world_size)
    line, changed = batches.resumed(before, now, step=step, samples=int(engine.global_samples), worlds=worlds)
    logger.log(logging.INFO if changed else logging.DEBUG, "unickpt: %s", line)
    warning = batches.changed(before, now, step=step, trainer=of_trainer)
    if warning:
        logger.warning("unickpt: %s", warning)
