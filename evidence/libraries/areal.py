"""AReaL: ``MegatronCheckpointManager``, which describes the optimizer without metadata, and the load as it describes the save.

python -m evidence.libraries.areal [--page docs/evidence/libraries.md]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evidence.libraries import trials
from evidence.libraries.trials import Task, Trial

if TYPE_CHECKING:
    from megatron_unickpt.testing.jobs import Job

TP2, PP2, DP2 = "gpt-tp2-dist", "gpt-pp2-dist", "gpt-dp2-dist"


def _manager(jobs: dict[str, Job]) -> Any:
    """Return AReaL's manager as ``areal/engine/megatron_engine.py`` makes it."""
    trials.stand_in("areal", "areal.infra")  # they import launchers and servers
    import areal.utils

    assert areal
    trials.stand_in("areal.utils.stats_tracker")  # it imports Numba; used by asynchronous saves alone
    from areal.engine.megatron_utils.checkpointer import MegatronCheckpointManager

    (job,) = jobs.values()
    return MegatronCheckpointManager(job.chunks, job.optimizer, None)


def _folder(task: Task) -> str:
    """Return the folder of ``areal/utils/saver.py``, which makes it."""
    folder = Path(task.folder) / "default" / "epoch0epochstep2globalstep3"
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder)


def save(jobs: dict[str, Job], task: Task) -> None:
    _manager(jobs).save_checkpoint(_folder(task))


def load(jobs: dict[str, Job], task: Task) -> None:
    _manager(jobs).load_checkpoint(_folder(task))


TEXT = """`areal/engine/megatron_utils/checkpointer.py` passes no metadata, at the save and at the load. Megatron-core 0.16.1
itself refuses this form of the optimizer. AReaL asks for 0.17.0, which needs Python 3.12.

Empty modules stood in for `areal`, `areal.infra` and `areal.utils.stats_tracker`, whose names the checkpoint code does not use.

Not tested: `async_save`, which passes an argument that Megatron-core 0.16.1 does not have, a learning rate scheduler, FSDP."""

REFUSED = "flattened_range is not supported"  # of Megatron-core 0.16.1, for optimizers that are described without metadata
TRIALS = (
    Trial(TP2, TP2, switch="", expected=REFUSED),
    Trial(TP2, TP2, switch="off", expected=REFUSED),
    *(Trial(TP2, target) for target in (TP2, PP2, DP2)),
    Trial(PP2, TP2),
)

if __name__ == "__main__":
    tasks = trials.tasks_of(sys.argv)
    if tasks:
        from evidence.libraries import megatron_job

        megatron_job.run_all(tasks, save, load)
    sys.exit(trials.main("areal", "AReaL 1.0.4", TRIALS, TEXT, together=True))
