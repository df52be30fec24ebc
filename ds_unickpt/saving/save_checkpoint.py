"""``DeepSpeedEngine.save_checkpoint``. A job without the ``unickpt`` key runs DeepSpeed's own function."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from ds_unickpt.checkpoint_engine import UnickptCheckpointEngine, ours_for
from ds_unickpt.compressing import optimizer_residuals
from ds_unickpt.framework import internals
from ds_unickpt.loops import callers
from ds_unickpt.saving import capture, committed
from unickpt.base.errors import CoordinationError, SaveFailedError
from unickpt.base.logs import logger
from unickpt.base.step_replay import saves_nothing
from unickpt.checkpoint.coordination.failure import FailureKind, sentence
from unickpt.checkpoint.coordination.message_exchange import Message
from unickpt.checkpoint.save import shutdown
from unickpt.checkpoint.save.failure import NOTHING_SAVES
from unickpt.checkpoint.save.opening import differences
from unickpt.checkpoint.save.requests import PendingSave, SaveRequest, SaveResult
from unickpt.checkpoint.save.shards import Contribution
from unickpt.checkpoint.storage.base import absolute, is_url, split
from unickpt.diagnosis import session

_INSTEAD = (
    'DeepSpeed\'s own checkpoint engine saves this job, as without the "unickpt" key. '
    "Its checkpoints can be resumed with the same layout only."
)
_SAME_VALUES = (
    "DeepSpeed's own save would write the files of each rank to another place, so it was not tried. Pass the same values on "
    "every rank: let rank 0 make a folder or tag with a clock or a random number, and broadcast it."
)


def save_checkpoint(
    native: Callable[..., Any],
    engine: Any,
    save_dir: str,
    tag: Any = None,
    client_state: Any = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> Any:
    """Replace ``DeepSpeedEngine.save_checkpoint``. The arguments have the same meaning.

    Returns:
        True if the checkpoint is committed and durable and ``latest`` names it, or if DeepSpeed's own save returned True.
        With ``async_save``, True if the save began. False if no checkpoint was written: training continues, and earlier
        checkpoints are intact.

    Raises:
        SaveFailedError: no checkpoint was written, and Trainer or Lightning would now delete the last complete one.
    """
    if saves_nothing(f"{save_dir}/{tag or f'global_step{engine.global_steps}'}", first=not engine.global_rank):
        return False
    client_state = {} if client_state is None else client_state
    ours = ours_for(engine)
    arguments: dict[str, Any] = {
        "tag": tag,
        "client_state": client_state,
        "save_latest": save_latest,
        "exclude_frozen_parameters": exclude_frozen_parameters,
    }
    if ours is None:
        return native(save_dir, **arguments)
    if ours.trainer is not None and ours.trainer.collects:
        ours.trainer.calls.append(arguments)
        return True
    if not save_dir:
        raise ValueError(f"save_dir must be a non-empty string, got {save_dir!r}")
    name = f"global_step{engine.global_steps}" if tag is None else str(tag)
    place = f"{save_dir}/{name}"
    _warn_of_open_window(ours, engine, place)
    if not ours.unsupported:
        request = request_of(
            ours, engine, str(save_dir), name, client_state=client_state, save_latest=save_latest,
            exclude_frozen=exclude_frozen_parameters, tier="" if ours.trainer is None else ours.trainer.run,
        )  # fmt: skip
        outcome = _save(ours, request, str(save_dir), name)
        internals.gather_persistent(engine)
        if isinstance(outcome, PendingSave) and (not outcome.done or (outcome.result and outcome.result.complete)):
            return True
        result = outcome.result if isinstance(outcome, PendingSave) else None
        if result is not None and result.has(FailureKind.ARGUMENTS):
            internals.validate_tag(engine, name)
        if result is None or not result.framework_saves:
            _end_or_raise(place, result, str(outcome) if result is None else sentence(result.failures), str(save_dir))
            return False
        ours.unsupported = result.unsupported
        if not ours.unsupported and ours.exchange.rank == 0:
            logger.warning("unickpt: %s: %s. %s", place, sentence(result.failures), _INSTEAD)
    if is_url(save_dir):
        if ours.exchange.rank == 0:
            logger.error(
                "unickpt: %s is NOT saved (%s). DeepSpeed itself cannot save to a URL. Use a local directory.",
                place,
                f"not supported yet: {ours.unsupported}" if ours.unsupported else "see above",
            )
        return False
    if not _same_everywhere(ours, engine, str(save_dir), name):
        return False
    if ours.unsupported:
        ours.warn_once(f"not supported yet: {ours.unsupported}. {_INSTEAD}")
    return native(save_dir, **arguments)


def _warn_of_open_window(ours: UnickptCheckpointEngine, engine: Any, place: str) -> None:
    """Warn of the micro batches that a resume loses. No checkpoint of DeepSpeed or unickpt has accumulated gradients."""
    trained = internals.open_window(engine)
    if trained and ours.exchange.rank == 0:
        logger.warning(
            "unickpt: %s is saved within an accumulation window: the gradients of %s since the last optimizer step are not "
            "stored. A resume begins the window anew, so it has to train these again. Save after the optimizer step, when "
            "engine.is_gradient_accumulation_boundary() was true for the last micro batch.",
            place, trained,
        )  # fmt: skip


def _same_everywhere(ours: UnickptCheckpointEngine, engine: Any, save_dir: str, name: str) -> bool:
    """Whether all ranks pass the same folder and tag to DeepSpeed's own save. Otherwise the error says which ones differ."""
    request, exchange = SaveRequest(_nothing, save_dir, name), ours.exchange.separate("native-save")
    try:
        failures = differences(request, exchange)
        exchange.leave()
    except CoordinationError as err:
        logger.error("unickpt: %s is not saved: %s", request.directory, err)
        return False
    if failures:
        internals.validate_tag(engine, name)
        if ours.exchange.rank == 0:
            advice = _advice(SaveResult(committed=False, failures=failures))
            logger.error("unickpt: %s is not saved: %s. %s", request.directory, sentence(failures), advice)
        return False
    return True


