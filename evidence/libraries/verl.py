"""verl: ``MegatronCheckpointManager``, for an actor and a critic in one process.

It saves each model in three folders of one checkpoint: weights, optimizer, generators.

python -m evidence.libraries.verl [--page docs/evidence/libraries.md]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evidence.libraries import trials
from evidence.libraries.trials import ABSENT, Task, Trial, Trials

if TYPE_CHECKING:
    from megatron_unickpt.testing.jobs import Job
    from megatron_unickpt.testing.layouts import Layout

STEP = 3
GATHERED, ASYNCHRONOUS = "dist_ckpt_optim_fully_reshardable", "async_save"
TP2, PP2, DP2 = "gpt-tp2-dist", "gpt-pp2-dist", "gpt-dp2-dist"
PARTS = 6  # folders of an actor and a critic
_COMMIT_S = 60.0
TEXT = f"""Each job has an actor and a critic with a value head. `MegatronCheckpointManager` saves weights, optimizer and
generators of each in folders of their own. verl writes `ckpt_contents.json`, `transformer_config.json` and its tracker file
itself. With `{ASYNCHRONOUS}` it writes the first and the last of these when Megatron's queue is polled, which no worker of this
release does. With the switch that happens when the next save is scheduled; an actor's can be when its critic's is.

With `{GATHERED}` verl gives the optimizer the description of the weights that their load has used. Megatron's load
reshapes the data in it, so Megatron does not find its parameters there, also without unickpt.

Not tested: weights in Hugging Face's format through a bridge, LoRA, Megatron-FSDP, the FSDP manager, and Ray."""


def models(layout: Layout, seed: int) -> dict[str, Job]:
    """Return an actor and a critic, which has a value head as ``verl.models.mcore.bridge`` makes it."""
    from evidence.libraries.critic import Critic
    from megatron_unickpt.testing.jobs import Job

    return {"actor": Job(layout, seed=seed), "critic": Critic(layout, seed=seed + 1, tied=False, groups=False)}


def _manager(job: Job, options: tuple[str, ...], role: str) -> Any:
    """Return verl's manager as ``verl/workers/engine/megatron/transformer_impl.py`` makes it."""
    from omegaconf import OmegaConf
    from verl.trainer.config import CheckpointConfig
    from verl.utils.checkpoint.megatron_checkpoint_manager import MegatronCheckpointManager

    megatron = {GATHERED: GATHERED in options, "distrib_optim_fully_reshardable_mem_efficient": False}
    return MegatronCheckpointManager(
        config=OmegaConf.create({"model": {"path": ""}, "megatron": megatron}),
        checkpoint_config=CheckpointConfig(async_save=ASYNCHRONOUS in options),
        model_config=None, transformer_config=job.config, role=role, model=job.chunks, arch="LlamaForCausalLM", hf_config=None,
        param_dtype=None, share_embeddings_and_output_weights=role == "actor", processing_class=None,
        optimizer=job.optimizer, optimizer_scheduler=None, use_distributed_optimizer=True, use_dist_checkpointing=True,
    )  # fmt: skip


def _folder(task: Task, role: str) -> str:
    return str(Path(task.folder) / f"global_step_{STEP}" / role)


def save(jobs: dict[str, Job], task: Task) -> dict[str, Any]:
    """Save both models. As in verl's workers, the queue of asynchronous saves is not polled."""
    folder = Path(task.folder)
    managers = {role: _manager(job, task.options, role) for role, job in jobs.items()}
    for role, manager in managers.items():
        manager.save_checkpoint(_folder(task, role), global_step=STEP)
    begin = time.monotonic()
    while len(found := _complete(folder)) < PARTS and time.monotonic() - begin < _COMMIT_S:
        time.sleep(0.1)
    tracker = folder / "latest_checkpointed_iteration.txt"
    if ASYNCHRONOUS in task.options:
        for role, manager in managers.items():
            manager.save_checkpoint(_folder(task, role).replace(f"_{STEP}", f"_{STEP + 1}"), global_step=STEP + 1)
    return {"complete": len(found), "tracker": tracker.read_text() if tracker.is_file() else "no checkpoint"}


def _complete(folder: Path) -> list[Path]:
    return list(folder.glob(f"global_step_{STEP}/*/*/dist_ckpt/metadata.json"))


def load(jobs: dict[str, Job], task: Task) -> None:
    for role, job in jobs.items():
        _manager(job, task.options, role).load_checkpoint(_folder(task, role))


def checks(run: Trials) -> Iterator[tuple[str, bool]]:
    """Count complete asynchronous saves, and compare what verl saves with the switch off, unset, and without unickpt."""
    seen = [run.saved(Trial(TP2, switch=switch, options=(ASYNCHRONOUS,)))[1].seen for switch in ("", "1")]
    complete, tracker = ([each.get(key) for each in seen] for key in ("complete", "tracker"))
    yield (
        f"`{ASYNCHRONOUS}`, whose queue verl never polls: within {_COMMIT_S:.0f} s, {complete[0]} of {PARTS} folders of step "
        f"{STEP} are complete without the switch, {complete[1]} with it. After the save of step {STEP + 1} the tracker file "
        f"names {tracker[0]} without the switch, {tracker[1]} with it",
        complete == [0, PARTS] and tracker[0] == "no checkpoint" != tracker[1],
    )
    yield trials.as_without_unickpt("verl", [run.saved(Trial(TP2, switch=switch))[0] for switch in (ABSENT, "", "off")])


TRIALS = (
    Trial(TP2, TP2, switch=""),
    Trial(TP2, PP2, switch="", expected="Global shape mismatch"),
    Trial(TP2, PP2, switch=ABSENT, options=(GATHERED,), expected="not in model_sharded_state_dict"),
    *(Trial(TP2, target) for target in (TP2, PP2, DP2)),
    Trial(PP2, TP2, options=(GATHERED,)),
    Trial(TP2, TP2, switch="", switch_of_load="1"),
    Trial(TP2, PP2, switch_of_load=""),
    Trial(TP2, TP2, switch="", options=(ASYNCHRONOUS,), expected="is not a distributed checkpoint"),
    Trial(TP2, PP2, options=(ASYNCHRONOUS,)),
    Trial("moe-ep2dp2-dist", "moe-pp2-dist"),
    Trial("gpt-tp2pp2-dist", DP2, ranks=(4, 2)),
)

if __name__ == "__main__":
    tasks = trials.tasks_of(sys.argv)
    if tasks:
        from evidence.libraries import megatron_job

        megatron_job.run_all(tasks, save, load, make=models)
    sys.exit(trials.main("verl", "verl 0.9.1", TRIALS, TEXT, checks, together=True))
