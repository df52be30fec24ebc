"""Under torchrun: resume, compare with what was recorded at that step, train on and save at every step until killed.

deepspeed_worker DIR STAGE [check]      DIR/word: what was resumed, and in what it differs
"""

from __future__ import annotations

import datetime
import sys
import warnings
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

from tests.jobs.deepspeed.jobs import Layout, build, train
from tests.jobs.deepspeed.truth import consolidated, differences
from tests.jobs.faults.ranks import write_word
from unickpt.testing.launch import leave

ADAM = ("exp_avg", "exp_avg_sq")


def main() -> None:
    folder, stage, check = Path(sys.argv[1]), int(sys.argv[2]), len(sys.argv) > 3
    warnings.filterwarnings("ignore")
    deepspeed.init_distributed("gloo", timeout=datetime.timedelta(seconds=120), verbose=False)
    engine = build(Layout(stage, dist.get_world_size()), seed=stage + 10, unickpt={"enabled": True, "keep_last": 2})
    saves = folder / "saves"
    path, _ = engine.load_checkpoint(str(saves)) if (saves / "latest").exists() else (None, None)
    if path is not None:
        truth = torch.load(folder / f"truth{engine.global_steps}.pt", weights_only=False)
        wrong = differences(truth, consolidated(engine, ADAM))
        if dist.get_rank() == 0:
            write_word(folder / "word", {"step": engine.global_steps, "wrong": wrong, "path": path})
    while not check:
        train(engine, 1)
        truth = consolidated(engine, ADAM)
        if dist.get_rank() == 0:
            torch.save(truth, folder / "new.pt")
            (folder / "new.pt").replace(folder / f"truth{engine.global_steps}.pt")
        dist.barrier()
        engine.save_checkpoint(str(saves))
        if dist.get_rank() == 0:
            (folder / "begun").write_text(str(engine.global_steps))
    leave()


if __name__ == "__main__":
    main()
