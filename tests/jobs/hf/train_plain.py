"""Trainer without DeepSpeed. After a resume it writes what it has: weights, moments, steps, learning rate."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

from tests.jobs.hf.train_trainer import MODELS, VOCABULARY, Counting
from unickpt.testing.launch import leave


class Noted(TrainerCallback):
    """Writes the state at the begin, and the learning rate of each step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_begin(self, args: Any, state: Any, *_: Any, model: Any, optimizer: Any, lr_scheduler: Any, **__: Any) -> None:
        plain = getattr(model, "module", model)
        inner = getattr(optimizer, "optimizer", optimizer)
        found: dict[str, Any] = {}
        for name, parameter in plain.named_parameters():
            found[f"{name}|weight"] = parameter.detach().clone()
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"{name}|{key}"] = inner.state.get(parameter, {}).get(key)
        if args.process_index == 0:
            torch.save({"state": found, "step": state.global_step, "lr": lr_scheduler.get_last_lr()}, self.folder / "begin.pt")


def main() -> None:
    folder, resume, *more = sys.argv[1:]
    set_seed(5)
    config = AutoConfig.for_model("llama", vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **MODELS["llama"])
    args = TrainingArguments(
        folder, use_cpu=True, max_steps=int(more[0]), per_device_train_batch_size=6, learning_rate=5e-3, save_strategy="no",
        report_to=[], disable_tqdm=True, warmup_steps=2,
    )  # fmt: skip
    trainer = Trainer(model=AutoModelForCausalLM.from_config(config), args=args, train_dataset=Counting(60))
    trainer.add_callback(Noted(Path(folder)))
    trainer.train(resume_from_checkpoint=resume)
    trainer.accelerator.end_training()
    leave()


if __name__ == "__main__":
    main()
