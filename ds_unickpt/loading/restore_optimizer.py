"""Restores an optimizer: elementwise states, scalars, and settings of parameter groups.

``check`` runs first, then ``request``, which adds read requests. ``place`` and ``apply`` run after all ranks have read. Every
state gets an entry in the report. After the load the optimizer has exactly the states of the checkpoint, and the first values
of those that the checkpoint lacks: no state of an earlier step stays.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

import torch

from ds_unickpt.framework import internals, partition_updates
from ds_unickpt.framework.partitions import Partition, states_of
from ds_unickpt.framework.swap_files import SwappedPartition
from ds_unickpt.held_state import owned_states
from ds_unickpt.held_state.beginning import Beginning
from ds_unickpt.held_state.engine_view import EngineView
from ds_unickpt.held_state.optimizer_record import RankScalars, layout_of
from ds_unickpt.held_state.owned_states import OwnDivision, OwnedStates
from ds_unickpt.loading.reads import Reads
from ds_unickpt.placing.slices import Slices
from unickpt.base.errors import MismatchError
from unickpt.base.listing import some
from unickpt.checkpoint.format.dtypes import name_of, torch_dtype
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.format.manifest import ParameterGroup
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.report import LoadReport
from unickpt.checkpoint.state.first_step import STEP, FirstStates, first_states, forget_powers, known
from unickpt.checkpoint.state.missing_states import ALL, StatesOfParameter, StatesOfPart, begin_anew, described, plan
from unickpt.checkpoint.state.optimizer_record import LEFT_OUT, copied, formed, is_number, not_stored, number_of, with_value
from unickpt.checkpoint.state.saved_optimizer import SavedOptimizer

IN_A_MEAN = "used in the mean of the tensor-parallel ranks' values"
_HINT = (
    'load_optimizer_states=False loads the weights alone, and "missing_state": "fresh" in "unickpt" of the DeepSpeed JSON '
    "starts the missing states fresh and keeps the others"
)
_FRESH = "the checkpoint lacks it (missing_state is fresh): starts fresh"


class RestoredOptimizer:
    """The optimizer of one load into one engine. Adds its entries to ``report``."""

    def __init__(
        self, view: EngineView, slices: Slices, reads: Reads, report: LoadReport, *, allow_pickle: bool, fresh: bool,
        beginning: Beginning,
    ) -> None:  # fmt: skip
        """``fresh``: states that the checkpoint lacks start fresh. ``beginning``: of the engine."""
        self.allow_pickle, self.fresh, self.beginning = allow_pickle, fresh, beginning
        self.view, self.parts, self.names, self.base = view, view.parts, view.names, view.base
        self.slices, self.reads, self.report = slices, reads, report
        self.checkpoint: Checkpoint = reads.checkpoint
        self.saved = SavedOptimizer(self.checkpoint, type(self.base).__name__)
        self._owned: list[dict[str, Any]] = []
        self._plans: list[StatesOfPart] = []
        self._added: list[tuple[Partition, str, torch.Tensor]] = []
        self._begun: list[tuple[torch.Tensor, complex]] = []
        self._firsts: dict[Any, FirstStates | None] = {}

    # ---------------------------------------------------------------- what the checkpoint has and this job needs

    def check(self) -> None:
        """Find out which states of this job's optimizer the checkpoint has.

        Raises:
            MismatchError: it lacks states. Names both optimizers, or the parameters and their states.
        """
        if self.base is None:
            return
        own = type(self.base).__name__
        if self.saved.record is None and not self.fresh:
            raise MismatchError(f"{self.checkpoint.storage} holds no optimizer, this job has {own}. {_HINT}.")
        if self.saved.record is not None and not self.saved.related and not self.fresh:
            held = ", ".join(sorted(self.saved.states)) or "none"
            raise MismatchError(
                f"{self.checkpoint.storage} was trained with {self.saved.record.name} (states {held}), "
                f"this job uses {own}. The states cannot be converted. {_HINT}."
            )
        division = OwnDivision(self.names, self.slices, self.view.placed.tensor, self.view.placed.tensors)
        owned = OwnedStates(self.checkpoint, self._stored_name, division, allow_pickle=self.allow_pickle)
        for part in self.parts:
            states, found = self._planned(part, owned)
            self._plans.append(states)
            self._owned.append(found)
        if not self.fresh:
            self._refuse()

    def _planned(self, part: Partition, owned: OwnedStates) -> tuple[StatesOfPart, dict[str, Any]]:
        """Return the plan for a partition, and its owned states."""
        described_parameters = [(p, self._of_parameter(p)) for p in part.parameters if 0 not in self.slices.of(p).shape]
        # without ZeRO, DeepSpeed may give frozen parameters to the optimizer, which has no states for them
        parameters = [found for p, found in described_parameters if p.requires_grad or found.held]
        first = self._first(part)
        if self.saved.record is None or not (self.saved.related or self.saved.usable):
            return begin_anew(parameters, first), {}
        sources = self.saved.scalars_of(self._stored_names(part))
        values = [self.saved.scalars(each, part.group, part.master.device) for each in sources]
        scalars = {key for each in values for key, value in each.items() if value is not None}
        if not self.saved.related:
            wanted = frozenset() if first is None else frozenset(first.tensors)
            parameters = [StatesOfParameter(p.name, p.trained, p.held & wanted) for p in parameters]
            used = any(p.held for p in parameters)
            return plan(parameters, scalars & {STEP} if used else (), first), {}  # of other scalars the meaning differs
        none = frozenset(key for parameter in parameters for key in parameter.none)
        others = bool(scalars or none) or any(parameter.held for parameter in parameters)
        found = owned.read(part, self._stepping(part), others=others, none=none, fresh=self.fresh)
        if found is None:
            return begin_anew(parameters, first), {}
        return plan(parameters, scalars, first, owned=bool(found)), found

    def _of_parameter(self, parameter: torch.nn.Parameter) -> StatesOfParameter:
        name = self.names.name(parameter)
        held = frozenset(state for state in self.saved.usable if self.reads.source(name, state) is not None)
        stored = self._stored_name(parameter)
        return StatesOfParameter(name, stored in self.saved.trained, held, self.saved.none.get(stored, frozenset()))

    def _first(self, part: Partition) -> FirstStates | None:
        """Return the states that this job's optimizer creates in its first step, with the settings after the load."""
        stepping, master = self._stepping(part), part.master
        kind = (id(stepping), id(part.group), master.dim(), master.dtype, master.device)
        if kind not in self._firsts:
            self._firsts[kind] = self._found_first(part) if known(stepping) else None
        return self._firsts[kind]

    def _found_first(self, part: Partition) -> FirstStates | None:
        group = dict(part.group)
        if self.saved.related:
            number, listed = self._groups[id(part.group)]
            found = self.saved.settings(number, part.group, self.saved.groups_of(listed), part.master.device)
            group |= {key: values[0] for key, values in found.items()}
        return first_states(self._stepping(part), group, part.master)

    def _refuse(self) -> None:
        """Raise if the checkpoint lacks states that this job's optimizer needs."""
        lacking = [plan.lacking for plan in self._plans]
        untrained = [name for each in lacking for name in each if self._stored(name) not in self.saved.trained]
        if untrained:
            raise MismatchError(
                f"{self.checkpoint.storage} has no optimizer state for {len(untrained)} parameters that this job trains. "
                f"The job that saved it did not train them: {some(untrained)}. {_HINT}."
            )
        if any(lacking):
            held = ", ".join(sorted(self.saved.states)) or "no state of a parameter"
            raise MismatchError(
                f"{self.checkpoint.storage} lacks states that this job's optimizer, {type(self.base).__name__}, needs: "
                f"{described(lacking)}. It has {held}. {_HINT}."
            )

    # ---------------------------------------------------------------- elementwise states

    def request(self) -> None:
        """Request the states of all partitions. Existing states are filled in place. ``place`` adds the others."""
        for part, states in zip(self.parts, self._plans, strict=True):
            if part.swapped is not None and not states.nothing:
                self._create_swapped(part, part.swapped, states)
            for state in states.tensors:
                self._request(part, states, state)
            self._account_missing(part, states)

    def place(self) -> None:
        """Add the new states, and remove those that the checkpoint lacks."""
        if self.base is None:
            return
        for part, key, tensor in self._added:
            partition_updates.add_state(self.view.engine, part, key, tensor)
        for view, value in self._begun:
            view.fill_(value)
        for part, states, owned in zip(self.parts, self._plans, self._owned, strict=True):
            if states.nothing and (part.swapped is not None or (states.first is not None and states.first.constructed)):
                self._begin(part, states)
                continue
            keep = states.keys | set(owned.get("states", ())) | internals.keys_of_rank(self.base)
            partition_updates.keep_states(self.view.engine, part, frozenset() if states.nothing else keep)
            for key in states.fresh_scalars:
                self._state(part)[key] = copied(states.first.scalars[key]) if states.first is not None else 0
        for stepping in {id(found): found for found in map(self._stepping, self.parts)}.values():
            forget_powers(stepping)

    def _begin(self, part: Partition, states: StatesOfPart) -> None:
        """Set the states of a partition to their first values. Its optimizer needs them, or their files exist already."""
        tensors = {} if states.first is None else states.first.tensors
        for key, value in states_of(self._stepping(part), part).items():
            if isinstance(value, torch.Tensor) and (key in tensors or value.numel() > 1):
                value.fill_(states.begin(key))
            elif value is not None:
                first = 0 if states.first is None else number_of(states.first.scalars.get(key, 0))
                self._state(part)[key] = formed(value, first)

    def _create_swapped(self, part: Partition, swapped: SwappedPartition, states: StatesOfPart) -> None:
        """Create the states that a partition on NVMe lacks."""
        found = {} if states.first is None else {key: dtype for key, (dtype, _) in states.first.tensors.items()}
        for state, parameter in ((state, p) for state in sorted(states.given) for p in part.parameters):
            source = self.reads.source(self.names.name(parameter), state)
            found |= {} if source is None else {state: torch_dtype(source.dtype)}
        missing = {state: found[state] for state in states.tensors if state not in swapped.tensors}
        if missing:
            swapped.create(missing)

    def _request(self, part: Partition, states: StatesOfPart, state: str) -> None:
        names = [self.names.name(p) for p in part.parameters]
        sources = {name: self.reads.source(name, state) if state in states.given else None for name in names}
        tensor = self._tensor(part, states, state, next((source for source in sources.values() if source is not None), None))
        flat = self.reads.flat(tensor)
        for piece in part.held(state):
            view = flat.narrow(0, piece.at, piece.hi - piece.lo)
            source = sources[self.names.name(piece.parameter)]
            if source is not None:
                self.reads.fill(source, self.slices.of(piece.parameter), piece.lo, piece.hi, view)
            elif flat.data_ptr() == tensor.data_ptr():
                self._begun.append((view, states.begin(state)))
            else:
                view.fill_(states.begin(state))  # of a temporary, which is copied before ``place``
        for name, source in sources.items():
            if state in states.lacking.get(name, ()):
                continue
            if source is not None:
                self.reads.account(name, state, source, name_of(tensor.dtype))
            elif name in self.reads.stored:
                self.report.add(name, state, "re-seeded", f"no state when it was saved: {states.begin(state):g}")

    def _tensor(self, part: Partition, states: StatesOfPart, state: str, info: TensorInfo | None) -> torch.Tensor:
        held = states_of(self._stepping(part), part).get(state)
        if isinstance(held, torch.Tensor) and tuple(held.shape) == part.shape(state):
            return held
        if info is None:
            assert states.first is not None  # or the state was not planned
            dtype = states.first.tensors[state][0]
        else:
            master = self.reads.source(self.names.name(part.parameters[0]), "master")
            same = master is not None and (master.state, master.dtype) == ("master", name_of(part.master.dtype))
            dtype = torch_dtype(info.dtype) if same else part.master.dtype
        tensor = partition_updates.empty_state(self.view.engine, part, state, dtype)
        self._added.append((part, state, tensor))
        return tensor

    def _state(self, part: Partition) -> dict[str, Any]:
        """Return the live state of a partition."""
        state: dict[str, Any] = self._stepping(part).state[part.master]
        return state

    def _stepping(self, part: Partition) -> torch.optim.Optimizer:
        assert self.base is not None
        return part.stepped_by or self.base

    def _account_missing(self, part: Partition, states: StatesOfPart) -> None:
        """Report the states that the checkpoint lacks, and the partitions of which it has none."""
        for name, keys in states.lacking.items():
            for key in keys:
                self.report.add(name, "optimizer" if key == ALL else key, "re-seeded", _FRESH)
        for parameter in part.parameters if states.nothing else ():
            name = self.names.name(parameter)
            if name not in states.lacking and name in self.reads.stored:
                self.report.add(name, "optimizer", "restored", "it had no state when it was saved")

    def fresh_line(self) -> str:
        """Return which states of this rank start fresh, and how many are kept, for the log; '' if the checkpoint lacks none."""
        lacking = [states.lacking for states in self._plans if states.lacking]
        if not lacking:
            return ""
        kept = sum(states.kept for states in self._plans)
        shared = any(states.lacking and not states.nothing for states in self._plans)
        step = " (those in a partition of ZeRO share the step of the others in it)" if shared else ""
        return f"the optimizer keeps states of {kept} parameters; fresh are {described(lacking)}{step}"

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
        elif self.saved.record is not None and not self.saved.related:
            reason = f"of {self.saved.record.name}: this job's optimizer has no such state"
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
        """Set the settings of the parameter groups, and the scalars. ``of_rank``: what this rank stored of them, or None."""
        if self.base is None:
            return
        own = RankScalars.from_object(of_rank)
        if own is not None and (not self.saved.related or own.layout != layout_of(self.parts, self.names, self.base)):
            own = None
        parts = {id(part.group): part for part in reversed(self.parts)}
        for key, (number, listed) in self._groups.items():
            sources = self.saved.groups_of(listed)
            for name in not_stored(sources):
                self.report.add(f"param_groups[{number}].{name}", "hyperparameter", "left out", LEFT_OUT)
            if own is not None and len(own.groups) == len(self._groups):
                sources = [own.groups[number]]
            self._set_group(number, parts[key], sources)
        for number, (part, states) in enumerate(zip(self.parts, self._plans, strict=True)):
            scalars = self.saved.scalars_of(self._stored_names(part))
            if own is not None and len(own.partitions) == len(self.parts):
                scalars = [own.partitions[number]]
            if not states.nothing:
                self._set_scalars(part, scalars, states)
        for part, owned in zip(self.parts, self._owned, strict=True):
            if owned:
                owned_states.restore(part, self.base, owned)
            for key in owned.get("states", ()):
                self.report.add(self._label(part), key, "restored")

    @cached_property
    def _groups(self) -> dict[int, tuple[int, list[str]]]:
        """Return the number and the parameters (their names in the checkpoint) of each parameter group, by its ``id``."""
        found: dict[int, tuple[int, list[str]]] = {}
        for part in self.parts:
            found.setdefault(id(part.group), (len(found), []))[1].extend(self._stored_names(part))
        return found

    def _stored_name(self, parameter: torch.nn.Parameter) -> str:
        return self._stored(self.names.name(parameter))

    def _stored(self, name: str) -> str:
        return self.reads.stored.get(name, name)

    def _stored_names(self, part: Partition) -> list[str]:
        names = map(self.names.name, part.parameters)
        return [self.reads.stored[name] for name in names if name in self.reads.stored]

    def _set_group(self, number: int, part: Partition, sources: Sequence[ParameterGroup]) -> None:
        assert self.base is not None
        group = part.group
        position = next((at for at, each in enumerate(self.base.param_groups) if each is group), number)
        if not sources:
            self.beginning.reset_group(position, group)
            if self.saved.record is not None and not self.saved.related:
                reason = f"those of {self.saved.record.name}: this job's own apply"
                self.report.add(f"param_groups[{number}]", "hyperparameter", "left out", reason)
        taken = self.saved.settings(number, part.group, sources, part.master.device, self.report)
        for key, found in taken.items():
            self._set(group, key, found, label=f"param_groups[{number}].{key}", state="hyperparameter")
        if STEP in group and STEP not in taken:
            self.beginning.reset_step(position, group)

    def _set_scalars(self, part: Partition, sources: Sequence[ParameterGroup], states: StatesOfPart) -> None:
        """Set the scalars of one partition from those of its parameters."""
        label = self._label(part)
        found: dict[str, list[Any]] = {}
        for source in sources:
            for key, value in self.saved.scalars(source, part.group, part.master.device).items():
                if self.saved.related or key in states.scalars:
                    found.setdefault(key, []).append(value)
        first = {} if states.first is None else states.first.scalars
        typed = self.saved.same and part.stepped_by is None and all(source.tensors is not None for source in sources)
        for key, values in found.items():
            held = self._state(part)
            if not with_value(values):
                if key not in states.tensors:
                    self._set(held, key, values, label=label, state=key)
                continue
            if key == STEP and not all(source.tensors is not None for source in sources):
                guess = self._step_of_group(label, part, values)
                if guess and key not in held:
                    continue
            if key not in held and not typed:
                held[key] = copied(first[key]) if key in first else self._guessed(part)
            self._set(held, key, values, label=label, state=key)

    def _label(self, part: Partition) -> str:
        more = f" and {len(part.parameters) - 1} more" if len(part.parameters) > 1 else ""
        return self.names.name(part.parameters[0]) + more

    def _step_of_group(self, label: str, part: Partition, values: Sequence[Any]) -> bool:
        """Set ``step`` in the group if it belongs there, and return whether it does. For checkpoints of before 2026-11."""
        if STEP in part.group:
            self._set(part.group, STEP, values, label=label, state=STEP)
            return True
        if not type(self.base).__module__.startswith(("torch.optim", "deepspeed.")):  # it may create it in its first step
            part.group[STEP] = max(map(number_of, with_value(values)))
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
        """Set one value with this job's type of it, or with the stored type if this job has none.

        The values of several parameters may differ: the largest number counts, and any value more than None.
        """
        values = with_value(found) or [None]
        distinct = sorted({number_of(value) for value in values}) if len(found) > 1 and is_number(values[0]) else []
        value = max(values, key=number_of) if len(distinct) > 1 else values[0]
        holder[key] = formed(holder.get(key), value)
        if len(distinct) > 1 or (distinct and len(values) < len(found)):
            had = some([*distinct, *[None] * (len(values) < len(found))])
            self.report.add(label, state, "cast", f"parameters of this partition had {had}; the largest is used")
        else:
            self.report.add(label, state, "restored")
