"""``Preemption``: a training that is told to end saves on all ranks at one step boundary, and ends with one exit code."""

from __future__ import annotations

import os
from functools import partial
from typing import NoReturn

from unickpt.base.errors import ConfigError
from unickpt.base.logs import make_visible
from unickpt.base.round_folder import ends_of_job, folder_of_round, read_stopping
from unickpt.checkpoint.save import shutdown
from unickpt.checkpoint.stopping.together import Job, StopTogether


class Preemption:
    """Lets a training that gets SIGTERM save on all ranks at the same step boundary. Every rank makes one before its loop.

    It is enough that one rank of the job gets the signal: the others learn of it in a second, over the key-value store of the
    process groups. While nobody has, a call of ``due`` costs about a microsecond, and no collective.

    Example:
        ```python
        preemption = unickpt.Preemption()
        for step in range(start.step, steps):
            ...
            if preemption.due(step + 1):
                unickpt.save_training(model, optimizer, f"out/step{step + 1}", step=step + 1)
                preemption.leave()
        ```

    Args:
        grace_seconds: time from the signal to the step boundary. If a rank does not come there in time, or has ended, no rank
            saves: each ends by SIGTERM with a warning, and the next start resumes from the newest complete checkpoint.

    Raises:
        ConfigError: the time is not positive, or this is not the main thread, where Python handles signals.
    """

    def __init__(self, *, grace_seconds: float = 25.0) -> None:
        make_visible()
        if not grace_seconds > 0:
            raise ConfigError(f"grace_seconds={grace_seconds!r}: expected a positive number of seconds")
        self._together = StopTogether(_job, grace_seconds)
        if not shutdown.take_over(self._together.signal):
            raise ConfigError("Preemption() handles signals: make it in the main thread")

    def due(self, step: int) -> bool:
        """Return whether this rank saves now, and ends. It is True on all ranks at the same boundary.

        Args:
            step: optimizer steps done. The same on all ranks.

        Returns:
            True at the common boundary, and from then on.
        """
        return self._together.due(step)

    def tell(self) -> None:
        """Tell all ranks to end, as SIGTERM does, for instance because the job has little time left. One rank is enough."""
        self._together.signalled.set()

    def leave_at_exit(self) -> None:
        """As ``leave``, when this process exits by itself, whatever its exit code then is: it ends by SIGTERM."""
        self._together.leave_at_exit()

    def leave(self) -> NoReturn:
        """Finish all saves, write the newest checkpoint in memory to disk, wait for the other ranks, and end this process.

        Raises:
            SystemExit: always, with exit code 143 (128 + SIGTERM).
        """
        self._together.leave()


def _job() -> Job | None:
    """Return the job of this process; None while its process groups do not exist."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return None if int(os.environ.get("WORLD_SIZE", "1") or 1) > 1 else Job()
    rank, world, folder = dist.get_rank(), dist.get_world_size(), folder_of_round()
    if world == 1:
        return Job(folder=folder)
    store = dist.distributed_c10d._get_default_store()
    number = store.add(f"unickpt/stopping/calls/{rank}", 1)
    own = store.clone() if hasattr(store, "clone") else store
    return Job(
        rank, world, own, f"unickpt/stopping/{number}", ends_of_job(rank, world),
        str if folder is None else partial(read_stopping, folder), folder,
    )  # fmt: skip
