"""The Trainer script whose last rank is told to end after the third step, with the callback that lets all ranks save."""

from __future__ import annotations

import os
import signal
from typing import Any

from transformers import TrainerCallback

import ds_unickpt
from tests.jobs.hf.train_trainer import main

STEP = 3


class Preempting(TrainerCallback):
    """Sends SIGTERM to the last rank."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if state.global_step == STEP and args.process_index == args.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return control


if __name__ == "__main__":
    main([Preempting(), ds_unickpt.PreemptionCallback()])
