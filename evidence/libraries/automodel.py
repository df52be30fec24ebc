"""NeMo AutoModel: its ``Checkpointer``, which saves model and optimizer in folders of one checkpoint.

python -m evidence.libraries.automodel [--page docs/evidence/libraries.md]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evidence.libraries.torch_job import Trained
    from evidence.libraries.trials import Task, Trials

FOLDER = "epoch_0_step_3"
WEIGHTS = "model_save_format=torch_save"
TEXT = f"""The calls are those of `nemo_automodel/recipes/base_recipe.py`. By default AutoModel saves the model by PyTorch's
writer of Hugging Face files, which stays as it is, and the optimizer and the schedule by a call without a writer. With
`{WEIGHTS}` both are saved without a writer. The model is a Llama of transformers. Not tested: `is_async`, which
copies by an accelerator, its recipes around the checkpointer, consolidated exports, adapters, experts, pipelines. Its file
`consolidate.sh` has the path of the folder, and is not compared."""


def _make(task: Task, seed: int) -> Trained:
    import torch
    import torch.distributed as dist
    from nemo_automodel.components.checkpoint.config import CheckpointingConfig
    from nemo_automodel.components.optim.scheduler import OptimizerParamScheduler

    from evidence.libraries.torch_job import Trained, llama, shard, step_of

    model = shard(llama(seed), task.layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    schedule = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=1e-2, min_lr=1e-3, lr_warmup_steps=1, lr_decay_steps=20, lr_decay_style="cosine",
        start_wd=0.1, end_wd=0.1, wd_incr_steps=20, wd_incr_style="constant",
    )  # fmt: skip
    config = CheckpointingConfig(
        checkpoint_dir=task.folder, model_save_format="torch_save" if WEIGHTS in task.options else "safetensors",
        save_consolidated=False, model_repo_id="none", model_cache_dir=task.notes,
    )  # fmt: skip
    checkpointer = config.build(dp_rank=dist.get_rank(), tp_rank=0, pp_rank=0)
    plain = step_of(model, optimizer)

    def step(number: int) -> float:
        loss: float = plain(number)
        schedule.step(1)
        return loss

    more = {"checkpointer": checkpointer, "schedule": [schedule]}
    return Trained(model, [optimizer], step, more, schedule.state_dict)


def _save(trained: Trained, task: Task) -> dict[str, Any]:
    checkpointer, path = trained.more["checkpointer"], Path(task.folder) / FOLDER
    checkpointer.save_model(trained.model, str(path))
    checkpointer.save_optimizer(trained.optimizers[0], trained.model, str(path), trained.more["schedule"])
    return {"files": sorted(str(each.relative_to(path)) for each in path.rglob("*") if each.is_file())}


def _load(trained: Trained, task: Task) -> None:
    checkpointer, path = trained.more["checkpointer"], Path(task.folder) / FOLDER
    checkpointer.load_model(trained.model, str(path / "model"))
    checkpointer.load_optimizer(trained.optimizers[0], trained.model, str(path), trained.more["schedule"])


def _more(run: Trials) -> Iterator[tuple[str, bool]]:
    """Compare the files of saves without the switch."""
    from evidence.libraries.trials import ABSENT, Trial, as_without_unickpt

    places = [run.saved(Trial("FSDP2 on 2", switch=value))[0] for value in (ABSENT, "", "off")]
    yield as_without_unickpt("AutoModel", places, but="consolidate.sh")


def main() -> int:
    from evidence.libraries import trials
    from evidence.libraries.trials import of_torch

    rows = [*of_torch(switch=""), *of_torch(), *of_torch(options=(WEIGHTS,))]
    return trials.main("automodel", "NeMo AutoModel 0.7.0", rows, TEXT, _more, together=True)


if __name__ == "__main__":
    from evidence.libraries.trials import tasks_of

    if tasks := tasks_of(sys.argv):
        from evidence.libraries import torch_job

        torch_job.run(tasks, _make, _save, _load)
    sys.exit(main())
