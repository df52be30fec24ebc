"""Optimizer states that a job needs and a checkpoint lacks. Pure functions.

A checkpoint lacks states if the saving job froze a parameter, had another optimizer, or had not made a step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from unickpt.base.listing import some
from unickpt.checkpoint.state.first_step import FirstStates

ALL = "all states"


@dataclass(frozen=True, slots=True)
class StatesOfParameter:
    """What the checkpoint has of one parameter.

    Attributes:
        name: name in this job.
        trained: the saving job trained it.
        held: keys of its elementwise states that this job uses.
        none: keys of its states that were None.
    """

    name: str
    trained: bool
    held: frozenset[str]
    none: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class StatesOfPart:
    """What a load does with the states of one partition.

    Attributes:
        given: elementwise states that the checkpoint has of one of its parameters.
        scalars: scalars that the checkpoint has, and states that it has as None.
        first: first values of all states; None if unknown.
        fresh: elementwise states that the checkpoint has of none of its parameters.
        fresh_scalars: scalars that the checkpoint lacks.
        lacking: missing states by the name of a parameter.
        nothing: the checkpoint has no state of the partition. The optimizer begins anew.
        kept: number of parameters of which the checkpoint has states.
    """

    given: frozenset[str] = frozenset()
    scalars: frozenset[str] = frozenset()
    first: FirstStates | None = None
    fresh: frozenset[str] = frozenset()
    fresh_scalars: frozenset[str] = frozenset()
    lacking: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    nothing: bool = False
    kept: int = 0

    @property
    def tensors(self) -> list[str]:
        """Keys of the elementwise states after the load."""
        return sorted(self.given | self.fresh)

    @property
    def keys(self) -> frozenset[str]:
        """Keys of the elementwise states and of the scalars after the load."""
        return self.given | self.fresh | self.scalars | self.fresh_scalars

    def begin(self, key: str) -> complex:
        """Return the first value of the elements of a state; 0 if it is unknown."""
        return 0.0 if self.first is None or key not in self.first.tensors else self.first.tensors[key][1]


def plan(
    parameters: Sequence[StatesOfParameter], scalars: Collection[str], first: FirstStates | None, *, owned: bool = False
) -> StatesOfPart:
    """Return what a load does with the states of a partition.

    A state that was None is not lacking. In a partition of several parameters it is None only if no other parameter has a
    tensor or a number there. The elements of a parameter with None then have the first value of the state.

    Args:
        parameters: the parameters of the partition.
        scalars: keys of the scalars that the checkpoint has of them, without those that are None.
        first: what this job's optimizer creates in its first step; None if unknown.
        owned: the checkpoint has states that belong to the partition (``ds_unickpt.held_state.owned_states``).
    """
    given = frozenset(key for parameter in parameters for key in parameter.held)
    none = frozenset(key for parameter in parameters for key in parameter.none) - given - frozenset(scalars)
    if not given and not scalars and not none and not owned:
        return StatesOfPart(first=first, lacking={p.name: (ALL,) for p in parameters if not p.trained}, nothing=True)
    needed = given if first is None else frozenset(first.tensors)
    needed_scalars = frozenset() if first is None else frozenset(first.scalars)
    lacking = {}
    for parameter in parameters:
        absent = needed - parameter.held - parameter.none
        if absent and (parameter.held or not parameter.trained):  # else it had no state when it was saved
            lacking[parameter.name] = tuple(sorted(absent))
    fresh_scalars = needed_scalars - frozenset(scalars) - none
    for parameter in parameters if fresh_scalars else ():
        lacking[parameter.name] = (*lacking.get(parameter.name, ()), *sorted(fresh_scalars))
    kept = sum(bool(parameter.held) for parameter in parameters)
    return StatesOfPart(given, frozenset(scalars) | none, first, needed - given - none, fresh_scalars, lacking, kept=kept)


def begin_anew(parameters: Sequence[StatesOfParameter], first: FirstStates | None) -> StatesOfPart:
    """Return the plan for a partition of which this job uses nothing that the checkpoint has."""
    return StatesOfPart(first=first, lacking={p.name: (ALL,) for p in parameters}, nothing=True)


def described(lacking: Iterable[Mapping[str, tuple[str, ...]]], *, most: int = 10) -> str:
    """Return the missing states as text: the states, each with the parameters that lack it."""
    by_states: dict[tuple[str, ...], list[str]] = {}
    for each in lacking:
        for name, keys in each.items():
            by_states.setdefault(keys, []).append(name)
    return "; ".join(f"{', '.join(keys)} of {some(names, most=most)}" for keys, names in by_states.items())
