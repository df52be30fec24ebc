"""``dist_checkpointing.save`` as unickpt: synchronous, or in a thread behind training.

Same arguments and results as megatron-core's own function (``dist_checkpointing/serialization.py``,
0.12 to 0.16 and the development branch), which the hooks send here when the strategy is ours. Also
usable by itself: nothing here needs Megatron's global arguments.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

from megatron_unickpt import capture, internals, job, mapping
from megatron_unickpt.job import CONTENT_METADATA, SaveFailedError
from unickpt.contribution import Contribution
from unickpt.coordination import Message
from unickpt.logs import make_visible
from unickpt.saves import PendingSave, Request, SaveResult
from unickpt.storage import absolute, split

logger = logging.getLogger("unickpt")

last_save: SaveResult | None = None
begun = 0  # calls of ``save`` in this process


def save(
    sharded_state_dict: dict[str, Any],
    checkpoint_dir: str | Path,
    *,
    content_metadata: dict[str, Any] | None = None,
    asynchronous: bool = False,
    share: bool = True,
    validate_access_integrity: bool = True,
    preprocess_common: Callable[[Any], Any] | None = None,
) -> Any:
    """Save a sharded state dict. All ranks call it.

    Args:
        sharded_state_dict: as for ``dist_checkpointing.save``. Not changed.
        checkpoint_dir: the checkpoint, a path or a URL; made if it is not there.
        content_metadata: kept with it, given back by ``load_content_metadata``.
        asynchronous: copy this rank's part and return; the rest goes on behind training.
        share: spread weights that data parallel ranks hold alike over all of them.
        validate_access_integrity: compare the ranks' common state, and warn where it differs: rank 0's
            is kept. (That shards cover every tensor once is checked always.)
        preprocess_common: takes out of it what may differ.

    Returns:
        None, or with ``asynchronous`` Megatron's ``AsyncRequest``.

    Raises:
        SaveFailedError: on every rank, if any rank could not describe or write its part. Nothing is left behind.
    """
    global begun
    begun += 1
    make_visible()
    directory = absolute(str(checkpoint_dir))
    save_dir, tag = split(directory)
    compared: list[Any] = []

    def contribute(_: Message) -> Contribution:
        common = mapping.common(sharded_state_dict)
        if content_metadata is not None:
            common[CONTENT_METADATA] = {k: v for k, v in content_metadata.items() if k != "dp_cp_group"}
        compared.append(preprocess_common(common) if preprocess_common is not None else common)
        return capture.contribution(sharded_state_dict, common, share=share)

    request = Request(
        contribute,
        save_dir=save_dir,
        tag=tag,
        on_commit=_on_commit(),
        on_end=_ended,
        framework_stands_in=_in_the_scripts(),
    )
    pending = _begun(request, asynchronous=asynchronous)
    if not pending.pending.agreed:
        pending.conclude()
    if validate_access_integrity:  # a collective: all ranks come here, or none does
        internals.compare_common_state(compared[0])
    if not asynchronous:
        pending.conclude()
        return None
    return AsyncRequest(Background(pending), (), _Finalizers(pending))


def refuse(err: Exception) -> SaveFailedError:
    """Take part in the save that the other ranks have begun, although this rank has failed before it could begin one.

    Returns:
        What all ranks raise.
    """
    request = Request(_nothing, save_dir="", tag="", failed=err)
    pending = _begun(request, asynchronous=False)
    return SaveFailedError(f"no checkpoint is saved ({pending.pending.cause()})", framework_saves=True)


def _nothing(_: Message) -> Contribution:
    raise AssertionError("a rank that has failed is not asked for its part")


def _begun(request: Request, *, asynchronous: bool) -> MegatronSave:
    meet = job.rendezvous().apart("save")  # an earlier save may still be going on
    with job.in_megatrons_terms():
        return MegatronSave(job.saver().save(request, meet, asynchronous=asynchronous))


def _on_commit() -> Callable[[str], None]:
    """What follows on a commit, here and where a copy is uploaded to; the training scripts have a tracker file."""
    tracked = _in_the_scripts()

    def follow(directory: str) -> None:
        job.mark(directory)
        if tracked:
            sys.modules["megatron_unickpt.training"].track(directory)

    return follow


def _in_the_scripts() -> bool:
    """Whether the training scripts make this save, which can make it in Megatron's own format as well."""
    scripts = sys.modules.get("megatron_unickpt.training")
    return scripts is not None and bool(scripts.in_a_save())


def _ended(save: PendingSave) -> None:
    global last_save
    last_save = result = save.result
    if result is not None and result.shortfall and save.rank == 0:
        logger.error("unickpt: %s", result.shortfall)
    elif result is not None and result.committed and save.rank == 0:
        logger.info(
            "unickpt: saved %s: %s bytes in %.2f s, training stood still for %.2f s",
            save.directory, f"{result.size_bytes:,}", result.seconds, result.stall_s,
        )  # fmt: skip


class MegatronSave:
    """One save of this rank, which may still be going on. Call ``conclude`` on every rank."""

    def __init__(self, pending: PendingSave) -> None:
        self.pending = pending

    @property
    def done(self) -> bool:
        return self.pending.done

    @property
    def committed(self) -> bool:
        return self.pending.committed

    def wait(self) -> None:
        self.pending.wait()

    def conclude(self) -> None:
        """Wait, and say how it went.

        Raises:
            SaveFailedError: there is no checkpoint.
        """
        self.wait()
        if not self.committed:
            result = self.pending.result
            raise SaveFailedError(
                f"Gave up saving {self.pending.directory} ({self.pending.cause()}). "
                "No checkpoint was written; earlier checkpoints are intact.",
                directory=self.pending.directory,
                framework_saves=result is not None and result.framework_saves,
            )


class Background:
    """Stands as ``async_fn`` of an ``AsyncRequest`` whose work already goes on in a thread of this process."""

    def __init__(self, pending: MegatronSave) -> None:
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

    def __init__(self, pending: MegatronSave) -> None:
        super().__init__([self._conclude])
        self._pending = pending

    def _conclude(self) -> None:
        try:
            self._pending.conclude()
        except SaveFailedError as err:
            if self._pending.pending.rank == 0:
                logger.error("unickpt: %s Training goes on; the next save is synchronous.", err)

    def append(self, function: Callable[[], Any]) -> None:
        super().append(lambda: function() if self._pending.committed else None)
