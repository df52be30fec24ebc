"""Megatron-Bridge: ``save_checkpoint`` and ``load_checkpoint`` with its ``GlobalState`` and its configuration.

python -m evidence.libraries.megatron_bridge [--page docs/evidence/libraries.md]
"""

from __future__ import annotations

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
ASYNCHRONOUS, STRICT, CONSTANT = "async_save", "dist_ckpt_strictness=raise_all", "ckpt_assume_constant_structure"
TEXT = """Megatron-Bridge's functions run with its own configuration, trackers and queue. The model has Megatron-core's own
layers: TransformerEngine is a module of names. `modelopt_run_config.yaml` has addresses in memory, which are not compared. Not
tested: adapters, ModelOpt's state, and checkpoints of the types
`local` and `fsdp_dtensor`, which stay its own."""


_ENERGON = tuple(f"megatron.energon{each}" for each in ("", ".task_encoder", ".task_encoder.base", ".task_encoder.cooking"))


def _state(job: Job, task: Task) -> Any:
    """Return Megatron-Bridge's state of a job, with the parts of its configuration that saves and loads read."""
    import torch.distributed as dist
    from evidence.libraries import names_of_transformer_engine

    names_of_transformer_engine.offer()
    names_of_transformer_engine.offer_names(*_ENERGON)
    from megatron.bridge.models import GPTModelProvider
    from megatron.bridge.training import config
    from megatron.bridge.training.state import GlobalState, TrainState
    from megatron.core import num_microbatches_calculator as batches

    layout = job.layout
    batches.destroy_num_microbatches_calculator()
    batches.init_num_microbatches_calculator(dist.get_rank(), None, job.batch, job.micro_batch, layout.dp)
    state = GlobalState()
    queue = {"async_strategy": "mcore"} if "async_strategy" in config.CheckpointConfig.__dataclass_fields__ else {}  # since 0.6
    state.cfg = config.ConfigContainer(
        train=config.TrainingConfig(train_iters=100, global_batch_size=job.batch, micro_batch_size=job.micro_batch),
        model=GPTModelProvider(
            num_layers=4, hidden_size=32, num_attention_heads=4, tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp, pipeline_dtype=job.config.pipeline_dtype,
        ),
        optimizer=config.OptimizerConfig(use_distributed_optimizer=layout.distributed, bf16=layout.low),
        scheduler=config.SchedulerConfig(), dataset=None, logger=config.LoggerConfig(), tokenizer=config.TokenizerConfig(),
        checkpoint=config.CheckpointConfig(
            save="ck", load="ck" if task.loads else None, async_save=ASYNCHRONOUS in task.options,
            dist_ckpt_strictness="raise_all" if STRICT in task.options else "assume_ok_unexpected",
            ckpt_assume_constant_structure=CONSTANT in task.options, fully_parallel_load=True, **queue,
        ),
    )  # fmt: skip
    state.train_state = TrainState(step=STEP, consumed_train_samples=SAMPLES)
    state.initialize_async_checkpoint_worker()
    return state


def save(jobs: dict[str, Job], task: Task) -> None:
    from evidence.libraries.megatron_job import scheduler_of

    os.chdir(Path(task.folder).parent)  # its files name the folder
    job = jobs["model"]
    state, scheduler = _state(job, task), scheduler_of(job)
    from megatron.bridge.training.checkpointing import maybe_finalize_async_save, save_checkpoint

    scheduler.step(increment=SAMPLES)
    context: dict[str, Any] = {}
    for _ in range(2 if CONSTANT in task.options else 1):  # the second takes the strategy of the first
        save_checkpoint(state, job.chunks, job.optimizer, scheduler, 0, checkpointing_context=context)
    maybe_finalize_async_save(state, state.cfg.checkpoint, blocking=True, terminate=True)


def load(jobs: dict[str, Job], task: Task) -> None:
    from evidence.libraries.megatron_job import scheduler_of

    os.chdir(Path(task.folder).parent)
    job = jobs["model"]
    state, scheduler = _state(job, task), scheduler_of(job)
    from megatron.bridge.training.checkpointing import load_checkpoint
    from megatron.bridge.training.state import TrainState

    state.train_state = TrainState()
    load_checkpoint(state, job.chunks, job.optimizer, scheduler, checkpointing_context={})
    found = (state.train_state.step, state.train_state.consumed_train_samples, scheduler.num_steps)
    assert found == (STEP, SAMPLES, SAMPLES), found


def looked_at(run: Trials) -> Iterator[tuple[str, bool]]:
    from unickpt.checkpoint.load.checkpoint import Checkpoint

    places = [run.saved(Trial(TP2, switch=switch))[0] for switch in (ABSENT, "", "off")]
    yield trials.as_without_unickpt("Megatron-Bridge", places)
    folder = run.saved(Trial(TP2))[0] / "ck"
    checkpoint = Checkpoint.open(str(folder / f"iter_{STEP:07d}"))
    beside = ("run_config.yaml", "train_state.pt")
    there = all((folder / f"iter_{STEP:07d}" / name).is_file() for name in beside)
    said = "the manifest has the step; `run_config.yaml` and `train_state.pt` are in the folder of the checkpoint"
    yield said, there and checkpoint.manifest.step == STEP


TRIALS = (
    Trial(TP2, TP2, switch=""),
    Trial(TP2, PP2, switch="", expected="not supported for DistributedOptimizer"),
    *(Trial(TP2, target) for target in (TP2, PP2, DP2)),
    Trial(TP2, "gpt-tp2dp2-dist", ranks=(2, 4)),
    Trial(PP2, TP2, options=(ASYNCHRONOUS,)),
    Trial(DP2, TP2, options=(STRICT, CONSTANT)),
)

if __name__ == "__main__":
    tasks = trials.tasks_of(sys.argv)
    if tasks:
        os.environ["PYTORCH_JIT"] = "0"  # before torch is imported: TransformerEngine's names cannot be compiled
        from evidence.libraries import megatron_job

        megatron_job.run_all(tasks, save, load)
    sys.exit(trials.main("megatron_bridge", "Megatron-Bridge 0.3.1", TRIALS, TEXT, looked_at, together=True))
