"""Flips of one bit in layers that the backward pass computes again, and what the check ``self`` says of each."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from unickpt.training.witness.vote import Kind, Verdict
from unickpt.training.witness.watching import Watching

WIDTH, MICRO_BATCH, BLOCKS = 24, 6, 3
PLACES = ("forward", "again", "stored input")
Checkpointing = Callable[..., torch.Tensor]


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.drop = torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Dropout(0.1)
        self.down, self.norm = torch.nn.Linear(WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(self.down(self.drop(self.act(self.up(x)))))
        return found


class Model(torch.nn.Module):
    """Blocks, each of which is called by a function that lets the backward pass compute it again."""

    def __init__(self, checkpointing: Checkpointing) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.head, self.checkpointing = torch.nn.Linear(WIDTH, WIDTH), checkpointing
        self.inputs: list[torch.Tensor] = []

    def layers(self) -> dict[str, torch.nn.Module]:
        """Return what is computed twice and can be wrong, by name."""
        names = ("up", "act", "drop", "down")
        return {f"blocks.{at}.{name}": getattr(block, name) for at, block in enumerate(self.blocks) for name in names}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inputs = []
        for block in self.blocks:
            self.inputs.append(x)
            x = self.checkpointing(block, x)
        found: torch.Tensor = self.head(x)
        return found


class Fault:
    """Flips a bit of an output in the first call of a layer, or in its second. It keeps outputs, to see what changed."""

    def __init__(self, layers: Mapping[str, torch.nn.Module]) -> None:
        self.calls: dict[str, list[torch.Tensor]] = {}
        self.active: tuple[str, int, float, int] | None = None
        for name, layer in layers.items():
            layer.register_forward_hook(partial(self._called, name))

    def begin(self, active: tuple[str, int, float, int] | None) -> None:
        self.calls, self.active = {}, active

    def _called(self, name: str, _module: Any, _args: Any, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return
        kept = self.calls.setdefault(name, [])
        if self.active is not None and self.active[:2] == (name, len(kept)):
            flip(output, *self.active[2:])
        kept.append(output.detach().clone())

    def first_change(self) -> str | None:
        """Return the first layer whose second output is another one."""
        for name, (first, *again) in self.calls.items():
            if again and not torch.equal(bits(first), bits(again[0])):
                return name
        return None


def flip(tensor: torch.Tensor, where: float, bit: int) -> None:
    """Change a bit, past torch's count of writes."""
    held = bits(tensor.data)
    held[int(where * held.numel())] ^= torch.tensor(1 << bit).to(held.dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor as whole numbers."""
    return tensor.contiguous().view({4: torch.int32, 2: torch.int16}[tensor.dtype.itemsize]).view(-1)


class Blocks(Protocol):
    """A model. ``inputs``: what its blocks began with in the forward pass of this step."""

    @property
    def inputs(self) -> Sequence[torch.Tensor]: ...
    def layers(self) -> dict[str, torch.nn.Module]: ...


class Trained(Protocol):
    """A training with a witness that checks every step. ``between`` is called before the backward pass."""

    @property
    def module(self) -> Blocks: ...

    fault: Fault  # whose hooks come before those of the witness

    @property
    def watching(self) -> Watching: ...
    def step(self, between: Callable[[], None]) -> None: ...


def twice(job: Trained, count: int, seed: int) -> Counter[str]:
    """Return how many flips were made, how many of them changed something that is computed twice, and how many were named."""
    chance, found, fault = random.Random(seed), Counter[str](), job.fault
    job.step(lambda: None)
    fault.begin(None)
    job.step(lambda: None)
    layers = _on_all_ranks(
        [name for name in job.module.layers() if [each.numel() > 0 for each in fault.calls.get(name, [])] == [True] * 2]
    )
    for _ in range(count):
        place, block, name = chance.choice(PLACES), chance.randrange(len(job.module.inputs)), chance.choice(layers)
        on, where, bit = chance.randrange(dist.get_world_size()), chance.random(), chance.randrange(15)
        before, own = len(job.watching.verdicts), on == dist.get_rank()
        fault.begin((name, int(place == "again"), where, bit) if own and place != "stored input" else None)
        job.step(partial(_stored, job.module, block, where, bit) if own and place == "stored input" else lambda: None)
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, (fault.first_change(), job.watching.verdicts[before:]))
        changed, verdicts = told[on][0], told[0][1]
        named = [_named(each, changed, on) for each in verdicts]
        among = len(verdicts) == 1 and len(verdicts[0].ranks) > 1
        found[place] += 1
        found[f"{place} changed"] += changed is not None
        found[f"{place} named" + among * ", among those that compute the layer"] += changed is not None and named == [True]
        found[f"{place} wrong"] += named != [True] * (changed is not None)
    return found


def _named(verdict: Any, layer: str | None, rank: int) -> bool:
    assert isinstance(verdict, Verdict)
    kind = verdict.kind if verdict.kind is Kind.SDC_COMPUTE else verdict.check
    return (kind, verdict.subject.what) == (Kind.SDC_COMPUTE, layer) and rank in verdict.ranks


def _on_all_ranks(names: Sequence[str]) -> list[str]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, list(names))
    return [name for name in every[0] if all(name in each for each in every)]


def _stored(model: Blocks, block: int, where: float, bit: int) -> None:
    """Flip a bit of what a block starts from, after the forward pass."""
    flip(model.inputs[block], where, bit)
