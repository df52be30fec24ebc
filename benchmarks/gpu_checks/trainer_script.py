"""An ordinary Trainer script: a small Llama learns to count. A callback writes down its state.

trainer_script STATES [arguments of Trainer]      STATES/save-<step>, STATES/begin: name and state -> full tensor

It arms unickpt as torch does if it is installed; this checkout may not be.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import _unickpt_autoload

_unickpt_autoload.arm()

import torch  # noqa: E402
from transformers import (  # noqa: E402
    AutoConfig,
    AutoModelForCausalLM,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

VOCABULARY, LENGTH, WIDTH = 48, 16, 64


class Counting(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences that count up from anywhere, in steps of one to three, modulo the vocabulary."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        tokens = (at * 7 + (1 + at % 3) * torch.arange(LENGTH)) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


class Recorder(TrainerCallback):
    """Writes masters and moments, through DeepSpeed's own accessors: after a resume, and at each save."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_begin(self, _: Any, state: Any, *__: Any, **kwargs: Any) -> None:
        if state.global_step:
            self._record("begin", kwargs["model"])

    def on_save(self, _: Any, state: Any, *__: Any, **kwargs: Any) -> None:
        self._record(f"save-{state.global_step}", kwargs["model"])

    def _record(self, event: str, model: torch.nn.Module) -> None:
        from benchmarks.gpu_checks.zero import consolidated

        self.folder.mkdir(parents=True, exist_ok=True)
        torch.save(consolidated(model), self.folder / event)


def main() -> None:
    states = Path(sys.argv.pop(1))
    (args,) = HfArgumentParser((TrainingArguments,)).parse_args_into_dataclasses()
    set_seed(args.seed)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    trainer = Trainer(model=AutoModelForCausalLM.from_config(config), args=args, train_dataset=Counting())
    trainer.add_callback(Recorder(states))
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
