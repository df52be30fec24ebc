"""Writers that get in the way of a copy behind training, beside a model that knows what each save must hold.

A trial is one save: the truth is copied when the save is called, then writers of random kinds act until the save has ended. A
committed checkpoint that differs from the truth is wrong. A refusal is right only if a writer has broken the rule that only a
step changes the state.
"""

from __future__ import annotations

import contextlib
import gc
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from unickpt.checkpoint.coordination.failure import FailureKind
from unickpt.checkpoint.coordination.message_exchange import MessageExchange
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.dtypes import name_of
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.format.manifest import Writer
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.save import late_places
from unickpt.checkpoint.save.kept import BoundShards, Facts, Keeper, KeptFacts
from unickpt.checkpoint.save.late_copy import LateCopy, settle_all
from unickpt.checkpoint.save.requests import PendingSave, SaveOptions, SaveRequest
from unickpt.checkpoint.save.saver import Saver
from unickpt.checkpoint.save.shards import Contribution
from unickpt.checkpoint.state.held import Description, Held

SIZES = (64, 3000, 60_000, 400_000)  # elements of the masters
_WRITER = Writer("test", "1", "0", torch.__version__, "none", {"world_size": 1})


class BreakingAdam(torch.optim.AdamW):
    """Raises in the middle of a step, after it has changed parameters, if ``breaks``."""

    breaks = False

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step(closure)
        if self.breaks:
            raise RuntimeError("a step that fails")


