"""The tensors that steps of an optimizer change, and which of them changed without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from unickpt.training.witness.hashes import combined, hashes

WEIGHT = ""
MOST_STATES = 15  # of a parameter, which have a number of their own in messages
Tensors = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Stepped:
    """A parameter, or a part of one, that steps of an optimizer change.

    Attributes:
        name: as the plain module has it.
        read: returns what this rank holds of it now, without gradients: the weight with the key ``WEIGHT``, if it is of this
            part, and then the states by their key, ascending.
        ranks: global ranks that hold the same values, ascending; empty if only this one does.
        moving: it also changes between two steps, such as a weight that is gathered late.
    """

    name: str
    read: Callable[[], Tensors]
    ranks: tuple[int, ...] = ()
    moving: bool = False

    def called(self, key: str) -> str:
        """Return the name of one of its tensors, as in ``exp_avg of head.weight``."""
        return f"{key} of {self.name}" if key else self.name

    def numbered(self, number: int) -> str:
        """Return the name of the n-th tensor, of another rank, which may have more states than this one.

        The weight is the first, whether this part has it or not.
        """
        keys = [WEIGHT, *(key for key, _ in self.read() if key != WEIGHT)]
        return self.called(keys[number] if number < len(keys) else "a state")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor on this rank. It shares memory and the counter of writes."""
    found = tensor.detach()
    of_dtensor = getattr(found, "to_local", None)
    return found if of_dtensor is None else of_dtensor().detach()


@dataclass(slots=True)
class Snapshot:
    """Hashes of all tensors that an optimizer changes, at one moment.

    Attributes:
        step: the last step.
        keys: number of the parameter, and key, of each tensor.
        marks: address and counter of writes of each tensor, which tell what the program itself does.
        values: hash of each tensor.
        forgotten: the program is about to write to tensors in a way that no counter sees.
    """

    step: int
    keys: Sequence[tuple[int, str]]
    marks: Sequence[tuple[int, int]]
    values: Sequence[int]
    forgotten: bool = False

    @classmethod
    def of(cls, stepped: Sequence[Stepped], step: int) -> Snapshot:
        """Take it now."""
        every = [(at, key, tensor) for at, each in enumerate(stepped) for key, tensor in each.read()]
        values = hashes([tensor for _, _, tensor in every]).tolist()
        return cls(step, [each[:2] for each in every], [_mark(tensor) for _, _, tensor in every], values)

    def changed(self, stepped: Sequence[Stepped]) -> tuple[list[tuple[int, str]], bool]:
        """Return the tensors that changed since, and whether any was compared.

        Those that move, and those that the program wrote to or replaced, are not. A tensor is the number of the parameter, and
        its key.
        """
        before = dict(zip(self.keys, zip(self.marks, self.values, strict=True), strict=True))
        resting = [(at, each) for at, each in enumerate(stepped) if not each.moving and not self.forgotten]
        now = [((at, key), tensor) for at, each in resting for key, tensor in each.read()]
        untouched = [(key, tensor) for key, tensor in now if key in before and before[key][0] == _mark(tensor)]
        values = hashes([tensor for _, tensor in untouched]).tolist()
        return [key for (key, _), value in zip(untouched, values, strict=True) if value != before[key][1]], bool(untouched)

    def columns(self, positions: Sequence[int]) -> torch.Tensor:
        """Return two hashes for each of these parameters: of the weight, and of all states together. 0: there is none."""
        held: dict[int, list[tuple[str, int]]] = {at: [] for at in positions}
        for (at, key), value in zip(self.keys, self.values, strict=True):
            if at in held:
                held[at].append((key, value))
        found = []
        for values in held.values():
            weight = next((value for key, value in values if key == WEIGHT), 0)
            found += [weight, _together([value for key, value in values if key != WEIGHT])]
        return torch.tensor(found, dtype=torch.int64, device="cpu")


def _together(states: Sequence[int]) -> int:
    return combined(torch.tensor(states, dtype=torch.int64, device="cpu")) if states else 0


def repeated(each: Stepped, column: int, times: int) -> list[int]:
    """Return the hash of a column of a parameter again, some times, and then those of all its tensors alone.

    The list has ``times + 1 + MOST_STATES`` numbers. The weight is the first of the tensors, and 0 if this part has none.
    """
    weight: list[int] = []
    states: list[int] = []
    again = []
    for _ in range(times):
        held = each.read()
        values = hashes([tensor for _, tensor in held]).tolist()
        weight = [value for value, (key, _) in zip(values, held, strict=True) if key == WEIGHT] or [0]
        states = [value for value, (key, _) in zip(values, held, strict=True) if key != WEIGHT]
        again.append(_together(states) if column else weight[0])
    alone = [*weight, *states][: 1 + MOST_STATES]
    return [*again, *alone, *[0] * (1 + MOST_STATES - len(alone))]


def _mark(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor._version
