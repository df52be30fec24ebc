"""Loads of unickpt checkpoints into engines that save DeepSpeed's own: their job neither names unickpt nor switches it off."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ds_unickpt.checkpoint_engine import UnickptCheckpointEngine
from ds_unickpt.framework import internals
from ds_unickpt.held_state.beginning import Beginning
from ds_unickpt.runtime import EngineRuntime
from ds_unickpt.saving import hints
from unickpt.base.logs import logger, make_visible
from unickpt.base.options.declared import KEY
from unickpt.base.options.job import MemoryOptions, Options
from unickpt.base.options.json_section import from_json
from unickpt.base.switch import recognises
from unickpt.checkpoint.coordination.owners import Owners


def checkpoint_for(engine: Any, load_dir: Any, tag: Any) -> str:
    """Return the unickpt checkpoint that a load means, if the engine may load one without the key; or ''."""
    return hints.meant(load_dir, tag) if recognises(internals.config_of(engine)) else ""


def options_of(engine: Any) -> Options:
    """Return the options of a load without the key. Its section may have some, such as those of timing."""
    section = internals.config_of(engine).get(KEY) or {}
    return replace(from_json(section), enabled=True, memory=MemoryOptions())  # only a job that saves has some in memory


def reader(runtime: EngineRuntime, engine: Any, options: Options, checkpoint: str) -> UnickptCheckpointEngine:
    """Return what loads unickpt checkpoints into an engine, the same one at each load. Every rank calls it."""
    make_visible()
    if engine.global_rank == 0:
        logger.info(
            "unickpt: %s is a unickpt checkpoint, so unickpt loads it. This job still saves DeepSpeed's own: with UNICKPT=1 in "
            'its environment, or "unickpt": {"enabled": true} in its DeepSpeed config, it saves unickpt checkpoints.',
            checkpoint,
        )
    found: UnickptCheckpointEngine | None = runtime.readers.get(engine)
    if found is None:
        runtime.owners = runtime.owners or Owners()
        found = runtime.readers[engine] = UnickptCheckpointEngine(
            engine.checkpoint_engine, options, runtime.engine_exchange(engine, timeout_s=options.timeout_seconds),
            runtime.owners, f"an engine of {type(engine.module).__name__}",
        )  # fmt: skip
        if engine.global_steps == 0:  # its state is still the first one
            found.beginning = Beginning.of(engine)
    return found
