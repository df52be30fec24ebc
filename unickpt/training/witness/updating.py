"""One step of an optimizer on a part of one tensor: what this rank has computed, and its repetition from the same values."""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unickpt.training.witness.cases import Case, loaded
from unickpt.training.witness.hashes import combined, hashes
from unickpt.training.witness.held import local

MOST_BYTES = 64 << 20  # that one rank sends
ELEMENTWISE = (
    torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam,
    torch.optim.RAdam, torch.optim.RMSprop, torch.optim.SGD,
)  # fmt: skip
# so a part of a tensor steps as the whole does


def unsuited(optimizers: Sequence[Any]) -> str:
    """Return why the steps of the optimizers of a rank cannot be repeated in parts, or ''."""
    kinds = dict.fromkeys(map(type, optimizers))
    other = next((each for each in kinds if each not in ELEMENTWISE), None)
    if other is not None:
        return f"{other.__name__} is none of torch's optimizers whose steps are elementwise"
    return "" if len(kinds) == 1 else "there is no optimizer" if not kinds else "there are optimizers of several classes"


@dataclass(frozen=True, slots=True)
class Range:
    """Elements of a tensor that an optimizer steps on.

    Attributes:
        stepped: the tensor.
        what: name of these elements.
        lo, hi: positions in the flat tensor, or in this rank's part of it.
    """

    stepped: torch.Tensor
    what: str
    lo: int
    hi: int


@dataclass
class _Step:
    """A step that is recorded.

    Attributes:
        chosen: what is compared.
        before: values before the step, as bytes.
        after: hashes of the values after it.
    """

    chosen: Range
    before: bytes
    after: tuple[int, ...] = ()


class StepTap:
    """Records a step of one range, and repeats those of others. Ranks of a job have optimizers of the same class.

    Args:
        optimizers: those that step, one after the other, of one class.
        ranges: returns what they step on, outside of a step.
        rank: of this process. Ranks choose different ranges.
        most_bytes: to record.
    """

    names = ("the result",)

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], ranges: Callable[[], Sequence[Range]], rank: int,
        most_bytes: int = MOST_BYTES,
    ) -> None:  # fmt: skip
        self._kind: Any = type(optimizers[0])
        self._ranges, self._rank, self._most = ranges, rank, most_bytes
        self._held: Sequence[Range] = ()
        self._seen = 0  # ranges of this step
        self._chance = random.Random(0)
        self._step: _Step | None = None
        self._failed = ""  # why nothing was recorded
        self._device = torch.device("cpu")
        self._hooks = [each.register_step_pre_hook(self._before) for each in optimizers]
        self._hooks += [each.register_step_post_hook(self._after) for each in optimizers]

    def close(self) -> None:
        """Remove the hooks."""
        self._step, self._held = None, ()
        for hook in self._hooks:
            hook.remove()

    def arm(self, turn: int) -> None:
        """Record the next step. ``turn``: number of the check, on which the choice depends."""
        self._held, self._seen, self._step, self._failed = (), 0, None, ""
        self._chance = random.Random(turn * 100_003 + self._rank)
        with self._noting():
            self._held = self._ranges()

    def take(self) -> tuple[Case | None, str]:
        """Return the recorded step; None if there was none, such as one that a loss scaler has left out, or why it failed."""
        step, self._step, self._held = self._step, None, ()
        if self._failed or step is None or not step.after:
            return None, self._failed
        return Case(step.before, step.after, step.chosen.what), ""

    def repeat(self, data: bytes) -> tuple[int, ...]:
        """Return the hash of the values of a step, computed here."""
        options, weight, gradient, state = loaded(data, self._device)
        parameter = torch.nn.Parameter(weight)
        parameter.grad = gradient
        optimizer = self._kind([parameter])
        optimizer.param_groups[0].update(options)
        optimizer.state[parameter] = state
        optimizer.step()
        return (_hash(parameter.detach(), optimizer.state[parameter], weight.numel(), slice(None)),)

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        """Let no error reach the program, such as that of a device without memory: other ranks would wait for this one."""
        try:
            yield
        except Exception as err:
            self._held, self._failed = (), f"a step cannot be recorded: {type(err).__name__}: {err}"

    def _before(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        with self._noting():
            self._choose(optimizer)

    def _choose(self, optimizer: torch.optim.Optimizer) -> None:
        """Choose a range, each with equal probability, even if the optimizer steps in several calls."""
        if not self._held or getattr(optimizer, "grad_scale", None) is not None:
            return
        where = {_place(each): (each, group) for group in optimizer.param_groups for each in group["params"]}
        for chosen in self._held:
            parameter, group = where.get(_place(chosen.stepped), (None, None))
            if parameter is None or parameter.grad is None:
                continue
            number = self._number(optimizer, chosen, parameter, group)
            self._seen += number > 0
            if number and self._chance.random() * self._seen < 1:
                self._step = self._recorded(optimizer, chosen, number, parameter, group)

    def _number(self, optimizer: torch.optim.Optimizer, chosen: Range, parameter: torch.Tensor, group: Any) -> int:
        """Return how many elements of a range can be repeated; 0: none.

        On a CPU the last elements of a tensor may be rounded otherwise than those before, where a kernel has two loops.
        """
        weight, states = local(parameter), optimizer.state.get(parameter, {}).values()
        each = weight.element_size() * (2 + sum(isinstance(value, torch.Tensor) for value in states))
        number = min(chosen.hi - chosen.lo, max(self._most // each, 1))
        splits = weight.device.type != "cpu" or (weight.dtype in (torch.float32, torch.float64) and not group.get("fused"))
        return number if splits or number == weight.numel() else 0

    def _recorded(
        self, optimizer: torch.optim.Optimizer, chosen: Range, number: int, parameter: torch.Tensor, group: Any
    ) -> _Step:
        state, weight = optimizer.state.get(parameter, {}), local(parameter)
        assert parameter.grad is not None
        lo = chosen.lo + self._chance.randrange(chosen.hi - chosen.lo - number + 1)
        chosen = Range(parameter, chosen.what, lo, lo + number)
        part = slice(chosen.lo, chosen.hi)
        options = {key: value for key, value in group.items() if key in optimizer.defaults}
        some = {key: _cut(value, weight.numel(), part) for key, value in state.items()}
        buffer = io.BytesIO()
        values = (options, _cut(weight, weight.numel(), part), _cut(parameter.grad, weight.numel(), part), some)
        torch.save(values, buffer)
        self._device = weight.device
        return _Step(chosen, buffer.getvalue())

    def _after(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        step = self._step
        if step is None or step.after or not self._held:
            return
        parameter, part = step.chosen.stepped, slice(step.chosen.lo, step.chosen.hi)
        with self._noting():
            weight = local(parameter)
            step.after = (_hash(weight, optimizer.state.get(parameter, {}), weight.numel(), part),)


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Return what tells tensors apart that are views of one another."""
    found = local(tensor)
    return found.data_ptr(), found.numel()


def _cut(value: Any, size: int, part: slice) -> Any:
    """Return a copy of a part of a value for each element. Other values, such as the number of steps, are whole."""
    if not isinstance(value, torch.Tensor):
        return value
    held = local(value)
    return held.reshape(-1)[part].clone() if held.numel() == size and held.dim() else held.clone()


@torch.no_grad()
def _hash(weight: torch.Tensor, state: dict[str, Any], size: int, part: slice) -> int:
    states = [value for _, value in sorted(state.items()) if isinstance(value, torch.Tensor)]
    return combined(hashes([_cut(each, size, part) for each in (weight, *states)])) or 1
