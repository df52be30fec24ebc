"""The optimizer that a checkpoint describes, seen from the optimizer of this job: groups, settings and scalars."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

import torch

from ds_unickpt.framework.partitions import Partition
from ds_unickpt.held_state.first_step import STEP
from ds_unickpt.held_state.optimizer_record import NOT_HYPERPARAMETERS
from ds_unickpt.loading.missing_states import shared_states
from unickpt.base.listing import some
from unickpt.checkpoint.format.manifest import ParameterGroup
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.report import LoadReport
from unickpt.checkpoint.state.optimizer_record import decoded, family_of


class SavedOptimizer:
    """The optimizer of the job that saved a checkpoint.

    Attributes:
        record: what the manifest has of it; None if the checkpoint has no optimizer.
        same: it is of the class of this job's optimizer.
        related: all of its states have a meaning in this job's optimizer.
    """

    def __init__(self, checkpoint: Checkpoint, own: str) -> None:
        """``own``: class name of this job's optimizer."""
        self.checkpoint, self.own, self.record = checkpoint, own, checkpoint.manifest.optimizer
        self.same = self.record is not None and self.record.name == own
        self.related = self.record is not None and family_of(self.record.name) == family_of(own)

    @cached_property
    def states(self) -> frozenset[str]:
        """Its elementwise states."""
        return frozenset(info.state for info in self.checkpoint.index.tensors if info.kind == "optimizer")

    @cached_property
    def usable(self) -> frozenset[str]:
        """Its elementwise states that this job's optimizer may use."""
        if self.related or self.record is None:
            return self.states
        return self.states & shared_states(self.record.name, self.own)

    @cached_property
    def trained(self) -> frozenset[str]:
        """Names in the checkpoint of the parameters that the saving job trained."""
        groups = () if self.record is None else self.record.groups
        return frozenset(name for group in groups for name in group.parameters)

    def groups_of(self, listed: Collection[str]) -> list[ParameterGroup]:
        """Return the groups that have some of these parameters; none if the settings are those of an unrelated optimizer."""
        if self.record is None or not self.related:
            return []
        return [group for group in self.record.groups if not set(group.parameters).isdisjoint(listed)]

    def scalars_of(self, listed: Collection[str]) -> list[ParameterGroup]:
        """Return the scalars of some of these parameters."""
        if self.record is None:
            return []
        return [found for found in self.record.scalars if not set(found.parameters).isdisjoint(listed)]

    def scalars(self, source: ParameterGroup, part: Partition) -> dict[str, Any]:
        """Return the scalars of one source without those that this job keeps in the parameter group."""
        return {
            key: value
            for key, value in self._decoded(source, part).items()
            if key not in source.repeated or not (self.same or key in part.group)
        }

    def settings(
        self, number: int, part: Partition, sources: Sequence[ParameterGroup], report: LoadReport | None = None
    ) -> dict[str, list[Any]]:
        """Return the values of the settings that a parameter group takes from its sources, by key.

        Args:
            number: number of the group.
            part: a partition of the group.
            sources: groups of the checkpoint, or of this rank.
            report: gets the settings that the group does not take.
        """
        group, taken = part.group, {}
        values = [self._decoded(source, part) for source in sources]
        for key in dict.fromkeys(key for source in values for key in source):
            if key in NOT_HYPERPARAMETERS:
                continue
            found = [source[key] for source in values if key in source]
            outcome: Any = "left out"
            if key == STEP and not self.same and key not in group:
                outcome, text = "cast", "this job's optimizer keeps it per parameter"
            elif any(value != found[0] for value in found) and key != STEP:
                text = f"{key} differs between the groups that form this one ({some(found)}); keeps {group.get(key)}"
            elif key not in group and key != "initial_lr" and not self.same:
                text = "this job's optimizer has no such setting"
            else:
                taken[key] = found
                continue
            if report is not None:
                report.add(f"param_groups[{number}].{key}", "hyperparameter", outcome, text)
        return taken

    def _decoded(self, group: ParameterGroup, part: Partition) -> dict[str, Any]:
        return decoded(group, where=self.checkpoint.storage.where(), device=part.master.device)


def formed(existing: Any, value: Any) -> Any:
    """Return the checkpoint's value with the type of this job's value."""
    if not is_number(value):
        return value
    if isinstance(existing, torch.Tensor):
        with torch.no_grad():
            return existing.fill_(number_of(value))
    if isinstance(existing, float):
        return number_of(value)
    if isinstance(existing, int) and not isinstance(existing, bool):
        number = number_of(value)
        return int(number) if float(number).is_integer() else number
    return value


def copied(value: Any) -> Any:
    """Return a scalar of its own."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def is_number(value: Any) -> bool:
    """Whether a value is a number or a tensor."""
    return isinstance(value, (bool, int, float, torch.Tensor))


def number_of(value: Any) -> Any:
    """Return the number in a tensor of one element; another value as it is."""
    return value.item() if isinstance(value, torch.Tensor) else value
