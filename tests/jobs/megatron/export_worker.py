"""Under torchrun: jobs saved by the adapter, and what ``unickpt export --to torch-dist`` made of them loaded by Megatron alone.

export_worker save DIR LAYOUT...               DIR/<layout>/iter_0000002; what the job holds: DIR/<layout>.truth
export_worker load DIR SOURCE TARGET NAME ...  DIR/<name> by dist_checkpointing, and DIR/<source> by the adapter, into a job of
                                               the layout TARGET each; DIR/<name>-<target>.json. UNICKPT_AUTOLOAD=0 is set
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_unickpt.testing.jobs import Job  # before anything of megatron

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state

from unickpt.base import autoload, hooks
from unickpt.testing.launch import leave
from megatron_unickpt.testing.layouts import Layout
from megatron_unickpt.testing.truth import Truth, close, consolidated
from tests.jobs.megatron.compared import differences

STEPS_BEFORE, STEPS_AFTER = 2, 2
ITERATION = f"iter_{STEPS_BEFORE:07d}"
LR = 1e-2


@dataclass(frozen=True)
class Loaded:
    """Return the state of a job after a load (on rank 0), and facts about it."""

    state: Truth | None
    facts: dict[str, Any]


def save(folder: Path, layout: Layout) -> None:
    import megatron_unickpt

    job = Job(layout, seed=1, tied=not layout.moe)
    job.train(STEPS_BEFORE)
    for group in job.optimizer.param_groups:  # differs from the initial values
        group["lr"] = LR / 2
    megatron_unickpt.save(folder / layout.name / ITERATION, job.chunks, job.optimizer, iteration=job.step)
    truth = consolidated(job, folder / "scratch")
    if dist.get_rank() == 0:
        torch.save(truth, folder / f"{layout.name}.truth")


def made(name: str, seed: int) -> Job:
    """Build a job of a layout. ``llama:gpt-tp2-dist`` has the model of a transformers job."""
    family, _, layout = name.rpartition(":")
    if not family:
        parsed = Layout.parse(layout)
        return Job(parsed, seed=seed, tied=not parsed.moe)
    from tests.jobs.journeys.megatron_job import FamilyJob

    return FamilyJob(layout, family, seed=seed)


def native(job: Job, folder: Path) -> None:
    """Load ``torch_dist`` as Megatron's scripts do (training/checkpointing.py, ``load_checkpoint``)."""
    metadata = dist_checkpointing.load_content_metadata(
        preloaded_state_dict=dist_checkpointing.load_common_state_dict(str(folder))
    )
    metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    modules = job.modules
    keys = ["model"] if len(modules) == 1 else [f"model{at}" for at in range(len(modules))]
    wanted: dict[str, Any] = {
        key: module.sharded_state_dict(metadata=metadata) for key, module in zip(keys, modules, strict=True)
    }
    wanted["optimizer"] = job.optimizer.sharded_state_dict(wanted, is_loading=True, metadata=metadata)
    found = dist_checkpointing.load(wanted, str(folder))
    for key, module in zip(keys, modules, strict=True):
        module.load_state_dict(found[key])
    job.optimizer.load_state_dict(found["optimizer"])
    job.step = found["iteration"]
    scheduler = getattr(job, "scheduler", None)
    if scheduler is not None:
        scheduler.override_opt_param_scheduler = True  # the option that goes with checkpoints of another framework
        scheduler.load_state_dict(found["opt_param_scheduler"])


def adapted(job: Job, folder: Path) -> None:
    """Save with unickpt."""
    import megatron_unickpt

    scheduler = getattr(job, "scheduler", None)
    job.step = megatron_unickpt.load(folder, job.chunks, job.optimizer, scheduler=scheduler)["iteration"]


def loaded(folder: Path, target: str, seed: int, how: Callable[[Job, Path], None], directory: Path) -> Loaded:
    job = made(target, seed)
    how(job, directory)
    state = consolidated(job, folder / "scratch")
    groups = sorted(job.hyperparameters(), key=lambda group: (group["is_expert_parallel"], group["wd_mult"]))
    scheduled = getattr(getattr(job, "scheduler", None), "num_steps", None)
    return Loaded(state, {"iteration": job.step, "scheduled": scheduled, "groups": groups, "losses": job.train(STEPS_AFTER)})


def source_of(folder: Path, name: str) -> Path:
    """Return the directory of ``save``, or of a DeepSpeed station (tests/jobs/journeys/station.py)."""
    own = folder / name / ITERATION
    return own if own.is_dir() else folder / name / "trained"


def load(folder: Path, asked: Sequence[tuple[str, str, str]]) -> None:
    """Load all with Megatron without hooks first, then with unickpt."""
    assert not hooks.status()
    alone = []
    for _, target, name in asked:
        (directory,) = (folder / name).glob("iter_*")
        alone.append(loaded(folder, target, 9, native, directory))
    assert not hooks.status()
    assert "megatron_unickpt.api" not in sys.modules
    autoload.watch(autoload.MEGATRON)
    assert hooks.status()
    for (source, target, name), found in zip(asked, alone, strict=True):
        expected = loaded(folder, target, 10, adapted, source_of(folder, source))
        if found.state is None or expected.state is None:
            continue
        truth = folder / f"{source}.truth"
        problems = differences(expected.state, found.state)
        problems += differences(torch.load(truth), found.state) if truth.exists() else []
        result = {"problems": problems, "compared": len(found.state), "native": found.facts, "adapted": expected.facts}
        (folder / f"{name}-{target}.json").write_text(json.dumps(result))


def main() -> None:
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    folder, names = Path(sys.argv[2]), sys.argv[3:]
    if sys.argv[1] == "save":
        for name in names:
            save(folder, Layout.parse(name))
    else:
        load(folder, list(zip(names[::3], names[1::3], names[2::3], strict=True)))
    dist.barrier()
    close()
    leave()


if __name__ == "__main__":
    main()
