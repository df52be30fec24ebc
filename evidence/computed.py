"""Flips of one bit in what one rank computes, or begins with, and what a witness says of each.

``buddy`` repeats a micro-batch, and sees what differs then: activations, their gradients, and those of parameters. It begins
with the batch and the random state that the rank had, so wrong ones are not seen. ``replicas`` sees reduced gradients that only
one rank has wrong, if each rank steps on all parameters.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from unickpt.training.witness.vote import Kind, Verdict
from unickpt.training.witness.watching import Watching

REPEATED = ("forward", "backward", "gradient")  # what ``buddy`` computes again
BEGUN_WITH = ("batch", "generator")
REDUCED = "reduced gradient"
GATHERED = "gathered weight"  # of ``fully_shard`` and ZeRO-3: the part that a rank holds stays as it was
OF_OUTPUT = "gradient of the output"  # made by the loss, which nobody repeats
BITS = {torch.float32: 32, torch.bfloat16: 16}


class Fault:
    """A flip in what one rank computes in one step, or begins with.

    It is made once in a step: what repeats a micro-batch computes it soundly. ``values`` has the output and gradients of the
    step before any reduction, with which a step with the fault is compared with the same one without.

    Args:
        module: with linear layers, not yet wrapped: hooks of the witness come later.
        layers: in which something may be computed wrongly; None: the linear ones, the last of which makes the output.
    """

    def __init__(self, module: torch.nn.Module, layers: Sequence[Any] | None = None) -> None:
        self.active: tuple[str, int, int, float] | None = None
        self.values: list[torch.Tensor] = []
        self._first = False  # of the calls of a step
        self.linear: Sequence[Any] = [each for each in module.modules() if isinstance(each, torch.nn.Linear)]
        self.of_output = len(self.linear) - 1 if layers is None else -1
        self.linear = layers or self.linear
        self._watched: list[torch.Tensor] = []
        for at, layer in enumerate(self.linear):
            layer.register_forward_hook(partial(self._layer, at))
            layer.forward = partial(self._forward, at, layer, layer.forward)
        for each in module.modules():
            each.register_forward_pre_hook(self._begins)
        module.register_forward_hook(self._output)

    def _begins(self, module: torch.nn.Module, _args: Any) -> None:
        """Watch the gradients of a layer. With FSDP2 it has other parameters when it is called than at rest."""
        for parameter in module.parameters(recurse=False):
            if all(parameter is not each for each in self._watched):
                self._watched.append(parameter)
                if module in self.linear and parameter is module.weight:
                    parameter.register_hook(partial(self._gradient, self.linear.index(module)))
                parameter.register_hook(self._seen)

    def begin(self, active: tuple[str, int, int, float] | None) -> None:
        self.active, self.values, self._first = active, [], True

    def _flip(self, place: str, at: int, tensor: torch.Tensor) -> torch.Tensor:
        if not self._first or self.active is None or self.active[:2] != (place, at):
            return tensor
        return _flipped(tensor, self.active[2], self.active[3])

    def batch(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the inputs of a micro-batch. Called before the forward pass."""
        place = None if self.active is None else self.active[0]
        if place == "generator":
            torch.manual_seed(random.Random(str(self.active)).randrange(1 << 30))
        return inputs if place != "batch" or self.active is None else _flipped(inputs, self.active[2], self.active[3])

    def reduced(self, gradients: Sequence[torch.Tensor]) -> None:
        """Change a gradient that the next step uses."""
        if self.active is not None and self.active[0] == REDUCED:
            chosen = gradients[self.active[1] % len(gradients)]
            chosen.copy_(_flipped(chosen, self.active[2], self.active[3]))

    def _forward(self, at: int, layer: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute a layer, whose weights are gathered now."""
        if self._first and self.active is not None and self.active[:2] == (GATHERED, at):
            layer.weight.data.copy_(_flipped(layer.weight, *self.active[2:]))
        return forward(*args, **kwargs)

    def _layer(self, at: int, _module: Any, _args: Any, found: Any) -> None:
        output = found[0] if isinstance(found, tuple) else found
        if self._first and output.requires_grad:
            output.register_hook(lambda gradient: self._flip("backward", at, gradient))
        with torch.no_grad():
            output.data = self._flip("forward", at, output)

    def _gradient(self, at: int, gradient: torch.Tensor) -> torch.Tensor:
        return self._flip("gradient", at, gradient)

    def _seen(self, gradient: torch.Tensor) -> None:
        if self._first:
            self.values.append(gradient.detach().clone())

    def _output(self, _module: Any, _args: Any, output: torch.Tensor) -> None:
        if self._first:
            self.values.append(output.detach().clone())

    def ends(self, *_: Any) -> None:
        """The gradients of the step are there: what follows repeats them."""
        self._first = False


class Trained(Protocol):
    """A training with dropout, and with a witness that checks every step."""

    fault: Fault
    dtype: torch.dtype

    @property
    def watching(self) -> Watching: ...
    def step(self) -> None: ...
    def unit(self) -> Sequence[int]:
        """Return the ranks that compute parts of the same layers as this one."""
        ...

    def tensors(self) -> Mapping[tuple[str, str], torch.Tensor]:
        """Return weights, masters and moments of this rank."""


def compute(job: Trained, count: int, seed: int, places: Sequence[str] = (*REPEATED, *BEGUN_WITH)) -> Counter[str]:
    """Return how many flips were made, how many of them changed something, and how many were named."""
    chance, found, fault = random.Random(seed), Counter[str](), job.fault
    job.step()
    job.step()
    sound = {key: tensor.clone() for key, tensor in job.tensors().items()}
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (tuple(job.unit()), len(fault.linear)))
    units = [unit for unit, _ in of_ranks]
    layers = min(number for _, number in of_ranks)  # one stage of a pipeline may have more layers than another
    for _ in range(count):
        place, at, bit = chance.choice(places), chance.randrange(layers), chance.randrange(BITS[job.dtype])
        rank, where = chance.randrange(dist.get_world_size()), chance.random()
        ours, state, before = rank == dist.get_rank(), torch.get_rng_state(), len(job.watching.verdicts)
        job.watching.said.clear()
        fault.begin((place, at, bit, where) if ours else None)
        job.step()
        values, verdicts = fault.values, job.watching.verdicts[before:]
        apart = place == REDUCED and _ranks_differ(job.tensors())
        _restore(job, sound)
        torch.set_rng_state(state)
        fault.begin(None)
        job.step()
        _restore(job, sound)
        differs = apart or any(not torch.equal(_bits(a), _bits(b)) for a, b in zip(values, fault.values, strict=True))
        changed = torch.tensor([differs]).int()
        dist.all_reduce(changed)
        place = OF_OUTPUT if place == "backward" and at == fault.of_output else place
        kind = Kind.SDC_REPLICA if place == REDUCED else Kind.SDC_COMPUTE
        wrong = units[rank] if kind is Kind.SDC_COMPUTE else (rank,)
        right = [each for each in verdicts if isinstance(each, Verdict) and (each.kind, each.ranks) == (kind, wrong)]
        found[place] += 1
        found[f"{place} changed"] += int(changed.item() > 0)
        found[f"{place} named"] += bool(verdicts) and len(right) == len(verdicts)
        found[f"{place} wrong"] += len(right) != len(verdicts) or (bool(verdicts) and not changed.item())
    return found


def _restore(job: Trained, sound: Mapping[tuple[str, str], torch.Tensor]) -> None:
    for key, tensor in job.tensors().items():
        tensor.data.copy_(sound[key])


def _ranks_differ(tensors: Mapping[tuple[str, str], torch.Tensor]) -> bool:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, [(key, _bits(tensor).tolist()) for key, tensor in sorted(tensors.items())])
    return any(each != every[0] for each in every)


def _flipped(tensor: torch.Tensor, bit: int, where: float) -> torch.Tensor:
    flipped = tensor.detach().clone().contiguous()
    bits = flipped.view({4: torch.int32, 2: torch.int16}[tensor.dtype.itemsize]).view(-1)
    bits[int(where * bits.numel())] ^= torch.tensor(1 << bit).to(bits.dtype)
    return flipped


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
