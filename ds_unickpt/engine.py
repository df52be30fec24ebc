"""What unickpt adds to an engine of DeepSpeed. A new engine begins with each feature that its configuration asks for."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ds_unickpt.batch import batches, steered
from ds_unickpt.batch.config import read_options, unused_options
from ds_unickpt.checkpoint_engine import UnickptCheckpointEngine
from ds_unickpt.compressing import automatic, compression
from ds_unickpt.framework import internals, settling
from ds_unickpt.held_state.beginning import Beginning
from ds_unickpt.runtime import EngineRuntime
from unickpt.base.errors import ConfigError, CoordinationError
from unickpt.base.logs import logger, make_visible
from unickpt.base.options.job import Options
from unickpt.checkpoint.coordination.owners import Owners
from unickpt.checkpoint.storage.open import unusable_reason


class NewEngine:
    """An engine that begins.

    Attributes:
        runtime: state of the adapter.
        options: options of its ``unickpt`` key.
        choosing, compressed: what the feature ``compression`` makes.
    """

    def __init__(self, runtime: EngineRuntime, engine: Any, options: Options) -> None:
        self.runtime, self.options = runtime, options
        self.choosing: automatic.Automatic | None = None
        self.compressed: compression.CompressedEngine | None = None
        self._engine = weakref.ref(engine)  # the end of a feature does not keep it

    @property
    def engine(self) -> Any:
        return self._engine()

    @property
    def ours(self) -> UnickptCheckpointEngine:
        """Its checkpoint engine, from the feature ``checkpoints`` on."""
        found: UnickptCheckpointEngine = self.engine.checkpoint_engine
        return found


@dataclass(frozen=True, slots=True)
class Feature:
    """Something that unickpt adds to an engine.

    Attributes:
        name: for messages.
        wanted: whether the options ask for it.
        begin: adds it. An exception ends the start of the engine.
        end: takes it back.
    """

    name: str
    wanted: Callable[[NewEngine], bool]
    begin: Callable[[NewEngine], None]
    end: Callable[[NewEngine], None] = lambda _: None


def _begin_timing(new: NewEngine) -> None:
    from ds_unickpt.measuring import timing  # imported only then

    timing.begin(new.engine, new.options.timing)


def _begin_precision(new: NewEngine) -> None:
    from ds_unickpt.measuring import precision

    precision.begin(new.engine, new.options.precision)


def _begin_compression(new: NewEngine) -> None:
    new.choosing = automatic.begin(new.runtime, new.engine, new.options)
    new.compressed = compression.begin(new.runtime, new.engine, new.options.compression)


def _end_compression(new: NewEngine) -> None:
    new.runtime.choosing.pop(new.engine, None)
    compression.stop(new.runtime, new.engine)


def _begin_checkpoints(new: NewEngine) -> None:
    """Wrap the checkpoint engine that DeepSpeed has selected."""
    engine, options, runtime = new.engine, new.options, new.runtime
    reason = unusable_reason(options.upload_to) if options.upload_to else ""
    if reason:
        raise ConfigError(f'"unickpt.upload_to": {reason}')
    exchange = runtime.engine_exchange(engine, timeout_s=options.timeout_seconds)
    runtime.owners = runtime.owners or Owners()
    engine.checkpoint_engine = UnickptCheckpointEngine(
        engine.checkpoint_engine, options, exchange, runtime.owners, f"an engine of {type(engine.module).__name__}",
        compressed=new.compressed, choosing=new.choosing,
    )  # fmt: skip
    own = runtime.witnesses.get(engine)
    new.ours.recorded = None if own is None else own.recorded


def _begin_witness(new: NewEngine) -> None:
    from ds_unickpt.witnessing import watch

    watch.begin(new.runtime, new.engine, new.options.witness)


def _end_witness(new: NewEngine) -> None:
    from ds_unickpt.witnessing import watch

    watch.end(new.runtime, new.engine)


def _copies_late(new: NewEngine) -> bool:
    options = new.options
    return options.enabled and options.copy_behind_training and bool(options.async_save or options.memory.to_disk_every)


def _reads_batch(new: NewEngine) -> bool:
    return new.options.enabled and new.runtime.reads_batch and steered.keeps_batch(new.options)


def _compare_batches(new: NewEngine) -> None:
    """Check that all ranks have the same batch. Each of them has read the checkpoint's from the folder by itself.

    Raises:
        CoordinationError: they differ. Raised on every rank.
    """
    exchange = new.ours.exchange
    exchange.begin("batch")
    batch = batches.of_engine(new.engine)
    others = exchange.combined(
        "batch", batch.to_json(), lambda every: {"batches": [each for each in every if each != every[0]]}
    )
    if others["batches"]:
        new.engine.checkpoint_engine = new.ours.native
        raise CoordinationError(
            f"ranks have different batches; this one has {batch}. They see different checkpoints in the folder from which "
            "the job resumes."
        )


def _take_memory(new: NewEngine) -> None:
    """Go on with the memory tier in which Trainer has looked for a checkpoint."""
    memory, new.runtime.memory = new.runtime.memory, None
    new.ours.memory = memory or new.ours.memory


def _keep_beginning(new: NewEngine) -> None:
    new.ours.beginning = Beginning.of(new.engine)


FEATURES = (
    Feature("timing", lambda new: new.options.timing.enabled, _begin_timing),
    Feature("precision", lambda new: bool(new.options.precision), _begin_precision),
    Feature("compression", lambda new: new.options.compression.scheme != "none", _begin_compression, _end_compression),
    Feature("witness", lambda new: bool(new.options.witness.every), _begin_witness, _end_witness),
    Feature("late copies", _copies_late, lambda _: settling.install()),
    Feature("checkpoints", lambda new: new.options.enabled, _begin_checkpoints),
    Feature("batch check", _reads_batch, _compare_batches),
    Feature("memory", lambda new: new.options.enabled, _take_memory),
    Feature("first state", lambda new: new.options.enabled, _keep_beginning),
)


def adopt(runtime: EngineRuntime, engine: Any) -> None:
    """Begin with the features that the configuration of an engine asks for. Runs after DeepSpeed has made it.

    If one cannot begin, those before it end. Otherwise, they end with the engine.

    Raises:
        ConfigError: the ``unickpt`` key is invalid.
    """
    options = read_options(internals.config_of(engine))
    if options is None:
        return
    if (
        options.enabled
        or options.timing.enabled
        or options.compression.scheme != "none"
        or options.precision
        or options.witness.every
    ):
        make_visible()
    new = NewEngine(runtime, engine, options)
    with contextlib.ExitStack() as begun:
        for feature in FEATURES:
            if feature.wanted(new):
                feature.begin(new)
                begun.callback(_end, feature, new)
        features = begun.pop_all()
    if options.enabled:
        new.ours.features = features
        return
    unused = unused_options(internals.config_of(engine))
    if unused and engine.global_rank == 0:
        logger.warning(
            'unickpt: "unickpt" in the DeepSpeed config sets %s, but not "enabled": true. DeepSpeed saves by itself.',
            ", ".join(unused),
        )


def _end(feature: Feature, new: NewEngine) -> None:
    if new.engine is None:
        return
    try:
        feature.end(new)
    except Exception as err:
        logger.warning("unickpt: %s did not end: %s: %s", feature.name, type(err).__name__, err)
