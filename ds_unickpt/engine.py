"""The checkpoint engine of a job with the ``unickpt`` key, and ``save_checkpoint``. Loading is in ``ds_unickpt.load``."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from ds_unickpt import callers, capture, hints, internals
from ds_unickpt.config import Options, read_options, save_options
from unickpt import interruption
from unickpt.coordination import Rendezvous
from unickpt.errors import ConfigError, CoordinationError, SaveFailedError
from unickpt.failures import sentence
from unickpt.logs import make_visible
from unickpt.report import LoadReport
from unickpt.saves import PendingSave, Request, SaveResult
from unickpt.saving import Saver
from unickpt.storage import is_url, usable

logger = logging.getLogger("unickpt")

_INSTEAD = (
    'This job is saved by DeepSpeed\'s own checkpoint engine, as without the "unickpt" key; '
    "what it saves can be resumed under the same layout only."
)
_engine_count = itertools.count()


class UnickptCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """DeepSpeed's checkpoint engine of a job with the ``unickpt`` key.

    Wraps the engine that DeepSpeed would have used, which still serves every file that DeepSpeed
    writes itself (``save_16bit_model``, and whole checkpoints of layouts not supported yet).

    Attributes:
        native: the wrapped engine.
        options: of the ``unickpt`` key.
        saver: makes the universal saves.
        last_save, last_report: how the last universal save that is over, and the last load, went.
        unsupported: why universal saves are not possible, if a save has found out.
    """

    def __init__(self, native: Any, options: Options, meet: Rendezvous) -> None:
        self.native, self.options, self.meet = native, options, meet
        self.name = "unickpt"
        self.last_save: SaveResult | None = None
        self.last_report: LoadReport | None = None
        self.saver = Saver(save_options(options))
        self.unsupported = ""
        self.warned: set[str] = set()

    def create(self, *args: Any, **kwargs: Any) -> Any:
        return self.native.create(*args, **kwargs)

    def save(self, *args: Any, **kwargs: Any) -> Any:
        return self.native.save(*args, **kwargs)

    def load(self, *args: Any, **kwargs: Any) -> Any:
        return self.native.load(*args, **kwargs)

    def commit(self, *args: Any, **kwargs: Any) -> Any:
        return self.native.commit(*args, **kwargs)

    def warn_once(self, message: str) -> None:
        """On the first rank, and once per message."""
        if message not in self.warned and self.meet.rank == 0:
            logger.warning("unickpt: %s", message)
        self.warned.add(message)


def _delegate(name: str) -> Callable[..., Any]:
    def method(self: UnickptCheckpointEngine, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.native, name)(*args, **kwargs)

    method.__name__ = name
    return method


for _name in (
    "makedirs", "is_data_parallel_writer", "is_decoupled", "set_commit_info", "get_commit_info", "cleanup",
    "preserves_storage_sharing",
):  # fmt: skip
    if hasattr(CheckpointEngine, _name):  # what the base class has differs between DeepSpeed versions
        setattr(UnickptCheckpointEngine, _name, _delegate(_name))


def adopt(engine: Any) -> None:
    """After DeepSpeed has configured checkpointing: put ours around its engine if the config says so.

    Raises:
        ConfigError: the ``unickpt`` key is wrong.
    """
    options = read_options(internals.config_of(engine))
    if options is None:
        return
    if options.timing.enabled:  # jobs without it do not even import it
        from ds_unickpt import timing

        timing.begin(engine, options.timing)
    if not options.enabled:
        return
    reason = usable(options.upload_to) if options.upload_to else ""
    if reason:
        raise ConfigError(f'"unickpt.upload_to": {reason}')
    make_visible()
    world = int(engine.world_size)
    meet = Rendezvous(
        internals.default_store() if world > 1 else None,
        rank=int(engine.global_rank),
        world=world,
        prefix=f"unickpt/{next(_engine_count)}",
        timeout_s=options.timeout_seconds,
    )
    engine.checkpoint_engine = UnickptCheckpointEngine(engine.checkpoint_engine, options, meet)


def ours_of(engine: Any) -> UnickptCheckpointEngine | None:
    found = getattr(engine, "checkpoint_engine", None)
    return found if isinstance(found, UnickptCheckpointEngine) else None


def save_checkpoint(
    native: Callable[..., Any],
    engine: Any,
    save_dir: str,
    tag: Any = None,
    client_state: Any = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> Any:
    """``DeepSpeedEngine.save_checkpoint``: same arguments, same meaning.

    Returns:
        True once the checkpoint is committed and durable and ``latest`` names it, or DeepSpeed's own save has returned
        True. With ``async_save`` True once the save has begun. False if there is no checkpoint; training goes on, and
        what was saved before is intact.

    Raises:
        SaveFailedError: there is no checkpoint, and Trainer or Lightning would delete the last whole one next.
    """
    client_state = {} if client_state is None else client_state
    ours = ours_of(engine)
    arguments: dict[str, Any] = {
        "tag": tag,
        "client_state": client_state,
        "save_latest": save_latest,
        "exclude_frozen_parameters": exclude_frozen_parameters,
    }
    if ours is None:
        return native(save_dir, **arguments)
    if not save_dir:
        raise ValueError(f"save_dir must be a non-empty string, got {save_dir!r}")
    name = f"global_step{engine.global_steps}" if tag is None else str(tag)
    place = f"{save_dir}/{name}"
    if not ours.unsupported:
        outcome = _save(ours, engine, str(save_dir), name, client_state, save_latest, exclude_frozen_parameters)
        internals.gather_persistent(engine)
        if isinstance(outcome, PendingSave) and (not outcome.done or (outcome.result and outcome.result.complete)):
            return True
        result = outcome.result if isinstance(outcome, PendingSave) else None
        if result is None or not result.framework_saves:
            _end_or_raise(place, result, str(outcome) if result is None else sentence(result.failures), str(save_dir))
            return False
        ours.unsupported = result.unsupported
        if not ours.unsupported and ours.meet.rank == 0:
            logger.warning("unickpt: %s: %s. %s", place, sentence(result.failures), _INSTEAD)
    if is_url(save_dir):
        if ours.meet.rank == 0:
            logger.error(
                "unickpt: %s is NOT saved (%s). DeepSpeed itself cannot save to a URL; give this job a directory.",
                place, f"not supported yet: {ours.unsupported}" if ours.unsupported else "see above",
            )  # fmt: skip
        return False
    if ours.unsupported:
        ours.warn_once(f"not supported yet: {ours.unsupported}. {_INSTEAD}")
    return native(save_dir, **arguments)


def _end_or_raise(place: str, result: SaveResult | None, reason: str, save_dir: str) -> None:
    """Keep a loop that takes every return of a save for a checkpoint from deleting the last whole one.

    Raises:
        SaveFailedError: it would.
    """
    if result is not None and (result.skipped or result.committed):
        return
    if callers.called_by_trainer():
        interruption.wait_for_end()
    deleting = callers.deletes_the_last(save_dir)
    if deleting:
        raise SaveFailedError(
            f"{place} is not saved ({reason}). Earlier checkpoints are intact. {deleting} would now delete the last one that "
            "can be resumed, so training ends here. Resume from the newest whole checkpoint."
        )


def _save(
    ours: UnickptCheckpointEngine,
    engine: Any,
    save_dir: str,
    tag: str,
    client_state: dict[str, Any],
    save_latest: bool,
    exclude_frozen: bool,
) -> PendingSave | CoordinationError:
    """The save, over or in the background; or why the ranks did not come together."""
    internals.validate_tag(engine, tag)
    meet = ours.meet.apart("save")
    request = Request(
        lambda announced: capture.contribution(
            engine, ours.options, client_state=client_state, exclude_frozen=exclude_frozen, announced=announced
        ),
        save_dir=save_dir,
        tag=tag,
        save_latest=save_latest,
        announce=lambda: capture.announcement(engine, ours.options, client_state),
        alike={"exclude_frozen_parameters": bool(exclude_frozen)},
        on_end=lambda save: _ended(ours, save),
    )
    at_once = callers.touches_checkpoints(save_dir) if ours.options.async_save else ""
    if at_once:
        ours.warn_once(f"saves are synchronous although async_save is on: {at_once}")
    try:
        return ours.saver.save(request, meet, asynchronous=False if at_once else None)
    except CoordinationError as err:
        logger.error("unickpt: %s/%s is not saved: %s", save_dir, tag, err)
        return err


def _ended(ours: UnickptCheckpointEngine, save: PendingSave) -> None:
    """Say how a save ended. In the thread that ended it."""
    result, directory = save.result, save.directory
    if result is None:
        if save.background:
            logger.error("unickpt: %s is not saved: %s", directory, save.error)
        return
    ours.last_save = result
    if ours.meet.rank or (result.framework_saves and not save.background):  # then the call itself goes on, and says so
        return
    if result.committed:
        hints.leave_readme(directory)
    if result.complete:
        logger.info(
            "unickpt: saved %s: %s bytes in %.2f s, training stood still for %.2f s",
            directory, f"{result.size_bytes:,}", result.seconds, result.stall_s,
        )  # fmt: skip
    elif result.committed:
        logger.error("unickpt: %s", result.shortfall)
    elif result.has("interrupted"):
        logger.warning("unickpt: %s is not saved (%s). Earlier checkpoints are intact.", directory, save.cause())
    else:
        logger.warning(
            "unickpt: Gave up saving %s after %.1f s (%s). No checkpoint was written; earlier checkpoints are intact. %s",
            directory, result.seconds, save.cause(),
            "DeepSpeed itself makes the next saves." if result.framework_saves else
            "Look at the storage: the next save tries again.",
        )  # fmt: skip
