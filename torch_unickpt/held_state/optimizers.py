"""The optimizers of a job: their states by parameter name, and what restores them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from torch_unickpt.framework.zero_redundancy import of_rank
from torch_unickpt.held_state import listed_states
from torch_unickpt.held_state.names import Names
from unickpt.api.dtensors import is_dtensor, local_tensor, placed_tensor
from unickpt.api.group import Group
from unickpt.api.state import Key, LocalShard, Value
from unickpt.base.errors import ConfigError, FormatError, MismatchError, UnsupportedLayoutError
from unickpt.base.listing import some
from unickpt.checkpoint.format.dtypes import torch_dtype
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.format.manifest import OptimizerRecord, ParameterGroup, merge_groups
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.report import LoadReport
from unickpt.checkpoint.state.first_step import STEP, FirstStates, first_states, known
from unickpt.checkpoint.state.missing_states import ALL, StatesOfParameter, StatesOfPart, begin_anew, described, plan
from unickpt.checkpoint.state.optimizer_record import (
    LEFT_OUT,
    NOT_HYPERPARAMETERS,
    copied,
    encoded,
    formed,
    is_number,
    not_stored,
    number_of,
    with_value,
)
from unickpt.checkpoint.state.saved_optimizer import SavedOptimizer

_NAMES = "param_names"  # of ``torch.optim`` with named parameters; the record has the names of the module
_HINT = 'optimizer=None loads the weights alone, and missing_state="fresh" starts the missing states fresh and keeps the others'
_FRESH = "the checkpoint lacks it (missing_state is fresh): starts fresh"


class Stepped(NamedTuple):
    """A parameter of an optimizer.

    Attributes:
        number: of its group, counted over all optimizers.
    """

    name: str
    parameter: torch.Tensor
    optimizer: torch.optim.Optimizer
    group: dict[str, Any]
    number: int

    @property
    def state(self) -> Mapping[str, Any]:
        """State of the parameter, lists of tensors as ``listed_states.flat`` has them; empty if the optimizer has none."""
        return listed_states.flat(self.optimizer.state.get(self.parameter, {}))


def unwrapped(given: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers that hold the states, without wrappers such as Accelerate's.

    Raises:
        ConfigError: a value is not an optimizer.
    """
    return [chain[-1] for chain in chains(given)]


def chains(given: Any) -> list[list[Any]]:
    """Return each optimizer behind the wrappers around it, the outermost first.

    Raises:
        ConfigError: a value is not an optimizer.
    """
    listed = given if isinstance(given, (list, tuple)) else [] if given is None else [given]
    found = []
    for each in (one for several in listed for one in _contained(several)):
        chain = [each]
        while (inner := _inside(chain[-1])) is not None:
            chain.append(inner)
        if not isinstance(chain[-1], torch.optim.Optimizer):
            raise ConfigError(f"optimizer: expected a torch.optim.Optimizer or a list of them, got {type(each).__name__}")
        found.append(chain)
    return found


def _contained(each: Any) -> list[Any]:
    """Return the optimizers in a container without states, such as torchtitan's; otherwise the value itself."""
    inside = getattr(each, "optimizers", None)
    if not isinstance(inside, (list, tuple)) or not inside or getattr(each, "state", None):
        return [each]
    return list(inside) if all(isinstance(one, torch.optim.Optimizer) for one in inside) else [each]


def _inside(each: Any) -> torch.optim.Optimizer | None:
    """Return the optimizer that a wrapper drives; None if it is no wrapper, or if the states of both are the same.

    Some wrappers, such as those of sharpness-aware minimization, are optimizers with states of their own. They share the
    groups with the optimizer inside, which has the moments.
    """
    inner = getattr(each, "optimizer", None)
    if isinstance(inner, torch.optim.Optimizer):
        return inner
    held = vars(each).values() if isinstance(each, torch.optim.Optimizer) else ()
    others = [other for other in held if isinstance(other, torch.optim.Optimizer) and other is not each]
    inside = [other for other in others if other.param_groups is each.param_groups and other.state is not each.state]
    return inside[0] if len(inside) == 1 else None


