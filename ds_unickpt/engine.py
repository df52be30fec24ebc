"""Save and load of a DeepSpeed engine: universal where the config asks for it, DeepSpeed's own otherwise."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import time
from collections.abc import Callable
from typing import Any

from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from ds_unickpt import capture, dialects, huggingface, internals, restore
from ds_unickpt.config import Options, read_options, save_options
from ds_unickpt.wanted import Wanted
from unickpt import interruption
from unickpt import neighbours as neighbours_module
from unickpt.coordination import Rendezvous
from unickpt.errors import (
    ConfigError,
    CoordinationError,
    CorruptCheckpointError,
    FormatError,
    NotACheckpointError,
    StorageError,
    UnickptError,
)
from unickpt.loading import Checkpoint, Planned, is_checkpoint
from unickpt.logs import make_visible
from unickpt.manifest import MANIFEST_FILE
from unickpt.neighbours import reason_of
from unickpt.report import LoadReport
from unickpt.resuming import Candidates, whole
from unickpt.saves import PendingSave, Request, SaveResult
from unickpt.saving import Saver
from unickpt.storage import Storage, is_url, join, open_storage, split, usable

logger = logging.getLogger("unickpt")

_engine_count = itertools.count()
_DAMAGE_KINDS = (CorruptCheckpointError, NotACheckpointError, StorageError, FormatError)


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


def _ours(engine: Any) -> UnickptCheckpointEngine | None:
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
    ours = _ours(engine)
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
        announce=capture.announcement(client_state) if meet.rank == 0 else None,
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


def load_checkpoint(
    native: Callable[..., Any],
    engine: Any,
    load_dir: str,
    tag: Any = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: Any = None,
) -> Any:
    """``DeepSpeedEngine.load_checkpoint``: same arguments, same meaning, any source layout.

    Returns:
        ``(path of the manifest, client_state)``, or ``(None, None)`` as DeepSpeed does if there is no
        ``latest`` and no tag is given.

    Raises:
        UnickptError: the checkpoint is damaged or does not fit; nothing unaccounted for is passed over.
    """
    ours = _ours(engine)
    wanted = Wanted(
        strict=load_module_strict,
        optimizer=load_optimizer_states and not load_module_only,
        scheduler=load_lr_scheduler_states and not load_module_only,
        module_only=load_module_only,
        custom_load_fn=custom_load_fn,
    )

    def run_native(tag: Any) -> Any:
        return native(
            load_dir,
            tag=tag,
            load_module_strict=load_module_strict,
            load_optimizer_states=load_optimizer_states,
            load_lr_scheduler_states=load_lr_scheduler_states,
            load_module_only=load_module_only,
            custom_load_fn=custom_load_fn,
        )

    if ours is None:
        return run_native(tag)
    interruption.finish_all()
    ours.meet.begin("load")
    skipped: list[str] = []
    tried: list[str] = []
    candidates = Candidates(load_dir)
    while True:
        first = not tried
        choice = ours.meet.broadcast("choice", _chosen(candidates, load_dir, tag, first=first) if ours.meet.rank == 0 else None)
        if choice["error"]:
            raise StorageError(f"{load_dir}: rank 0 cannot see what is there: {choice['error']}")
        if first and choice["notes"] and not ours.options.fall_back:
            raise CorruptCheckpointError("; ".join(choice["notes"]))
        if choice["tag"] is None:
            skipped += choice["notes"]
            if skipped:
                raise CorruptCheckpointError(f"no whole checkpoint is left in {load_dir}: " + "; ".join(skipped))
            if ours.meet.rank == 0 and choice["present"]:
                logger.warning(
                    "unickpt: %s has no 'latest' file, so nothing is loaded; whole checkpoints there: %s. "
                    "Pass one of them as tag to resume from it.", load_dir, ", ".join(choice["present"]),
                )  # fmt: skip
            if is_url(load_dir):
                if ours.meet.rank == 0 and not choice["present"]:
                    logger.warning("unickpt: %s has no 'latest' and no checkpoint, so nothing is loaded", load_dir)
                return None, None
            return run_native(tag)
        if not choice["universal"]:
            return run_native(tag if not tried else choice["tag"])
        name = choice["tag"]
        if choice["itself"]:
            load_dir, tag = _place_of(load_dir)
        tried.append(name)
        skipped += choice["notes"]
        reason = internals.unsupported_reason(engine)
        if reason:
            raise UnickptError(
                f"{load_dir}/{name} is a unickpt checkpoint, and this job uses {reason}, which cannot load one yet"
            )
        try:
            return _load(ours, engine, str(load_dir), name, wanted, skipped)
        except _DamagedError as err:
            if tag is not None or not ours.options.fall_back:
                raise err.cause from None
            skipped.append(f"{name}: {err.cause}")
            if ours.meet.rank == 0:
                logger.warning("unickpt: %s/%s cannot be used: %s. Looking for an older one.", load_dir, name, err.cause)


class _DamagedError(Exception):
    """All ranks agree that a checkpoint is damaged; ``cause`` is the error to show."""

    def __init__(self, cause: UnickptError) -> None:
        super().__init__(str(cause))
        self.cause = cause


def _chosen(candidates: Candidates, load_dir: str, tag: Any, *, first: bool) -> dict[str, Any]:
    """``_choose``, and if the storage does not answer, what it said: the other ranks wait for the coordinator's word."""
    nothing: dict[str, Any] = {"tag": None, "universal": False, "present": [], "notes": [], "error": "", "itself": False}
    try:
        return {**nothing, **_choose(candidates, load_dir, tag, first=first)}
    except (UnickptError, OSError) as err:
        return {**nothing, "error": f"{type(err).__name__}: {err}"}