def _nothing(_: Message) -> Contribution:
    raise AssertionError("DeepSpeed saves this state")


def _end_or_raise(place: str, result: SaveResult | None, reason: str, save_dir: str) -> None:
    """Prevent a loop that ignores failed saves from deleting the last complete checkpoint.

    Raises:
        SaveFailedError: the loop would delete it.
    """
    if result is not None and (result.skipped or result.committed):
        return
    if callers.called_by_trainer():
        shutdown.wait_for_end()
    deleting = callers.deletes_the_last(save_dir)
    if deleting:
        raise SaveFailedError(
            f"{place} is not saved ({reason}). Earlier checkpoints are intact. {deleting} would now delete the last one that "
            "can be resumed, so training stops here. Resume from the newest complete checkpoint."
        )


def _save(ours: UnickptCheckpointEngine, request: SaveRequest, save_dir: str, tag: str) -> PendingSave | CoordinationError:
    """Save, or begin to save in the background. Returns the error if not all ranks entered the save.

    The ranks compare their folders and tags in the first message. If these differ, nothing is saved.
    """
    exchange = ours.exchange.separate("save")
    at_once = callers.touches_checkpoints(save_dir) if ours.options.async_save or ours.memory.enabled else ""
    if ours.memory.enabled and ours.trainer is None:
        to_disk = at_once or callers.completes_folder()
        if to_disk:
            ours.warn_once(f"saves go to disk although memory.to_disk_every is set: {to_disk}")
        else:
            in_memory = _save_in_memory(ours, request)
            if in_memory is not None:
                return in_memory
    if at_once and ours.options.async_save:
        ours.warn_once(f"saves are synchronous although async_save is on: {at_once}")
    try:
        return ours.saver.save(request, exchange, asynchronous=False if at_once else None)
    except CoordinationError as err:
        logger.error("unickpt: %s/%s is not saved: %s", save_dir, tag, err)
        return err


def _memory_of_another(ours: UnickptCheckpointEngine, save_dir: str) -> bool:
    """Whether the memory tier of a folder has the checkpoints of another model, whose place new ones would take.

    The answer of rank 0 counts.
    """
    another = not ours.owners.memory_of(absolute(save_dir), ours.owner)
    if another:
        ours.warn_once(
            f"checkpoints of this engine go to disk: those of {save_dir} in memory are of another model of this job. Give each "
            "model a folder of its own"
        )
    return another


