"""``dist_checkpointing.save`` and ``load`` and their siblings, on unickpt directories.

Same arguments and results as megatron-core's own functions (``dist_checkpointing/serialization.py``,
0.12 to 0.16 and the development branch), which the hooks send here when the strategy or the
directory is unickpt's. Also usable by themselves: nothing here needs Megatron's global arguments.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing import validation
from megatron.core.dist_checkpointing.dict_utils import merge
from megatron.core.dist_checkpointing.mapping import (
    CheckpointingException,
    ShardedObject,
    ShardedTensor,
    apply_factory_merges,
)
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.utils import extract_sharded_base

from megatron_unickpt import capture, internals, mapping, restore
from megatron_unickpt.optimizer import METADATA, OptimizerPart
from unickpt import saving
from unickpt.coordination import Rendezvous
from unickpt.dtypes import torch_dtype
from unickpt.errors import CoordinationError, UnickptError
from unickpt.loading import Checkpoint, is_checkpoint
from unickpt.report import LoadReport
from unickpt.saving import Contribution, SaveResult, Shard

logger = logging.getLogger("unickpt")

BACKEND, VERSION = "unickpt", 1
CONTENT_METADATA = "content_metadata"  # key in Megatron's common state dict
CONFIG_FILE = "metadata.json"  # by which Megatron knows that a directory is a distributed checkpoint

_meeting: tuple[Any, Rendezvous] | None = None
last_save: SaveResult | None = None
last_report: LoadReport | None = None


class MegatronCheckpointError(CheckpointingException, UnickptError):  # type: ignore[misc]
    """An error of unickpt that is one of Megatron's too."""


class SaveFailedError(MegatronCheckpointError):
    """A checkpoint was not saved; every rank raises it, and nothing that was saved before is touched."""


@contextmanager
def _in_megatrons_terms() -> Iterator[None]:
    try:
        yield
    except UnickptError as err:
        if isinstance(err, CheckpointingException):
            raise
        raise MegatronCheckpointError(f"{type(err).__name__}: {err}") from err


def rendezvous(*, timeout_s: float = 1800.0) -> Rendezvous:
    """The message exchange of the job's ranks; anew if the default process group is another one."""
    global _meeting
    world = torch.distributed.get_world_size()
    store = internals.default_store() if world > 1 else None
    if _meeting is None or _meeting[0] is not store or _meeting[1].world != world:
        meet = Rendezvous(store, rank=torch.distributed.get_rank(), world=world, prefix="unickpt/megatron", timeout_s=timeout_s)
        _meeting = (store, meet)
    return _meeting[1]


def recognises(checkpoint_dir: str | Path | None) -> bool:
    """Whether a directory holds a unickpt checkpoint."""
    return checkpoint_dir is not None and is_checkpoint(str(checkpoint_dir))


def make_visible() -> None:
    """Give our logger a handler if the user has configured none: a report that no one sees is none."""
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(asctime)s] %(message)s"))
        logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


# ---------------------------------------------------------------- saving


def save(
    sharded_state_dict: dict[str, Any],
    checkpoint_dir: str | Path,
    *,
    content_metadata: dict[str, Any] | None = None,
    asynchronous: bool = False,
    share: bool = True,
) -> Any:
    """Save a sharded state dict. All ranks call it.

    Args:
        sharded_state_dict: as for ``dist_checkpointing.save``. Not changed.
        checkpoint_dir: the checkpoint; made if it is not there.
        content_metadata: kept with it, given back by ``load_content_metadata``.
        asynchronous: copy this rank's part and return; the rest goes on behind training.
        share: spread weights that data parallel ranks hold alike over all of them.

    Returns:
        None, or with ``asynchronous`` Megatron's ``AsyncRequest``.

    Raises:
        SaveFailedError: on every rank, if any rank could not write. Nothing is left behind.
    """
    make_visible()
    directory = os.path.abspath(str(checkpoint_dir))
    common = mapping.common(sharded_state_dict)
    if content_metadata is not None:
        common[CONTENT_METADATA] = {k: v for k, v in content_metadata.items() if k != "dp_cp_group"}
    meet = rendezvous().apart(f"save/{directory}")  # an earlier save may still be going on in its thread
    if not asynchronous:
        pending = PendingSave(directory, lambda: capture.contribution(sharded_state_dict, common, share=share), meet)
        pending.run()
        pending.conclude()
        return None
    begin = time.monotonic()
    part, failure = None, None
    try:
        part = _staged(capture.contribution(sharded_state_dict, common, share=share))
    except Exception as err:  # told to all ranks by the background part
        failure = err
    stall = time.monotonic() - begin
    pending = PendingSave(directory, lambda: _given(part, failure), meet, stall_s=stall)
    pending.start()
    return AsyncRequest(Background(pending), (), _Finalizers(pending))


