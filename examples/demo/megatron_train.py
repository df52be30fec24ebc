"""A GPT trained with megatron-core's own schedules, DDP and distributed optimizer, on the CPU harness.

Started by ``megatron_run.py`` under torchrun, once per process group.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import warnings
from pathlib import Path

from megatron_unickpt.testing.jobs import Job  # isort: skip  before anything of megatron

import torch
import torch.distributed as dist
from data import batch, corpus

import megatron_unickpt
from megatron_unickpt.testing.layouts import Layout
from megatron_unickpt.testing.truth import close, consolidated
from unickpt.testing.launch import leave

LENGTH, BATCH, WIDTH = 64, 8, 128


class TextJob(Job):
    """Use bytes of real text instead of random tokens."""

    text = corpus()

    def rows(self) -> torch.Tensor:
        inputs, targets = batch(self.text, self.step, BATCH, LENGTH, rank=0, ranks=1)
        return torch.cat([inputs, targets[:, -1:]], dim=1)


def main() -> None:
    args = _arguments()
    warnings.filterwarnings("ignore")
    logging.getLogger("unickpt").setLevel(logging.WARNING)
    dist.init_process_group("gloo")
    job = TextJob(Layout.parse(args.layout), seed=args.seed, vocabulary=256, width=WIDTH, length=LENGTH, batch=BATCH, lr=1e-3)
    seen = {}
    if args.resume_from:
        seen["before_load"] = digests(job, args.out, optimizer=False)
        found = megatron_unickpt.load(args.resume_from, job.chunks, job.optimizer)
        job.step = found["iteration"]
        seen["after_load"] = digests(job, args.out)
    if args.untrained:
        megatron_unickpt.save(args.untrained, job.chunks, job.optimizer, iteration=0)
    first = job.step
    losses = job.train(args.until - job.step)
    seen["at_end"] = digests(job, args.out)
    if args.save_to:
        megatron_unickpt.save(args.save_to, job.chunks, job.optimizer, iteration=job.step)
    if dist.get_rank() == 0:
        record = {**seen, "losses": {first + at: loss for at, loss in enumerate(losses)}}
        (args.out / "seen.json").write_text(json.dumps(record))
    dist.barrier()
    close()
    leave()


def digests(job: Job, out: Path, *, optimizer: bool = True) -> dict[str, str]:
    """Return digests of all weights, main parameters and moments, resharded by Megatron's own format. Collective."""
    found = consolidated(job, out / "scratch", optimizer=optimizer) or {}
    return {
        name: f"{t.dtype} {tuple(t.shape)} {hashlib.sha256(t.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()}"
        for name, t in found.items()
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--until", type=int, required=True)
    parser.add_argument("--untrained", type=Path, help="save the untrained model here")
    parser.add_argument("--resume-from", type=Path)
    parser.add_argument("--save-to", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