class Job:
    """Masters with bfloat16 weights, a parameter that is its own master, a frozen one, a buffer; AdamW steps on them."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.masters = [torch.nn.Parameter(torch.randn(size)) for size in SIZES]
        self.weights = [torch.nn.Parameter(master.detach().bfloat16()) for master in self.masters]
        self.own = torch.nn.Parameter(torch.randn(300, 100))
        self.frozen = torch.nn.Parameter(torch.randn(50_000), requires_grad=False)
        self.buffer = torch.randn(1000)
        self.shadow = [master.detach().clone() for master in self.masters]  # a moving average
        self.optimizer = BreakingAdam([*self.masters, self.own], lr=1e-2, foreach=False)
        self.other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=1.0)
        self.kept: tuple[KeptFacts, Keeper] | None = None
        self.reused = 0  # saves with shards that an earlier one has described
        self.backward()
        self.step()

    def backward(self) -> None:
        for parameter in (*self.masters, self.own):
            grad = torch.randn_like(parameter)
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for weight, master in zip(self.weights, self.masters, strict=True):
                weight.copy_(master)

    def held(self) -> list[Held]:
        found = []

        def add(name: str, state: str, tensor: torch.Tensor, kind: str, unless: torch.Tensor | None = None) -> None:
            derived = None if unless is None else "master"
            info = TensorInfo(name, state, name_of(tensor.dtype), tuple(tensor.shape), kind, derived)
            whole, steady = Box.whole(info.shape), kind != "buffer"
            found.append(Held(info, whole, tensor.detach(), None, None if unless is None else unless.detach(), steady))

        for at, (master, weight) in enumerate(zip(self.masters, self.weights, strict=True)):
            add(f"p{at}", "master", master, "parameter")
            add(f"p{at}", "weight", weight, "parameter", master)
        add("own", "weight", self.own, "parameter")
        add("frozen", "weight", self.frozen, "parameter")
        add("buffer", "weight", self.buffer, "buffer")
        for at, parameter in enumerate((*self.masters, self.own)):
            for key in ("exp_avg", "exp_avg_sq"):
                name = f"p{at}" if at < len(self.masters) else "own"
                add(name, key, self.optimizer.state[parameter][key], "optimizer")
        return found

    def request(self, folder: Path, tag: str, *, keeps: bool = False) -> SaveRequest:
        """Return the request for a save. ``keeps``: with the shards of an earlier save, where they fit."""
        held = self.held()
        listed = [each.tensor for each in held]
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        bases = [*self.masters, *self.weights, self.own, self.frozen, *(value for value in states if value.dim())]
        facts = Facts(bases, bases)
        if keeps and self.kept is not None and self.kept[0].fit(facts) and self.kept[1].kept is not None:
            self.reused += 1
            rest = Description(held=[each for each in held if not each.steady]).shards()
            bound = BoundShards.of(self.kept[1].kept, facts.tensors)
            made = Contribution(rest, 1, _WRITER, tensors=listed, bound=bound)
        else:
            self.kept = (KeptFacts(facts), Keeper(facts.tensors))
            made = Contribution(Description(held=held).shards(), 1, _WRITER, tensors=listed, keeper=self.kept[1])
        return SaveRequest(lambda _: made, str(folder), tag)


Act = Callable[[Job, random.Random], None]


def _any_master(job: Job, chance: random.Random) -> torch.nn.Parameter:
    return chance.choice([*job.masters, job.own])


def _backward(job: Job, _: random.Random) -> None:
    job.backward()


def _step(job: Job, _: random.Random) -> None:
    job.backward()
    job.step()


def _failing_step(job: Job, _: random.Random) -> None:
    job.backward()
    job.optimizer.breaks = True
    try:
        job.step()
    except RuntimeError:
        pass
    finally:
        job.optimizer.breaks = False


def _skipped_step(job: Job, _: random.Random) -> None:
    job.backward()
    job.optimizer.zero_grad()  # an overflow: the scaler leaves the step out


def _other_optimizer(job: Job, _: random.Random) -> None:
    job.other.step()


def _buffer(job: Job, _: random.Random) -> None:
    job.buffer.add_(1.0)


def _freeze(job: Job, _: random.Random) -> None:
    job.own.requires_grad_(not job.own.requires_grad)


def _garbage(_: Job, __: random.Random) -> None:
    gc.collect()


def _sleep(_: Job, chance: random.Random) -> None:
    time.sleep(chance.random() * 2e-3)


def _average(job: Job, _: random.Random) -> None:
    for shadow, master in zip(job.shadow, job.masters, strict=True):
        shadow.lerp_(master.detach(), 0.1)


def _setter(job: Job, chance: random.Random) -> None:
    settle_all()
    with torch.no_grad():
        _any_master(job, chance).data.mul_(1.5)


def _load(job: Job, _: random.Random) -> None:
    settle_all()
    for master, weight in zip(job.masters, job.weights, strict=True):
        master.data.copy_(torch.randn_like(master))
        weight.data.copy_(master.data)


def _offload(job: Job, chance: random.Random) -> None:
    settle_all()
    master = _any_master(job, chance)
    before, master.data = master.data, master.data.clone()
    if before.untyped_storage().resizable():  # NumPy has not seen it
        before.untyped_storage().resize_(0)


def _reassign(job: Job, chance: random.Random) -> None:
    master = _any_master(job, chance)
    master.data = master.data * 2  # the memory of before keeps its values


def _in_place(job: Job, chance: random.Random) -> None:
    with torch.no_grad():
        _any_master(job, chance).add_(1.0)


def _state_in_place(job: Job, chance: random.Random) -> None:
    job.optimizer.state[_any_master(job, chance)]["exp_avg"].mul_(0.5)


def _one_in_place(job: Job, chance: random.Random) -> None:
    with torch.no_grad():
        _any_master(job, chance).view(-1)[17].add_(1.0)  # no sample shows it


def _frozen_in_place(job: Job, _: random.Random) -> None:
    job.frozen.add_(1.0)


def _weight_in_place(job: Job, chance: random.Random) -> None:
    with torch.no_grad():
        chance.choice(job.weights).add_(1.0)


def _data(job: Job, chance: random.Random) -> None:
    _any_master(job, chance).data.add_(1.0)


def _half_data(job: Job, chance: random.Random) -> None:
    flat = _any_master(job, chance).data.view(-1)
    half = flat.numel() // 2
    (flat[:half] if chance.random() < 0.5 else flat[half:]).add_(1.0)


def _numpy(job: Job, chance: random.Random) -> None:
    _any_master(job, chance).detach().numpy()[...] += 1.0


def _swap_in_place(job: Job, _: random.Random) -> None:
    with torch.no_grad():
        for shadow, master in zip(job.shadow, job.masters, strict=True):
            kept = master.clone()
            master.copy_(shadow)
            shadow.copy_(kept)


def _swap_through_data(job: Job, _: random.Random) -> None:
    for shadow, master in zip(job.shadow, job.masters, strict=True):
        kept = master.data.clone()
        master.data.copy_(shadow)
        shadow.copy_(kept)


LAWFUL: tuple[Act, ...] = (
    _backward, _step, _step, _failing_step, _skipped_step, _other_optimizer, _buffer, _freeze, _garbage, _sleep, _average,
    _setter, _load, _offload, _reassign,
)  # fmt: skip
BREAKING: tuple[Act, ...] = (
    _in_place, _one_in_place, _state_in_place, _frozen_in_place, _weight_in_place, _data, _half_data, _numpy, _swap_in_place,
    _swap_through_data,
)  # fmt: skip


@dataclass
class Found:
    """What came of trials.

    Attributes:
        wrong: trials whose checkpoint differs from the truth, or that were refused without reason, with what had acted.
        committed, refused: numbers of saves.
        reused: saves with shards that an earlier one had described.
        by: of the writers that had broken the rule, the refused and the committed saves.
    """

    wrong: list[str] = field(default_factory=list)
    committed: int = 0
    refused: int = 0
    reused: int = 0
    by: Counter[tuple[str, bool]] = field(default_factory=Counter)


def run(folder: Path, trials: int, seed: int, *, breaking: float = 0.3) -> Found:
    """Make trials. ``breaking``: probability that one of the writers of a trial breaks the rule."""
    chance, found = random.Random(seed), Found()
    job, saver = Job(seed), Saver(SaveOptions(asynchronous=True, on_busy="queue"))
    running: list[tuple[PendingSave, str, dict[tuple[str, str], torch.Tensor], list[str], bool]] = []
    for trial in range(trials):
        tag = f"t{trial}"
        truth = {held.tensor.key: held.data.clone() for held in job.held()}
        request = job.request(folder, tag, keeps=chance.random() < 0.8)
        save = saver.save(request, MessageExchange(None, rank=0, world=1, prefix=tag))
        acts = [chance.choice(LAWFUL) for _ in range(chance.randrange(4))]
        broke = chance.random() < breaking
        if broke:
            acts.insert(chance.randrange(len(acts) + 1), chance.choice(BREAKING))
        running.append((save, tag, truth, names := [act.__name__ for act in acts], broke))
        for act in acts:
            if chance.random() < 0.3:
                _sleep(job, chance)
            act(job, chance)
        for other in running[:-1]:  # what has acted on a save that is still running
            other[3].extend(names)
        running = [(*each[:4], each[4] or broke) for each in running]
        if chance.random() < 0.3 and trial + 1 < trials:
            continue  # two saves in flight
        for each in running:
            _judge(folder, found, *each)
        running = []
        saver._parts._late = True  # a refusal has switched it off for the job
        saver._recovering = False
        for weight, master in zip(job.weights, job.masters, strict=True):
            weight.data.copy_(master.data)
    found.reused = job.reused
    return found


def _judge(
    folder: Path,
    found: Found,
    save: PendingSave,
    tag: str,
    truth: dict[tuple[str, str], torch.Tensor],
    acts: list[str],
    broke: bool,
) -> None:
    assert save.wait(60), tag
    assert save.result is not None, (tag, save.error)
    for act in set(acts) & {each.__name__ for each in BREAKING}:
        found.by[act, save.committed] += 1
    if not save.committed:
        found.refused += 1
        kinds = {failure.kind for failure in save.result.failures}
        if kinds != {FailureKind.CHANGED} or not broke:
            found.wrong.append(f"{tag}: {save.cause()} after {', '.join(acts) or 'nothing'}")
        return
    found.committed += 1
    checkpoint = Checkpoint.open(folder / tag)
    for key, value in truth.items():
        read = checkpoint.read_tensor(*key)
        if not torch.equal(read.view(torch.uint8), value.view(torch.uint8)):
            found.wrong.append(f"{tag}: {key} differs from the truth after {', '.join(acts)}")
    shutil.rmtree(folder / tag)


@contextlib.contextmanager
def held_copies() -> Iterator[list[LateCopy]]:
    """Let every save leave its copies until something settles them: its thread copies nothing before. Yields the copies.

    Saves of any size copy late, from the second one of a saver on.
    """
    made: list[LateCopy] = []
    gates: dict[LateCopy, threading.Event] = {}
    begin, run_, settle, least = LateCopy.__init__, LateCopy.run, LateCopy.settle, late_places.LATE_BYTES

    def noted(copy: LateCopy, *arguments: Any) -> None:
        gates[copy] = threading.Event()
        made.append(copy)
        begin(copy, *arguments)

    def held(copy: LateCopy) -> None:
        assert gates[copy].wait(120), "nothing has settled the copies of a save"
        run_(copy)

    def settled(copy: LateCopy) -> None:
        settle(copy)
        gates[copy].set()

    LateCopy.__init__, LateCopy.run, LateCopy.settle = noted, held, settled  # type: ignore[method-assign, assignment]
    late_places.LATE_BYTES = 0
    try:
        yield made
    finally:
        LateCopy.__init__, LateCopy.run, LateCopy.settle = begin, run_, settle  # type: ignore[method-assign]
        late_places.LATE_BYTES = least
        for gate in gates.values():
            gate.set()
