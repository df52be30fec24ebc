"""Under torchrun: a small DeepSpeed job that ``ds_unickpt.resume_or_start`` continues, with the sampler of one global order.

    deepspeed_job.py FOLDER STAGE BATCH [--steps N] [--pause MS] [--memory] [--every-step]

Every start is compared with the checkpoint that it came from, bit for bit, through DeepSpeed's own accessors.
"""

import time

STARTED_S = time.time()

import argparse  # noqa: E402
import os  # noqa: E402
import warnings  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

from evidence.steering.observed import Observed  # noqa: E402

SAVE_STEPS, SAMPLES, LENGTH, VOCABULARY, WIDTH = 10, 1009, 16, 61, 32
STATES = ("exp_avg", "exp_avg_sq")
HEARTBEATS = "UNICKPT_TEST_HEARTBEATS"  # of ``effective_time.py``


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("stage", type=int)
    parser.add_argument("batch", type=int)
    parser.add_argument("--steps", type=int, default=1 << 30)
    parser.add_argument("--pause", type=float, default=120.0)
    parser.add_argument("--memory", action="store_true", help="save into memory, and each sixth time to disk")
    parser.add_argument("--every-step", action="store_true", help="save at each step, each 60th time to disk")
    args = parser.parse_args()
    job = Observed(args.folder, STARTED_S)
    warnings.filterwarnings("ignore")

    import deepspeed
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    import ds_unickpt
    import unickpt
    from unickpt.checkpoint.save import late_places
    from unickpt.testing.launch import leave

    job.say("imported")

    class Data(Dataset[tuple[int, torch.Tensor]]):
        """Sample ``i`` is a sequence of tokens with a rule of its own."""

        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
            first, stride = index % VOCABULARY, 1 + index % 7
            fault = job.wanted(0, "data")
            if fault is not None:
                time.sleep(fault["ms"] / 1000)
            return index, (first + stride * torch.arange(LENGTH + 1)) % VOCABULARY

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
            self.layers = nn.Sequential(
                nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)
            )
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            logits = self.head(self.layers(self.embed(tokens[:, :-1])))
            return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(1)
    keep = "steering" if "UNICKPT_ROUND" in os.environ else "always"  # as well under stock torchrun
    config: dict[str, Any] = {
        "train_batch_size": args.batch,
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_accumulation_steps": args.batch // job.world,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 2000, "warmup_num_steps": 20}},
        "zero_optimization": {"stage": args.stage},
        "steps_per_print": 1 << 30,
        "unickpt": {
            "enabled": True,
            "resume_from": str(args.folder / "ck"),
            "keep_last": 3,
            "keep_global_batch": keep,
            "timing": {"enabled": True, "records": 4096},
        },
    }
    if args.memory:
        place = args.folder / "memory" / job.host
        place.mkdir(parents=True, exist_ok=True)
        config["unickpt"]["memory"] = {"to_disk_every": 6, "folder": str(place)}
        if args.every_step:
            config["unickpt"]["memory"] |= {"to_disk_every": 60, "on_busy": "skip"}
            late_places.LATE_BYTES = 0  # the state is small
    model = Model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    job.die_soon(0, "kill in load")
    start = ds_unickpt.resume_or_start(engine)
    job.say("resumed", step=start.step, samples=start.samples, resumed=start.resumed)
    job.say("checked", differences=_differences(engine, start.path, start.step) if start.resumed else [])

    sampler = unickpt.GlobalOrderSampler(SAMPLES, rank=job.rank, ranks=job.world, per_device=1, start=start.samples, seed=3)
    batches = iter(DataLoader(Data(), batch_size=1, sampler=sampler))
    stopping, step, heartbeat = False, start.step, _heartbeat()
    while not stopping and step < args.steps:
        job.at_step(step)
        heartbeat()
        ids, losses = [], []
        for _ in range(engine.gradient_accumulation_steps()):
            index, tokens = next(batches)
            loss = engine(tokens)
            engine.backward(loss)
            engine.step()
            ids.append(int(index))
            losses.append(float(loss.detach()))
        time.sleep(args.pause / 1000)
        seen = torch.tensor([sum(losses) / len(losses) / job.world, float(job.stopping)], dtype=torch.float64)
        if job.wanted(step, "skip") is None:  # a collective that one rank leaves out
            dist.all_reduce(seen)
        step, stopping = step + 1, bool(seen[1])
        job.stepped(step, ids, float(seen[0]))
        if args.every_step or step % SAVE_STEPS == 0:
            job.die_soon(step, "kill in save")
            engine.save_checkpoint(str(args.folder / "ck"))
        if job.rank == 0:
            fault = job.wanted(step, "save alone")
            time.sleep(fault["ms"] / 1000 if fault is not None and step % SAVE_STEPS == 1 else 0)
    dist.barrier()
    leave()


def _heartbeat() -> Callable[[], Any]:
    """Return what tells the launcher of NVIDIA Resiliency Extension that this rank is alive; nothing under other launchers."""
    if HEARTBEATS not in os.environ:
        return lambda: None
    from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

    client = RankMonitorClient()
    client.init_workload_monitoring()
    send: Callable[[], Any] = client.send_heartbeat
    return send


def _differences(engine: Any, path: str | None, step: int) -> list[str]:
    """Return on rank 0 where the engine differs from the checkpoint that it has loaded. Collective."""
    from tests.jobs.deepspeed.truth import consolidated, differences
    from unickpt.checkpoint.load.checkpoint import Checkpoint

    found = consolidated(engine, STATES)
    if engine.global_rank != 0:
        return []
    where = Path(str(path))
    checkpoint = engine.checkpoint_engine.memory.opened
    checkpoint = checkpoint or Checkpoint.open(where if where.is_dir() else where.parent)
    expected = {
        key: checkpoint.read_tensor(name, state)
        for key in found
        if (state := key.partition("/")[0]) in ("weight", "master", *STATES) and (name := key.partition("/")[2])
    }
    problems = differences(expected, {key: found[key] for key in expected})
    counted = found["counters"][0]
    return problems + ([] if counted == step else [f"steps: {step} expected, {counted} found"])


if __name__ == "__main__":
    main()
