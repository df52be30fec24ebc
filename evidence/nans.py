"""Causes of NaN and infinity, injected into what one rank computes, and what a witness says of each.

A cause of the data or the model is in the input of a micro-batch. One of the hardware is a flip of the highest bit of an
exponent: in a weight, in an activation, or in the gradient of one. What a witness should name is found by computing the
micro-batch once more, layer by layer, without the witness's own code.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from evidence.flips import Places
from unickpt.training.witness.counting import WARM_UP
from unickpt.training.witness.nonfinite import Cause, NonFinite, Place
from unickpt.training.witness.watching import Watching

WIDTH, MICRO_BATCH, ACCUMULATION = 24, 6, 3
DATA = ("input", "huge input", "division by zero", "log of zero", "root of zero")
HARDWARE = ("weight", "activation", "sick rank", "gradient")
OUTLIERS = ("large input", "activation", "gradient")
Inputs = dict[str, torch.Tensor]


class Layer(torch.nn.Module):
    """A layer whose output, or the gradient of it, may become wrong."""

    fault: Callable[[torch.Tensor], torch.Tensor] | None = None

    def broken(self, output: torch.Tensor) -> torch.Tensor:
        return output if self.fault is None else self.fault(output)


class Linear(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.broken(x @ self.weight)


class Function(Layer):
    """A layer without parameters."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.broken(self.function(*args))


