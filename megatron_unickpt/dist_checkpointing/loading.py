"""Replaces ``dist_checkpointing.load`` for unickpt checkpoints.

Arguments and results are those of megatron-core's function (``dist_checkpointing/serialization.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import validation
from megatron.core.dist_checkpointing.dict_utils import merge
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    apply_factory_merges,
)
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_base

from megatron_unickpt.dist_checkpointing import capture, dialects, lacking, metadata, restore
from megatron_unickpt.dist_checkpointing.lacking import Fit, Lack
from megatron_unickpt.framework import internals, optimizer_internals
from megatron_unickpt.framework.errors import as_megatron_errors
from megatron_unickpt.framework.versions import require_usable
from megatron_unickpt.held_state import optimizer_forms, sharded_tensors
from megatron_unickpt.held_state.foreign_state import Receiver
from megatron_unickpt.held_state.hyperparameters import OptimizerPart
from megatron_unickpt.runtime import Runtime
from unickpt.base.errors import MismatchError
from unickpt.base.garbage import collection_paused
from unickpt.base.listing import some
from unickpt.base.logs import logger, make_visible
from unickpt.checkpoint.coordination.message_exchange import MessageExchange
from unickpt.checkpoint.coordination.owners import Origin
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.format.topology import describe
from unickpt.checkpoint.load.checkpoint import Checkpoint, Planned
from unickpt.checkpoint.load.resume import Together
from unickpt.checkpoint.save import shutdown
from unickpt.checkpoint.state.filling import lost_parameters, mask_of, unrequested
from unickpt.diagnosis import session
from unickpt.training.witness.watching import forget_all
from unickpt.transform.dialects.translated_checkpoint import TranslatedCheckpoint

# Objects of one rank's position. A job with another parallel shape has other positions and loads none of them.
BY_POSITION = {"rng_state", "unickpt_rng", "rerun_state_machine_state"}

Adapt = Callable[[Checkpoint, dict[str, Any]], dict[str, Any]]


@collection_paused()
def load(
    runtime: Runtime,
    sharded_state_dict: dict[str, Any],
    checkpoint_dir: str | Path,
    *,
    receiver: Receiver | None = None,
    adapt: Adapt | None = None,
    validate_access_integrity: bool = True,
    strict: Any = validation.StrictHandling.ASSUME_OK_UNEXPECTED,
    source: Callable[[], Checkpoint] | None = None,
    load_dialect: str = "",
    fit: Fit = Fit.REQUESTED,
    missing_state: str | None = None,
) -> Any:
    """Load into a sharded state dict, from a checkpoint of any parallel shape and optimizer. All ranks call it.

    Args:
        runtime: state of the adapter; ``last_report`` is set.
        sharded_state_dict: tensors and objects that this rank loads; tensors that have data are filled in place.
        checkpoint_dir: path or URL of a unickpt checkpoint.
        receiver: objects of the job that receive the state of another framework's checkpoint.
        adapt: function of the opened checkpoint and ``sharded_state_dict`` that returns the state dict to load.
        validate_access_integrity: the ranks also find the tensors that none of them loads. Megatron's check that shards do
            not overlap runs in a save.
        strict: Megatron's ``StrictHandling`` or its value.
        source: opens the checkpoint, if it is in memory. ``checkpoint_dir`` is then its name in messages.
        load_dialect: model family or dialect file, to load a checkpoint of another framework. '' for
            ``--unickpt-load-dialect``.
        fit: which tensors the checkpoint and the job may have alone.
        missing_state: ``error`` or ``fresh``: what to do about optimizer states that the checkpoint lacks. None:
            ``--unickpt-missing-state``.

    Returns:
        The state dict; with ``return_all`` and ``return_unexpected`` also missing and unexpected keys.

    Raises:
        MegatronCheckpointError: on every rank, if the checkpoint is damaged or does not fit on any rank; names the tensor.
        UnsupportedFrameworkError: the source of this Megatron has changed, and the self-test of the hooks failed.
    """
    make_visible()
    require_usable()
    forget_all()
    begin = time.monotonic()
    handling = validation.parse_strict_flag(strict)
    options = internals.options()
    shutdown.finish_all(ending=False)
    together = begin_together(runtime, checkpoint_dir)
    owner = runtime.owner(sharded_state_dict) if capture.optimizer_parts(sharded_state_dict) else None

    def opened() -> tuple[Checkpoint, _Request]:
        checkpoint = runtime.opened(checkpoint_dir) if source is None else source()
        if owner is not None and together.exchange.rank == 0:
            refused = runtime.owners.load_refusal(owner, checkpoint.manifest)
            if refused:
                raise MismatchError(f"{checkpoint_dir}: {refused}")
            notice = runtime.owners.load_notice(owner, checkpoint.manifest)
            if notice:
                logger.warning("unickpt: %s: %s", checkpoint_dir, notice)
        state = adapt(checkpoint, sharded_state_dict) if adapt else sharded_state_dict
        return checkpoint, _Request.of(optimizer_forms.to_load(state, checkpoint))

    with as_megatron_errors():
        stored, request = together.step("open", opened)
        with_others = together.exchange if validate_access_integrity else None
        checkpoint = together.step(
            "named", lambda: dialects.as_named_here(stored, request.items(), with_others, receiver, load_dialect)
        )
        wanted, missing, unexpected = request.wanted, set[str](), set[str]()
        if fit is Fit.EQUAL and with_others is not None:
            _refuse_left_out(together, checkpoint, wanted)
        if handling != validation.StrictHandling.ASSUME_OK_UNEXPECTED:  # may raise on some ranks only
            wanted, missing, unexpected = together.step(
                "strictly", lambda: _strictly(checkpoint, wanted, handling, validate_access_integrity)
            )
        work: restore.Restore | None = None
        state: Any = None

        def planned() -> Planned:
            nonlocal work, state
            work = restore.Restore(
                checkpoint, verify=options.verify, allow_pickle=options.allow_pickle, own=request.optimizer, fit=fit,
                missing_state=missing_state or options.missing_state,
            )  # fmt: skip
            found = work.request(wanted)
            work.begin_anew(request.dropped(wanted))
            state = work.common()
            return found

        plan, opener = together.plan(planned, identity=lambda: checkpoint.identity, share=options.read_once_per_host)
        assert work is not None
        together.read(partial(work.read, plan), opener)
        together.step("finish", partial(_finish, work, request, state))
        _account(work, wanted, with_others, time.monotonic() - begin, handling, with_optimizer=bool(request.parts))
        if owner is not None:
            runtime.owners.adopt(owner, Origin.of(checkpoint.manifest))
        runtime.last_report = work.report
        session.checkpoint_io(work.report.io_times(checkpoint.manifest.step or 0))
    merge(state, request.local)
    state = apply_factory_merges(state, request.factories)
    if validation.StrictHandling.requires_returning_mismatch_keys(handling):
        return state, missing, unexpected
    return state


def begin_together(runtime: Runtime, checkpoint_dir: str | Path) -> Together:
    """Begin the agreements of a load. All ranks call it."""
    runtime.loads_begun += 1
    exchange = runtime.exchange()
    exchange.begin("load")
    return Together(exchange, str(checkpoint_dir))


@dataclass(frozen=True, slots=True)
class _Request:
    """This rank's sharded state dict, divided by how its parts are loaded.

    Attributes:
        wanted: sharded tensors and objects, which are filled.
        local: the rest, which does not change.
        factories: factories of megatron-core, which are applied to the loaded tensors.
        parts: optimizers that receive hyperparameters and steps.
    """

    wanted: Any
    local: Any
    factories: Any
    parts: list[OptimizerPart]

    @classmethod
    def of(cls, sharded_state_dict: dict[str, Any]) -> _Request:
        _dequantize(sharded_state_dict)
        wanted, local, factories = load_preprocess(sharded_state_dict)
        parts = [leaf for leaf in sharded_tensors.walk(local) if isinstance(leaf, OptimizerPart)]
        return cls(extract_sharded_base(wanted)[0], local, factories, parts)

    def items(self) -> list[ShardedTensor]:
        return _tensors_of(self.wanted)

    def dropped(self, wanted: Any) -> list[ShardedTensor]:
        """Return the sharded tensors that Megatron's handling of keys has removed from the request."""
        kept = {id(item) for item in _tensors_of(wanted)}
        return [item for item in self.items() if id(item) not in kept]

    @property
    def optimizer(self) -> str:
        """Class name of this job's optimizer; '' without one."""
        return next((optimizer_internals.name_of(leaf) for part in self.parts for leaf in part.leaves), "")


