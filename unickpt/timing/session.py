"""Timing of one process, switched on: the ring, the hooks, and what the adapter tells.

One per process. Whatever goes wrong while it begins is a warning, and training runs without it.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from unickpt.agent import starting
from unickpt.timing import collectives, stacks
from unickpt.timing.folder import SHARED_MEMORY, remove_old, shared_folder
from unickpt.timing.moments import Moments
from unickpt.timing.options import TimingOptions
from unickpt.timing.recorder import Recorder
from unickpt.timing.records import Phase
from unickpt.timing.ring import SUFFIX, Identity, RingWriter

logger = logging.getLogger("unickpt")

_KEPT_S = 7 * 24 * 3600.0
_UNNAMED = {"undefined": "", "default_pg": "default"}  # torch's names for groups that nobody has named
Labels = Callable[[], Mapping[str, Sequence[Any]]]  # the framework's name of a kind of group -> its process groups


class Session:
    """Timing of this process.

    Attributes:
        folder: where the job's rings are, on this host.
        moments: for the adapter to tell of steps and phases.
    """

    def __init__(self, options: TimingOptions, labels: Labels) -> None:
        self._labels = labels
        rank, world = dist.get_rank(), dist.get_world_size()
        job = job_name()
        first = os.environ.get("LOCAL_RANK", "0") == "0"
        if first:
            remove_old(SHARED_MEMORY, older_than_s=_KEPT_S)
        named = Path(options.folder).absolute() if options.folder else None  # the agent has another working directory
        self.folder = named or shared_folder(SHARED_MEMORY, job, _store())
        ring = RingWriter(self.folder / f"{rank:05d}{SUFFIX}", Identity.here(rank, world, job), capacity=options.records)
        self._recorder = Recorder(ring, self._described)
        self.moments = Moments(self._recorder)
        collectives.install(self._recorder)
        self.moments.install()
        self._stacks = stacks.listen(stacks.path_of(self.folder, rank))
        self._agent = (
            starting.start(
                self.folder, rank, _store(), metrics_port=options.metrics_port, metrics_address=options.metrics_address
            )
            if options.watch and first
            else None
        )

    def _described(self, group: Any) -> dict[str, Any]:
        named = [label for label, groups in self._labels().items() if any(group is known for known in groups)]
        return {
            "ranks": dist.get_process_group_ranks(group),
            "label": named[0] if named else _UNNAMED.get(group.group_desc, group.group_desc),
            "backend": group.name(),
        }

    def close(self) -> None:
        """Stop; the ring stays where it is."""
        self.moments.uninstall()
        collectives.uninstall()
        self._recorder.close()
        if self._stacks is not None:
            stacks.ignore()
            self._stacks.close()


_session: Session | None = None


def start(options: TimingOptions, labels: Labels) -> Session | None:
    """Begin to time, if it is asked for and has not begun. Never raises."""
    global _session
    if not options.enabled or _session is not None:
        return _session
    try:
        _session = Session(options, labels)
    except Exception as err:
        logger.warning("unickpt: collectives are not timed, training is not affected (%s: %s)", type(err).__name__, err)
        return None
    atexit.register(stop)
    os.register_at_fork(after_in_child=_forget)
    if dist.get_rank() == 0:
        logger.info("unickpt: collectives are timed; rings in %s", _session.folder)
    return _session


def stop() -> None:
    """End it, in order."""
    global _session
    session, _session = _session, None
    if session is not None:
        atexit.unregister(stop)
        session.close()


def _forget() -> None:
    """In a child that was forked: the ring is the parent's."""
    global _session
    session, _session = _session, None
    if session is not None:
        session.moments.uninstall()
        collectives.uninstall()


def stepped(number: int) -> None:
    """Training has made its step ``number``."""
    if _session is not None:
        _session.moments.step(number)


@contextlib.contextmanager
def in_phase(phase: Phase) -> Iterator[None]:
    """Training is in another phase while this goes on."""
    moments = None if _session is None else _session.moments
    if moments is None:
        yield
        return
    before = moments.phase(phase)
    try:
        yield
    finally:
        moments.phase(Phase(before))


def _store() -> Any:
    """The job's key-value store, which made its process groups."""
    store: Any = dist.distributed_c10d._get_default_store()
    return store


def job_name() -> str:
    """The same on all ranks of a job, and another one for the next: the launcher's run, or the master's address and port."""
    parts = [os.environ.get("TORCHELASTIC_RUN_ID", ""), os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")]
    text = "-".join(part for part in parts if part and part != "none")
    return re.sub(r"[^A-Za-z0-9._-]", "_", text) or "job"
