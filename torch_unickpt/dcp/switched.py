"""Calls of ``torch.distributed.checkpoint`` that hooks hand over."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.stateful import Stateful

from torch_unickpt.dcp import saving
from torch_unickpt.dcp.errors import DcpSaveError
from torch_unickpt.dcp.reading import load_into, plans_alone
from torch_unickpt.dcp.saving import Call, Parts
from torch_unickpt.dcp.storage import UnickptReader, UnickptWriter
from torch_unickpt.edge import RUNTIME
from unickpt.api.group import exchange_of
from unickpt.base.errors import UnickptError
from unickpt.base.logs import logger, make_visible
from unickpt.base.switch import REASON
from unickpt.checkpoint.format.file_names import DCP_MARK_FILE
from unickpt.checkpoint.format.manifest import MANIFEST_FILE
from unickpt.checkpoint.load.validation import is_checkpoint
from unickpt.checkpoint.save.requests import PendingSave, SaveOptions
from unickpt.checkpoint.storage.base import absolute
from unickpt.checkpoint.storage.open import open_storage


def recognised(directory: str) -> bool:
    """Return whether a folder holds a checkpoint of unickpt, and no newer one of torch."""
    if not is_checkpoint(directory):
        return False
    place = open_storage(directory)
    size = place.size_bytes(DCP_MARK_FILE)
    return not size or place.read(DCP_MARK_FILE, 0, 1) == b"#"  # no pickle begins so


def save(wrapped: Callable[..., Any], given: Mapping[str, Any], *, explicit: bool) -> Any:
    """Save the state dict of a call of ``_save_state_dict``. ``explicit``: the caller passes a ``UnickptWriter``.

    Under the switch torch saves instead if another attempt would fail in the same way.
    """
    make_visible()
    writer = given["storage_writer"]
    call = _call(given, writer, writer.path, asynchronous=False, explicit=explicit)
    if not explicit and _refuses(writer, call):
        return wrapped(**given)
    first = _is_first(call)
    _note_switch(first, explicit=explicit)
    try:
        with RUNTIME.saving:
            parts, failed, direct = _direct(given["state_dict"], given["planner"], call)
            if direct:
                saving.save(RUNTIME, parts, call, failed=failed)
                return saving.metadata_of(parts or Parts())
            planned = UnickptWriter(call.directory)
            planned.call = call
            return wrapped(**{**given, "storage_writer": planned})
    except (UnickptError, CheckpointException) as err:
        if explicit or not _framework_saves(err):
            raise
        if first:
            logger.warning("unickpt: %s torch saves this checkpoint in its own format instead.", err)
    saved = wrapped(**given)
    if first:
        open_storage(call.directory).delete(MANIFEST_FILE)  # of an earlier save: it would be loaded instead
    return saved


def _call(given: Mapping[str, Any], writer: Any, path: Any, *, asynchronous: bool, explicit: bool) -> Call:
    alone = bool(given["no_dist"]) or not dist.is_initialized()
    options = replace(writer.options if explicit else SaveOptions(), asynchronous=asynchronous)
    allow_pickle = explicit and writer.allow_pickle
    return Call(absolute(os.fspath(path)), given["process_group"], alone, options, not explicit, allow_pickle)


def _refuses(writer: Any, call: Call) -> bool:
    """Whether torch's writer refuses to replace the checkpoint in the folder. Every rank calls it."""
    if getattr(writer, "overwrite", True):
        return False
    exists = open_storage(call.directory).size_bytes(DCP_MARK_FILE) is not None
    exchange = exchange_of(call.group, timeout_s=saving.TIMEOUT_S, purpose="dcp-exists", place=call.directory, alone=call.alone)
    found = exchange.combined("exists", {"any": exists}, lambda every: {"any": any(each["any"] for each in every)})
    return bool(found["any"])


def _framework_saves(err: BaseException) -> bool:
    """Whether torch's own save may succeed after an error, which DCP's messages between ranks may carry."""
    carried = [each[0] for each in err.failures.values()] if isinstance(err, CheckpointException) else []
    return any(getattr(each, "framework_saves", False) for each in (err, *carried))


