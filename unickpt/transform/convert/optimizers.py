"""What formats of other programs do not store of an optimizer in the same way: its class, and its step."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from unickpt.base.errors import MismatchError
from unickpt.checkpoint.format.manifest import OptimizerRecord
from unickpt.checkpoint.state.optimizer_record import decoded

_CLASSES = (({"exp_avg", "exp_avg_sq"}, "AdamW"), ({"exp_avg"}, "Lion"), ({"momentum_buffer"}, "SGD"), ({"sum"}, "Adagrad"))


def class_of_states(states: Collection[str]) -> str:
    """Return the class name that follows from the keys of the tensor states, or ``unknown``."""
    return next((name for keys, name in _CLASSES if keys <= set(states)), "unknown")


def step_of_all(record: OptimizerRecord, names: Iterable[str], where: str, *, needs: str, single: str) -> float:
    """Return the step of all parameters, for a format that has a single one.

    Args:
        record: the optimizer of a checkpoint.
        names: the trained parameters; at least one.
        where, needs, single: for messages: the checkpoint, who needs the step, and which format has one.

    Raises:
        MismatchError: a parameter has no step, or parameters have different ones.
    """
    steps: dict[str, Any] = {}
    for group in record.scalars:
        steps |= dict.fromkeys(group.parameters, decoded(group, where="optimizer").get("step"))
    found: dict[float, str] = {}
    for name in names:
        if not isinstance(steps.get(name), (int, float)):
            raise MismatchError(f"{where}: {name} has no step, which {needs}")
        found[float(steps[name])] = name
    if len(found) > 1:
        (a, first), (b, second) = list(found.items())[:2]
        raise MismatchError(f"{where}: {first} is at step {a:g}, {second} at step {b:g}; {single}")
    return next(iter(found))
