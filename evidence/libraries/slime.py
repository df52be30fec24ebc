"""slime: its ``save`` and ``load_checkpoint`` around those of Megatron's scripts, with slime's defaults of their arguments.

slime is on no index: ``$SLIME`` and ``$MEGATRON_LM`` are trees of it and of Megatron-LM. wandb is a module of names.

SLIME=/path/to/slime MEGATRON_LM=/path/to/Megatron-LM python -m evidence.libraries.slime [--page docs/evidence/libraries.md]
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from evidence.libraries import trials
from evidence.libraries.trials import Task, Trial

if TYPE_CHECKING:
    from megatron_unickpt.testing.jobs import Job

STEP, SAMPLES = 3, 12
TP2, PP2, DP2 = "gpt-tp2-dist", "gpt-pp2-dist", "gpt-dp2-dist"
ASYNCHRONOUS = "--async-save"
ARGUMENTS = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 1 --global-batch-size 4 --distributed-backend gloo --tokenizer-type NullTokenizer --vocab-size 95 "
    "--transformer-impl local --lr 1e-2 --min-lr 0 --train-iters 100 --save-interval 1 --tokenizer-model none "
    "--hf-checkpoint none --no-masked-softmax-fusion --no-gradient-accumulation-fusion --no-persist-layer-norm --no-rope-fusion"
)
TEXT = """The number is that of the commit. It ran with Megatron-LM core_v0.16.1 and slime's own defaults of its arguments.
wandb is a module of names. In the job that loads, slime also asks whether the head of a critic fits the checkpoint: it needs
`.metadata` and the shapes of the tensors for that. Not tested: `initialize_model_and_optimizer` as a whole, which wants
numpy 1, and Ray."""


def _arguments(job: Job, task: Task) -> Any:
    """Return Megatron's arguments as slime parses, completes and checks them."""
    from evidence.libraries import names_of_transformer_engine

    names_of_transformer_engine.offer_names("wandb")
    import torch.distributed as dist
    from megatron.core import num_microbatches_calculator as batches
    from megatron.training.global_vars import set_args
    from slime.backends.megatron_utils import arguments

    def own(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--hf-checkpoint")
        parser.add_argument("--actor-num-nodes", type=int, default=1)
        parser.add_argument("--actor-num-gpus-per-node", type=int, default=job.layout.world)
        return parser

    layout, given = job.layout, sys.argv
    sizes = f"--tensor-model-parallel-size {layout.tp} --pipeline-model-parallel-size {layout.pp}"
    place = f"--save {task.folder}" + (f" --load {task.folder}" if task.loads else "")
    sys.argv = ["slime", *f"{ARGUMENTS} {sizes} {place}".split(), *task.options]
    args = arguments.megatron_parse_args(own, skip_hf_validate=True)
    sys.argv = given
    args.rank = dist.get_rank()
    arguments.validate_args(args)
    set_args(args)
    batches.destroy_num_microbatches_calculator()
    batches.init_num_microbatches_calculator(args.rank, None, args.global_batch_size, args.micro_batch_size, layout.dp)
    return args


def save(jobs: dict[str, Job], task: Task) -> None:
    from evidence.libraries.megatron_job import scheduler_of

    job = jobs["model"]
    args, scheduler = _arguments(job, task), scheduler_of(job)
    from megatron.training.async_utils import maybe_finalize_async_save
    from slime.backends.megatron_utils import model

    scheduler.step(increment=SAMPLES)
    args.consumed_train_samples = SAMPLES
    model.save(STEP, job.chunks, job.optimizer, scheduler)
    maybe_finalize_async_save(blocking=True)


def load(jobs: dict[str, Job], task: Task) -> None:
    from evidence.libraries.megatron_job import scheduler_of

    import torch

    job = jobs["model"]
    args, scheduler = _arguments(job, task), scheduler_of(job)
    from slime.backends.megatron_utils import checkpoint, model

    iteration, _ = checkpoint.load_checkpoint(job.chunks, job.optimizer, scheduler, {}, False)
    found = (iteration, args.consumed_train_samples, scheduler.num_steps)
    assert found == (STEP, SAMPLES, SAMPLES), found
    critic = torch.nn.Module()
    critic.output_layer = torch.nn.Linear(32, 1)
    assert model._critic_output_layer_needs_reinit(args, [critic], "critic")


TRIALS = (
    Trial(TP2, TP2, switch=""),
    Trial(TP2, PP2, switch="", expected="not supported for DistributedOptimizer"),
    *(Trial(TP2, target) for target in (TP2, PP2, DP2)),
    Trial(PP2, "gpt-tp2dp2-dist", ranks=(2, 4), options=(ASYNCHRONOUS,)),
)

if __name__ == "__main__":
    tasks = trials.tasks_of(sys.argv)
    if tasks:
        sys.path += [os.environ["MEGATRON_LM"], os.environ["SLIME"]]
        from evidence.libraries import megatron_job

        megatron_job.run_all(tasks, save, load)
    sys.exit(trials.main("slime", "slime 624b824", TRIALS, TEXT, together=True))
