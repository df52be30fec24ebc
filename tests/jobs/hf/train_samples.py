"""An ordinary Trainer script that writes down the samples of every forward pass. It names no checkpoint to resume from.

A sample begins with its own number, so the model's input says which samples a step has. ``--stop_at`` ends the run like a
host that leaves: after the save of that step. ``--step_seconds`` makes steps long enough to kill a host in between.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

SIZE, LENGTH, VOCABULARY = 60, 8, 64


@dataclass
class ScriptArguments:
    """``samples``: folder of the files ``<round>-<rank>`` with lines ``step sample``."""

    samples: str
    stop_at: int = 0
    step_seconds: float = 0.0


class Numbered(torch.utils.data.Dataset):
    """Sequences that start with their number and count up from there."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        tokens = (at + torch.arange(LENGTH) * (1 + at % 3)) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


class Pace(TrainerCallback):
    """Stops after a step, and makes each step last longer."""

    def __init__(self, stop_at: int, step_seconds: float) -> None:
        self.stop_at, self.step_seconds = stop_at, step_seconds

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= state.global_step == self.stop_at
        time.sleep(self.step_seconds)


def main() -> None:
    script, args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(args.seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=VOCABULARY, **sizes))
    pace = Pace(script.stop_at, script.step_seconds)
    trainer = Trainer(model=model, args=args, train_dataset=Numbered(), callbacks=[pace])
    seen = Path(script.samples, f"{os.environ.get('UNICKPT_ROUND', '0')}-{args.process_index}")
    seen.parent.mkdir(parents=True, exist_ok=True)

    def write(module: torch.nn.Module, _: Any, given: dict[str, Any]) -> None:
        with seen.open("a") as file:
            file.writelines(f"{trainer.state.global_step + 1} {row[0]}\n" for row in given["input_ids"].tolist())

    model.register_forward_pre_hook(write, with_kwargs=True)
    trainer.train()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
