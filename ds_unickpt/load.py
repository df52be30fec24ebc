"""``DeepSpeedEngine.load_checkpoint``: any source layout into a job with the ``unickpt`` key, DeepSpeed's own otherwise."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from typing import Any

from ds_unickpt import dialects, internals, restore
from ds_unickpt.engine import UnickptCheckpointEngine, ours_of
from ds_unickpt.wanted import Wanted
from unickpt import interruption
from unickpt import neighbours as neighbours_module
from unickpt.errors import (
    CoordinationError,
    CorruptCheckpointError,
    FormatError,
    NotACheckpointError,
    StorageError,
    UnickptError,
)
from unickpt.loading import Checkpoint, Planned, is_checkpoint
from unickpt.manifest import MANIFEST_FILE
from unickpt.neighbours import reason_of
from unickpt.resuming import Candidates, whole
from unickpt.storage import Storage, is_url, join, open_storage, split

logger = logging.getLogger("unickpt")

_DAMAGE_KINDS = (CorruptCheckpointError, NotACheckpointError, StorageError, FormatError)


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
    ours = ours_of(engine)
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
