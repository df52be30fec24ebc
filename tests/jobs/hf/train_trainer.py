"""An ordinary Trainer script: a tiny causal language model learns to count.

Everything about DeepSpeed and checkpoints is on the command line and in the JSON, as in any user's
script; the one addition is a callback that writes down what the tests compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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

from tests.jobs.hf.recorder import Recorder

VOCABULARY, LENGTH = 48, 16
MODELS = {
    "llama": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    # Tied input and output embeddings; no dropout, so that a run does not depend on the number of generators.
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}


@dataclass
class ScriptArguments:
    """What is not Trainer's own. ``resume``: ``last`` for the newest checkpoint in ``output_dir``."""

    model: str = field(default="llama", metadata={"choices": sorted(MODELS)})
    resume: str | None = None
    record: str | None = None


class Counting(torch.utils.data.Dataset):
    """Sequences that count up from anywhere, in steps of one to three, modulo the vocabulary."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        tokens = (at * 7 + (1 + at % 3) * torch.arange(LENGTH)) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


def main(callbacks: Sequence[TrainerCallback] = ()) -> None:
    """Train. ``callbacks``: further ones."""
    script, args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(args.seed)
    config = AutoConfig.for_model(script.model, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **MODELS[script.model])
    model = AutoModelForCausalLM.from_config(config)
    trainer = Trainer(model=model, args=args, train_dataset=Counting(60), eval_dataset=Counting(12))
    for each in callbacks:
        trainer.add_callback(each)
    if script.record:
        trainer.add_callback(Recorder(script.record))
    trainer.train(resume_from_checkpoint=True if script.resume == "last" else script.resume)
    trainer.accelerator.end_training()  # ends the process group: a rank that is still busy does not lose its peers


if __name__ == "__main__":
    main()
