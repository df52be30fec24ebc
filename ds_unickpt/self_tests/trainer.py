"""Self-test of the hooks on transformers: ``python -m ds_unickpt.self_tests.trainer FOLDER``.

Trainer trains a small model to step 2 and saves. Another Trainer resumes by itself, passes over a newer folder whose save has
not finished, and goes on to step 4. Its losses and weights must be those of a run without interruption, bit for bit. Exits with
an error otherwise. ``unickpt.base.self_test`` runs it for a transformers whose hooked functions have changed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from ds_unickpt.self_tests.engine import begin

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "unickpt": {"enabled": True, "auto_resume": "always"},
}


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(x) - labels).square().mean()}


def main(folder: str) -> None:
    """Run the test.

    Raises:
        SystemExit: Trainer did not resume, or other losses or weights came.
    """
    begin()
    whole = _train(Path(folder, "whole"), steps=4, seed=1)
    parts = Path(folder, "parts")
    _train(parts, steps=4, seed=1, stop_at=2)
    (parts / "checkpoint-3").mkdir()  # what a save leaves that was cut
    resumed = _train(parts, steps=4, seed=2)
    if resumed[0] != 2:
        sys.exit(f"Trainer begins at step {resumed[0]} instead of 2")
    if resumed[1] != whole[1][2:]:
        sys.exit(f"the losses after a resume are {resumed[1]}, and {whole[1][2:]} without")
    for name, tensor in whole[2].items():
        if not torch.equal(tensor, resumed[2][name]):
            sys.exit(f"{name} differs after a resume")


def _train(folder: Path, *, steps: int, seed: int, stop_at: int = 0) -> tuple[int, list[float], dict[str, torch.Tensor]]:
    """Train, and return the first step, the losses and the weights."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    first_steps: list[int] = []
    losses: list[float] = []

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            first_steps.append(state.global_step)

        def on_log(self, _args: Any, _state: Any, _control: Any, logs: dict[str, Any], **_: Any) -> None:
            losses.extend([logs["loss"]] if "loss" in logs else [])

        def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == stop_at or control.should_training_stop

    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(7)
    rows = [{"x": torch.randn(8, generator=generator), "labels": torch.randn(8, generator=generator)} for _ in range(16)]
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, save_steps=2, logging_steps=1, per_device_train_batch_size=2,
        learning_rate=1e-2, lr_scheduler_type="constant", report_to=[], disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(), deepspeed=CONFIG,
    )  # fmt: skip
    trainer = Trainer(model=_Model(), args=arguments, train_dataset=rows, callbacks=[Watch()])
    trainer.train()
    return first_steps[0], losses, {name: tensor.detach().clone() for name, tensor in trainer.model.named_parameters()}


if __name__ == "__main__":
    main(sys.argv[1])
