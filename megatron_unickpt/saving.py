"""``dist_checkpointing.save`` as unickpt: here, or in a thread behind training.

Same arguments and results as megatron-core's own function (``dist_checkpointing/serialization.py``,
0.12 to 0.16 and the development branch), which the hooks send here when the strategy is ours. Also
usable by itself: nothing here needs Megatron's global arguments.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

from megatron_unickpt import capture, internals, job, mapping
from megatron_unickpt.job import CONTENT_METADATA, SaveFailedError
from unickpt import saving
from unickpt.coordination import Rendezvous
from unickpt.logs import make_visible
from unickpt.saving import Contribution, SaveResult, Shard

logger = logging.getLogger("unickpt")

last_save: SaveResult | None = None


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
        checkpoint_dir: the checkpoint; made if it is not there.
        content_metadata: kept with it, given back by ``load_content_metadata``.
        asynchronous: copy this rank's part and return; the rest goes on behind training.
        share: spread weights that data parallel ranks hold alike over all of them.
        validate_access_integrity: compare the ranks' common state, and warn where it differs: rank 0's
            is kept. (That shards cover every tensor once is checked always.)
        preprocess_common: takes out of it what may differ.

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
    if validate_access_integrity:
        internals.compare_common_state(preprocess_common(common) if preprocess_common is not None else common)
    meet = job.rendezvous().apart(f"save/{directory}")  # an earlier save may still be going on in its thread
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
                on_commit=lambda: job.mark(self.directory),
            )
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