def _tensors_of(tree: Any) -> list[ShardedTensor]:
    return [leaf for leaf in sharded_tensors.walk(tree) if isinstance(leaf, ShardedTensor)]


def _finish(work: restore.Restore, request: _Request, state: Any) -> None:
    """Complete the state dict with the data read, and set the optimizers' hyperparameters."""
    merge(state, work.filled())
    work.optimizers(request.parts)


def load_sharded(runtime: Runtime, wanted: Any, checkpoint_dir: str | Path) -> Any:
    """Fill a tree of sharded tensors and objects without communication, as Megatron's load strategies do."""
    with as_megatron_errors():
        checkpoint = dialects.as_named_here(runtime.opened(checkpoint_dir), _tensors_of(wanted), None, runtime.call.receiver)
        work = restore.Restore(checkpoint, missing_state=internals.options().missing_state)
        work.read(work.request(wanted))
        return work.filled()


def _dequantize(state: Any) -> None:
    for leaf in sharded_tensors.walk(state):
        if isinstance(leaf, ShardedTensor) and leaf.data is not None:
            leaf.data = internals.dequantized(leaf.data)


def _strictly(checkpoint: Checkpoint, wanted: Any, handling: Any, together: bool) -> tuple[Any, set[str], set[str]]:
    """Apply Megatron's handling of missing and unexpected keys, after normalizing the keys of both sides."""
    local, everyone = None, None
    if together or validation.StrictHandling.requires_global_app_metadata(handling):
        local, everyone = validation.determine_global_metadata(wanted)
    requested = {item.key for rank in everyone for item in rank} if everyone else {i.key for i in sharded_tensors.walk(wanted)}
    known = {item.key: item for item in metadata.sharded_of(checkpoint).values()}
    for key in BY_POSITION - requested:  # another parallel shape has other positions; the report lists them
        known.pop(key, None)
    for key in requested - known.keys():
        name, state = sharded_tensors.tensor_of(key)
        info = checkpoint.serving(name, state)
        if info is not None:  # the same value under another key
            known[key] = metadata.without_data(key, info)
            known.pop(sharded_tensors.key_of(*info.key), None) if sharded_tensors.key_of(*info.key) not in requested else None
    for key in list(known):
        name, state = sharded_tensors.tensor_of(key)
        twin = sharded_tensors.WEIGHT if state == sharded_tensors.MASTER else sharded_tensors.MASTER
        if (
            state in (sharded_tensors.WEIGHT, sharded_tensors.MASTER)
            and key not in requested
            and sharded_tensors.key_of(name, twin) in requested
        ):
            known.pop(key)
    result: tuple[Any, set[str], set[str]] = validation.validate_integrity_and_strict_load(
        wanted, handling, False, local, everyone, known
    )
    return result


