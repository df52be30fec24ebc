"""The optimizer that a checkpoint describes, seen from the optimizer of this job: groups, settings and scalars."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from unickpt.base.listing import some
from unickpt.checkpoint.format.manifest import ParameterGroup
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.report import LoadReport
from unickpt.checkpoint.state.first_step import STEP
from unickpt.checkpoint.state.optimizer_record import NOT_HYPERPARAMETERS, decoded, family_of, shared_states

OWNERS = "optimizer_owners/"  # + rank: shapes and parameter ranges of the owners that a rank stores, among the shared objects


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

    @cached_property
    def none(self) -> Mapping[str, frozenset[str]]:
        """Keys of the states that were None, by the name of a parameter. Empty if they are those of an unrelated optimizer."""
        found: dict[str, frozenset[str]] = {}
        for source in () if self.record is None or not self.related else self.record.scalars:
            keys = frozenset(key for key, value in source.hyperparameters.items() if value is None)
            found |= {name: found.get(name, frozenset()) | keys for name in source.parameters if keys}
        return found

    @cached_property
    def owned(self) -> frozenset[str]:
        """Names in the checkpoint of the parameters with states that belong to the tensor that the optimizer stepped on.

        These states are not of a parameter's shape. Only a job of DeepSpeed with the same owners can use them
        (``ds_unickpt.held_state.owned_states``).
        """
        ranks = [key for key in self.checkpoint.shared_names() if key.startswith(OWNERS)]
        owners = [owner for key in ranks for owner in self.checkpoint.shared_object(key).value]
        return frozenset(name for _, (_, pieces), *_ in owners for name, *_ in pieces)

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

    def scalars(self, source: ParameterGroup, own: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
        """Return the scalars of one source without those that this job keeps in the parameter group."""
        return {
            key: value
            for key, value in self._decoded(source, device).items()
            if key not in source.repeated or not (self.same or key in own)
        }

    def settings(
        self,
        number: int,
        own: Mapping[str, Any],
        sources: Sequence[ParameterGroup],
        device: torch.device,
        report: LoadReport | None = None,
    ) -> dict[str, list[Any]]:
        """Return the values of the settings that a parameter group takes from its sources, by key.

        Args:
            number: number of the group.
            own: the group.
            sources: groups of the checkpoint, or of this rank.
            device: place of tensors.
            report: gets the settings that the group does not take.
        """
        taken: dict[str, list[Any]] = {}
        values = [self._decoded(source, device) for source in sources]
        for key in dict.fromkeys(key for source in values for key in source):
            if key in NOT_HYPERPARAMETERS:
                continue
            found = [source[key] for source in values if key in source]
            outcome: Any = "left out"
            if key == STEP and not self.same and key not in own:
                outcome, text = "cast", "this job's optimizer keeps it per parameter"
            elif any(value != found[0] for value in found) and key != STEP:
                text = f"{key} differs between the groups that form this one ({some(found)}); keeps {own.get(key)}"
            elif key not in own and key != "initial_lr" and not self.same:
                text = "this job's optimizer has no such setting"
            else:
                taken[key] = found
                continue
            if report is not None:
                report.add(f"param_groups[{number}].{key}", "hyperparameter", outcome, text)
        return taken

    def _decoded(self, group: ParameterGroup, device: torch.device) -> dict[str, Any]:
        return decoded(group, where=self.checkpoint.storage.where(), device=device)