def _given(part: Contribution | None, failure: Exception | None) -> Contribution:
    if failure is not None:
        raise failure
    assert part is not None
    return part


def _staged(part: Contribution) -> Contribution:
    """A contribution whose data no longer change with training."""
    part.shards = [Shard(s.tensor, s.box, s.data.detach().to("cpu", copy=True)) for s in part.shards]
    return part


class PendingSave:
    """One save of this rank, run here or in a thread. Attributes: ``result`` once it is done."""

    def __init__(
        self, directory: str, contribute: Callable[[], Contribution], meet: Rendezvous, *, stall_s: float | None = None
    ) -> None:
        self.directory, self.meet, self.stall_s = directory, meet, stall_s
        self.result: SaveResult | None = None
        self.error: Exception | None = None
        self._contribute = contribute
        self._thread: threading.Thread | None = None
        self._concluded = False

    def run(self) -> None:
        """Write, agree, commit. Never raises: ``conclude`` does."""
        try:
            self.result = saving.save(
                lambda _: self._contribute(),
                save_dir=os.path.dirname(self.directory),
                tag=os.path.basename(self.directory),
                save_latest=False,
                meet=self.meet,
            )
            if self.result.committed and self.meet.rank == 0:
                mark(self.directory)
        except Exception as err:
            self.error = err
        self._contribute = _nothing

    def start(self) -> None:
        """Run in a thread."""
        self._thread = threading.Thread(target=self.run, name="unickpt-save", daemon=False)
        self._thread.start()

    @property
    def done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    @property
    def committed(self) -> bool:
        return self.result is not None and self.result.committed

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def conclude(self) -> None:
        """Wait, and say how it went, once.

        Raises:
            SaveFailedError: there is no checkpoint.
        """
        global last_save
        self.wait()
        if self._concluded:
            return
        self._concluded = True
        last_save = self.result
        if self.committed:
            assert self.result is not None
            if self.meet.rank == 0:
                stall = "" if self.stall_s is None else f", training stood still for {self.stall_s:.2f} s"
                logger.info(
                    "unickpt: saved %s: %s bytes in %.2f s%s",
                    self.directory, f"{self.result.size_bytes:,}", self.result.seconds, stall,
                )  # fmt: skip
            return
        raise SaveFailedError(
            f"{self.directory} is NOT saved and its files are removed ({self._cause()}). Checkpoints saved before are intact."
        )

    def _cause(self) -> str:
        if self.error is not None:
            return f"{type(self.error).__name__}: {self.error}"
        assert self.result is not None
        if self.result.unsupported:
            return f"not supported: {self.result.unsupported}"
        return "; ".join(f"rank {rank}: {reason}" for rank, reason in sorted(self.result.failures.items())[:8])


def _nothing() -> Contribution:
    raise AssertionError("a save runs once")


