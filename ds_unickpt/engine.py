"""The checkpoint engine of a job with the ``unickpt`` key, and ``save_checkpoint``. Loading is in ``ds_unickpt.load``."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from ds_unickpt import capture, hints, huggingface, internals
from ds_unickpt.config import Options, read_options, save_options
from unickpt.coordination import Rendezvous
from unickpt.errors import ConfigError, CoordinationError
from unickpt.logs import make_visible
from unickpt.report import LoadReport
from unickpt.saves import PendingSave, Request, SaveResult
from unickpt.saving import Saver
from unickpt.storage import is_url, usable

logger = logging.getLogger("unickpt")

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
        True once the save has begun (``async_save``), else once the checkpoint is committed (or
        DeepSpeed's own save has returned True); False if it is known that it could not be written, or
        was skipped. Training goes on, and what was saved before is intact.
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
    reason = internals.unsupported_reason(engine) or ours.unsupported
    if not reason:
        save = _save(ours, engine, str(save_dir), name, client_state, save_latest, exclude_frozen_parameters)
        internals.gather_persistent(engine)
        if save is None or not save.done:
            return save is not None
        if save.result is None or not save.result.unsupported:
            return save.committed
        reason = save.result.unsupported
    if is_url(save_dir):
        if ours.meet.rank == 0:
            logger.error(
                "unickpt: %s/%s is NOT saved. Not supported yet: %s; and DeepSpeed itself cannot save to a URL, so give this "
                "job a directory", save_dir, name, reason,
            )  # fmt: skip
        return False
    ours.warn_once(
        f"not supported yet: {reason}. This job is saved by DeepSpeed's own checkpoint engine, as without the "
        '"unickpt" key; it can be resumed under the same layout only.'
    )
    return native(save_dir, **arguments)


def _save(
    ours: UnickptCheckpointEngine,
    engine: Any,
    save_dir: str,
    tag: str,
    client_state: dict[str, Any],
    save_latest: bool,
    exclude_frozen: bool,
) -> PendingSave | None:
    internals.validate_tag(engine, tag)
    meet = ours.meet.apart(f"save/{tag}")
    request = Request(
        lambda announced: capture.contribution(
            engine, ours.options, client_state=client_state, exclude_frozen=exclude_frozen, announced=announced
        ),
        save_dir=save_dir,
        tag=tag,
        save_latest=save_latest,
        announce=capture.announcement(engine, ours.options, client_state) if meet.rank == 0 else None,
        on_end=lambda save: _ended(ours, save),
    )
    at_once = huggingface.touches_checkpoints(save_dir)
    if at_once and ours.options.async_save:
        ours.warn_once(f"saves wait until they are written: {at_once}")
    try:
        return ours.saver.save(request, meet, asynchronous=False if at_once else None)
    except CoordinationError as err:
        logger.error("unickpt: %s/%s is not saved: %s", save_dir, tag, err)
        return None


def _ended(ours: UnickptCheckpointEngine, save: PendingSave) -> None:
    """In the thread that ended the save."""
    result, directory = save.result, save.directory
    if result is None:
        logger.error("unickpt: %s is not saved: %s", directory, save.error)
        return
    ours.last_save = result
    ours.unsupported = result.unsupported
    if ours.meet.rank:
        return
    if result.committed:
        hints.leave_readme(directory)
        logger.info(
            "unickpt: saved %s: %s bytes in %.2f s, training stood still for %.2f s",
            directory, f"{result.size_bytes:,}", result.seconds, result.stall_s,
        )  # fmt: skip
    elif result.unsupported:
        logger.warning("unickpt: %s is NOT saved: not supported: %s", directory, result.unsupported)
    else:
        logger.warning(
            "unickpt: %s is NOT saved and its files are removed (%s). Training goes on; checkpoints saved before "
            "are untouched. Look at the storage: the next save tries again.", directory, save.cause(),
        )  # fmt: skip
