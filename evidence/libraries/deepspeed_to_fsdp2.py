"""A run of TRL on DeepSpeed goes on in torchtitan and in Accelerate on FSDP2, with its moments.

python -m evidence.libraries.deepspeed_to_fsdp2 [--page docs/evidence/libraries.md]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evidence.libraries import trials
from evidence.libraries.environments import python_of
from evidence.libraries.trials import Trial, Trials

if TYPE_CHECKING:
    from evidence.libraries.torch_job import Trained
    from evidence.libraries.trials import Result, Task

TITLE = "From DeepSpeed to FSDP2"
SOURCE, CHECKPOINT = Trial("ZeRO-2 on 2", options=("DPO",)), "checkpoint-3/global_step3"
STATES = ("weight", "exp_avg", "exp_avg_sq")
ROWS = (
    Trial("ZeRO-2 on 2", "FSDP2 on 2", (2, 2), options=("torchtitan",)),
    Trial("ZeRO-2 on 2", "HSDP 2x2", (2, 4), options=("torchtitan",)),
    Trial("ZeRO-2 on 2", "FSDP2 on 1", (2, 1), options=("accelerate",)),
)
TEXT = """TRL saves, as in its own section. torchtitan loads `global_step3` as `initial_load_path`, with
`initial_load_model_only=False` and `exclude_from_loading` of what a DeepSpeed checkpoint does not have in torchtitan's form:
schedule, step and data. Accelerate looks for two folders: `ln -s` makes `pytorch_model_fsdp_0` and `optimizer_0` names of that
one. Equal: every weight and moment, and the steps."""


def _model(task: Task) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(Path(task.folder) / "checkpoint-3"))


def _torchtitan(task: Task) -> Trained:
    from torchtitan.components.checkpointer.dcp import CheckpointManager
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

    from evidence.libraries.torch_job import Trained, shard

    model = shard(_model(task), task.layout)
    config = default_adamw(lr=1e-2)
    config.implementation = "foreach"
    optimizers = config.build(model_parts=[model])
    manager = CheckpointManager.Config(
        enable=True, folder="own", initial_load_path=f"{task.folder}/{CHECKPOINT}", initial_load_model_only=False,
        exclude_from_loading=["lr_scheduler", "dataloader"],
    ).build(
        dataloader=None, model_parts=[model], optimizers=optimizers, states={}, sd_adapter=None,
        lr_schedulers=LRSchedulersContainer.Config().build(optimizers=optimizers, training_steps=20), base_folder=task.notes,
    )  # fmt: skip
    assert manager.load()
    return Trained(model, list(optimizers), lambda _: 0.0)


def _accelerate(task: Task) -> Trained:
    import torch
    import torch.distributed as dist

    from evidence.libraries import accelerate
    from evidence.libraries.torch_job import Trained

    accelerator = accelerate.accelerator_of(task.layout)
    model = _model(task)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    place = Path(task.notes) / "accelerate"
    if dist.get_rank() == 0:
        place.mkdir()
        for name in ("pytorch_model_fsdp_0", "optimizer_0"):
            (place / name).symlink_to(Path(task.folder) / CHECKPOINT)
    dist.barrier()
    accelerator.load_state(str(place))
    return Trained(model, [optimizer.optimizer], lambda _: 0.0)


def _load(task: Task) -> Result:
    import torch

    from evidence.libraries.torch_job import gathered
    from evidence.libraries.trials import Result

    found = gathered((_torchtitan if "torchtitan" in task.options else _accelerate)(task))
    truth = torch.load(Path(task.notes) / "state.pt", weights_only=False)
    wanted = {key: value for key, value in truth.items() if key.partition("/")[0] in STATES}
    assert wanted
    problems = [key for key, value in wanted.items() if key not in found or not torch.equal(value, found[key])]
    steps = sorted({float(value) for key, value in found.items() if key.startswith("step/")})
    problems += [] if steps == truth["step"] else [f"steps: {truth['step']} expected, {steps} found"]
    return Result(problems=problems)


def _row(trial: Trial, folder: Path, environments: Path) -> tuple[dict[str, str], bool]:
    (library,) = trial.options
    saver = Trials("trl", python_of("trl", environments), folder / "trl")
    place, saved = saver.saved(SOURCE)
    loader = Trials("deepspeed_to_fsdp2", python_of(library, environments), folder / library / trial.target.replace(" ", "-"))
    loader.at(trial, place)
    result = saved if saved.error else loader.loaded(trial)
    outcome = result.error or "; ".join(result.problems[:3]) or trials.EQUAL
    print(trial, outcome, flush=True)
    row = {"library": library, "saved under": trial.source, "loaded under": trial.target, "result": outcome}
    return row, outcome == trials.EQUAL


def main() -> int:
    return trials.main_of_rows("deepspeed_to_fsdp2", TITLE, TEXT, ROWS, _row)


if __name__ == "__main__":
    tasks = trials.tasks_of(sys.argv)
    if tasks:
        from evidence.libraries import torch_job

        torch_job.run_all(tasks, _load)
    sys.exit(main())
