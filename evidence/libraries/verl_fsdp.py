"""verl on FSDP2: ``FSDPCheckpointManager``, which saves the DTensors of each rank by ``torch.save``.

python -m evidence.libraries.verl_fsdp [--page docs/evidence/libraries.md]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evidence.libraries.torch_job import Trained
    from evidence.libraries.trials import Task

STEP = 3
TEXT = """Each rank writes its DTensors by `torch.save` to a file whose name has the number of ranks, and reads this file again.
Under the switch a hook on the manager saves model, optimizer and schedule as a unickpt checkpoint in the same folder; verl
still writes its configuration and the generators of each rank. FSDP1 and `save_lora_only` stay verl's own."""


def _make(task: Task, seed: int) -> Trained:
    import torch
    from omegaconf import OmegaConf
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    from evidence.libraries.torch_job import Trained, llama, shard, step_of

    model = shard(llama(seed), task.layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    parts = ["model", "optimizer", "extra"]
    manager = FSDPCheckpointManager(
        model=model, optimizer=optimizer, lr_scheduler=schedule, processing_class=None,
        checkpoint_config=OmegaConf.create({"save_contents": parts, "load_contents": parts}),
    )  # fmt: skip
    return Trained(model, [optimizer], step_of(model, optimizer, schedule), {"manager": manager}, schedule.state_dict)


def _folder(task: Task) -> str:
    return str(Path(task.folder) / f"global_step_{STEP}" / "actor")


def _save(trained: Trained, task: Task) -> dict[str, Any]:
    trained.more["manager"].save_checkpoint(_folder(task), global_step=STEP)
    return {"files": sorted(path.name for path in Path(_folder(task)).iterdir())}


def _load(trained: Trained, task: Task) -> None:
    trained.more["manager"].load_checkpoint(_folder(task))


def main() -> int:
    from dataclasses import replace

    from evidence.libraries import trials
    from evidence.libraries.trials import of_torch

    own = "_world_size_{}_rank_0.pt'"
    first, *others = of_torch(switch="")
    rows = [*of_torch(), first, *(replace(each, expected=own.format(each.ranks[1])) for each in others[:2])]
    return trials.main("verl_fsdp", "verl 0.9.1, FSDP2", rows, TEXT, environment="verl", together=True)


if __name__ == "__main__":
    from evidence.libraries.trials import tasks_of

    if tasks := tasks_of(sys.argv):
        from evidence.libraries import torch_job

        torch_job.run(tasks, _make, _save, _load)
    sys.exit(main())
