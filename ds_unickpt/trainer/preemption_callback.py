"""A callback of Hugging Face's Trainer: all ranks save at the same step when the job is told to end."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from unickpt.api.preemption import Preemption


class PreemptionCallback(TrainerCallback):  # type: ignore[misc]
    """Lets Trainer save on all ranks at the same optimizer step when one of them gets SIGTERM, and ends the process then.

    Example:
        ```python
        trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[ds_unickpt.PreemptionCallback()])
        ```

    Args:
        grace_seconds: as of ``unickpt.Preemption``.
    """

    def __init__(self, grace_seconds: float = 25.0) -> None:
        self._grace_seconds = grace_seconds
        self._preemption: Preemption | None = None
        self._told = False

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Begin to listen."""
        if self._preemption is None:
            self._preemption = Preemption(grace_seconds=self._grace_seconds)

    def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> Any:
        """Ask Trainer to save and to stop, on all ranks at the same step."""
        if self._preemption is not None and self._preemption.due(state.global_step):
            self._told = control.should_save = control.should_training_stop = True
        return control

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Leave after the save: what the script does after its training is for a training that is complete."""
        if self._told and self._preemption is not None:
            self._preemption.leave()
