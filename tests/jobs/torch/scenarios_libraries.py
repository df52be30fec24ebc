"""Scenarios of managers of libraries that do not save through DCP. The evidence of libraries runs the libraries themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

from tests.jobs.torch.model import Job
from tests.jobs.torch.pairs_worker import differences
from tests.jobs.torch.registry import job_of, logged, scenario
from torch_unickpt.libraries import verl_manager


class Manager:
    """What ``verl_manager`` uses of verl's ``FSDPCheckpointManager``: attributes, and the files of each rank."""

    should_save_lora_only = False

    def __init__(self, job: Job, world: int = 2) -> None:
        self.job, self.model, self.optimizer, self.lr_scheduler = job, job.module, job.optimizer, job.scheduler
        self.world_size, self.rank = world, dist.get_rank()
        self.checkpoint_save_contents = self.checkpoint_load_contents = ["model", "optimizer", "extra"]

    def __getattr__(self, name: str) -> bool:
        _, action, part = name.split("_")  # such as should_save_model
        return part in getattr(self, f"checkpoint_{action}_contents")

    def _file(self, folder: str, part: str) -> Path:
        return Path(folder) / f"{part}_world_size_{self.world_size}_rank_{self.rank}.pt"

    def save_checkpoint(self, local_path: str, global_step: int = 0) -> int:
        Path(local_path).mkdir(parents=True, exist_ok=True)
        states: dict[str, Any] = {"model": {}, "optimizer": {}, "extra": self.lr_scheduler.state_dict()}
        for part in self.checkpoint_save_contents:
            name = "extra_state" if part == "extra" else {"optimizer": "optim"}.get(part, part)
            torch.save(states[part], self._file(local_path, name))
        return global_step

    def load_checkpoint(self, local_path: str) -> list[str]:
        if "extra" in self.checkpoint_load_contents:
            self.lr_scheduler.load_state_dict(torch.load(self._file(local_path, "extra_state")))
        return list(self.checkpoint_load_contents)


def _saved(manager: Manager, folder: Path) -> list[str]:
    given = {"local_path": str(folder), "global_step": manager.job.step}
    assert verl_manager.save(manager.save_checkpoint, manager, given) == manager.job.step
    dist.barrier()
    assert manager.checkpoint_save_contents == ["model", "optimizer", "extra"]
    return sorted(path.name for path in folder.iterdir() if path.name.endswith("rank_0.pt") or path.name == "manifest.json")


@scenario(2)
def verls_manager_saves_and_loads_model_and_optimizer_by_unickpt(folder: Path) -> None:
    job = job_of("fsdp2", 1)
    job.train(2)
    assert _saved(Manager(job), folder / "actor") == ["extra_state_world_size_2_rank_0.pt", "manifest.json"]
    for world, left in ((2, ["extra"]), (4, [])):  # 4: a job that does not find the file of its rank
        other = job_of("ddp2", 6)
        manager = Manager(other, world)
        assert verl_manager.load(manager.load_checkpoint, manager, {"local_path": str(folder / "actor")}) == left
        assert manager.checkpoint_load_contents == ["model", "optimizer", "extra"]
        assert differences(job.truth(), other.truth()) == []
    manager = Manager(job_of("fsdp2", 6))
    manager.checkpoint_load_contents = ["model"]
    verl_manager.load(manager.load_checkpoint, manager, {"local_path": str(folder / "actor")})
    assert manager.optimizer.state == {}


@scenario(2)
def verls_manager_saves_by_itself_what_unickpt_cannot(folder: Path) -> None:
    every = [f"{part}_world_size_2_rank_0.pt" for part in ("extra_state", "model", "optim")]
    job = job_of("fsdp2", 1)
    manager = Manager(job)
    manager.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2, 3))], lr=0.1)  # no parameter of the model
    with logged() as lines:
        assert _saved(manager, folder / "unknown") == every
    assert dist.get_rank() or any("verl saves this checkpoint in its own format instead" in line for line in lines)
    flat = Manager(job)
    flat.model = FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device("cpu"))
    assert _saved(flat, folder / "flat") == every
    manager = Manager(job)
    assert verl_manager.load(manager.load_checkpoint, manager, {"local_path": str(folder / "flat")}) == [
        "model", "optimizer", "extra",
    ]  # fmt: skip