def _direct(state_dict: Any, planner: Any, call: Call) -> tuple[Parts | None, Exception | None, bool]:
    """Return the parts of this rank, why there are none, and whether no rank needs the messages of DCP."""
    if not saving.is_default(planner):
        return None, None, False
    parts, failed = None, None
    try:
        parts = saving.parts_of(state_dict, planner or DefaultSavePlanner())
    except Exception as err:  # the other ranks learn it in the save
        failed = err
    exchange = exchange_of(call.group, timeout_s=saving.TIMEOUT_S, purpose="dcp-route", place=call.directory, alone=call.alone)
    own = {"direct": parts is not None or failed is not None}
    direct = exchange.combined("route", own, lambda every: {"direct": all(each["direct"] for each in every)})["direct"]
    return parts, failed, direct


def _is_first(call: Call) -> bool:
    return call.alone or dist.get_rank(call.group) == 0


def _note_switch(first: bool, *, explicit: bool) -> None:
    if not explicit and first and RUNTIME.is_news(f"{REASON}: dcp"):
        logger.info("unickpt: %s: torch.distributed.checkpoint.save writes unickpt checkpoints.", REASON)


def async_save(wrapped: Callable[..., Any], given: Mapping[str, Any], *, explicit: bool) -> Any:
    """Save the state dict of a call of ``async_save``: return after the copy. A thread of this process writes it.

    Returns:
        A future of what ``save`` returns. ``result`` raises if no checkpoint was written.
    """
    make_visible()
    writer = given["storage_writer"]
    call = _call(given, writer, given["checkpoint_id"] or writer.path, asynchronous=True, explicit=explicit)
    if not explicit and _refuses(writer, call):
        return wrapped(**given)
    state_dict = {key: each.state_dict() if isinstance(each, Stateful) else each for key, each in given["state_dict"].items()}
    done: Future[Any] = Future()
    _note_switch(_is_first(call), explicit=explicit)
    with RUNTIME.saving:
        parts, failed, direct = _direct(state_dict, given["planner"], call)
        if direct:
            metadata = saving.metadata_of(parts or Parts())

            def ended(pending: PendingSave) -> None:
                done.set_result(metadata) if pending.committed else done.set_exception(saving.failure_of(pending))

            with contextlib.suppress(DcpSaveError):
                saving.save(RUNTIME, parts, call, failed=failed, on_end=ended)
                return done
    return wrapped(**{**given, "state_dict": state_dict})  # ends in ``save``, which knows what to do


def load(wrapped: Callable[..., Any], given: Mapping[str, Any], *, explicit: bool) -> Any:
    """Load into the state dict of a call of ``_load_state_dict``: a checkpoint of unickpt, or what torch finds."""
    reader = given["storage_reader"]
    directory = absolute(os.fspath(reader.path))
    if not explicit and not recognised(directory):
        return wrapped(**given)
    allow_pickle = explicit and reader.allow_pickle
    if plans_alone(given["planner"]):
        load_into(
            given["state_dict"], directory, given["planner"], group=given["process_group"], alone=bool(given["no_dist"]),
            allow_pickle=allow_pickle,
        )  # fmt: skip
        return None
    return wrapped(**{**given, "storage_reader": UnickptReader(directory, allow_pickle=allow_pickle)})


def metadata(wrapped: Callable[..., Any], reader: Any, args: Any, kwargs: Any) -> Any:
    """Return what torch's reader says of a folder: of a checkpoint of unickpt by its manifest."""
    if kwargs.get("rank") is not None or not recognised(absolute(os.fspath(reader.path))):
        return wrapped(*args, **kwargs)
    found = UnickptReader(reader.path).read_metadata()
    found.storage_meta = StorageMeta(reader.path, load_id=getattr(reader, "load_id", None))
    found.storage_data = {}  # by which ``read_data`` knows that there are no files of torch
    return found


def read_data(wrapped: Callable[..., Any], reader: Any, given: Mapping[str, Any]) -> Any:
    """Read what torch's reader is asked for after ``metadata``."""
    if not recognised(absolute(os.fspath(reader.path))):
        return wrapped(**given)
    return UnickptReader(reader.path).read_data(given["plan"], given["planner"])