def _choose(candidates: Candidates, load_dir: str, tag: Any, *, first: bool) -> dict[str, Any]:
    """On the coordinator: which checkpoint to load next. Reads manifests, never data."""
    folder = open_storage(load_dir)
    if tag is not None:
        return {"tag": str(tag), "universal": not _is_native(folder.inside(str(tag)))}
    if first and is_checkpoint(load_dir):  # not a folder of checkpoints
        return {"tag": _place_of(load_dir)[1], "universal": True, "itself": True}
    choice = candidates.next()
    for note in choice.notes:
        logger.warning("unickpt: %s. Looking for the newest whole checkpoint.", note)
    if choice.tag is None:
        return {"present": [name for _, name in whole(load_dir)], "notes": [*choice.notes]}
    native = first and _is_native(folder.inside(choice.tag))
    return {"tag": choice.tag, "universal": not native, "notes": [*choice.notes]}


def _place_of(checkpoint: str) -> tuple[str, str]:
    """Its folder and its tag."""
    return split(checkpoint if is_url(checkpoint) else os.path.abspath(checkpoint))


def _is_native(directory: Storage) -> bool:
    """Whether DeepSpeed's own files are what was saved last under this tag."""
    native = [directory.modified_ns(name) for name in directory.names() if name.endswith(".pt")]
    if not native or not is_checkpoint(directory.where()):
        return bool(native)
    return max(native) > directory.modified_ns(MANIFEST_FILE)


def _load(
    ours: UnickptCheckpointEngine, engine: Any, load_dir: str, tag: str, wanted: Wanted, skipped: list[str]
) -> tuple[str, dict[str, Any]]:
    begin = time.monotonic()
    directory = join(load_dir, tag)
    failure: Exception | None = None
    loading: restore.Restore | None = None
    planned: Planned | None = None
    try:
        checkpoint = dialects.as_named_here(Checkpoint.open(directory), engine, ours.options.load_dialect)
        loading = restore.Restore(engine, checkpoint, ours.options, wanted)
        internals.before_restore(engine)
        planned = loading.plan()
    except Exception as err:
        failure = err
    reasons, neighbours = neighbours_module.meet(
        ours.meet,
        planned.rows if planned is not None else None,
        reason_of(failure),
        identity=loading.checkpoint.identity if loading is not None else "",
        wanted_bytes=planned.size_bytes if planned is not None else 0,
        share=ours.options.read_once_per_host,
    )
    if not reasons:
        assert loading is not None
        assert planned is not None
        try:
            with neighbours or contextlib.nullcontext():
                loading.read(planned, neighbours)
        except Exception as err:
            failure = err
        reasons = ours.meet.agree("read", reason_of(failure))
    if reasons:
        _raise_agreed(directory, None if reason_of(failure) is None else failure, reasons)
    if failure is not None:  # a neighbour did not come, and does not know of a failure
        raise failure
    assert loading is not None
    client_state = loading.finish()
    report = loading.report
    report.skipped = list(skipped)
    report.seconds = time.monotonic() - begin
    ours.last_report = report
    if ours.meet.rank == 0:
        for line in report.lines():
            logger.info("unickpt: %s", line)
    return join(directory, MANIFEST_FILE), client_state


def _raise_agreed(directory: str, failure: Exception | None, reasons: dict[int, str]) -> None:
    """Every rank raises, and every rank's message names the rank whose failure it is.

    A disk that cannot read a file will not read it tomorrow; a store that does not answer may. So the
    latter is an error: training shall not lose what it has done since an older checkpoint.
    """
    kinds = {reason.split(":", 1)[0] for reason in reasons.values()}
    damage = {kind.__name__ for kind in _DAMAGE_KINDS if not (kind is StorageError and is_url(directory))}
    if failure is None:
        rank, reason = min(reasons.items())
        text = f"{directory}: rank {rank} could not load it: {reason}"
        failure = CorruptCheckpointError(text) if kinds <= damage else CoordinationError(text)
    if kinds <= damage and isinstance(failure, UnickptError):
        raise _DamagedError(failure)
    raise failure