def _warn_of_lost_states(left: list[TensorInfo], with_optimizer: bool) -> None:
    lost = sorted({info.state for info in left if info.kind == "optimizer"})
    if lost and with_optimizer:
        logger.warning(
            "unickpt: the checkpoint has %s, which this job's optimizer does not keep or has not allocated. They keep "
            "their initial values.",
            ", ".join(lost),
        )


def _warn_of_fresh(fresh: Mapping[str, set[str]], stored: list[str]) -> None:
    """Warn of optimizer states that begin anew, if the checkpoint's optimizer, or that of another run, would have had them.

    Args:
        fresh: their names, ``parameter (state)``, by the reason.
        stored: names of the states of the checkpoint.
    """
    for lack in (each for each in Lack if fresh.get(each.name) and not each.loses_nothing):
        names = sorted(fresh[lack.name])
        if lack is Lack.NO_OPTIMIZER:
            logger.warning(
                "unickpt: %s. The weights are loaded. This job's optimizer begins anew: masters from the weights, %d states "
                "and all steps at zero.",
                lack.value,
                len(names),
            )
        else:
            logger.warning(
                "unickpt: %d optimizer states begin at zero: %s: %s. Restored: the other states (%s). An optimizer that counts "
                "steps per group does not correct the bias of new states.", len(names), lack.value, some(names),
                ", ".join(stored),
            )  # fmt: skip


