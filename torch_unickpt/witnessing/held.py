"""The tensors that steps of an optimizer change, and which of them changed without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.parallel import DistributedDataParallel

from torch_unickpt.held_state.names import Names
from unickpt.api.dtensors import is_dtensor, placed_tensor
from unickpt.training.witness.hashes import combined, hashes

WEIGHT = ""
MOST_STATES = 15  # of a parameter, which have a number of their own in messages


@dataclass(frozen=True, slots=True)
class Stepped:
    """A parameter of an optimizer.

    Attributes:
        name: as the plain module has it.
        parameter: plain, or a DTensor.
        optimizer: which fills the state of the parameter in its first step, and replaces it in a load.
        ranks: global ranks that hold the same part of it, ascending; empty if only this one does.
    """

    name: str
    parameter: torch.Tensor
    optimizer: torch.optim.Optimizer
    ranks: tuple[int, ...]

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return the part of this rank: the weight, and the states by their key, ascending."""
        state = self.optimizer.state.get(self.parameter, {})
        states = [(str(key), value) for key, value in state.items() if isinstance(value, torch.Tensor)]
        found = [(WEIGHT, self.parameter), *sorted(states, key=lambda each: each[0])]
        return [(key, local(value)) for key, value in found]

    def called(self, key: str) -> str:
        """Return the name of one of its tensors, as in ``exp_avg of head.weight``."""
        return f"{key} of {self.name}" if key else self.name

    def numbered(self, number: int) -> str:
        """Return the name of the n-th tensor, of another rank, which may have more states than this one."""
        keys = [key for key, _ in self.tensors()]
        return self.called(keys[number] if number < len(keys) else "a state")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor on this rank. It shares memory and the counter of writes."""
    if is_dtensor(tensor):
        tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    return tensor.detach()


def stepped_by(optimizer: torch.optim.Optimizer, names: Names, model: torch.nn.Module) -> list[Stepped]:
    """Return the parameters of an optimizer, in its order."""
    found = []
    for at, parameter in enumerate(each for group in optimizer.param_groups for each in group["params"]):
        name = names.of.get(id(parameter), f"parameter {at} of {type(optimizer).__name__}")
        found.append(Stepped(name, parameter, optimizer, _copies(name, parameter, model)))
    return found


def _copies(name: str, parameter: torch.Tensor, model: torch.nn.Module) -> tuple[int, ...]:
    if is_dtensor(parameter):
        place = placed_tensor(name, parameter, local(parameter).shape)
        return place.ranks if place is not None and len(place.ranks) > 1 else ()
    if isinstance(model, DistributedDataParallel):
        return tuple(sorted(torch.distributed.get_process_group_ranks(model.process_group)))
    return ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Hashes of all tensors that an optimizer changes, at one moment.

    Attributes:
        step: the last step.
        keys: number of the parameter, and key, of each tensor.
        marks: address and counter of writes of each tensor, which tell what the program itself does.
        values: hash of each tensor.
    """

    step: int
    keys: Sequence[tuple[int, str]]
    marks: Sequence[tuple[int, int]]
    values: Sequence[int]

    @classmethod
    def of(cls, stepped: Sequence[Stepped], step: int) -> Snapshot:
        """Take it now."""
        every = [(at, key, tensor) for at, each in enumerate(stepped) for key, tensor in each.tensors()]
        values = hashes([tensor for _, _, tensor in every]).tolist()
        return cls(step, [each[:2] for each in every], [_mark(tensor) for _, _, tensor in every], values)

    def changed(self, stepped: Sequence[Stepped]) -> tuple[list[tuple[int, int]], int]:
        """Return the tensors that changed since, and how many the program wrote to or replaced, which are not compared.

        A tensor is the number of the parameter, and its number among the tensors of this parameter.
        """
        now = [(at, number, tensor) for at, each in enumerate(stepped) for number, (_, tensor) in enumerate(each.tensors())]
        if [at for at, _, _ in now] != [at for at, _ in self.keys]:
            return [], len(self.keys)
        untouched = [n for n, (_, _, tensor) in enumerate(now) if _mark(tensor) == self.marks[n]]
        values = hashes([now[n][2] for n in untouched]).tolist()
        found = [now[n][:2] for n, value in zip(untouched, values, strict=True) if value != self.values[n]]
        return found, len(now) - len(untouched)

    def columns(self, parameters: int) -> torch.Tensor:
        """Return two hashes for each parameter: of the weight, and of all states together, which is 0 if there are none."""
        of_parameter: list[list[int]] = [[] for _ in range(parameters)]
        for (at, _), value in zip(self.keys, self.values, strict=True):
            of_parameter[at].append(value)
        found = [[weight, _together(states)] for weight, *states in of_parameter]
        return torch.tensor(found, dtype=torch.int64).view(-1)


def _together(states: Sequence[int]) -> int:
    return combined(torch.tensor(states, dtype=torch.int64)) if states else 0


def repeated(each: Stepped, column: int, times: int) -> list[int]:
    """Return the hash of a column of a parameter again, some times, and then those of all its tensors alone.

    The list has ``times + 1 + MOST_STATES`` numbers.
    """
    tensors = [tensor for _, tensor in each.tensors()]
    values: list[int] = []
    again = []
    for _ in range(times):
        values = hashes(tensors).tolist()
        again.append(_together(values[1:]) if column else values[0])
    alone = values[: 1 + MOST_STATES]
    return [*again, *alone, *[0] * (1 + MOST_STATES - len(alone))]


def _mark(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor._version
