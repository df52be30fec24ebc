"""SkyRL on FSDP2: ``FSDPStrategy``, which saves the DTensors of each rank by ``torch.save``.

python -m evidence.libraries.skyrl_fsdp [--page docs/evidence/libraries.md]
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from evidence.libraries import trials

if TYPE_CHECKING:
    from evidence.libraries.torch_job import Trained
    from evidence.libraries.trials import Task

STEP = 3
TEXT = """The switch does not reach `FSDPStrategy`: each rank writes its DTensors by `torch.save` to a file whose name has the
number of ranks, and reads this file again. So a job of another number of ranks does not find its own.

Empty modules stood in for `skyrl.backends`, which imports a server, for SkyRL's configuration and for the wrapper of its model,
both of which name types here. `torch.cuda.synchronize`, which ends each save, did nothing, nor did the copy of the model's
configuration."""


def _named(module: str, *names: str) -> None:
    """Put a module with classes of these names in place of one that only types need."""
    found = ModuleType(module)
    for name in names:
        setattr(found, name, type(name, (), {}))
    sys.modules.setdefault(module, found)


def _strategy() -> Any:
    """Return SkyRL's strategy without the parts that start its server and its workers."""
    import skyrl
    import torch
    import torch.distributed as dist

    assert skyrl
    trials.stand_in("skyrl.backends", "skyrl.train")
    _named("skyrl.train.config", "FSDPConfig", "ModelConfig", "OptimizerConfig")
    _named("skyrl.backends.skyrl_train.workers.model_wrapper", "HFModelWrapper")
    torch.cuda.synchronize = lambda *_: None
    from skyrl.backends.skyrl_train.distributed.fsdp_strategy import FSDPStrategy

    strategy = FSDPStrategy(SimpleNamespace(fsdp_size=-1, cpu_offload=False))
    strategy.world_size = dist.get_world_size()
    strategy.save_hf_configs = lambda *_: None  # asks transformers for files of a model of the hub
    return strategy


def _make(task: Task, seed: int) -> Trained:
    import torch

    from evidence.libraries.torch_job import Trained, llama, shard, step_of

    model = shard(llama(seed), task.layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    parts = {"strategy": _strategy(), "schedule": schedule}
    return Trained(model, [optimizer], step_of(model, optimizer, schedule), parts, schedule.state_dict)


def _folder(task: Task) -> str:
    return str(Path(task.folder) / f"global_step_{STEP}" / "policy")


def _save(trained: Trained, task: Task) -> dict[str, Any]:
    import torch.distributed as dist

    trained.more["strategy"].save_checkpoint(
        trained.model, _folder(task), dist.get_rank(), trained.optimizers[0], trained.more["schedule"]
    )
    return {"files": sorted(path.name for path in Path(_folder(task)).iterdir())}


def _load(trained: Trained, task: Task) -> None:
    trained.more["strategy"].load_checkpoint(trained.model, _folder(task), trained.optimizers[0], trained.more["schedule"])


def main() -> int:
    from dataclasses import replace

    from evidence.libraries.trials import of_torch

    rows = []
    for switch in ("", "1"):
        first, *others = of_torch(switch=switch)
        missing = "model_world_size_{}_rank_"  # of any rank
        rows += [first, *(replace(each, expected=missing.format(each.ranks[1])) for each in others[:2])]
    return trials.main("skyrl_fsdp", "SkyRL 0.4.0, FSDP2", rows, TEXT, environment="skyrl", together=True)


if __name__ == "__main__":
    if tasks := trials.tasks_of(sys.argv):
        from evidence.libraries import torch_job

        torch_job.run(tasks, _make, _save, _load)
    sys.exit(main())