def request_of(
    ours: UnickptCheckpointEngine, engine: Any, save_dir: str, tag: str,
    *,
    client_state: Mapping[str, Any] | None = None, save_latest: bool = True, exclude_frozen: bool = False,
    rank_objects: Mapping[str, Any] | None = None, tier: str = "",
) -> SaveRequest:  # fmt: skip
    """Return the request for a save of an engine.

    Args:
        save_dir, tag, client_state, save_latest: as for ``save_checkpoint``.
        exclude_frozen: leave out parameters that do not require a gradient.
        rank_objects: further non-tensor state of this rank.
        tier: save directory of the memory tier, if it is another than ``save_dir``.
    """
    state = capture.EngineState(engine, ours.options, client_state or {}, exclude_frozen=exclude_frozen, known=ours.known)
    return SaveRequest(
        partial(_contribution, ours, state, rank_objects or {}, absolute(save_dir)),
        save_dir=save_dir,
        tag=tag,
        save_latest=save_latest,
        one_writer=save_latest,
        announce=state.announcement,
        early=state.read,
        forget=state.forget,
        must_match={"exclude_frozen_parameters": bool(exclude_frozen)},
        claim=ours.owners.claim(ours.owner, replaces=True),
        on_commit=committed.complete,
        on_end=lambda save: _ended(ours, save, tier or split(save.directory)[0]),
    )


def _contribution(
    ours: UnickptCheckpointEngine, state: capture.EngineState, rank_objects: Mapping[str, Any], save_dir: str,
    announced: Message,
) -> Contribution:  # fmt: skip
    """Return what this rank writes: the state of the engine, what compression has not sent, and what the witness has passed."""
    made = capture.contribution(state, announced)
    residuals = {} if ours.compressed is None else ours.compressed.shared_objects()
    choice = {} if ours.choosing is None else ours.choosing.shared_objects(ours.exchange.rank)
    own = {**made.rank_objects, **rank_objects}
    shared = {**made.shared_objects, **residuals, **optimizer_residuals.captured(state), **choice}
    writer = replace(made.writer, origin=asdict(ours.owners.origin(ours.owner)))
    witness = None if ours.recorded is None or ours.exchange.rank else ours.recorded.passed(save_dir)
    return replace(made, rank_objects=own, shared_objects=shared, writer=writer, witness=witness)


def _save_in_memory(ours: UnickptCheckpointEngine, request: SaveRequest) -> PendingSave | None:
    """Begin a save into the memory of the hosts. Returns None if the checkpoint has to go to disk."""
    try:
        save = ours.memory.save(request, ours.exchange, never=_memory_of_another(ours, request.save_dir))
    except CoordinationError as err:
        logger.error("unickpt: %s is not saved in memory: %s", request.directory, err)
        return None
    return None if save is None or not save.agreed else save


def _advice(result: SaveResult) -> str:
    """Return what helps against a save that failed, and that DeepSpeed cannot make either."""
    if result.has(FailureKind.ARGUMENTS):
        return _SAME_VALUES
    if result.has(FailureKind.OTHER_MODEL):
        return "DeepSpeed's own save would replace it, so it was not tried."
    if result.has(FailureKind.OUTSIDE):
        return "DeepSpeed's own save would write there, so it was not tried."
    if result.has(FailureKind.UNRESUMABLE):
        return "DeepSpeed's own files of such a job cannot be resumed, so it was not tried."
    if result.has(FailureKind.MEMORY):
        return "The next save writes without a copy in memory. Set staging_gigabytes to limit the copies of later ones."
    return "Check the storage. The next save tries again."


def _ended(ours: UnickptCheckpointEngine, save: PendingSave, tier: str) -> None:
    """Log the result of a save to disk. Runs in the thread that ended it. ``tier``: save directory of the memory tier."""
    result, directory = save.result, save.directory
    if result is None:
        if save.background:
            logger.error("unickpt: %s is not saved: %s", directory, save.error)
        return
    ours.last_save = result
    session.checkpoint_io(result.times)
    if result.complete:
        ours.memory.saved_to_disk(tier, result.seconds)
    if ours.exchange.rank or (result.framework_saves and not save.background):  # the call logs it
        return
    if result.complete:
        logger.info(
            "unickpt: saved %s: %s bytes in %.2f s; training paused for %.2f s",
            directory, f"{result.size_bytes:,}", result.seconds, result.stall_s,
        )  # fmt: skip
    elif result.committed:
        logger.error("unickpt: %s", result.shortfall)
    elif result.has(FailureKind.INTERRUPTED):
        logger.warning("unickpt: %s is not saved (%s). Earlier checkpoints are intact.", directory, save.cause())
    else:
        level = logging.ERROR if any(failure.kind in NOTHING_SAVES for failure in result.failures) else logging.WARNING
        logger.log(
            level,
            "unickpt: Gave up saving %s after %.1f s (%s). No checkpoint was written; earlier checkpoints are intact. %s",
            directory,
            result.seconds,
            save.cause(),
            "DeepSpeed itself saves from now on." if result.framework_saves else _advice(result),
        )
