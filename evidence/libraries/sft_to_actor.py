"""A run of Megatron-Bridge or ms-swift goes on as verl's actor under another layout, with its moments.

verl looks for three folders of one checkpoint. Links give these names to the one folder.

python -m evidence.libraries.sft_to_actor [--page docs/evidence/libraries.md]
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from evidence.libraries import trials, verl
from evidence.libraries.environments import python_of
from evidence.libraries.trials import Trial, Trials

if TYPE_CHECKING:
    from megatron_unickpt.testing.jobs import Job
    from megatron_unickpt.testing.layouts import Layout

TP2, PP2, DP2 = "gpt-tp2-dist", "gpt-pp2-dist", "gpt-dp2-dist"
SOURCES = {"megatron_bridge": "iter_0000003", "ms_swift": "checkpoint-3/iter_0000003"}
TEXT = """The setting names the library that saved. verl's `load_checkpoint(DIR)` reads `DIR/model/dist_ckpt`,
`DIR/optimizer/dist_ckpt` and `DIR/extra/dist_ckpt`. `ln -s` makes each of them a name of the folder that the other library has
saved."""


def _models(layout: Layout, seed: int) -> dict[str, Job]:
    from megatron_unickpt.testing.jobs import Job

    return {"actor": Job(layout, seed=seed)}


def _prepare(folder: Path, environments: Path) -> None:
    """Save with the other libraries, and give what they have saved the names that verl looks for."""
    for at, (library, checkpoint) in enumerate(SOURCES.items()):
        source, result = Trials(library, python_of(library, environments), folder / library).saved(Trial(TP2))
        if result.error:
            raise RuntimeError(f"{library}: {result.error}")
        place = folder / str(at)
        for part in ("model", "optimizer", "extra"):
            link = place / "ck" / f"global_step_{verl.STEP}" / "actor" / part / "dist_ckpt"
            link.parent.mkdir(parents=True)
            link.symlink_to(source / "ck" / checkpoint)
        shutil.copytree(source / "notes" / "model", place / "notes" / "actor")
        shutil.copy(source / f"save-{TP2}.json", place)


TRIALS = tuple(Trial(TP2, target, options=(library,)) for library in SOURCES for target in (PP2, DP2))

if __name__ == "__main__":
    tasks = trials.tasks_of(sys.argv)
    if tasks:
        from evidence.libraries import megatron_job

        megatron_job.run_all(tasks, verl.save, verl.load, make=_models)
    title = "From SFT to verl's actor"
    sys.exit(trials.main("sft_to_actor", title, TRIALS, TEXT, together=True, environment="verl", prepare=_prepare))
