"""ms-swift: ``BaseMegatronTrainer`` and its calls of ``dist_checkpointing``, with ms-swift's arguments and learning rate.

TransformerEngine is a module of names: ms-swift and its mcore_bridge import them.

python -m evidence.libraries.ms_swift [--page docs/evidence/libraries.md]
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evidence.libraries import trials
from evidence.libraries.trials import ABSENT, Task, Trial, Trials

if TYPE_CHECKING:
    from megatron_unickpt.testing.jobs import Job

STEP, SAMPLES = 3, 12
TP2, PP2, DP2 = "gpt-tp2-dist", "gpt-pp2-dist", "gpt-dp2-dist"
TEXT = """ms-swift's trainer saves, and loads with `--mcore_model` and `--finetune false`. The model has Megatron-core's own
layers: mcore_bridge's need TransformerEngine, of which these jobs have the names alone. Not tested: adapters,
`--save_safetensors`, Megatron-FSDP, which is saved by PyTorch's DCP, and its trainers of reinforcement learning."""
ASYNCHRONOUS, RESHARDABLE = "async_save", "dist_ckpt_optim_fully_reshardable"


def _arguments(job: Job, task: Task) -> Any:
    """Return ms-swift's arguments: their defaults, as its command line would parse them, and those of this job."""
    import torch
    from swift.megatron.arguments import MegatronSftArguments

    args = object.__new__(MegatronSftArguments)
    for field in dataclasses.fields(MegatronSftArguments):
        made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        setattr(args, field.name, None if made is dataclasses.MISSING else made)
    os.chdir(Path(task.folder).parent)  # its files name the folder
    checkpoint = f"ck/checkpoint-{STEP}" if task.loads else None
    settings: dict[str, Any] = {
        "output_dir": "ck", "mcore_model": checkpoint, "model": checkpoint, "finetune": False, "tuner_type": "full",
        "tensor_model_parallel_size": job.layout.tp, "pipeline_model_parallel_size": job.layout.pp, "bf16": job.layout.low,
        "use_distributed_optimizer": job.layout.distributed, "params_dtype": torch.bfloat16, "save_safetensors": False,
        "global_batch_size": job.batch, "train_iters": 100, "lr": 1e-2, "min_lr": 0.0, "lr_warmup_fraction": None,
        "start_weight_decay": 0.1, "end_weight_decay": 0.1, ASYNCHRONOUS: ASYNCHRONOUS in task.options,
        RESHARDABLE: RESHARDABLE in task.options,
    }  # fmt: skip
    for name, value in settings.items():
        setattr(args, name, value)
    return args


def _trainer(job: Job, task: Task) -> Any:
    """Return ms-swift's trainer around a model that exists. It loads, as its own constructor does last."""
    from evidence.libraries import names_of_transformer_engine

    names_of_transformer_engine.offer()
    from swift.megatron.trainers.base import BaseMegatronTrainer
    from swift.megatron.trainers.utils import TrainerState
    from swift.megatron.utils import get_optimizer_param_scheduler

    for group in job.optimizer.param_groups:
        group["min_lr"] = 0.0
    BaseMegatronTrainer.__abstractmethods__ = frozenset()
    trainer = object.__new__(BaseMegatronTrainer)
    trainer.args = args = _arguments(job, task)
    trainer.wrapped_models, trainer.unwrapped_models, trainer.optimizer = job.chunks, job.modules, job.optimizer
    trainer.opt_param_scheduler = get_optimizer_param_scheduler(args, job.optimizer)
    trainer.state, trainer.callbacks, trainer._pre_hook_enabled = TrainerState(max_steps=args.train_iters), [], False
    trainer._load_checkpoint()
    return trainer


def save(jobs: dict[str, Job], task: Task) -> dict[str, Any]:
    from megatron_unickpt.testing.jobs import dist

    trainer = _trainer(jobs["model"], task)
    if dist.get_rank() == 0:
        (Path(task.folder) / "args.json").write_text("{}")
    trainer.opt_param_scheduler.step(increment=SAMPLES)
    trainer.state.iteration, trainer.state.consumed_train_samples = STEP, SAMPLES
    trainer.save_checkpoint()
    trainer.finalize_training()  # waits for asynchronous saves
    return {"scheduler": trainer.opt_param_scheduler.state_dict()["num_steps"]}


def load(jobs: dict[str, Job], task: Task) -> dict[str, Any]:
    trainer = _trainer(jobs["model"], task)
    state = trainer.state
    found = (state.iteration, state.consumed_train_samples, trainer.opt_param_scheduler.num_steps)
    assert found == (STEP, SAMPLES, SAMPLES), found
    return {}


def _looked_at(run: Trials) -> Iterator[tuple[str, bool]]:
    from unickpt.checkpoint.load.checkpoint import Checkpoint

    yield trials.as_without_unickpt("ms-swift", [run.saved(Trial(TP2, switch=switch))[0] for switch in (ABSENT, "", "off")])
    folder = run.saved(Trial(TP2))[0] / "ck"
    checkpoint = Checkpoint.open(str(folder / f"checkpoint-{STEP}" / f"iter_{STEP:07d}"))
    links = (folder / "last-checkpoint").resolve().name == f"checkpoint-{STEP}"
    said = "the manifest has the step of ms-swift's iteration; its link `last-checkpoint` names the checkpoint"
    yield said, checkpoint.manifest.step == STEP and links


TRIALS = (
    Trial(TP2, TP2, switch=""),
    Trial(TP2, PP2, switch="", expected="not supported for DistributedOptimizer"),
    *(Trial(TP2, target) for target in (TP2, PP2, DP2)),
    Trial(TP2, "gpt-tp2dp2-dist", ranks=(2, 4)),
    Trial(PP2, TP2, options=(ASYNCHRONOUS,)),
)

if __name__ == "__main__":
    tasks = trials.tasks_of(sys.argv)
    if tasks:
        os.environ["PYTORCH_JIT"] = "0"  # before torch is imported: TransformerEngine's names cannot be compiled
        from evidence.libraries import megatron_job

        megatron_job.run_all(tasks, save, load)
    sys.exit(trials.main("ms_swift", "ms-swift 4.6.0", TRIALS, TEXT, _looked_at, together=True))
