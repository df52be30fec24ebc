"""Accelerate: ``save_state`` and ``load_state`` under FSDP2, and transformers' Trainer on top of it.

python -m evidence.libraries.accelerate [--page docs/evidence/libraries.md]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evidence.libraries.torch_job import Trained
    from evidence.libraries.trials import Result, Task, Trials

TRAINER = "Trainer"
STATES = "SHARDED_STATE_DICT"
LAYER = "LlamaDecoderLayer"
TEXT = f"""With `{STATES}`. `save_state` writes model and optimizer in a folder each, and scheduler and generators in
files of its own. {TRAINER} adds its files and resumes by `resume_from_checkpoint`.

On a CPU, Accelerate trains without FSDP and does not say so. The jobs therefore replace two methods of its `PartialState`:
one answers that there are several GPUs, with gloo between them, and one that the device is the CPU. Each job asserts that its
parameters are DTensors. Not tested: `FULL_STATE_DICT` and `use_dcp=False`, which are files of
`torch.save`, FSDP 1, tensor parallelism, offload."""


def _on_cpu() -> None:
    """Let Accelerate have FSDP on a CPU."""
    import torch
    from accelerate import state
    from accelerate.utils import DistributedType

    def prepare(*_: Any, **__: Any) -> tuple[str, DistributedType]:
        return "gloo", DistributedType.MULTI_GPU

    def device(self: Any) -> None:
        self.device = torch.device("cpu")

    state.AcceleratorState._reset_state(reset_partial_state=True)  # of the task before
    state.GradientState._reset_state()
    state.PartialState._prepare_backend = prepare
    state.PartialState.set_device = device


def accelerator_of(layout: str) -> Any:
    """Return Accelerate's object of a job under FSDP2."""
    _on_cpu()
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.parallelism_config import ParallelismConfig

    from evidence.libraries.torch_job import sizes

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type=STATES, auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[LAYER],
    )  # fmt: skip
    found = sizes(layout)
    replicas = ParallelismConfig(dp_replicate_size=found["replicas"], dp_shard_size=found["shards"]) if len(found) > 1 else None
    return Accelerator(fsdp_plugin=plugin, parallelism_config=replicas)


def _make(task: Task, seed: int) -> Trained:
    accelerator = accelerator_of(task.layout)
    import torch

    from evidence.libraries.torch_job import Trained, llama, step_of

    model = llama(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    accelerator.step_scheduler_with_optimizer = False
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    step = step_of(model, optimizer, schedule, accelerator.backward)
    return Trained(model, [optimizer.optimizer], step, {"accelerator": accelerator}, schedule.state_dict)


def _save(trained: Trained, task: Task) -> None:
    trained.more["accelerator"].save_state(task.folder)


def _load(trained: Trained, task: Task) -> None:
    trained.more["accelerator"].load_state(task.folder)


def _trainer(task: Task, callbacks: list[Any]) -> Any:
    """Return a Trainer under FSDP2."""
    _on_cpu()
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    from evidence.libraries.torch_job import BATCH, STEPS, llama, rows_of, seed_of, sizes

    world = 1
    for size in sizes(task.layout).values():
        world *= size
    every = [words for step in range(sum(STEPS)) for words in rows_of(step).tolist()]
    args = TrainingArguments(
        output_dir=task.folder, max_steps=sum(STEPS), save_steps=STEPS[0], logging_steps=1, learning_rate=1e-2, fsdp=True,
        per_device_train_batch_size=BATCH // world, disable_tqdm=True, seed=seed_of(task), data_seed=1, report_to="none",
        fsdp_config={"version": 2, "state_dict_type": STATES, "transformer_layer_cls_to_wrap": [LAYER]},
    )  # fmt: skip
    data = Dataset.from_dict({"input_ids": every, "labels": every})
    return Trainer(model=llama(seed_of(task)), args=args, train_dataset=data, callbacks=callbacks)


def _with_trainer(task: Task) -> Result:
    """Train by Trainer. It saves and loads."""
    from transformers import TrainerCallback

    from evidence.libraries.torch_job import STEPS, Trained, compared, note
    from evidence.libraries.trials import Result

    problems: list[str] = []

    def trained() -> Trained:
        optimizer = trainer.optimizer
        held = [getattr(optimizer, "optimizer", optimizer)]
        return Trained(trainer.model_wrapped, held, lambda _: 0.0, values=trainer.lr_scheduler.state_dict)

    class Noting(TrainerCallback):  # type: ignore[misc]
        def on_save(self, *_: Any, **__: Any) -> None:
            if not task.loads and trainer.state.global_step == STEPS[0]:
                note(trained(), task)

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            if task.loads:
                problems.extend(compared(trained(), task))

    trainer = _trainer(task, [Noting()])
    trainer.train(resume_from_checkpoint=str(Path(task.folder) / f"checkpoint-{STEPS[0]}") if task.loads else None)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][STEPS[0] :]
    return Result(losses, problems)


def _more(run: Trials) -> Iterator[tuple[str, bool]]:
    """Compare the files of saves without the switch, and let Accelerate's tool read what was saved with it."""
    import torch
    from safetensors.torch import load_file

    from evidence.libraries.trials import ABSENT, Trial, as_without_unickpt

    yield as_without_unickpt("Accelerate", [run.saved(Trial("FSDP2 on 2", switch=value))[0] for value in (ABSENT, "", "off")])
    place, _ = run.saved(Trial("FSDP2 on 2"))
    cli, out = "accelerate.commands.accelerate_cli", place / "merged"
    made = run.tool(cli, "merge-weights", str(place / "ck" / "pytorch_model_fsdp_0"), str(out))
    state = torch.load(place / "notes" / "state.pt", weights_only=False)
    found = {f"weight/{name}": value for name, value in (load_file(out / "model.safetensors") if made else {}).items()}
    equal = bool(found) and all(torch.equal(value, state[name]) for name, value in found.items())
    yield f"`accelerate merge-weights` writes the {len(found)} weights of the live model, bit for bit", equal


def main() -> int:
    from evidence.libraries import trials
    from evidence.libraries.trials import of_torch

    trainer = [*of_torch(switch="", options=(TRAINER,))[:2], *of_torch(options=(TRAINER,))[:3]]
    rows = [*of_torch(switch=""), *of_torch(), *trainer]
    return trials.main("accelerate", "Accelerate 1.15.0, transformers 5.24.0", rows, TEXT, _more, together=True)


if __name__ == "__main__":
    from evidence.libraries.trials import tasks_of

    if tasks := tasks_of(sys.argv):
        from evidence.libraries import torch_job

        torch_job.run_all(
            tasks,
            lambda task: _with_trainer(task) if TRAINER in task.options else torch_job.result_of(task, _make, _save, _load),
        )
    sys.exit(main())