def _mask(checkpoint: Checkpoint, wanted: Any) -> str:
    """Return the tensors of the checkpoint that this rank requests."""
    infos = (checkpoint.serving(*sharded_tensors.tensor_of(item.key)) for item in _tensors_of(wanted))
    return mask_of(checkpoint, (info for info in infos if info is not None))


def _refuse_left_out(together: Together, checkpoint: Checkpoint, wanted: Any) -> None:
    """Raise on all ranks if the checkpoint has parameters that no rank requests."""
    messages = together.exchange.gather("parameters", {"tensors": _mask(checkpoint, wanted)})
    refused = None
    if messages is not None:
        left = unrequested(checkpoint, [message["tensors"] for message in messages])
        reason = lacking.left_out_refusal(
            info.name for info in left if info.kind == "parameter" and not optimizer_forms.is_bucket(info.name)
        )
        refused = MismatchError(f"{checkpoint.storage} does not fit this job: {reason}. Nothing is loaded.") if reason else None
    together.agree("parameters-agreed", refused)


def _account(
    work: restore.Restore, wanted: Any, exchange: MessageExchange | None, seconds: float, handling: Any, *, with_optimizer: bool
) -> None:
    """Complete the report; the coordinator adds the tensors that no rank loaded, and logs it.

    Args:
        exchange: message exchange of the ranks; None: only this rank's own tensors are reported.
    """
    checkpoint, report = work.checkpoint, work.report
    report.target = describe(internals.topology())
    report.seconds = seconds
    if exchange is not None:
        fresh = {lack.name: sorted(f"{name} ({state})" for name, state in pairs) for lack, pairs in work.fresh.items()}
        messages = exchange.gather("requested", {"tensors": _mask(checkpoint, wanted), "fresh": fresh})
        if messages is not None:
            left = unrequested(checkpoint, [message["tensors"] for message in messages])
            for info in left:
                report.add(info.name, info.state, "left out", "no rank of this job loads it")
            lost = [name for name in lost_parameters(checkpoint, left) if not optimizer_forms.is_bucket(name)]
            if lost and handling is validation.StrictHandling.ASSUME_OK_UNEXPECTED:
                logger.warning(
                    "unickpt: %s: no rank of this job loads %d of its parameters: %s", checkpoint.storage, len(lost), some(lost)
                )
            _warn_of_lost_states(left, with_optimizer)
            begun: dict[str, set[str]] = {}
            for lack, names in (pair for message in messages for pair in message["fresh"].items()):
                begun.setdefault(lack, set()).update(names)
            _warn_of_fresh(begun, work.stored_states)
            if work.vocabulary.change and not isinstance(checkpoint, TranslatedCheckpoint):
                logger.warning("unickpt: %s", work.vocabulary.change)
            report.log()
