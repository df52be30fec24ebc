"""Access to private attributes of ``HybridDeviceOptimizer`` (``--optimizer-cpu-offload``).

It steps on copies: those of a fraction of the parameters are in host memory, the others on the device. Each copy belongs to
one of its inner optimizers, torch's or fused, which has state and step of it. Follows megatron-core 0.12 to 0.19 and the
development branch: ``optimizer/cpu_offloading/hybrid_optimizer.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

# Keys of its parameter groups that place the copies. They belong to the running job.
PLACEMENT = frozenset(
    {
        "offload_fraction",
        "cpu_optimizer_cls",
        "gpu_optimizer_cls",
        "param_update_in_fp32",
        "pin_cpu_grads",
        "pin_cpu_params",
        "overlap_cpu_optimizer_d2h_h2d",
    }
)


@dataclass(frozen=True, slots=True)
class OffloadedCopy:
    """The copy of a parameter that an inner optimizer steps on.

    Attributes:
        optimizer: the inner optimizer.
        group: its parameter group that has the copy.
        stepped: the copy, in the precision of the master.
    """

    optimizer: Any
    group: dict[str, Any]
    stepped: torch.Tensor

    @property
    def state(self) -> dict[str, Any]:
        """State and step of the copy. Empty before the first step."""
        found = dict(self.optimizer.state.get(self.stepped, {}))
        if "step" in self.group:
            found.setdefault("step", self.group["step"])
        return found

    def set_step(self, step: float) -> None:
        """Set the step count, where the inner optimizer keeps it."""
        if steps_per_parameter(self.optimizer):
            state = self.optimizer.state.get(self.stepped)
            if state and counts_steps(self.optimizer, state):
                state["step"] = torch.tensor(float(step), dtype=torch.float32, device=self.stepped.device)
        else:
            self.group["step"] = int(step)


def is_hybrid(optimizer: Any) -> bool:
    """Whether this is Megatron's CPU offloading optimizer."""
    return type(optimizer).__name__ == "HybridDeviceOptimizer"


def steps_per_parameter(optimizer: Any) -> bool:
    """Whether an optimizer keeps ``step`` per parameter, as torch's do, and not per group, as fused ones do."""
    return type(optimizer).__module__.startswith("torch.optim")


def counts_steps(optimizer: Any, state: Mapping[str, Any]) -> bool:
    """Whether an optimizer counts the steps of a parameter that has state. SGD does not."""
    return "step" in state or not isinstance(optimizer, torch.optim.SGD)


def inner_optimizers(optimizer: Any) -> list[Any]:
    """Return the optimizers that step: those inside, or for any other optimizer itself."""
    return list(optimizer.sub_optimizers) if is_hybrid(optimizer) else [optimizer]


def copies(optimizer: Any) -> dict[int, OffloadedCopy]:
    """Return the copies by the id of the parameter in the outer groups. Empty for any other optimizer."""
    if not is_hybrid(optimizer):
        return {}
    places = {
        id(stepped): OffloadedCopy(inner, group, stepped)
        for inner in optimizer.sub_optimizers
        for group in inner.param_groups
        for stepped in group["params"]
    }
    return {id(outer): places[id(optimizer.param_to_inner_param[outer])] for outer in _parameters(optimizer)}


def publish_states(optimizer: Any) -> None:
    """Let the outer optimizer know the states that were allocated in the inner ones."""
    if is_hybrid(optimizer):
        optimizer._sync_sub_optimizers_state_to_hdo()


def copy_back(outer: torch.Tensor, copy: OffloadedCopy) -> None:
    """Write a loaded master into the outer parameter if that is a master too. (A 16-bit one is the model's weight.)"""
    if outer is not copy.stepped and outer.dtype == copy.stepped.dtype:
        outer.data.copy_(copy.stepped.data)


def _parameters(optimizer: Any) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
