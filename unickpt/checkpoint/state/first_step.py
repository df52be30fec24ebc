"""The states that an optimizer creates by itself, and their first values.

A checkpoint may lack states that the optimizer of this job needs. The class of an optimizer does not tell which states these
are. Its step does: a copy of the optimizer makes one step on a small tensor of zeros with a gradient of zeros.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

STEP = "step"
_KNOWN = ("torch.", "deepspeed.", "apex.", "transformers.", "bitsandbytes.")  # modules whose steps have no other effect
_NOT = ("deepspeed.runtime.fp16.onebit.", "deepspeed.runtime.zero.muon.", "apex.contrib.")  # these call collectives
_LENGTHS = (5, 3)


@dataclass(frozen=True, slots=True)
class FirstStates:
    """The states of one parameter before its first step.

    Attributes:
        tensors: dtype and value of all elements, by the key of an elementwise state.
        scalars: value by key.
        owned: keys of the other states.
        constructed: the constructor of the optimizer creates them, and its step does not.
    """

    tensors: Mapping[str, tuple[torch.dtype, complex]] = field(default_factory=dict)
    scalars: Mapping[str, Any] = field(default_factory=dict)
    owned: frozenset[str] = frozenset()
    constructed: bool = False


class _Recorded(dict[str, Any]):
    """The state of one parameter, which keeps the first value of each key."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        self.first.setdefault(key, value.detach().clone() if isinstance(value, torch.Tensor) else value)
        super().__setitem__(key, value)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *others: Any, **more: Any) -> None:
        for key, value in dict(*others, **more).items():
            self[key] = value


class _Inert:
    """Takes the place of the C++ optimizer of DeepSpeed, which counts the steps of all parameters."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_args, **_more: None


def known(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of a copy of this optimizer has no effect on anything else."""
    module = inspect.unwrap(type(optimizer).step).__module__
    nested = any(isinstance(value, torch.optim.Optimizer) for value in vars(optimizer).values())
    return module.startswith(_KNOWN) and not module.startswith(_NOT) and not nested


def first_states(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], master: torch.Tensor) -> FirstStates | None:
    """Return the states that an optimizer creates for a tensor; None if its step does not tell. The optimizer does not change.

    Args:
        group: settings of the parameter group.
        master: tensor that the optimizer steps on, for its dimensions, dtype and device.
    """
    if not (master.is_floating_point() or master.is_complex()):
        return None  # it has no gradient, so no optimizer steps on it
    shape = (*_LENGTHS, *(2,) * master.dim())[: master.dim()]
    matrix = torch.nn.Parameter(torch.zeros(shape, dtype=master.dtype, device=master.device))
    matrix.grad = torch.zeros_like(matrix)
    settings = {**optimizer.param_groups[0], **group}
    if isinstance(optimizer, torch.optim.Adagrad):
        initial = settings.get("initial_accumulator_value", 0.0)
        made = torch.optim.Adagrad([matrix], initial_accumulator_value=initial)
        return _classified(made.state[matrix], matrix, constructed=True)
    state = _Recorded()
    try:
        with copy_of(optimizer, settings, matrix, state, inert=True) as copy:
            inspect.unwrap(type(optimizer).step)(copy)
        return _classified(state.first, matrix, constructed=False)
    except Exception:  # an optimizer may need more than its class and its settings
        return None


@contextmanager
def copy_of(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], tensor: torch.Tensor, state: dict[str, Any], *, inert: bool
) -> Iterator[Any]:
    """Yield a copy of an optimizer that has one tensor, with a gradient. Gradients are off.

    ``inert``: without the C++ optimizer of DeepSpeed.
    """
    copy: Any = object.__new__(type(optimizer))
    copy.__dict__.update(vars(optimizer))
    if inert:
        copy.__dict__.update({key: _Inert() for key in vars(optimizer) if key.startswith("ds_opt_")})
    copy.state, copy.param_groups = defaultdict(_Recorded, {tensor: state}), [{**group, "params": [tensor]}]
    try:
        with torch.no_grad():
            yield copy
    finally:
        vars(copy).clear()  # DeepSpeed's ``__del__`` destroys the C++ optimizer, which is also that of the original


def _classified(state: Mapping[str, Any], matrix: torch.Tensor, *, constructed: bool) -> FirstStates:
    tensors: dict[str, tuple[torch.dtype, complex]] = {}
    scalars: dict[str, Any] = {}
    owned = set()
    for key, value in state.items():
        if value is None:
            continue
        if not isinstance(value, torch.Tensor):
            (scalars.update({key: value}) if isinstance(value, (bool, int, float)) else owned.add(key))
        elif value.shape == matrix.shape and (matrix.dim() or key != STEP):
            found = value.flatten()[0]  # complex numbers have no order
            (tensors.update({key: (value.dtype, found.item())}) if bool((value == found).all()) else owned.add(key))
        elif value.numel() == 1:
            scalars[key] = value
        else:
            owned.add(key)
    return FirstStates(tensors, scalars, frozenset(owned), constructed)


def forget_powers(optimizer: torch.optim.Optimizer) -> None:
    """Let DeepSpeed's C++ Adam begin anew.

    It multiplies the powers of the betas from step to step, and computes them from ``step`` after a jump. So its next step
    would depend on the steps that it made before a load, in the last bit.
    """
    if not hasattr(optimizer, "ds_opt_adam"):
        return
    tensor = torch.zeros(1, device="cpu")
    tensor.grad = torch.zeros(1, device="cpu")
    state = {"step": -1, "exp_avg": torch.zeros(1, device="cpu"), "exp_avg_sq": torch.zeros(1, device="cpu")}
    for group in optimizer.param_groups[:1]:
        with copy_of(optimizer, group, tensor, state, inert=False) as copy:
            inspect.unwrap(type(optimizer).step)(copy)
