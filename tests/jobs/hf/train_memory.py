"""A Trainer script for the memory tier: records the state after each step, and may be killed after one.

A callback with ``on_save`` would make Trainer save to disk only, so the recorder uses ``on_step_end``.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from typing import Any

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from tests.jobs.hf.recorder import record
from tests.jobs.hf.train_trainer import MODELS, VOCABULARY, Counting


@dataclass
class ScriptArguments:
    """What is not Trainer's own.

    Attributes:
        record: folder of records.
        resume: ``last`` for True, ``script`` for what ``get_last_checkpoint`` returns, or a folder.
        die: step at whose beginning all ranks end by ``signal``, ``delay`` seconds later.
    """

    record: str = ""
    resume: str | None = None
    die: int = 0
    delay: float = field(default=3.0)
    signal: str = "SIGKILL"


class StepRecorder(TrainerCallback):
    """Records ``begin`` and ``step-N``, and ends the process as a crash does."""

    def __init__(self, script: ScriptArguments) -> None:
        self.script = script

    def on_train_begin(self, _args: Any, state: Any, *_: Any, **kwargs: Any) -> None:
        if state.global_step:
            self._record("begin", state, **kwargs)

    def on_step_begin(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        if self.script.die and state.global_step + 1 == self.script.die:
            time.sleep(self.script.delay)
            os.kill(os.getpid(), signal.Signals[self.script.signal])

    def on_step_end(self, _args: Any, state: Any, *_: Any, **kwargs: Any) -> None:
        self._record(f"step-{state.global_step}", state, **kwargs)

    def on_train_end(self, _args: Any, state: Any, *_: Any, **kwargs: Any) -> None:
        self._record("end", state, **kwargs)

    def _record(self, event: str, state: Any, *, model: Any, lr_scheduler: Any, **_: Any) -> None:
        scheduler = getattr(lr_scheduler, "scheduler", lr_scheduler)
        last = {k: v for k, v in scheduler.state_dict().items() if isinstance(v, (int, float, list))}
        record(self.script.record, event, model, step=state.global_step, log=state.log_history, scheduler=last)


def main() -> None:
    script, args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(args.seed)
    config = AutoConfig.for_model("llama", vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **MODELS["llama"])
    trainer = Trainer(model=AutoModelForCausalLM.from_config(config), args=args, train_dataset=Counting(60))
    trainer.add_callback(StepRecorder(script))
    named = get_last_checkpoint(args.output_dir) if script.resume == "script" else script.resume
    trainer.train(resume_from_checkpoint=True if named == "last" else named)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
