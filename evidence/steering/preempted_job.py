"""Under torchrun: a small training that all ranks stop at one step when it is told to end.

    preempted_job.py FOLDER torch|deepspeed|megatron STEPS

``FOLDER/checkpoints`` gets a checkpoint when the job is told to end, and after the last step. In ``FOLDER/events``, each rank
writes a line when it starts and one when it saves: event, rank, step, pid, time. Megatron is the unmodified ``pretrain_gpt.py``
of ``$MEGATRON_LM`` with ``--exit-signal-handler``, on CPU and gloo.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEP_S = 0.03  # a step takes this long at least, and longer on later ranks
BATCH, WIDTH = 6, 32
Note = Callable[[str, int], None]


def main() -> None:
    folder, framework, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    warnings.filterwarnings("ignore")
    rank = int(os.environ["RANK"])

    def note(event: str, step: int) -> None:
        line = f"{event} {rank} {step} {os.getpid()} {time.time()}\n".encode()
        file = os.open(folder / "events", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, line)
        os.close(file)
        if rank == 0 and event == "step":
            (folder / "saved.part").write_text(str(step))
            (folder / "saved.part").rename(folder / "saved")

    {"torch": _torch, "deepspeed": _deepspeed, "megatron": _megatron}[framework](folder, steps, note, rank)


def batch(step: int, rank: int) -> Any:
    """Return the samples of a step on a rank."""
    import torch

    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))


def layers() -> Any:
    """Return the model of torch and DeepSpeed."""
    import torch
    from torch import nn

    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.LayerNorm(WIDTH))


def _torch(folder: Path, steps: int, note: Note, rank: int) -> None:
    """Train with FSDP2."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    import torch_unickpt
    import unickpt

    dist.init_process_group("gloo")
    model = layers()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 50))
    start = torch_unickpt.resume_or_start(model, optimizer, folder / "checkpoints", scheduler=scheduler)
    preemption = unickpt.Preemption()

    def save(step: int) -> None:
        note("save", step)
        unickpt.save_training(model, optimizer, folder / f"checkpoints/step{step}", step=step, scheduler=scheduler)

    note("start", start.step)
    for step in range(start.step + 1, steps + 1):
        model(batch(step, rank)).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        time.sleep(STEP_S * (1 + rank / 4))
        note("step", step)
        if preemption.due(step):
            save(step)
            preemption.leave()
    save(steps)
    dist.destroy_process_group()


def _deepspeed(folder: Path, steps: int, note: Note, rank: int) -> None:
    """Train with ZeRO-1 in bf16, and checkpoints in memory."""
    import deepspeed

    import ds_unickpt
    import unickpt

    deepspeed.init_distributed("gloo", verbose=False)
    place = folder / "memory" / os.environ.get("GROUP_RANK", "0")
    place.mkdir(parents=True, exist_ok=True)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 2000, "warmup_num_steps": 20}},
        "zero_optimization": {"stage": 1},
        "steps_per_print": 1 << 30,
        "unickpt": {"enabled": True, "memory": {"to_disk_every": 1000, "folder": str(place)}},
    }
    model = layers()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    start = ds_unickpt.resume_or_start(engine, str(folder / "checkpoints"))
    preemption = unickpt.Preemption()
    note("start", start.step)
    for step in range(start.step + 1, steps + 1):
        loss = engine(batch(step, rank).bfloat16()).square().mean()
        engine.backward(loss)
        engine.step()
        time.sleep(STEP_S * (1 + rank / 4))
        note("step", step)
        if preemption.due(step):
            note("save", step)
            engine.save_checkpoint(str(folder / "checkpoints"), tag=f"step{step}")
            preemption.leave()
    note("save", steps)
    engine.save_checkpoint(str(folder / "checkpoints"), tag=f"step{steps}")


def _megatron(folder: Path, steps: int, note: Note, rank: int) -> None:
    """Train with the script of Megatron-LM."""
    from tests.jobs.megatron.pretrain import ARGUMENTS  # before the tree, which has a package of this name

    tree = os.environ["MEGATRON_LM"]
    sys.path.insert(1, tree)
    from megatron_unickpt.testing import cpu

    cpu.adapt_megatron()
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(exist_ok=True)
    own = (
        f"--global-batch-size 6 --num-layers 2 --hidden-size 32 --vocab-size 511 --bf16 --use-distributed-optimizer "
        f"--ckpt-format unickpt --save {checkpoints} --load {checkpoints} --save-interval 100000 --train-iters 3000 "
        f"--lr-decay-iters 2000 --exit-interval {steps} --exit-signal-handler"
    )
    script = os.path.join(tree, "pretrain_gpt.py")
    sys.argv = [script, *ARGUMENTS.split(), *own.split()]
    from megatron.training import training

    done = [0]
    setup, train_step, save = training.setup_model_and_optimizer, training.train_step, training.save_checkpoint_and_time

    def set_up(*args: Any, **kwargs: Any) -> Any:
        result = setup(*args, **kwargs)
        done[0] = int(training.get_args().iteration)
        note("start", done[0])
        return result

    def one_step(*args: Any, **kwargs: Any) -> Any:
        result = train_step(*args, **kwargs)
        time.sleep(STEP_S * (1 + rank / 4))
        done[0] += 1
        note("step", done[0])
        return result

    def saved(*args: Any, **kwargs: Any) -> Any:
        note("save", done[0])
        return save(*args, **kwargs)

    training.setup_model_and_optimizer, training.train_step, training.save_checkpoint_and_time = set_up, one_step, saved
    exec(compile(Path(script).read_text(), script, "exec"), {**globals(), "__name__": "__main__", "__file__": script})


if __name__ == "__main__":
    main()
