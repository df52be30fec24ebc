"""The steps of one load into one engine. The ranks agree on the outcome of each."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ds_unickpt.checkpoint_engine import UnickptCheckpointEngine
from ds_unickpt.compressing.compression import RestoredResiduals
from ds_unickpt.compressing.optimizer_residuals import RestoredOptimizerResiduals
from ds_unickpt.framework import internals
from ds_unickpt.framework.fallbacks import require_supported
from ds_unickpt.held_state.engine_view import EngineView
from ds_unickpt.loading import dialects
from ds_unickpt.loading.restore import EngineRestore
from ds_unickpt.loading.restore_objects import LoadArguments
from unickpt.base.errors import MismatchError
from unickpt.base.garbage import collection_paused
from unickpt.base.logs import logger
from unickpt.checkpoint.coordination.host_peers import HostMemory
from unickpt.checkpoint.coordination.message_exchange import Message, MessageExchange
from unickpt.checkpoint.coordination.owners import Origin
from unickpt.checkpoint.load.checkpoint import Checkpoint, Planned
from unickpt.checkpoint.load.resume import Together
from unickpt.checkpoint.state.filling import shapes_of_all
from unickpt.diagnosis import session

Opener = Callable[[], Checkpoint]
Residuals = tuple[RestoredResiduals, RestoredOptimizerResiduals]


@collection_paused()
def restore_engine(
    ours: UnickptCheckpointEngine, engine: Any, directory: str, opener: Opener, wanted: LoadArguments, skipped: tuple[str, ...]
) -> tuple[EngineRestore, dict[str, Any]]:
    """Load a checkpoint into an engine, and return the load and the client state. Every rank calls this.

    Args:
        ours: checkpoint engine of ``engine``.
        opener: opens the checkpoint in ``directory``, which is for messages.
        skipped: notes on checkpoints that were tried before.

    Raises:
        AgreedFailureError: a step failed on at least one rank.
    """
    begin = time.monotonic()
    together, view = Together(ours.exchange, directory), EngineView(engine)
    whole = wanted.optimizer and view.base is not None
    names: dialects.Shapes | None = None
    if engine.pipeline_parallelism or engine.has_moe_layers:  # a rank may have a part of the tensors
        names = shapes_of_all(together.step("names", partial(_own_names, view, directory)), ours.exchange)
    loading = together.step("open", partial(_opened, ours, view, directory, opener, wanted, names))
    if ours.choosing is not None and wanted.optimizer:
        together.step("compression", partial(ours.choosing.restore, engine, loading.checkpoint))
    if loading.placed.partial:
        unclaimed = _unclaimed(ours.exchange, loading)
        together.step("match", partial(loading.settle, unclaimed))
    planned, peers = together.plan(
        loading.plan, identity=lambda: loading.checkpoint.identity, share=ours.options.read_once_per_host
    )
    residuals = (
        RestoredResiduals(ours.compressed, loading.checkpoint, wanted=wanted.optimizer),
        RestoredOptimizerResiduals(view, loading.checkpoint, loading.stored_name, wanted=wanted.optimizer),
    )
    with HostMemory(peers) as memory:
        together.step("read", partial(_read, loading, memory, planned, residuals))
        loading.agree(ours.exchange)
        client_state = together.step("set", partial(_set, loading, memory))
    if client_state is None:
        client_state = together.step("finish", loading.finish)
    if whole:
        ours.owners.adopt(ours.owner, Origin.of(loading.checkpoint.manifest))
    for each in residuals:
        each.apply(loading.report)
    _report(ours, loading, skipped, time.monotonic() - begin)
    return loading, client_state


def _own_names(view: EngineView, directory: str) -> dialects.Shapes:
    require_supported(view.engine, for_load=directory)
    return dialects.wanted_here(view)


def _opened(
    ours: UnickptCheckpointEngine, view: EngineView, directory: str, opener: Opener, wanted: LoadArguments,
    names: dialects.Shapes | None,
) -> EngineRestore:  # fmt: skip
    require_supported(view.engine, for_load=directory)
    stored = opener()
    if wanted.optimizer and view.base is not None and ours.exchange.rank == 0:
        _check_owner(ours, stored, directory)
    checkpoint = dialects.as_named_here(stored, view, ours.options.load_dialect, names)
    loading = EngineRestore(view, checkpoint, ours.options, wanted, ours.beginning)
    if not loading.placed.partial:
        loading.settle(loading.matching.unclaimed)
    internals.before_restore(view.engine)
    return loading


def _read(loading: EngineRestore, memory: HostMemory, planned: Planned, residuals: Residuals) -> None:
    memory.use(partial(loading.read, planned))
    for each in residuals:
        each.read()


def _set(loading: EngineRestore, memory: HostMemory) -> dict[str, Any] | None:
    memory.use(loading.set_tensors)
    return None if loading.finishes_together else loading.finish()


def _report(ours: UnickptCheckpointEngine, loading: EngineRestore, skipped: tuple[str, ...], seconds: float) -> None:
    report = loading.report
    report.skipped, report.seconds = list(skipped), seconds
    ours.last_report = report
    session.checkpoint_io(report.io_times(loading.checkpoint.manifest.step or 0))
    if ours.exchange.rank == 0:
        report.log()
    if loading.placed.first and loading.fresh_line:
        logger.warning("unickpt: %s: %s", loading.checkpoint.storage, loading.fresh_line)


def _check_owner(ours: UnickptCheckpointEngine, checkpoint: Checkpoint, directory: str) -> None:
    """Raise MismatchError if the checkpoint is one of another model of this job, and warn if it may be one."""
    refused = ours.owners.load_refusal(ours.owner, checkpoint.manifest)
    if refused:
        raise MismatchError(f"{directory}: {refused}")
    notice = ours.owners.load_notice(ours.owner, checkpoint.manifest)
    if notice:
        logger.warning("unickpt: %s: %s", directory, notice)


def _unclaimed(exchange: MessageExchange, loading: EngineRestore) -> list[str]:
    """Return the names of the checkpoint that no rank of this job claims. Every rank gets the misfits of all ranks.

    The first of the ranks with the same parameters sends what it uses. Each rank sends its misfits, because tensor-parallel
    ranks may have other shapes.
    """
    own = loading.matching
    found = {"claimed": own.claimed if loading.placed.first else [], "missing": own.missing, "shapes": own.shapes}

    def everyones(messages: list[Message]) -> Message:
        claimed, missing, shapes = ([name for message in messages for name in message[key]] for key in found)
        known = set(claimed)
        unclaimed = [name for name in own.known if name not in known]
        return {"unclaimed": unclaimed, "missing": list(dict.fromkeys(missing)), "shapes": list(dict.fromkeys(shapes))}

    result = exchange.combined("claims", found, everyones)
    own.missing, own.shapes = result["missing"], result["shapes"]
    names: list[str] = result["unclaimed"]
    return names
