"""An ordinary DeepSpeed training script. It does not import unickpt; the JSON enables it.

Started by ``run.py`` under torchrun, once per process group.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import deepspeed
import torch
from data import batch, corpus
from model import CONTEXT, ByteTransformer
from states import digests, weight_digests
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    args = _arguments()
    torch.manual_seed(args.seed)
    model = ByteTransformer()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=str(args.config))
    seen = {}
    if args.resume_from:
        seen["before_load"] = weight_digests(engine)
        loaded, _ = engine.load_checkpoint(str(args.resume_from))
        if loaded is None:
            raise SystemExit(f"{args.resume_from} has no checkpoint")
        seen["after_load"] = digests(engine)
    train(engine, args.until, args.out / "losses.jsonl")
    seen["at_end"] = digests(engine)
    if args.save_to:
        engine.save_checkpoint(str(args.save_to))
    if engine.global_rank == 0:
        (args.out / "seen.json").write_text(json.dumps(seen, indent=1))
    leave()


def train(engine: Any, until: int, log: Path) -> None:
    """Train up to a global step, and write the mean loss of each global batch, before its update."""
    text = corpus()
    rank, ranks = engine.global_rank, engine.world_size
    with log.open("w") as losses:
        while engine.global_steps < until:
            step = engine.global_steps
            inputs, targets = batch(text, step, engine.train_batch_size(), CONTEXT, rank=rank, ranks=ranks)
            loss = engine(inputs, targets)
            engine.backward(loss)
            engine.step()
            mean = loss.detach() / ranks
            torch.distributed.all_reduce(mean)
            if rank == 0:
                losses.write(json.dumps({"step": step, "loss": mean.item()}) + "\n")
                losses.flush()


def leave() -> NoReturn:
    """End this process without Python's finalization, after all ranks are done.

    A thread of gloo may still release the tensors of the last collective. Before Python 3.14 this aborts the process during
    the finalization ("terminate called without an active exception"). ``destroy_process_group`` would wait for the thread, but
    DeepSpeed keeps references to the group.
    """
    torch.distributed.barrier()
    atexit._run_exitfuncs()  # an ordinary exit also finishes a checkpoint that is still being written
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True, help="DeepSpeed JSON")
    parser.add_argument("--out", type=Path, required=True, help="folder for losses.jsonl and seen.json")
    parser.add_argument("--seed", type=int, required=True, help="seed of the initial weights and buffers")
    parser.add_argument("--until", type=int, required=True, help="global step to stop at")
    parser.add_argument("--resume-from", type=Path, help="folder of checkpoints")
    parser.add_argument("--save-to", type=Path, help="folder of checkpoints")
    return parser.parse_args()


if __name__ == "__main__":
    main()