class Model(torch.nn.Module):
    """Layers one after the other. Some take more of the input, which is 1 in sound micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Linear()
        self.ratio = Function(lambda x, mask: x / mask.mean())
        self.log = Function(lambda x, gain: x + torch.log(gain))
        self.half = Function(lambda x: x.to(torch.float16).to(x.dtype))
        self.middle = Linear()
        self.root = Function(lambda x, scale: x + (x * scale).abs().sqrt())
        self.square = Function(lambda x: x * x)
        self.drop = torch.nn.Dropout(0.1)
        self.head = Linear()

    def forward(self, x: torch.Tensor, mask: torch.Tensor, gain: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        for _, output in self.outputs(x, mask, gain, scale):
            x = output
        return x

    def outputs(self, x: torch.Tensor, mask: torch.Tensor, gain: torch.Tensor, scale: torch.Tensor) -> Any:
        more = {"ratio": (mask,), "log": (gain,), "root": (scale,)}
        for name, layer in self.named_children():
            x = layer(x, *more.get(name, ()))
            yield name, x


class Trained(Protocol):
    """A training of ``Model`` with a witness.

    Attributes:
        wraps: the framework wraps the outputs of layers, as ZeRO-3 does. A gradient that is wrong inside the wrapper is first
            seen at the output of the layer before.
    """

    module: Model
    wraps: bool

    @property
    def watching(self) -> Watching: ...
    def steps(self, micro_batches: Sequence[Inputs]) -> None: ...
    def places(self) -> Places: ...
    def whole(self) -> Model:
        """Return a model with all weights: ``module``, or a copy if that has shards. Every rank calls it."""
        ...


def sound(dtype: torch.dtype) -> Inputs:
    """Return the input of a micro-batch."""
    ones = torch.ones(MICRO_BATCH, 1)
    found = {"x": torch.randn(MICRO_BATCH, WIDTH), "mask": ones, "gain": ones, "scale": ones}
    return {name: value.to(dtype) for name, value in found.items()}


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """Return the loss."""
    return output.float().mean()


def _broken_data(cause: str, inputs: Inputs, chance: random.Random) -> None:
    if cause == "input":
        inputs["x"][chance.randrange(MICRO_BATCH), chance.randrange(WIDTH)] = chance.choice((float("nan"), float("inf")))
    elif cause == "huge input":
        inputs["x"][chance.randrange(MICRO_BATCH)] = 1e7 * chance.choice((1, 1e3))
    else:
        name = {"division by zero": "mask", "log of zero": "gain", "root of zero": "scale"}[cause]
        inputs[name] = inputs[name] * 0


def flip(tensor: torch.Tensor, at: float) -> None:
    """Change the highest bit of the exponent of a value, one from 1 to 2 if there is one: that becomes infinite or NaN."""
    flat = tensor.data.view(-1)
    chosen = ((flat.abs() >= 1) & (flat.abs() < 2)).nonzero().view(-1)
    chosen = chosen if len(chosen) else torch.arange(len(flat))
    size = 8 * tensor.element_size()
    flat.view({32: torch.int32, 16: torch.int16}[size])[chosen[int(at * len(chosen))]] ^= 1 << (size - 2)


def _flipping(cause: str, at: float, first_alone: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    calls = [0]

    def flipped(tensor: torch.Tensor) -> torch.Tensor:
        other = tensor.detach().clone().contiguous()
        flip(other, at)
        return other

    def fault(output: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        if first_alone and calls[0] > 1:
            return output
        if cause == "gradient":
            output.register_hook(flipped)
            return output
        output.data = flipped(output)
        return output

    return fault


def expected(module: Model, inputs: Inputs, state: torch.Tensor) -> tuple[str, bool] | None:
    """Return the first layer whose output, or its gradient, is not finite in a micro-batch; None if it makes no NaN."""
    module, kept, before = copy.deepcopy(module), [], torch.get_rng_state()
    for each in module.modules():
        each._forward_hooks.clear()
        each._forward_pre_hooks.clear()
    torch.set_rng_state(state)
    for name, output in module.outputs(**inputs):
        output.retain_grad()
        kept.append((name, output))
    gradients = torch.autograd.grad(loss_of(kept[-1][1]), [*(each for _, each in kept), *module.parameters()])
    torch.set_rng_state(before)
    if all(bool(each.isfinite().all()) for each in gradients[len(kept) :]):
        return None
    for name, output in kept:
        if not output.isfinite().all():
            return name, False
    for (name, _), gradient in reversed(list(zip(kept, gradients, strict=False))):
        if not gradient.isfinite().all():
            return name, True
    return None


def nans(job: Trained, count: int, seed: int, dtype: torch.dtype = torch.float32) -> Counter[str]:
    """Return how many causes were injected, and how many were named with cause, layer, rank and micro-batch."""
    chance, found = random.Random(seed), Counter[str]()
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(100 * seed + rank)
    job.steps([sound(dtype) for _ in range(ACCUMULATION)])
    kept = {key: tensor.detach().clone() for key, tensor in job.places().items()}
    whole = job.whole()  # a flip in a shard reaches all ranks, so nobody has the right weight
    causes = DATA + tuple(each for each in HARDWARE if each != "weight" or whole is job.module)
    while found["injected"] < count:
        cause, at, on = chance.choice(causes), chance.randrange(ACCUMULATION), chance.randrange(world)
        layer = chance.choice(_with_gradients(job) if cause == "gradient" else ("first", "middle", "head"))
        where, own = chance.random(), random.Random(chance.random())
        before = len(job.watching.verdicts)
        batches = [sound(dtype) for _ in range(ACCUMULATION)]
        wanted = _injected(job, whole, cause, layer, where, batches, at, own) if rank == on else None
        told: list[Any] = [None] * world
        job.steps(batches)
        _sound_again(job)
        dist.all_gather_object(told, (wanted, job.watching.verdicts[before:]))
        for key, tensor in job.places().items():
            tensor.data.copy_(kept[key])
        if told[on][0] is None:  # the flip made nothing infinite
            found["verdicts about finite numbers"] += any(len(each) > 0 for _, each in told)
            continue
        found["injected"] += 1
        found[cause] += 1
        right = [_right(each, told[on][0], cause, at, on) for each in told[on][1]]
        found[f"{cause}: named"] += right == [True] and all(not each for at_, (_, each) in enumerate(told) if at_ != on)
    dist.barrier()  # the end of a rank removes its files
    return found


def outliers(job: Trained, count: int, seed: int) -> Counter[str]:
    """Return how many values were made far too large, and how many were named with cause, layer, rank and micro-batch.

    An input is 3,000 times as large, or the highest bit of an exponent flips in a value below 1, in an activation or its
    gradient: that becomes about 1e35.
    """
    chance, found = random.Random(seed), Counter[str]()
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(100 * seed + rank)
    for _ in range(WARM_UP + 1):
        job.steps([sound(torch.float32) for _ in range(ACCUMULATION)])
    kept = {key: tensor.detach().clone() for key, tensor in job.places().items()}
    for _ in range(count):
        cause, at, on = chance.choice(OUTLIERS), chance.randrange(ACCUMULATION), chance.randrange(world)
        layer = {"large input": "first", "gradient": chance.choice(_with_gradients(job))}.get(cause)
        layer, where = layer or chance.choice(("first", "middle", "head")), chance.random()
        before, batches = len(job.watching.verdicts), [sound(torch.float32) for _ in range(ACCUMULATION)]
        if rank == on:
            _enlarge(job, cause, layer, where, batches, at)
        job.steps(batches)
        _sound_again(job)
        told: list[Any] = [None] * world
        dist.all_gather_object(told, job.watching.verdicts[before:])
        for key, tensor in job.places().items():
            tensor.data.copy_(kept[key])
        job.steps([sound(torch.float32) for _ in range(ACCUMULATION)])
        for key, tensor in job.places().items():
            tensor.data.copy_(kept[key])
        why = Cause.DATA_OR_MODEL if cause == "large input" else Cause.HARDWARE
        seen = "half" if cause == "gradient" and job.wraps else layer
        wanted = ("OUTLIER", Place(seen, cause == "gradient", at), why)
        found[cause] += 1
        right = [(each.kind, each.place, each.cause) == wanted for each in told[on]]
        found[f"{cause}: named"] += right == [True] and all(not each for at_, each in enumerate(told) if at_ != on)
        found["verdicts about sound steps"] += len(job.watching.verdicts) - before - len(told[rank])
    return found


def _with_gradients(job: Trained) -> tuple[str, ...]:
    """Return the layers of whose outputs a gradient may be wrong."""
    return ("middle",) if job.wraps else ("first", "middle")


def _enlarge(job: Trained, cause: str, layer: str, where: float, batches: list[Inputs], at: int) -> None:
    if cause == "large input":
        batches[at]["x"] *= 3000
        return
    calls = [0]

    def fault(output: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        if calls[0] != at + 1:
            return output
        if cause == "gradient":
            output.register_hook(lambda gradient: _large(gradient, where))
            return output
        output.data = _large(output, where)
        return output

    getattr(job.module, layer).fault = fault


def _large(tensor: torch.Tensor, where: float) -> torch.Tensor:
    found = tensor.detach().clone().contiguous()
    flat = found.view(-1)
    chosen = ((flat.abs() < 1) & (flat != 0)).nonzero().view(-1)
    flat.view(torch.int32)[chosen[int(where * len(chosen))]] ^= 1 << 30
    return found


def _injected(
    job: Trained, whole: Model, cause: str, layer: str, where: float, batches: list[Inputs], at: int, chance: random.Random
) -> tuple[str, bool] | None:
    """Break a micro-batch of this rank, and return what should be named; None if a flip makes nothing infinite."""
    module, state = job.module, torch.get_rng_state()
    if cause in DATA:
        _broken_data(cause, batches[at], chance)
    elif cause == "weight":
        flip(getattr(module, layer).weight, where)
        at = 0  # the first micro-batch sees it
    else:
        getattr(whole, layer).fault = _flipping(cause, where, first_alone=False)
    for _ in range(at):  # random numbers of the micro-batches before, of dropout alone
        torch.nn.functional.dropout(torch.ones(MICRO_BATCH, WIDTH), 0.1)
    then = torch.get_rng_state()
    torch.set_rng_state(state)
    wanted = expected(whole, batches[at], then)
    if wanted == ("middle", True) and cause == "gradient" and job.wraps:
        wanted = ("half", True)
    getattr(whole, layer).fault = None
    if cause in HARDWARE and cause != "weight":
        calls = [0]
        fault = _flipping(cause, where, first_alone=False)

        def in_micro_batch(output: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            sick = cause == "sick rank" and calls[0] > ACCUMULATION  # also when it repeats something
            return fault(output) if calls[0] == at + 1 or sick else output

        getattr(module, layer).fault = in_micro_batch
    return wanted


def _sound_again(job: Trained) -> None:
    for each in job.module.modules():
        if isinstance(each, Layer):
            each.fault = None


def _right(verdict: Any, wanted: tuple[str, bool], cause: str, at: int, rank: int) -> bool:
    """Return whether a verdict has cause, layer, rank and micro-batch, and its file the batch."""
    assert isinstance(verdict, NonFinite)
    place, why = verdict.place, Cause.DATA_OR_MODEL if cause in DATA else Cause.HARDWARE
    micro_batch = 0 if cause == "weight" else at
    named = (place.layer, place.backward, place.micro_batch, verdict.rank) == (*wanted, micro_batch, rank)
    return named and verdict.cause is why and (not verdict.batch or Path(verdict.batch).exists())
