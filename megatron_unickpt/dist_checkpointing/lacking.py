"""States that this job has and a checkpoint lacks: why, and what a load does about them. Pure functions.

Megatron's optimizers get their states at the first step, or at a load. A checkpoint can lack some or all of them. Nothing is
lost if the optimizer had not stepped. In other cases the user decides (``missing_state``).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from functools import cached_property

from unickpt.base.listing import some
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.format.manifest import OptimizerRecord
from unickpt.checkpoint.state.optimizer_record import family_of

ERROR = "error"  # value of the option missing_state


class Fit(enum.Enum):
    """Which tensors a checkpoint and a job may have alone."""

    EQUAL = "none"
    REQUESTED = "the checkpoint may have parameters that no rank requests"
    COMMON = "both may: the job keeps its own values of tensors that the checkpoint lacks"


class Lack(enum.Enum):
    """Why a checkpoint lacks a state of an optimizer. The values complete the report's entry of the state."""

    NO_OPTIMIZER = "the checkpoint has no optimizer"
    NOT_STEPPED = "the optimizer had not stepped when it was saved"
    NO_STATE = "the parameter had no state when it was saved"
    FROZEN = "it was not trained when it was saved"
    OTHER_OPTIMIZER = "the optimizer that saved it has no such state"
    NO_PARAMETER = "not in the checkpoint"

    @property
    def loses_nothing(self) -> bool:
        """Whether the job that saved had no state either, and no optimizer of another kind."""
        return self in (Lack.NOT_STEPPED, Lack.NO_STATE)


ASKED = (Lack.FROZEN, Lack.OTHER_OPTIMIZER)  # a load refuses them unless missing_state is fresh


class States:
    """The optimizer states of a checkpoint."""

    def __init__(self, record: OptimizerRecord | None, step: int | None, tensors: Iterable[TensorInfo], own: str) -> None:
        """Collect the states.

        Args:
            record: hyperparameters and steps of the checkpoint's optimizer.
            step: of the checkpoint.
            tensors: all tensors of the checkpoint.
            own: class name of this job's optimizer; '' if unknown.
        """
        infos = list(tensors)
        self._record, self._step, self._own = record, step, own
        self._parameters = {info.name for info in infos if info.kind != "optimizer"}
        self._of: dict[str, set[str]] = {}
        for info in infos:
            if info.kind == "optimizer":
                self._of.setdefault(info.name, set()).add(info.state)

    @property
    def names(self) -> list[str]:
        """Return the names of all states, such as ``exp_avg``."""
        return sorted(set().union(*self._of.values()))

    def lack(self, name: str) -> Lack:
        """Return why the checkpoint lacks a state of a parameter. Call it only for a state that it lacks."""
        if name not in self._parameters:
            return Lack.NO_PARAMETER
        if self._record is None and not self._of:
            return Lack.NO_OPTIMIZER
        if not self._of:
            return Lack.NOT_STEPPED if self._not_stepped else Lack.OTHER_OPTIMIZER
        if self._of.get(name):
            return Lack.OTHER_OPTIMIZER
        return Lack.NO_STATE if name in self._grouped or not self._grouped else Lack.FROZEN

    @cached_property
    def _grouped(self) -> frozenset[str]:
        """Return the names of the parameters in the groups of the checkpoint's optimizer."""
        record = self._record
        return frozenset(n for group in (*record.groups, *record.scalars) for n in group.parameters) if record else frozenset()

    @cached_property
    def _not_stepped(self) -> bool:
        """Whether an optimizer without any state is one before its first step, and not one that has none."""
        assert self._record is not None
        if self._record.stepped is not None:
            return not self._record.stepped
        steps = (entry.hyperparameters.get("step", 0) for entry in self._record.scalars)
        if any(isinstance(step, (int, float)) and step > 0 for step in steps):
            return False
        return self._step == 0 or not self._own or family_of(self._record.name) == family_of(self._own)


def refusal(absent: Mapping[Lack, set[tuple[str, str]]], saved_with: str, stored: Iterable[str]) -> str:
    """Return why a load with ``missing_state`` ``error`` fails, and how it does not; '' if nothing is absent.

    Args:
        absent: states (name, state) that the checkpoint lacks, by the reason.
        saved_with: class name of the optimizer that saved the checkpoint.
        stored: names of the states of the checkpoint.
    """
    lines = [f"no optimizer state for {_some(pairs)}: {lack.value}" for lack, pairs in absent.items() if pairs]
    if not lines:
        return ""
    return (
        f"{'; '.join(lines)}. It was saved with {saved_with}, whose states are {', '.join(stored) or 'none'}. "
        "missing_state=fresh (--unickpt-missing-state fresh) starts these states fresh and keeps the others; a load without "
        "optimizer (--no-load-optim) takes the weights alone"
    )


def _some(pairs: set[tuple[str, str]]) -> str:
    return f"{some(sorted({name for name, _ in pairs}))} ({', '.join(sorted({state for _, state in pairs}))})"


def left_out_refusal(names: Iterable[str]) -> str:
    """Return why a load that must take every parameter fails; '' if none is left out."""
    left = sorted(set(names))
    if not left:
        return ""
    return (
        f"no rank of this job loads {len(left)} parameters of the checkpoint: {some(left)}. Their values would be lost. If "
        "that is intended, load with strict=False (scripts: --dist-ckpt-strictness log_all)"
    )