def mark(directory: str) -> None:
    """Megatron's own mark of a distributed checkpoint, so that its tools know whose it is. The manifest is what counts."""
    if os.path.isfile(os.path.join(directory, CONFIG_FILE)):
        return
    text = json.dumps(
        {
            "sharded_backend": BACKEND, "sharded_backend_version": VERSION,
            "common_backend": BACKEND, "common_backend_version": VERSION,
        }
    )  # fmt: skip
    temporary = os.path.join(directory, f".{CONFIG_FILE}.tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, os.path.join(directory, CONFIG_FILE))


class Background:
    """Stands as ``async_fn`` of an ``AsyncRequest`` whose work already goes on in a thread of this process."""

    def __init__(self, pending: PendingSave) -> None:
        self.pending = pending
        self._process = os.getpid()

    def __call__(self) -> None:
        if os.getpid() == self._process:  # in a child that Megatron forked there is nothing to do
            self.pending.wait()

    def __reduce__(self) -> Any:
        return (_noop_factory, ())  # a worker process that Megatron spawned has nothing to do either


def _noop_factory() -> Callable[[], None]:
    return _noop


def _noop() -> None:
    return None


class _Finalizers(list[Callable[[], Any]]):
    """Megatron's finalize functions; those added behind ours run only if there is a checkpoint."""

    def __init__(self, pending: PendingSave) -> None:
        super().__init__([self._conclude])
        self._pending = pending

    def _conclude(self) -> None:
        try:
            self._pending.conclude()
        except SaveFailedError as err:
            if self._pending.meet.rank == 0:
                logger.warning("unickpt: %s Training goes on; the next save tries again.", err)

    def append(self, function: Callable[[], Any]) -> None:
        super().append(lambda: function() if self._pending.committed else None)


# ---------------------------------------------------------------- loading


def load(
    sharded_state_dict: dict[str, Any],
    checkpoint_dir: str | Path,
    *,
    validate_access_integrity: bool = True,
    strict: Any = validation.StrictHandling.ASSUME_OK_UNEXPECTED,
    allow_pickle: bool = False,
    verify: bool = True,
) -> Any:
    """Load into a sharded state dict, written under any parallel shape and optimizer.

    Args:
        sharded_state_dict: what this rank wants; tensors that it brings are filled in place.
        checkpoint_dir: of a unickpt checkpoint.
        validate_access_integrity: all ranks call this together; they then agree on failure, and on what
            nobody asked for. (Megatron's check that shards do not overlap is made when saving.)
        strict: Megatron's ``StrictHandling`` or its value.
        allow_pickle: unpickle what the checkpoint holds as opaque blobs. Only for one you wrote yourself.
        verify: check every fragment that is read against its checksum.

    Returns:
        The state dict; with ``return_all`` and ``return_unexpected`` also missing and unexpected keys.

    Raises:
        MegatronCheckpointError: the checkpoint is damaged or does not fit; which tensor, what was found.
    """
    make_visible()
    begin = time.monotonic()
    _dequantize(sharded_state_dict)
    wanted, local, factories = load_preprocess(sharded_state_dict)
    parts = [leaf for leaf in mapping.walk(local) if isinstance(leaf, OptimizerPart)]
    wanted, _ = extract_sharded_base(wanted)
    missing: set[str] = set()
    unexpected: set[str] = set()
    failure: Exception | None = None
    work: restore.Restore | None = None
    state: Any = None
    handling = validation.parse_strict_flag(strict)
    with _in_megatrons_terms():
        checkpoint = _open_together(checkpoint_dir, validate_access_integrity)
        try:
            if handling != validation.StrictHandling.ASSUME_OK_UNEXPECTED:  # may raise on some ranks only
                wanted, missing, unexpected = _strictly(checkpoint, wanted, handling, validate_access_integrity)
            work = restore.Restore(checkpoint, verify=verify, allow_pickle=allow_pickle)
            state = _fill(work, wanted, parts)
        except Exception as err:
            failure = err
        if validate_access_integrity:
            _agree(checkpoint, failure)
        if failure is not None:
            raise failure
        assert work is not None
        _account(work, wanted, validate_access_integrity, time.monotonic() - begin)
    merge(state, local)
    state = apply_factory_merges(state, factories)
    if validation.StrictHandling.requires_returning_mismatch_keys(handling):
        return state, missing, unexpected
    return state


def load_sharded(wanted: Any, checkpoint_dir: str | Path) -> Any:
    """Fill a tree of sharded tensors and objects, without any communication: what a load strategy does."""
    with _in_megatrons_terms():
        work = restore.Restore(Checkpoint.open(str(checkpoint_dir)))
        return _fill_sharded(work, wanted)


def _dequantize(state: Any) -> None:
    for leaf in mapping.walk(state):
        if isinstance(leaf, ShardedTensor) and leaf.data is not None:
            leaf.data = internals.dequantized(leaf.data)


def _open_together(checkpoint_dir: str | Path, together: bool) -> Checkpoint:
    """Open on every rank; if one cannot, none goes on."""
    checkpoint, failure = None, None
    try:
        checkpoint = Checkpoint.open(str(checkpoint_dir))
    except Exception as err:
        failure = err
    if together:
        meet = rendezvous()
        meet.begin(f"load/{checkpoint_dir}")
        reasons = meet.agree("open", None if failure is None else f"{type(failure).__name__}: {failure}")
        if reasons and failure is None:
            rank, reason = min(reasons.items())
            failure = MegatronCheckpointError(f"{checkpoint_dir}: rank {rank} could not open it: {reason}")
    if failure is not None:
        raise failure
    assert checkpoint is not None
    return checkpoint


def _agree(checkpoint: Checkpoint, failure: Exception | None) -> None:
    reasons = rendezvous().agree("read", None if failure is None else f"{type(failure).__name__}: {failure}")
    if reasons and failure is None:
        rank, reason = min(reasons.items())
        raise MegatronCheckpointError(f"{checkpoint.storage.root}: rank {rank} could not load it: {reason}")


def _fill(work: restore.Restore, wanted: Any, parts: list[OptimizerPart]) -> Any:
    """The state dict that Megatron expects: common state, with tensors and objects in their places."""
    state = work.common()
    merge(state, _fill_sharded(work, wanted))
    work.optimizers(parts)
    return state


def _fill_sharded(work: restore.Restore, wanted: Any) -> Any:
    leaves = list(mapping.walk(wanted))
    values = work.objects(leaf for leaf in leaves if isinstance(leaf, ShardedObject))
    work.tensors([leaf for leaf in leaves if isinstance(leaf, ShardedTensor)])
    return _mapped(wanted, lambda item: values[item.unique_key] if isinstance(item, ShardedObject) else item.data)


def _mapped(tree: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(tree, dict):
        return {key: _mapped(value, function) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_mapped(value, function) for value in tree]
    return function(tree)


def _strictly(checkpoint: Checkpoint, wanted: Any, handling: Any, together: bool) -> tuple[Any, set[str], set[str]]:
    """Megatron's own handling of keys that only one side has, on keys that mean the same here and there."""
    local, everyone = None, None
    if together or validation.StrictHandling.requires_global_app_metadata(handling):
        local, everyone = validation.determine_global_metadata(wanted)
    requested = {item.key for rank in everyone for item in rank} if everyone else {i.key for i in mapping.walk(wanted)}
    known = {item.key: item for item in _sharded_metadata(checkpoint).values()}
    for key in requested - known.keys():
        name, state = mapping.tensor_of(key)
        info = restore.source_of(checkpoint, name, state)
        if info is not None:  # the same value under another key
            known[key] = _without_data(key, info)
            known.pop(mapping.key_of(*info.key), None) if mapping.key_of(*info.key) not in requested else None
    for key in list(known):
        name, state = mapping.tensor_of(key)
        twin = mapping.WEIGHT if state == mapping.MASTER else mapping.MASTER
        if state in (mapping.WEIGHT, mapping.MASTER) and key not in requested and mapping.key_of(name, twin) in requested:
            known.pop(key)
    result: tuple[Any, set[str], set[str]] = validation.validate_integrity_and_strict_load(
        wanted, handling, False, local, everyone, known
    )
    return result


def _account(work: restore.Restore, wanted: Any, together: bool, seconds: float) -> None:
    """What no rank asked for goes into the report; the first rank prints it."""
    global last_report
    checkpoint, report = work.checkpoint, work.report
    report.target = capture.describe(internals.topology())
    report.seconds = seconds
    used = set()
    for leaf in mapping.walk(wanted):
        if isinstance(leaf, ShardedTensor):
            info = restore.source_of(checkpoint, *mapping.tensor_of(leaf.key))
            if info is not None:
                used.add(checkpoint.ids[info.key])
    if together:
        meet = rendezvous()
        mask = sum(1 << position for position in used)
        masks = meet.gather("requested", {"tensors": f"{mask:x}"})
        if masks is not None:
            everything = 0
            for message in masks:
                everything |= int(message["tensors"], 16)
            used = {position for position in range(len(checkpoint.index.tensors)) if everything >> position & 1}
        if meet.rank == 0:
            for info in restore.unloaded(checkpoint, used):
                report.add(info.name, info.state, "left out", "no rank of this job asked for it")
            for line in report.lines():
                logger.info("unickpt: %s", line)
    last_report = report


# ---------------------------------------------------------------- looking at a checkpoint


def load_common_state_dict(checkpoint_dir: str | Path) -> Any:
    """Megatron's common state dict, without tensors. Needs no process group."""
    with _in_megatrons_terms():
        work = restore.Restore(Checkpoint.open(str(checkpoint_dir)))
        state = work.common()
    if isinstance(state, dict):
        if work.checkpoint.manifest.optimizer is not None:  # optimizers have described themselves our way
            state[CONTENT_METADATA] = {**(state.get(CONTENT_METADATA) or {}), **METADATA}
        state.setdefault("optimizer", {})  # 0.12 looks into it
    return state


def _without_data(key: str, info: Any) -> ShardedTensor:
    shape = tuple(info.shape)
    return ShardedTensor(key, None, torch_dtype(info.dtype), shape, shape, (0,) * len(shape), (1,) * len(shape))


def _tensors_metadata(checkpoint: Checkpoint) -> dict[str, ShardedTensor]:
    found = {}
    for info in restore.stored_tensors(checkpoint):
        key = mapping.key_of(info.name, info.state)
        found[key] = _without_data(key, info)
    return found


def _sharded_metadata(checkpoint: Checkpoint) -> dict[str, Any]:
    found: dict[str, Any] = dict(_tensors_metadata(checkpoint))
    for key in checkpoint.shared_names():
        item = ShardedObject.empty_from_unique_key(key)
        found[item.unique_key] = item
    return found


def load_tensors_metadata(checkpoint_dir: str | Path) -> dict[str, ShardedTensor]:
    """key -> ``ShardedTensor`` without data: every tensor's global shape and dtype."""
    with _in_megatrons_terms():
        return _tensors_metadata(Checkpoint.open(str(checkpoint_dir)))


def load_sharded_metadata(checkpoint_dir: str | Path) -> dict[str, Any]:
    """As ``load_tensors_metadata``, and the sharded objects."""
    with _in_megatrons_terms():
        return _sharded_metadata(Checkpoint.open(str(checkpoint_dir)))


def remove_sharded_tensors(checkpoint_dir: str | Path, key_prefix: str) -> None:
    """Remove all tensors whose key begins with a prefix: from the index, at once or not at all.

    The bytes stay in the data files until the checkpoint is deleted; Megatron calls this on one rank.
    """
    from unickpt.editing import remove_tensors

    with _in_megatrons_terms():
        names = remove_tensors(str(checkpoint_dir), lambda name, state: mapping.key_of(name, state).startswith(key_prefix))
    logger.info("unickpt: removed %d tensors of %s* from %s", len(names), key_prefix, checkpoint_dir)


__all__ = [
    "CoordinationError", "MegatronCheckpointError", "SaveFailedError", "load",
    "load_common_state_dict", "load_sharded_metadata", "load_tensors_metadata", "recognises", "remove_sharded_tensors", "save",
]  # fmt: skip
