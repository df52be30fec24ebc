"""torchtitan: ``CheckpointManager`` with its containers of optimizers and schedules.

python -m evidence.libraries.torchtitan [--page docs/evidence/libraries.md]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evidence.libraries.torch_job import Trained
    from evidence.libraries.trials import Task, Trials

STEP = 3
ASYNCHRONOUS, LAST = "async", "last step"
TEXT = """`CheckpointManager` saves model, optimizers, schedule, the position in the data and the step of the job in one call of
`torch.distributed.checkpoint`. The data are those of `ParallelAwareDataloader`, which itself refuses another number of
ranks, so those jobs load with `exclude_from_loading=["dataloader"]`. The model is a Llama of transformers. Not tested:
`async_with_pinned_mem`, which needs a GPU, pipeline parallelism, and its own trainer."""


class _Step:
    """The state of the job, as ``torchtitan.trainer.Trainer`` has it."""

    def __init__(self) -> None:
        self.step = self.ntokens_seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step, self.ntokens_seen = state_dict["step"], state_dict["ntokens_seen"]


def _make(task: Task, seed: int) -> Trained:
    import torch.distributed as dist
    from torchtitan.components.checkpointer.dcp import CheckpointManager
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

    from evidence.libraries.torch_job import Trained, llama, shard, sizes, step_of

    model, job = shard(llama(seed), task.layout), _Step()
    config = default_adamw(lr=1e-2)
    config.implementation = "foreach"
    optimizers = config.build(model_parts=[model])
    schedules = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=20)
    data = ParallelAwareDataloader(_numbers(), dp_rank=dist.get_rank(), dp_world_size=dist.get_world_size(), batch_size=1)
    same = sizes(task.layout) == {"shards": 2}
    manager = CheckpointManager.Config(
        enable=True, folder="ck", interval=STEP, async_mode="async" if ASYNCHRONOUS in task.options else "disabled",
        last_save_model_only=False, exclude_from_loading=[] if same else ["dataloader"],
    ).build(
        dataloader=data, model_parts=[model], optimizers=optimizers, lr_schedulers=schedules, states={"train_state": job},
        sd_adapter=None, base_folder=str(Path(task.folder).parent),
    )  # fmt: skip
    numbers: list[Iterator[Any]] = []
    plain = step_of(model, optimizers, schedules)

    def step(number: int) -> float:
        numbers[:] = numbers or [iter(data)]  # after the load
        found_number = int(next(numbers[0]))
        assert found_number == number or not same, f"{found_number} of the data, not {number}"
        job.step, job.ntokens_seen = number + 1, 100 * (number + 1)
        found: float = plain(number)
        return found

    return Trained(
        model, list(optimizers), step, {"manager": manager}, lambda: {**job.state_dict(), "schedule": schedules.state_dict()}
    )


def _numbers() -> Any:
    """Return data: the numbers of the steps. torchtitan saves the position."""
    from torch.utils.data import IterableDataset

    class Numbers(IterableDataset):  # type: ignore[type-arg]
        at = 0

        def __iter__(self) -> Iterator[int]:
            while True:
                self.at += 1
                yield self.at - 1

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    return Numbers()


def _save(trained: Trained, task: Task) -> dict[str, Any]:
    manager = trained.more["manager"]
    assert manager.save(STEP, last_step=LAST in task.options)
    manager.maybe_wait_for_saving()
    return {"files": sorted(path.name for path in (Path(task.folder) / f"step-{STEP}").iterdir())}


def _load(trained: Trained, _: Task) -> None:
    assert trained.more["manager"].load(), "torchtitan finds no checkpoint and starts anew"


def _more(run: Trials) -> Iterator[tuple[str, bool]]:
    """Compare the files of saves without the switch."""
    from evidence.libraries.trials import ABSENT, Trial, as_without_unickpt

    yield as_without_unickpt("torchtitan", [run.saved(Trial("FSDP2 on 2", switch=value))[0] for value in (ABSENT, "", "off")])


def main() -> int:
    from evidence.libraries import trials
    from evidence.libraries.trials import of_torch

    rows = [*of_torch(switch=""), *of_torch(), *of_torch(options=(ASYNCHRONOUS,))[1:2], *of_torch(options=(LAST,))[1:2]]
    return trials.main("torchtitan", "torchtitan 0.3.0", rows, TEXT, _more, together=True)


if __name__ == "__main__":
    from evidence.libraries.trials import tasks_of

    if tasks := tasks_of(sys.argv):
        from evidence.libraries import torch_job

        torch_job.run(tasks, _make, _save, _load)
    sys.exit(main())
