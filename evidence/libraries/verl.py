"""verl: ``MegatronCheckpointManager``, which saves model, optimizer and generators in three folders of one checkpoint.

python -m evidence.libraries.verl [--page docs/evidence/libraries.md]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evidence.libraries.trials import Task
    from megatron_unickpt.testing.jobs import Job
    from megatron_unickpt.testing.layouts import Layout

STEP = 3
RESHARDABLE, ASYNCHRONOUS = "dist_ckpt_optim_fully_reshardable", "async_save"


def _manager(job: Job, options: tuple[str, ...], role: str) -> Any:
    """Return verl's manager as ``verl/workers/engine/megatron/transformer_impl.py`` makes it."""
    from omegaconf import OmegaConf
    from verl.trainer.config import CheckpointConfig
    from verl.utils.checkpoint.megatron_checkpoint_manager import MegatronCheckpointManager

    megatron = {RESHARDABLE: RESHARDABLE in options, "distrib_optim_fully_reshardable_mem_efficient": False}
    return MegatronCheckpointManager(
        config=OmegaConf.create({"model": {"path": ""}, "megatron": megatron}),
        checkpoint_config=CheckpointConfig(async_save=ASYNCHRONOUS in options),
        model_config=None, transformer_config=job.config, role=role, model=job.chunks, arch="LlamaForCausalLM", hf_config=None,
        param_dtype=None, share_embeddings_and_output_weights=True, processing_class=None, optimizer=job.optimizer,
        optimizer_scheduler=None, use_distributed_optimizer=True, use_dist_checkpointing=True,
    )  # fmt: skip


def _folder(task: Task, role: str) -> str:
    return str(Path(task.folder) / f"global_step_{STEP}" / role)


def _models(layout: Layout, seed: int) -> dict[str, Job]:
    from megatron_unickpt.testing.jobs import Job

    return {"actor": Job(layout, seed=seed)}


def save(jobs: dict[str, Job], task: Task) -> None:
    for role, job in jobs.items():
        _manager(job, task.options, role).save_checkpoint(_folder(task, role), global_step=STEP)


def load(jobs: dict[str, Job], task: Task) -> None:
    for role, job in jobs.items():
        _manager(job, task.options, role).load_checkpoint(_folder(task, role))


def main() -> int:
    from evidence.libraries import trials
    from evidence.libraries.trials import Trial

    tp2, pp2, dp2 = "gpt-tp2-dist", "gpt-pp2-dist", "gpt-dp2-dist"
    rows = [
        Trial(tp2, tp2, switch=""),
        Trial(tp2, pp2, switch="", expected="Error"),
        Trial(tp2, pp2, switch="", options=(RESHARDABLE,)),
        *(Trial(tp2, target) for target in (tp2, pp2, dp2)),
        Trial(pp2, tp2, options=(RESHARDABLE,)),
    ]
    return trials.main("verl", "verl 0.9.1", rows, "")


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].endswith(".task.json"):
        from evidence.libraries import megatron_job, trials

        megatron_job.run(trials.Task.read(sys.argv[1]), save, load, make=_models)
    sys.exit(main())
