"""Optimizers of a user whose states are not of the parameter's shape."""

from __future__ import annotations

from typing import Any

import torch
from transformers.optimization import Adafactor  # before ranks fork

from tests.jobs.deepspeed.truth import optimizer_of

BLOCK = 16
OF_BLOCKS = ("preconditioner", "absmax1")  # states that belong to blocks


class _OfBlocks(torch.optim.Optimizer):
    """Updates each parameter by the blocks of its gradient."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: ARG002 - torch's signature
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, self.state[p], _blocks(p.grad), group["lr"])

    def _update(self, p: torch.Tensor, state: dict[str, Any], blocks: torch.Tensor, lr: float) -> None:
        raise NotImplementedError


class BlockPreconditioned(_OfBlocks):
    """Shampoo on blocks of 16 elements: a momentum, and a list of the matrices of all blocks and of their traces."""

    def _update(self, p: torch.Tensor, state: dict[str, Any], blocks: torch.Tensor, lr: float) -> None:
        if not state:
            start = torch.eye(BLOCK).repeat(len(blocks), 1, 1)
            state["step"], state["momentum"] = 0, torch.zeros_like(p)
            state["preconditioner"] = [start, start.diagonal(dim1=1, dim2=2).sum(1)]
        state["step"] += 1
        matrices, traces = state["preconditioner"]
        matrices.mul_(0.9).add_(torch.einsum("bi,bj->bij", blocks, blocks))
        traces.copy_(matrices.diagonal(dim1=1, dim2=2).sum(1))
        update = torch.einsum("bij,bj->bi", matrices, blocks) / traces[:, None]
        state["momentum"].mul_(0.9).add_(update.flatten()[: p.numel()].view_as(p))
        p.sub_(lr * state["momentum"])


class BlockwiseMomentum(_OfBlocks):
    """SGD with a momentum of 8 bits per element, with one scale per block of 16 elements."""

    def _update(self, p: torch.Tensor, state: dict[str, Any], blocks: torch.Tensor, lr: float) -> None:
        if not state:
            state["state1"], state["absmax1"] = torch.full_like(p, 127, dtype=torch.uint8), torch.zeros(len(blocks))
        momentum = (_blocks(state["state1"].float()) - 127) / 127 * state["absmax1"][:, None] * 0.9 + blocks
        state["absmax1"] = momentum.abs().amax(1)
        scaled = momentum / state["absmax1"].clamp(min=1e-12)[:, None] * 127 + 127
        state["state1"] = scaled.round().to(torch.uint8).flatten()[: p.numel()].view_as(p)
        p.sub_(lr * momentum.flatten()[: p.numel()].view_as(p))


class Averaging(torch.optim.Optimizer):
    """SGD that follows the mean of the gradients of some tensors, and counts their steps. Both states of the others are None.

    A group has ``averages``: "all", "none", or "matrices".
    """

    def __init__(self, params: Any, averages: str = "all") -> None:
        super().__init__(params, {"lr": 1e-2, "averages": averages})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: ARG002 - torch's signature
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, self.state[p], group)

    def _update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            averages = group["averages"] == "all" or (group["averages"] == "matrices" and p.dim() > 1)
            state["momentum"] = torch.zeros_like(p)
            state["mean"], state["seen"] = (torch.zeros_like(p), 0) if averages else (None, None)
        state["momentum"].mul_(0.9).add_(p.grad)
        if state["seen"] is not None:
            state["seen"] += 1
        if state["mean"] is not None:
            state["mean"].lerp_(p.grad, 0.1)
        p.sub_(group["lr"] * (state["momentum"] if state["mean"] is None else state["momentum"] + state["mean"]))


class Pulled(torch.optim.SGD):
    """SGD that pulls weights to their mean at every third step. The count of steps is in the state dict, beside the states."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-2)
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.count = state_dict["count"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.count += 1
        for p in (p for group in self.param_groups for p in group["params"]):
            mean = self.state[p].setdefault("mean", torch.zeros_like(p))
            mean.lerp_(p, 0.1)
            if self.count % 3 == 0:
                p.copy_(mean)


def _blocks(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.flatten()
    return torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)


def adafactor(params: Any) -> Any:
    return Adafactor(params, lr=1e-2, relative_step=False, scale_parameter=False, beta1=0.9)


def raw_states(engine: Any, keys: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Return copies of the raw states of this rank, in the order of the masters: those of some keys, or all."""
    base, wrapper = optimizer_of(engine), engine.optimizer
    masters = getattr(wrapper, "fp32_partitioned_groups_flat", None) or [p for g in base.param_groups for p in g["params"]]
    states = [copied(base.state[master]) for master in masters]
    return [{key: value for key, value in each.items() if not keys or key in keys} for each in states]


def copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [copied(item) for item in value]
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def equal_states(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal_states(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(equal_states, a, b))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]  # padding may be NaN
        return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*bits)
    return bool(a == b)
