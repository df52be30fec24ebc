"""Restores an optimizer: elementwise states, scalars, and settings of parameter groups.

``check`` runs first, then ``request``, which adds read requests. ``apply`` runs after all ranks have read. Every state gets an
entry in the report.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from ds_unickpt import internals, owned_states, partition_updates, tensor_parallel
from ds_unickpt.names import ModuleNames
from ds_unickpt.optimizer_record import NOT_HYPERPARAMETERS, STEP, RankScalars, classify, decoded, layout_of
from ds_unickpt.owned_states import Division, OwnedStates
from ds_unickpt.partitions import Partition, states_of
from ds_unickpt.reads import Reads
from ds_unickpt.slices import Slices
from ds_unickpt.swap_files import SwappedPartition
from unickpt.errors import MismatchError
from unickpt.format.dtypes import name_of, torch_dtype
from unickpt.format.index import TensorInfo
from unickpt.format.manifest import ParameterGroup
from unickpt.load.checkpoint import Checkpoint
from unickpt.load.report import LoadReport

_FAMILIES = {"adamw": "adam"}
_DECORATIONS = ("deepspeedcpu", "fused", "zenflow", "cpu")
IN_A_MEAN = "used in the mean of the tensor-parallel ranks' values"
_HINT = "load_optimizer_states=False loads the weights alone"


def family_of(name: str) -> str:
    """Return the family of an optimizer class. A family has the same states: Adam, AdamW, FusedAdam, DeepSpeedCPUAdam, ..."""
    plain = name.lower()
    for decoration in _DECORATIONS:
        plain = plain.removeprefix(decoration)
    return _FAMILIES.get(plain, plain)


class RestoredOptimizer:
    """The optimizer of one load into one engine. Adds its entries to ``report``."""

    def __init__(
        self, engine: Any, parts: Sequence[Partition], names: ModuleNames, slices: Slices, reads: Reads, report: LoadReport, *,
        allow_pickle: bool,
    ) -> None:  # fmt: skip
        self.allow_pickle = allow_pickle
        self._owned: list[dict[str, Any]] = []
        self.engine, self.parts, self.names, self.reads, self.report = engine, parts, names, reads, report
        self.slices = slices
        self.checkpoint: Checkpoint = reads.checkpoint
        self.base = internals.base_optimizer(engine)

    def check(self) -> None:
        """Check that this job's optimizer has the states of the checkpoint's optimizer.

        Raises:
            MismatchError: names both optimizers, or the parameters that the checkpoint's optimizer did not train.
        """
        record = self.checkpoint.manifest.optimizer
        if self.base is None:
            return
        own = type(self.base).__name__
        if record is None:
            raise MismatchError(f"{self.checkpoint.storage} holds no optimizer, this job has {own}. {_HINT}.")
        if family_of(record.name) != family_of(own):
            states = sorted(self._states())
            raise MismatchError(
                f"{self.checkpoint.storage} was trained with {record.name} (states {', '.join(states) or 'none'}), "
                f"this job uses {own}. The states cannot be converted. {_HINT}."
            )
        trained = {name for group in record.groups for name in group.parameters}
        stored = self.reads.stored
        untrained = [
            name
            for part in self.parts
            for name, parameter in ((self.names.name(p), p) for p in part.parameters)
            if name in stored and stored[name] not in trained and 0 not in self.slices.of(parameter).shape
        ]
        if untrained:
            raise MismatchError(
                f"{self.checkpoint.storage} has no optimizer state for {len(untrained)} parameters that this job trains. "
                f"The job that saved it did not train them: {some(untrained)}. {_HINT}."
            )

    # ---------------------------------------------------------------- elementwise states

    def _states(self) -> set[str]:
        return {info.state for info in self.checkpoint.index.tensors if info.kind == "optimizer"}

    def request(self) -> None:
        """Request the states of all partitions. Existing states are filled in place, and missing ones are created."""
        if self.base is None:
            return
        states = self._states()
        division = Division(self.names, self.slices, tensor_parallel.rank(self.engine), tensor_parallel.degree(self.engine))
        owned = OwnedStates(self.checkpoint, self._stored_name, division, allow_pickle=self.allow_pickle)
        self._owned = [owned.read(part, self._stepping(part)) for part in self.parts]
        for part, found in zip(self.parts, self._owned, strict=True):
            self._refuse_unknown_states(part, states | set(found.get("states", ())))
        for part in self.parts:
            if part.swapped is not None:
                self._create_swapped(part, part.swapped, states)
            for state in sorted(states):
                self._request(part, state)

    def _create_swapped(self, part: Partition, swapped: SwappedPartition, states: set[str]) -> None:
        """Create the states that a partition on NVMe lacks."""
        sources = {state: self.reads.source(self.names.name(p), state) for p in part.parameters for state in sorted(states)}
        missing = {state: torch_dtype(source[1].dtype) for state, source in sources.items() if source is not None}
        missing = {state: dtype for state, dtype in missing.items() if state not in swapped.tensors}
        if missing:
            swapped.create(missing)

    def _request(self, part: Partition, state: str) -> None:
        names = [self.names.name(p) for p in part.parameters]
        sources = {name: self.reads.source(name, state) for name in names}
        infos = [source[1] for source in sources.values() if source is not None]
        if not infos:
            return
        tensor = self._tensor(part, state, infos[0])
        flat = self.reads.flat(tensor)
        for piece in part.held(state):
            view = flat.narrow(0, piece.at, piece.hi - piece.lo)
            source = sources[self.names.name(piece.parameter)]
            if source is None:
                view.zero_()
            else:
                self.reads.fill(source[0], self.slices.of(piece.parameter), piece.lo, piece.hi, view)
        for name, source in sources.items():
            self._account(name, state, source, name_of(tensor.dtype))

    def _refuse_unknown_states(self, part: Partition, states: set[str]) -> None:
        """Raise if the checkpoint lacks a state of this job's optimizer, because the state would keep a stale value."""
        assert self.base is not None
        own, held = classify([part], self.base).tensors, states_of(self.base, part)
        unknown = sorted(key for key in own - states if held.get(key) is not None)
        if unknown and states:
            raise MismatchError(
                f"this job's optimizer has state {', '.join(unknown)}, which the checkpoint lacks "
                f"(it has {', '.join(sorted(states))})"
            )

    def _tensor(self, part: Partition, state: str, info: TensorInfo) -> torch.Tensor:
        assert self.base is not None
        held = states_of(self._stepping(part), part).get(state)
        if isinstance(held, torch.Tensor) and tuple(held.shape) == part.shape(state):
            return held
        master = self.reads.source(self.names.name(part.parameters[0]), "master")
        same = master is not None and master[1].dtype == name_of(part.master.dtype)
        dtype = torch_dtype(info.dtype) if same else part.master.dtype
        return partition_updates.new_state(self.engine, part, state, dtype)

    def _state(self, part: Partition) -> dict[str, Any]:
        """Return the live state of a partition."""
        state: dict[str, Any] = self._stepping(part).state[part.master]
        return state

    def _stepping(self, part: Partition) -> torch.optim.Optimizer:
        assert self.base is not None
        return part.stepped_by or self.base

    def _account(self, name: str, state: str, source: tuple[int, TensorInfo] | None, dtype: str) -> None:
        values = self.reads.means.get(self.reads.stored.get(name, ""), ())
        if source is not None and values:
            self.report.add(name, state, "cast", f"the mean of the values of {len(values)} tensor-parallel ranks")
            return
        if source is None:
            if name in self.reads.stored:
                self.report.add(name, state, "re-seeded", "no state when it was saved: zeros")
        elif source[1].dtype == dtype:
            self.report.add(name, state, "restored")
        else:
            self.report.add(name, state, "cast", f"{source[1].dtype} to {dtype}")

    def account_others(self, *, wanted: bool, elsewhere: Collection[str]) -> None:
        """Report the optimizer states of the checkpoint that this rank does not use.

        Args:
            wanted: the load includes the optimizer.
            elsewhere: names of the checkpoint that other ranks have.
        """
        back = {stored: name for name, stored in self.reads.stored.items()}
        known = {(entry.name, entry.state) for entry in self.report.entries}
        if not wanted:
            reason = "not requested (load_optimizer_states or load_module_only)"
        elif self.base is None:
            reason = "this job has no optimizer"
        else:
            reason = "this job does not train it"
        averaged = {value for values in self.reads.means.values() for value in values}
        for info in self.checkpoint.index.tensors:
            if info.kind != "optimizer" or (back.get(info.name, info.name), info.state) in known:
                continue
            if wanted and info.name in elsewhere:
                self.report.add(info.name, info.state, "on other ranks")
            elif wanted and self.base is not None and info.name in averaged:
                self.report.add(info.name, info.state, "cast", IN_A_MEAN)
            else:
                self.report.add(back.get(info.name, info.name), info.state, "left out", reason)

    # ---------------------------------------------------------------- settings and scalars

    def apply(self, of_rank: Any) -> None:
        """Set the settings of the parameter groups, and the scalars.

        Args:
            of_rank: scalars that this rank stored (``RankScalars.to_object``), or None.
        """
        record = self.checkpoint.manifest.optimizer
        if self.base is None or record is None:
            return
        own = RankScalars.from_object(of_rank)
        if own is not None and own.layout != layout_of(self.parts, self.names, self.base):
            own = None
        same = record.name == type(self.base).__name__
        members: dict[int, tuple[Any, Partition, list[str]]] = {}
        for part in self.parts:
            members.setdefault(id(part.group), (part.group, part, []))[2].extend(self._stored_names(part))
        for number, (group, part, listed) in enumerate(members.values()):
            sources = [other for other in record.groups if set(other.parameters) & set(listed)]
            if own is not None and len(own.groups) == len(members):
                sources = [own.groups[number]]
            self._set_group(number, group, part, sources, same=same)
        for number, part in enumerate(self.parts):
            names = set(self._stored_names(part))
            scalars = [other for other in record.scalars if names & set(other.parameters)]
            if own is not None and len(own.partitions) == len(self.parts):
                scalars = [own.partitions[number]]
            self._set_scalars(part, scalars, same=same)
        for part, states in zip(self.parts, self._owned, strict=True):
            if states:
                owned_states.restore(part, self.base, states)
            for key in states.get("states", ()):
                self.report.add(self._label(part), key, "restored")

    def _stored_name(self, parameter: torch.nn.Parameter) -> str:
        name = self.names.name(parameter)
        return self.reads.stored.get(name, name)

    def _stored_names(self, part: Partition) -> list[str]:
        names = map(self.names.name, part.parameters)
        return [self.reads.stored[name] for name in names if name in self.reads.stored]

    def _decoded(self, group: ParameterGroup, part: Partition) -> dict[str, Any]:
        return decoded(group, where=self.checkpoint.storage.where(), device=part.master.device)

    def _set_group(self, number: int, group: Any, part: Partition, sources: Sequence[ParameterGroup], *, same: bool) -> None:
        label = f"param_groups[{number}]"
        values = [self._decoded(source, part) for source in sources]
        for key in dict.fromkeys(key for source in values for key in source):
            if key in NOT_HYPERPARAMETERS:
                continue
            found = [source[key] for source in values if key in source]
            if key == STEP and not same and key not in group:
                self.report.add(f"{label}.{key}", "hyperparameter", "cast", "this job's optimizer keeps it per parameter")
            elif any(value != found[0] for value in found) and key != STEP:
                text = f"{key} differs between the groups that form this one ({some(map(str, found))}); keeps {group.get(key)}"
                self.report.add(f"{label}.{key}", "hyperparameter", "left out", text)
            elif key not in group and key != "initial_lr" and not same:
                self.report.add(f"{label}.{key}", "hyperparameter", "left out", "this job's optimizer has no such setting")
            else:
                self._set(group, key, found, label=f"{label}.{key}", state="hyperparameter")

    def _set_scalars(self, part: Partition, sources: Sequence[ParameterGroup], *, same: bool) -> None:
        """Set the scalars of one partition from those of its parameters."""
        assert self.base is not None
        label = self._label(part)
        found: dict[str, list[Any]] = {}
        for source in sources:
            for key, value in self._decoded(source, part).items():
                if key not in source.repeated or not (same or key in part.group):  # otherwise the group already has it
                    found.setdefault(key, []).append(value)
        typed = same and part.stepped_by is None and all(source.tensors is not None for source in sources)
        for key, values in found.items():
            held = self._state(part)
            if key == STEP and not all(source.tensors is not None for source in sources):
                guess = self._step_of_group(label, part, values)
                if guess and key not in held:
                    continue
            if key not in held and not typed:
                held[key] = self._guessed(part)
            self._set(held, key, values, label=label, state=key)

    def _label(self, part: Partition) -> str:
        more = f" and {len(part.parameters) - 1} more" if len(part.parameters) > 1 else ""
        return self.names.name(part.parameters[0]) + more

    def _step_of_group(self, label: str, part: Partition, values: Sequence[Any]) -> bool:
        """Set ``step`` in the group if it belongs there, and return whether it does. For checkpoints of before 2026-11."""
        if STEP in part.group:
            self._set(part.group, STEP, values, label=label, state=STEP)
            return True
        if not type(self.base).__module__.startswith(
            ("torch.optim", "deepspeed.")
        ):  # such a class may create it in its first step
            part.group[STEP] = max(map(_number, values))
            text = "the checkpoint does not record whether it belongs to the group or the state: set in both"
            self.report.add(f"{label} (group)", STEP, "cast", text)
        return False

    def _guessed(self, part: Partition) -> Any:
        """Return a scalar state of the type that this optimizer probably uses."""
        if not type(self._stepping(part)).__module__.startswith("torch.optim"):
            return 0
        on_device = part.group.get("capturable") or part.group.get("fused")
        return torch.zeros((), dtype=torch.float32, device=part.master.device if on_device else "cpu")

    def _set(self, holder: Any, key: str, found: Sequence[Any], *, label: str, state: str) -> None:
        """Set one value with this job's type of it, or with the stored type if this job has none."""
        distinct = sorted({_number(value) for value in found}) if len(found) > 1 and _is_number(found[0]) else []
        value = max(found, key=_number) if len(distinct) > 1 else found[0]
        holder[key] = _formed(holder.get(key), value)
        if len(distinct) > 1:
            text = f"parameters of this partition had {some(map(str, distinct))}; the largest is used"
            self.report.add(label, state, "cast", text)
        else:
            self.report.add(label, state, "restored")


def _formed(existing: Any, value: Any) -> Any:
    """Return the checkpoint's value with the type of this job's value."""
    if not _is_number(value):
        return value
    if isinstance(existing, torch.Tensor):
        with torch.no_grad():
            return existing.fill_(_number(value))
    if isinstance(existing, float):
        return _number(value)
    if isinstance(existing, int) and not isinstance(existing, bool):
        number = _number(value)
        return int(number) if float(number).is_integer() else number
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float, torch.Tensor))


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def some(items: Iterable[str], separator: str = ", ", most: int = 10) -> str:
    """Return the first items as text, with the number of the others."""
    listed = list(items)
    return separator.join(listed[:most]) + (f"{separator}and {len(listed) - most} more" if len(listed) > most else "")
