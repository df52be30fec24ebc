"""Under torchrun: a DeepSpeed job that trains until a fault on one rank, or without end.

training_worker RINGS STAGE FAULT RANK STEP
"""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from tests.support import deepspeed_imports  # noqa: F401
from unickpt.diagnosis import session
from unickpt.diagnosis.recording import recorder
from unickpt.testing.launch import leave


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def loop() -> None:
    while True:
        pass


def sleep() -> None:
    time.sleep(3600)


def skip() -> None:
    """The other ranks make one more call than this rank."""


def reshape() -> None:
    dist.all_reduce(torch.ones(5))


def no_save() -> None:
    """The other ranks save a checkpoint here."""


def send_first() -> None:
    """Two ranks send to each other before they receive."""


def barrier() -> None:
    """This rank makes a barrier after training that the others do not make."""


def no_group() -> None:
    time.sleep(3600)  # the others create a process group


FAULTS = {
    "absent": None,
    "barrier": barrier,
    "send": send_first,
    "no-group": no_group,
    "no-save": no_save,
    "stop": stop,
    "kill": kill,
    "loop": loop,
    "sleep": sleep,
    "skip": skip,
    "reshape": reshape,
    "none": None,
}


def main() -> None:
    warnings.filterwarnings("ignore")
    if sys.argv[3].endswith("@device"):  # as if only the starts of calls were known
        sys.argv[3] = sys.argv[3].removesuffix("@device")
        recorder.HOST_BACKENDS = ("none",)
    rings, stage, fault, culprit, at = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
    deepspeed.init_distributed("gloo", verbose=False)
    if fault == "absent" and dist.get_rank() == culprit:
        time.sleep(3600)
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3)))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "unickpt": {"timing": {"enabled": True, "folder": rings}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    rank = dist.get_rank()
    for step in range(at + 1 if fault in ("none", "barrier") else 1 << 30):
        if fault == "no-save" and step == at:
            if rank != culprit:
                engine.save_checkpoint(f"{rings}/checkpoints")
        elif fault == "send" and step == at and rank in (culprit, culprit - 1):
            dist.send(torch.ones(300_000), 2 * culprit - 1 - rank)
        elif fault == "no-group" and step == at and rank != culprit:
            dist.new_group()
        elif fault in ("skip", "reshape") and step == at:  # all but one make the same call here
            if rank != culprit:
                dist.all_reduce(torch.ones(7))
            else:
                FAULTS[fault]()
        elif rank == culprit and step == at and fault not in ("none", "barrier", "absent", "send"):
            FAULTS[fault]()
        engine.backward(engine(torch.ones(2, 32)).mean())
        engine.step()
    if fault == "barrier" and rank == culprit:
        dist.barrier()
    dist.barrier()
    session.stop()  # what an ordinary end of the process does
    leave()


if __name__ == "__main__":
    main()
