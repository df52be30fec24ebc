"""Under torchrun: the unmodified ``pretrain_gpt.py`` of ``$MEGATRON_LM`` with ``--ckpt-format unickpt``, on CPU and gloo.

    megatron_job.py FOLDER TP PP BATCH [--steps N] [--pause MS] [--memory] [--every-step]

Every start is compared with the checkpoint that it came from through Megatron's own resharding format. The id of a
sample is the digest of its tokens. Functions of Megatron's training loop are wrapped to write down steps and to make faults.
"""

import time

STARTED_S = time.time()

import argparse  # noqa: E402
import hashlib  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
import warnings  # noqa: E402
from pathlib import Path  # noqa: E402
from types import SimpleNamespace  # noqa: E402
from typing import Any  # noqa: E402

from evidence.steering.observed import Observed  # noqa: E402

SAVE_STEPS = 10


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("tp", type=int)
    parser.add_argument("pp", type=int)
    parser.add_argument("batch", type=int)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--pause", type=float, default=30.0)
    parser.add_argument("--memory", action="store_true", help="save into memory, and each sixth time to disk")
    parser.add_argument("--every-step", action="store_true", help="save at each step, each 60th time to disk")
    args = parser.parse_args()
    job = Observed(args.folder, STARTED_S)
    warnings.filterwarnings("ignore")
    from tests.jobs.megatron.pretrain import ARGUMENTS  # before the tree, which has a package of this name

    tree = os.environ["MEGATRON_LM"]
    sys.path.insert(1, tree)

    from megatron_unickpt.testing import cpu

    cpu.adapt_megatron()
    checkpoints = args.folder / "ck"
    checkpoints.mkdir(exist_ok=True)
    own = (
        f"--tensor-model-parallel-size {args.tp} --pipeline-model-parallel-size {args.pp} --global-batch-size {args.batch} "
        f"--num-layers 2 --hidden-size 32 --vocab-size 511 --bf16 --use-distributed-optimizer --ckpt-format unickpt "
        f"--save {checkpoints} --load {checkpoints} --save-interval {1 if args.every_step else SAVE_STEPS} --train-iters 3000 "
        f"--lr-decay-iters 2000 --unickpt-keep-last 3 --unickpt-timing"
        + (f" --exit-interval {args.steps}" if args.steps else "")
    )
    if args.memory:
        place = args.folder / "memory" / job.host
        place.mkdir(parents=True, exist_ok=True)
        own += f" --unickpt-memory-to-disk-every {60 if args.every_step else 6} --unickpt-memory-folder {place}"
        if args.every_step:
            own += " --unickpt-memory-on-busy skip"
            from unickpt.checkpoint.save import late_places

            late_places.LATE_BYTES = 0  # the state is small
    script = os.path.join(tree, "pretrain_gpt.py")
    sys.argv = [script, *ARGUMENTS.split(), *own.split()]
    watch(job, args.folder, args.pause)
    job.say("imported")
    exec(compile(Path(script).read_text(), script, "exec"), {**globals(), "__name__": "__main__", "__file__": script})


def watch(job: Observed, folder: Path, pause_ms: float) -> None:
    """Wrap functions of Megatron's training loop."""
    import torch
    from megatron.core import parallel_state
    from megatron.training import training, utils

    ids: list[str] = []
    step = [0]
    setup, train_step = training.setup_model_and_optimizer, training.train_step
    save, get_batch = training.save_checkpoint_and_time, utils.get_batch_on_this_tp_rank

    def recorded(*args: Any, **kwargs: Any) -> Any:
        fault = job.wanted(0, "data")
        time.sleep(fault["ms"] / 1000 if fault is not None else 0)
        batch = get_batch(*args, **kwargs)
        first = parallel_state.is_pipeline_first_stage() and parallel_state.get_tensor_model_parallel_rank() == 0
        ids.extend(hashlib.sha256(row.numpy().tobytes()).hexdigest()[:12] for row in (batch["tokens"] if first else ()))
        return batch

    def set_up(*args: Any, **kwargs: Any) -> Any:
        job.die_soon(0, "kill in load")
        model, optimizer, scheduler = setup(*args, **kwargs)
        given = training.get_args()
        step[0] = int(given.iteration)
        job.say("resumed", step=step[0], samples=int(given.consumed_train_samples), resumed=step[0] > 0)
        found = differences(model, optimizer, folder, step[0]) if step[0] else []
        job.say("checked", differences=found)
        return model, optimizer, scheduler

    def one_step(*args: Any, **kwargs: Any) -> Any:
        job.at_step(step[0])
        ids.clear()
        result = train_step(*args, **kwargs)
        time.sleep(pause_ms / 1000)
        if job.wanted(step[0], "skip") is None:  # a collective that one rank leaves out
            torch.distributed.all_reduce(torch.zeros(1))
        step[0] += 1
        loss = result[0].get("lm loss")
        job.stepped(step[0], ids, None if loss is None else float(loss))
        fault = job.wanted(step[0], "save alone") if job.rank == 0 and step[0] % SAVE_STEPS == 1 else None
        time.sleep(fault["ms"] / 1000 if fault is not None else 0)
        return result

    def saved(*args: Any, **kwargs: Any) -> Any:
        job.die_soon(step[0], "kill in save")
        return save(*args, **kwargs)

    training.setup_model_and_optimizer, training.train_step = set_up, one_step
    training.save_checkpoint_and_time, utils.get_batch_on_this_tp_rank = saved, recorded


def differences(model: Any, optimizer: Any, folder: Path, step: int) -> list[str]:
    """Return on rank 0 where the job differs from the checkpoint that it has loaded. Collective."""
    from megatron.training import get_args
    from megatron.training.utils import unwrap_model

    from megatron_unickpt.edge import RUNTIME
    from megatron_unickpt.pretraining.memory import tier_of
    from megatron_unickpt.testing import truth
    from tests.jobs.megatron.compared import differences
    from unickpt.checkpoint.load.checkpoint import Checkpoint

    job = SimpleNamespace(modules=unwrap_model(model), optimizer=optimizer, layout=SimpleNamespace(optimizer="dist"))
    found = truth.consolidated(job, folder / "check")  # type: ignore[arg-type]
    if found is None:
        return []
    checkpoint = tier_of(RUNTIME, get_args()).opened or Checkpoint.open(folder / "ck" / f"iter_{step:07d}")
    expected = {
        key: checkpoint.read_tensor(name, state)
        for key in found
        for state, _, name in [key.partition("/")]
        if checkpoint.info(name, state) is not None
    }
    missing = [f"{key}: not in the checkpoint" for key in found if key not in expected]
    return missing + differences(expected, {key: found[key] for key in expected})


if __name__ == "__main__":
    main()
