"""An ordinary SFTTrainer script: LoRA adapters on a frozen base model from disk.

Everything about DeepSpeed and checkpoints is on the command line and in the JSON, as in any user's
script; the one addition is a callback that writes down what the tests compare.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser
from trl import SFTConfig, SFTTrainer

from tests.jobs.hf.recorder import Recorder

WORDS = 24


@dataclass
class ScriptArguments:
    """What is not Trainer's own. ``resume``: ``last`` for the newest checkpoint in ``output_dir``."""

    base: str
    adapters: list[str] = field(default_factory=lambda: ["q_proj", "v_proj"])
    resume: str | None = None
    record: str | None = None


def counting(rows: int) -> Dataset:
    """Texts that count up from anywhere, all of one length."""
    return Dataset.from_dict({"text": [" ".join(f"w{(at * 7 + i) % WORDS}" for i in range(12)) for at in range(rows)]})


def main() -> None:
    script, args = HfArgumentParser((ScriptArguments, SFTConfig)).parse_args_into_dataclasses()
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(script.base),
        args=args,
        train_dataset=counting(60),
        processing_class=AutoTokenizer.from_pretrained(script.base),
        peft_config=LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=script.adapters, task_type="CAUSAL_LM"),
    )
    if script.record:
        trainer.add_callback(Recorder(script.record))
    trainer.train(resume_from_checkpoint=True if script.resume == "last" else script.resume)
    trainer.accelerator.end_training()  # ends the process group: a rank that is still busy does not lose its peers


if __name__ == "__main__":
    main()