class Optimizers:
    """The optimizers of a job.

    Args:
        optimizers: in the order of the job.
        names: of the module.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], names: Names) -> None:
        self.optimizers, self.names = [of_rank(each) for each in optimizers], names
        self._given = optimizers
        self.name = "+".join(type(each).__name__ for each in self.optimizers)
        self.parameters = list(self._parameters())

    def _parameters(self) -> Iterator[Stepped]:
        number = 0
        first: dict[str, torch.optim.Optimizer] = {}
        for given, optimizer in zip(self._given, self.optimizers, strict=True):
            for group, of_this_rank in zip(given.param_groups, optimizer.param_groups, strict=True):
                for parameter in of_this_rank["params"]:
                    name = self.names.of.get(id(parameter))
                    if name is None:
                        raise UnsupportedLayoutError(
                            f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that the module lacks. Make "
                            "the optimizer after fully_shard, and pass the module that it trains"
                        )
                    if first.setdefault(name, optimizer) is not optimizer:
                        raise UnsupportedLayoutError(self._shared(name, first[name], optimizer))
                    yield Stepped(name, parameter, optimizer, group, number)
                number += 1

    def _shared(self, name: str, *optimizers: torch.optim.Optimizer) -> str:
        listed = [next(at for at, each in enumerate(self.optimizers) if each is other) for other in optimizers]
        both = " and ".join(f"{type(self.optimizers[at]).__name__} (optimizer[{at}])" for at in listed)
        return (
            f"{name}: {both} hold this parameter, and a checkpoint has one state of an optimizer for each. Pass one of the two "
            'as optimizer=, and the other as stateful={"other": optimizer}, which stores rank 0\'s state_dict'
        )

    def tensors(self, group: Group) -> dict[Key, Value]:
        """Return the states that are not scalars, by parameter name and state. ``group``: the ranks that save."""
        return {
            (each.name, key): _placed(each, key, value, group)
            for each in self.parameters
            for key, value in each.state.items()
            if isinstance(value, torch.Tensor) and not _is_scalar(key, value, each.parameter)
        }

    def states(self) -> list[Mapping[str, Any]]:
        """Return the state of each of ``parameters`` as it is now; empty where the optimizer has none."""
        return [each.state for each in self.parameters]

    def record(
        self, states: Sequence[Mapping[str, Any]] | None = None, common: CommonScalar | None = None
    ) -> OptimizerRecord | None:
        """Return settings and scalars for the manifest; None without an optimizer.

        Args:
            states: as of ``states()``.
            common: as of ``common_scalar``, for states with the same keys, types, dtypes and shapes.
        """
        if not self.optimizers:
            return None
        states = self.states() if states is None else states
        groups: dict[int, tuple[dict[str, Any], list[str]]] = {}
        for each in self.parameters:
            found = groups.get(each.number)
            if found is None:
                found = groups[each.number] = each.group, []
            found[1].append(each.name)
        settings = [
            encoded({key: value for key, value in group.items() if key not in ("params", _NAMES)}, names)
            for group, names in groups.values()
        ]
        scalars = None if common is None else common.of(states)
        scalars = self._scalars(states) if scalars is None else scalars
        same = merge_groups(encoded(values, names) for values, names in scalars)
        return OptimizerRecord(self.name, tuple(settings), same, any(states))

    def _scalars(self, states: Sequence[Mapping[str, Any]]) -> list[tuple[dict[str, Any], list[str]]]:
        """Return different scalars, each with the names of the parameters that have them."""
        found: dict[Any, tuple[dict[str, Any], list[str]]] = {}
        for each, state in zip(self.parameters, states, strict=True):
            values = _scalars_of(state, each.parameter)
            if values:
                found.setdefault(tuple(map(_identity, values.items())), (values, []))[1].append(each.name)
        return list(found.values())

    def common_scalar(self, states: Sequence[Mapping[str, Any]]) -> CommonScalar | None:
        """Return the one scalar that parameters have, such as the step of Adam; None if there are others."""
        own = [_scalars_of(state, each.parameter) for each, state in zip(self.parameters, states, strict=True)]
        kinds = {tuple((key, *_kind(value)) for key, value in each.items()) for each in own if each}
        only = kinds.pop() if len(kinds) == 1 else ()
        if len(only) != 1 or only[0][1] is None:
            return None
        places = [at for at, each in enumerate(own) if each]
        return CommonScalar(only[0][0], places, [self.parameters[at].name for at in places])


@dataclass(frozen=True, slots=True)
class CommonScalar:
    """The one scalar tensor that parameters of a job have.

    Attributes:
        key: of the state.
        places: parameters with it, as places among all.
        names: of these parameters.
    """

    key: str
    places: Sequence[int]
    names: list[str]

    def of(self, states: Sequence[Mapping[str, Any]]) -> list[tuple[dict[str, Any], list[str]]] | None:
        """Return the value and the names; None if the parameters have several values."""
        tensors = [states[at][self.key] for at in self.places]
        values = set(map(torch.Tensor.item, tensors))
        if len(values) != 1 or 0 in values:  # 0.0 and -0.0 are equal
            return None
        return [({self.key: tensors[0]}, self.names)]


def _kind(value: Any) -> tuple[Any, ...]:
    return (value.dtype, value.shape, value.device) if isinstance(value, torch.Tensor) else (None,)


def _scalars_of(state: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    found = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            if value.numel() == 1 and _is_scalar(key, value, parameter):
                found[key] = value
        else:
            found[key] = value
    return found


def _first_of(each: Stepped, first: FirstStates) -> dict[str, Any]:
    """Return the states of a parameter before its first step."""
    like = each.parameter.detach()
    found: dict[str, Any] = {key: copied(value) for key, value in first.scalars.items()}
    return found | {key: torch.full_like(like, value, dtype=dtype) for key, (dtype, value) in first.tensors.items()}


def _is_scalar(key: str, value: torch.Tensor, parameter: torch.Tensor) -> bool:
    return value.numel() == 1 and (key == STEP or tuple(value.shape) != tuple(parameter.shape))


def _identity(item: tuple[str, Any]) -> Any:
    """Return what scalars that are encoded alike have in common."""
    key, value = item
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        found = value.item()
        # 0.0 and -0.0 are equal, and NaN is not
        return key, value.dtype, value.shape, value.device, found if found and found == found else repr(found)
    return (key, type(value), repr(value)) if type(value) in (bool, int, float, str) else (key, id(value))


def _placed(each: Stepped, key: str, value: torch.Tensor, group: Group) -> Value:
    """Return a state with its place in the global tensor."""
    parameter: Any = each.parameter
    if is_dtensor(value) or not is_dtensor(parameter) or all(placement.is_replicate() for placement in parameter.placements):
        return value
    part = placed_tensor((each.name, key), parameter, local_tensor(parameter).shape)
    if part is None or tuple(value.shape) != part.shape or len(part.boxes) > 1:
        raise UnsupportedLayoutError(
            f"{each.name} ({key}): is a plain tensor of shape {tuple(value.shape)} beside a DTensor parameter of shape "
            f"{tuple(parameter.shape)}: its place in the whole state is not known"
        )
    return LocalShard(value, part.boxes[0][0].start, tuple(parameter.shape), group.among(part.ranks))


class RestoredOptimizers:
    """The optimizers of one load. ``requests`` first, ``apply`` after the read.

    Args:
        optimizers: of this job.
        checkpoint: under the names of this job.
        stored: name in the checkpoint of a name of this job.
        report: gets an entry for each state.
        fresh: states that the checkpoint lacks start fresh.
    """

    def __init__(
        self, optimizers: Optimizers, checkpoint: Checkpoint, stored: Mapping[str, str], report: LoadReport, *, fresh: bool
    ) -> None:
        self.own, self.checkpoint, self.report, self.fresh = optimizers, checkpoint, report, fresh
        self._names = stored
        self.saved = SavedOptimizer(checkpoint, optimizers.name)
        self._plans: list[StatesOfPart] = []
        self._firsts: dict[Any, FirstStates | None] = {}
        self._new: list[dict[str, torch.Tensor]] = []
        self._sources: dict[str, list[ParameterGroup]] = {}
        for source in () if self.saved.record is None else self.saved.record.scalars:
            for name in source.parameters:
                self._sources.setdefault(name, []).append(source)
        self._decoded: dict[tuple[int, int], dict[str, Any]] = {}

    def requests(self, group: Group) -> list[tuple[Key, Value]]:
        """Return the states to fill, under their names in the checkpoint. No optimizer changes before ``apply``.

        Args:
            group: the ranks that load.

        Raises:
            MismatchError: the checkpoint lacks states. Names them, or both optimizers.
        """
        where = self.checkpoint.storage
        if self.saved.record is None and not self.fresh:
            raise MismatchError(f"{where} holds no optimizer, this job has {self.own.name}. {_HINT}.")
        if self.saved.record is not None and not self.saved.related and not self.fresh:
            raise MismatchError(
                f"{where} was trained with {self.saved.record.name}, this job uses {self.own.name}. The states cannot be "
                f"converted. {_HINT}."
            )
        if self.saved.owned and not self.fresh:
            raise MismatchError(
                f"{where} has states of {self.own.name} that are not of the shape of their parameters: of "
                f"{some(sorted(self.saved.owned))}. Only a job of DeepSpeed with the same ZeRO stage can use them. {_HINT}."
            )
        self._plans = [self._plan(each) for each in self.own.parameters]
        lacking = [plan.lacking for plan in self._plans if plan.lacking]
        if lacking and not self.fresh:
            raise MismatchError(f"{where} lacks states that this job's {self.own.name} needs: {described(lacking)}. {_HINT}.")
        found: list[tuple[Key, Value]] = []
        for each, states in zip(self.own.parameters, self._plans, strict=True):
            made = {key: self._made(each, key, info) for key in sorted(states.given) if (info := self._info(each, key))}
            self._new.append(made)
            if torn := listed_states.missing(self._scalars(each), made):
                raise FormatError(f"{where}: {some(torn)} of {each.name}: the list of this state is there without its tensors")
            found += [((self._stored(each.name), key), _placed(each, key, value, group)) for key, value in made.items()]
        return found

    def _info(self, each: Stepped, key: str) -> TensorInfo | None:
        return self.checkpoint.info(self._stored(each.name), key)

    def _stored(self, name: str) -> str:
        return self._names.get(name, name)

    def _plan(self, each: Stepped) -> StatesOfPart:
        first = self._first(each)
        held = frozenset(key for key in self.saved.usable if self._info(each, key) is not None)
        stored = self._stored(each.name)
        none = self.saved.none.get(stored, frozenset())
        described_here = StatesOfParameter(each.name, stored in self.saved.trained, held, none)
        if not (each.parameter.requires_grad or held):  # the optimizer holds it, and makes no state for it
            return StatesOfPart(first=first, nothing=True)
        if self.saved.record is None or not (self.saved.related or self.saved.usable):
            return begin_anew([described_here], first)
        if self.saved.related and stored in self.saved.owned:
            return begin_anew([described_here], first)
        if isinstance(each.optimizer, torch.optim.LBFGS) and not_stored(self._sources.get(self._stored(each.name), ())):
            return begin_anew([described_here], first)  # of an earlier release, without lists: the others alone end its step
        scalars = {key for key, value in self._scalars(each).items() if value is not None}
        if not self.saved.related:
            wanted = frozenset() if first is None else frozenset(first.tensors)
            described_here = StatesOfParameter(each.name, described_here.trained, held & wanted)
            return plan([described_here], scalars & {STEP} if held & wanted else (), first)
        owned = frozenset() if first is None or not held else first.owned - held - none
        if owned:  # as Adafactor's rows and columns of a checkpoint of ZeRO, whose partitions have none
            return StatesOfPart(first=first, lacking={each.name: tuple(sorted(owned))}, nothing=True)
        return plan([described_here], scalars, first)

    def _scalars(self, each: Stepped) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for source in self._sources.get(self._stored(each.name), ()):
            kind = (id(source), each.number)
            if kind not in self._decoded:
                self._decoded[kind] = self.saved.scalars(source, each.group, each.parameter.device)
            found |= {key: copied(value) for key, value in self._decoded[kind].items()}
        return found

    def _first(self, each: Stepped) -> FirstStates | None:
        parameter = each.parameter
        kind = (id(each.optimizer), id(each.group), parameter.dim(), parameter.dtype, parameter.device)
        if kind not in self._firsts:
            group = {**each.group, **{key: values[0] for key, values in self._settings(each).items()}}
            self._firsts[kind] = first_states(each.optimizer, group, parameter) if known(each.optimizer) else None
        return self._firsts[kind]

    def _settings(self, each: Stepped, report: LoadReport | None = None) -> dict[str, list[Any]]:
        listed = [self._stored(other.name) for other in self.own.parameters if other.number == each.number]
        return self.saved.settings(each.number, each.group, self.saved.groups_of(listed), each.parameter.device, report)

    def _made(self, each: Stepped, key: str, info: TensorInfo) -> torch.Tensor:
        """Return an uninitialised tensor for a state: where and how the optimizer would make it."""
        own = each.state.get(key)
        if isinstance(own, torch.Tensor) and tuple(own.shape) == info.shape:
            return torch.empty_like(own)
        parameter, dtype = each.parameter.detach(), torch_dtype(info.dtype)
        first = self._first(each)
        if first is not None and key in first.tensors:  # it steps on no other dtype
            dtype = first.tensors[key][0]
        if tuple(parameter.shape) == info.shape:
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        return parameter.new_empty(info.shape, dtype=dtype)

    def apply(self) -> None:
        """Give the optimizers their states, scalars and settings. They then have no state of an earlier step."""
        for each, states, made in zip(self.own.parameters, self._plans, self._new, strict=True):
            for name, keys in states.lacking.items():
                for key in keys:
                    self.report.add(name, "optimizer" if key == ALL else key, "re-seeded", _FRESH)
            if states.nothing:
                each.optimizer.state.pop(each.parameter, None)
                if states.first is not None and states.first.constructed:  # its step makes none, as of Adagrad
                    each.optimizer.state[each.parameter] = _first_of(each, states.first)
                if not states.lacking and self._stored(each.name) in self.saved.trained:
                    self.report.add(each.name, "optimizer", "restored", "it had no state when it was saved")
                continue
            first = FirstStates() if states.first is None else states.first
            new: dict[str, Any] = {}
            for key in [*first.tensors, *sorted(states.given)]:  # in the order of the optimizer's own
                if key in made:
                    new[key] = made[key]
                elif key in states.fresh:
                    new[key] = torch.full_like(each.parameter.detach(), states.begin(key), dtype=first.tensors[key][0])
            found = self._scalars(each)
            for key in (*sorted(states.scalars), *sorted(states.fresh_scalars)):
                own = copied(each.state.get(key, first.scalars.get(key)))
                new[key] = formed(own, found[key]) if key in found else own
            ordered = [key for key in first.scalars if key in new]
            whole = {key: new[key] for key in dict.fromkeys([*ordered, *new])}
            each.optimizer.state[each.parameter] = listed_states.nested(whole)
            for key in sorted(states.scalars):
                self.report.add(each.name, key, "restored")
            for key in not_stored(self._sources.get(self._stored(each.name), ())):
                self.report.add(each.name, key, "left out", LEFT_OUT)
        done = set()
        for each in self.own.parameters:
            if each.number not in done:
                done.add(each.number)
                self._set_group(each)

    def _set_group(self, each: Stepped) -> None:
        sources: Sequence[ParameterGroup] = self.saved.groups_of(
            [self._stored(other.name) for other in self.own.parameters if other.number == each.number]
        )
        for key in not_stored(sources):
            self.report.add(f"param_groups[{each.number}].{key}", "hyperparameter", "left out", LEFT_OUT)
        for key, values in self._settings(each, self.report).items():
            if key in NOT_HYPERPARAMETERS:
                continue
            values = with_value(values) or [None]
            value = max(values, key=number_of) if is_number(values[0]) else values[0]
            each.group[key] = formed(each.group.get(key), value)
            self.report.add(f"param_groups[{each.number}].{key}", "hyperparameter", "restored")
