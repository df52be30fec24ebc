"""Scenarios of ``torch_unickpt.witness``: bits flip in the memory of one rank; sound training stays as it is."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import torch_unickpt
from tests.jobs.torch.model import Job
from tests.jobs.torch.registry import job_of, logged, scenario
from unickpt.checkpoint.format.witnessed import Passed
from unickpt.training.witness.held import local
from unickpt.training.witness.nonfinite import NonFinite
from unickpt.training.witness.vote import Kind, Verdict

NAME, MOMENT = "blocks.0.up.weight", "exp_avg_sq of blocks.1.down.weight"


def flip(tensor: torch.Tensor, bit: int = 20) -> None:
    """Change a bit as a fault of the memory does: no counter of writes notices."""
    held = tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor
    held.data.view(torch.int32).view(-1)[3] ^= 1 << bit


def weight(job: Job, name: str = NAME) -> torch.Tensor:
    return dict(job.module.named_parameters())[name]


def told(watching: torch_unickpt.Witness) -> list[tuple[Kind, str, int, tuple[int, ...]]]:
    """Return the verdicts, which all ranks must have alike."""
    own = []
    for each in watching.verdicts:
        assert isinstance(each, Verdict)
        own.append((each.kind, each.subject.what, each.subject.step, each.ranks))
        assert each.blamed == ()  # all are on this host
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    assert every == [own] * len(every)
    return own


@scenario(4)
def a_bit_that_flips_in_a_replica_is_named(folder: Path) -> None:
    job = job_of("ddp4", 1)
    with logged() as lines:
        watching = torch_unickpt.witness(job.model, job.optimizer, {"every": 2, "checks": ["replicas"]})
        job.train(2)
        assert told(watching) == []
        assert watching.passed == Passed(2, ("replicas",))
        if dist.get_rank() == 2:
            flip(weight(job))
        job.train(1)
        assert told(watching) == []
        job.train(1)
        assert told(watching) == [(Kind.SDC_REPLICA, NAME, 4, (2,))]
        if dist.get_rank() == 1:
            flip(job.optimizer.state[weight(job, "blocks.1.down.weight")]["exp_avg_sq"])
        job.train(4)  # each is told once
    assert told(watching)[:2] == [(Kind.SDC_REPLICA, NAME, 4, (2,)), (Kind.SDC_REPLICA, "blocks.1.down.weight", 6, (1,))] or (
        told(watching)[1] == (Kind.SDC_REPLICA, MOMENT, 6, (1,))
    )
    assert watching.passed == Passed(2, ("replicas",))
    found = [line for line in lines if "SDC_REPLICA step 4: rank 2 (on" in line and NAME in line and "than 3 other" in line]
    assert len(found) == (dist.get_rank() == 0)
    watching.close()


@scenario(4)
def a_bit_that_flips_at_rest_is_named(folder: Path) -> None:
    for shape in ("ddp4", "fsdp4"):
        job = job_of(shape, 1)
        watching = torch_unickpt.witness(job.model, job.optimizer, {"every": 1, "checks": ["rest"]}, step=10)
        job.train(2)
        with torch.no_grad():
            weight(job).mul_(1.5)  # of the program: torch counts it
        job.train(1)
        for parameter in job.module.parameters():  # likewise, and no counter sees it
            held: Any = parameter.detach()
            (held.to_local() if shape == "fsdp4" else held).data.mul_(0.9)
        job.train(1)
        assert told(watching) == []
        if dist.get_rank() == 3:
            flip(weight(job), bit=0)
            flip(job.optimizer.state[weight(job, "blocks.1.down.weight")]["exp_avg_sq"])
        job.train(2)
        kind = Kind.SDC_AT_REST if shape == "ddp4" else Kind.NO_MAJORITY  # no other rank holds this part
        assert told(watching) == [(kind, NAME, 14, (3,)), (kind, MOMENT, 14, (3,))]
        assert watching.passed == Passed(13, ("rest",))  # and nothing after a fault
        watching.close()


@scenario(2)
def two_replicas_cannot_vote(folder: Path) -> None:
    job = job_of("ddp2", 1)
    watching = torch_unickpt.witness(job.model, job.optimizer, {"every": 1, "checks": ["replicas"]})
    job.train(1)
    if dist.get_rank() == 1:
        flip(weight(job))
    job.train(1)
    assert told(watching) == [(Kind.NO_MAJORITY, NAME, 2, (0, 1))]
    watching.close()


@scenario(4)
def copies_of_a_shard_are_replicas(folder: Path) -> None:
    job = job_of("hsdp2x2", 1)
    watching = torch_unickpt.witness(job.model, job.optimizer, {"every": 1, "checks": ["replicas"]})
    job.train(2)
    assert told(watching) == []
    if dist.get_rank() == 3:
        flip(weight(job))
    job.train(1)
    assert told(watching) == [(Kind.NO_MAJORITY, NAME, 3, (1, 3))]
    watching.close()


class Noisy(torch.nn.Module):
    """Dropout, activation checkpointing, and a mask with infinities."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        self.mask, self.drop = Mask(), torch.nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(lambda y: self.drop(torch.relu(self.first(y))), x, use_reentrant=False)
        return self.second(torch.softmax(self.mask(x), dim=-1) * x)


class Mask(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(torch.arange(x.shape[-1]) > 12, float("-inf"))


def _trained(kind: str, options: dict[str, Any] | None) -> tuple[list[torch.Tensor], torch_unickpt.Witness]:
    torch.manual_seed(3)
    module: torch.nn.Module = Noisy()
    ddp = DistributedDataParallel(module) if kind == "ddp" else None
    model = fully_shard(module) if ddp is None else ddp
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    watching = torch_unickpt.witness(model, optimizer, options)
    torch.manual_seed(dist.get_rank())
    for step in range(12):
        for micro_batch in range(3):
            x = torch.randn(2 + (step + micro_batch + dist.get_rank()) % 3, 8)  # uneven
            with nullcontext() if ddp is None or micro_batch == 2 else ddp.no_sync():
                model(x).square().mean().backward()
        if step % 5 != 4:  # as a loss scaler that leaves a step out
            optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.eval()
            model(torch.randn(2, 8))
            model.train()
    if isinstance(model, FSDPModule):
        model.reshard()
    return [p.detach().to_local() if kind == "fsdp" else p.detach() for p in model.parameters()], watching  # type: ignore[attr-defined]


@scenario(2)
def sound_training_has_no_verdict_and_the_same_weights(folder: Path) -> None:
    for kind in ("ddp", "fsdp"):
        expected, off = _trained(kind, None)
        found, watching = _trained(kind, {"every": 1})
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        assert watching.verdicts == off.verdicts == []
        assert watching.passed.passed_until == 9  # rest of step 10 is compared when step 11 begins
        watching.close()


class Faulty(torch.nn.Module):
    """Two layers with dropout and running statistics, and between them what a broken device does to an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 8)
        self.drop, self.fault = torch.nn.Dropout(0.3), lambda x: x

    def forward(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
        return self.second(self.drop(self.fault(self.norm(self.first(x))))) * scale


def _flipped(x: torch.Tensor) -> torch.Tensor:
    other = x.detach().clone()
    flip(other, bit=18)
    return x + (other - x).detach()


def _once(calls: list[int], number: int, fault: Any) -> Any:
    """Return what is wrong in one call since ``calls`` was 0: repetitions are later calls."""

    def passed(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return fault(x) if calls[0] == number else x

    return passed


def _sound(_step: int, _micro_batch: int) -> Any:
    return lambda x: x


def _wrapped(module: Faulty, kind: str) -> Any:
    if kind == "ddp":
        return DistributedDataParallel(module, broadcast_buffers=False)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if kind == "hsdp" else None
    for each in (module.first, module.second, module):
        fully_shard(each, mesh=mesh)
    return module


def _with_buddies(
    fault: Any,
    steps: int,
    options: dict[str, Any] | None,
    penalty: float = 0,
    bad: tuple[int, int, int] | None = None,
    kind: str = "ddp",
) -> tuple[Faulty, Any]:
    """Train with DDP, or with shards, on one dimension or on two. ``bad``: step, micro-batch and rank whose input has NaN."""
    torch.manual_seed(3)
    module = Faulty()
    model = _wrapped(module, kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    watching = torch_unickpt.witness(model, optimizer, options)
    torch.manual_seed(dist.get_rank())
    for step in range(1, steps + 1):
        for micro_batch in range(2):
            module.fault = fault(step, micro_batch)
            ddp = isinstance(model, DistributedDataParallel)
            if not ddp:
                model.set_requires_gradient_sync(micro_batch == 1)
            with model.no_sync() if ddp and micro_batch == 0 else nullcontext():
                x = torch.randn(3 + dist.get_rank(), 8) * (float("nan") if bad == (step, micro_batch, dist.get_rank()) else 1)
                loss = model(x, scale=0.5).square().mean()
                (loss + penalty * module.first.weight.square().sum() if penalty else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    return module, watching


@scenario(2, 4)
def what_a_buddy_repeats_is_equal_and_leaves_no_trace(folder: Path) -> None:
    kinds = {"ddp": ("replicas",), "fsdp": ()} if dist.get_world_size() == 2 else {"ddp": ("replicas",), "hsdp": ("replicas",)}
    for kind, more in kinds.items():
        ends = []
        for options in (None, {"every": 1, "checks": ["rest", "nonfinite", "buddy", *more]}):
            module, watching = _with_buddies(_sound, 5, options, kind=kind)
            assert watching.verdicts == []
            ends.append({name: local(tensor) for name, tensor in module.state_dict().items()})
            if options is not None:
                assert watching.passed == Passed(4, ("buddy", *more, "rest")), watching.passed
            watching.close()
        assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@scenario(4)
def a_wrong_activation_is_named_by_two_others(folder: Path) -> None:
    rank, calls = dist.get_rank(), [0]

    def once(step: int, micro_batch: int) -> Any:
        """In the forward pass of the program alone, and not when it is repeated."""
        calls[0] = 0

        def passed(x: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            return _flipped(x) if (rank, step, micro_batch, calls[0]) == (2, 4, 0, 1) else x

        return passed

    for each in ("ddp", "fsdp"):
        _, watching = _with_buddies(once, 6, {"every": 2, "checks": ["buddy"]}, kind=each)
        (found,) = told(watching)
        assert (found[0], found[2], found[3]) == (Kind.SDC_COMPUTE, 4, (2,))
        assert found[1] == "the output, the gradient of second.weight"  # what lies before the fault has the same gradient
        assert watching.passed == Passed(2, ("buddy",))  # and nothing after a fault
        watching.close()

    def always(step: int, micro_batch: int) -> Any:
        return _flipped if rank == 1 and step > 2 else lambda x: x

    _, watching = _with_buddies(always, 4, {"every": 2, "checks": ["buddy"]})
    found = told(watching)
    assert {(kind, step, ranks) for kind, _, step, ranks in found} == {(Kind.SDC_COMPUTE, 4, (1,))}
    watching.close()


@scenario(4)
def what_cannot_be_repeated_ends_the_check(folder: Path) -> None:
    noise = torch.Generator().manual_seed(dist.get_rank())

    def noisy(step: int, micro_batch: int) -> Any:
        return lambda x: x + 1e-3 * torch.rand(x.shape, generator=noise)

    with logged() as lines:
        _, watching = _with_buddies(noisy, 3, {"every": 1, "checks": ["buddy"]})
        found = told(watching)
        assert [(kind, step, ranks) for kind, _, step, ranks in found] == [(Kind.NONDETERMINISTIC, 1, (0, 1, 2, 3))]
        assert watching.passed == Passed(0, ())
        watching.close()
        _, watching = _with_buddies(_sound, 3, {"every": 1, "checks": ["buddy"]}, penalty=0.1)
        assert told(watching) == []
        watching.close()
    if dist.get_rank() == 0:
        assert sum("the check buddy ends: an operator has another result" in line for line in lines) == 1
        assert sum("the ranks cannot repeat the gradient of first.weight from" in line for line in lines) == 1


def _raise(_gradient: torch.Tensor) -> None:
    raise ValueError("halfway")


@scenario(2)
def a_repetition_that_raises_halfway_leaves_training_as_it_was(folder: Path) -> None:
    """FSDP2 would otherwise keep its parameters gathered, and reduce no gradient any more."""

    def fault(_step: int, micro_batch: int) -> Any:
        calls = [0]

        def passed(x: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            if micro_batch == 1 and calls[0] > 1:  # what is repeated before the step
                x.register_hook(_raise)  # type: ignore[no-untyped-call]
            return x

        return passed

    for kind in ("ddp", "fsdp"):
        ends = []
        for options in (None, {"every": 1, "checks": ["buddy", "rest"]}):
            module, watching = _with_buddies(fault, 4, options, kind=kind)
            ends.append({name: local(tensor) for name, tensor in module.state_dict().items()})
            if options is not None:
                assert watching.passed == Passed(3, ("rest",)), (kind, watching.passed)
            watching.close()
        assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0]), kind


def _causes(watching: torch_unickpt.Witness) -> list[tuple[int, int, str, str, str]]:
    """Return what ``nonfinite`` has found on all ranks: step, rank, layer, cause and file."""
    own = [each for each in watching.verdicts if isinstance(each, NonFinite)]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, [(each.step, each.rank, each.place.layer, each.cause.value, each.batch) for each in own])
    return [each for of_rank in every for each in of_rank]


@scenario(2, 4)
def the_cause_of_nan_is_found_by_repetitions(folder: Path) -> None:
    rank, batches = dist.get_rank(), {"every": 50, "checks": ["nonfinite"], "batches": str(folder)}
    for each in ("fsdp", "ddp"):
        _, watching = _with_buddies(_sound, 2, batches, bad=(2, 1, 1), kind=each)
        (found,) = _causes(watching)
        assert found[:4] == (2, 1, "first", "DATA_OR_MODEL")
    content = torch.load(found[4], weights_only=True)
    assert (content["step"], content["micro_batch"], content["rank"], content["kwargs"]) == (2, 1, 1, {"scale": 0.5})
    assert content["args"][0].isnan().all()
    watching.close()

    def transient(step: int, micro_batch: int) -> Any:
        return _once([0], 1, lambda x: x * float("inf")) if (rank, step, micro_batch) == (1, 2, 0) else lambda x: x

    for each in ("fsdp", "ddp"):
        _, watching = _with_buddies(transient, 2, batches, kind=each)
        assert _causes(watching) == [(2, 1, "drop", "HARDWARE", "")]
        watching.close()

    def sick(step: int, micro_batch: int) -> Any:
        return (lambda x: x * float("inf")) if rank == 1 and step == 2 else lambda x: x

    _, watching = _with_buddies(sick, 2, batches)  # of two ranks nobody knows which is wrong
    assert _causes(watching) == [(2, 1, "drop", "HARDWARE" if dist.get_world_size() > 2 else "UNDECIDED", "")]
    watching.close()


@scenario(4)
def a_weight_that_becomes_infinite_is_of_the_hardware_and_an_input_that_was_overwritten_is_not_repeated(folder: Path) -> None:
    job, rank = job_of("ddp4", 1), dist.get_rank()
    with logged() as lines:
        watching = torch_unickpt.witness(job.model, job.optimizer, {"checks": ["nonfinite"]})
        job.train(1)
        if rank == 2:
            weight(job).data[0, 0] = float("inf")
        job.train(3)  # with weights that are NaN on all ranks
        assert [each[:4] for each in _causes(watching)] == [(2, 2, "blocks.0.up", "HARDWARE")]
        watching.close()
    assert sum(
        "HARDWARE: a repetition finds finite values). Next: test the memory and the GPU of" in line for line in lines
    ) == (rank == 2)

    torch.manual_seed(3)
    module = Faulty()
    model = DistributedDataParallel(module, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    watching = torch_unickpt.witness(model, optimizer, {"checks": ["nonfinite"]})
    x = torch.full((3, 8), float("nan") if rank == 0 else 1.0)
    model(x, scale=0.5).square().mean().backward()
    x.fill_(1)
    optimizer.step()
    assert [each[:4] for each in _causes(watching)] == [(1, 0, "first", "UNDECIDED")]
    watching.close()


class Checkpointed(torch.nn.Module):
    """Blocks whose activations the backward pass computes again, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = torch.nn.ModuleList([Faulty(), Faulty()]), torch.nn.Linear(8, 4)
        for at, block in enumerate(self.blocks):
            block.norm = torch.nn.LayerNorm(16) if at else torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.blocks
        x = checkpoint(lambda y: first(y, scale=0.5), x, use_reentrant=True)
        x = checkpoint(second, x, scale=0.5, use_reentrant=False)
        found: torch.Tensor = self.head(x)
        return found


def _checkpointed(kind: str, options: dict[str, Any] | None, fault: Any = None) -> tuple[list[torch.Tensor], Any]:
    torch.manual_seed(3)
    module: Any = Checkpointed()
    if kind == "fsdp":
        for block in module.blocks:
            fully_shard(block)
    model = DistributedDataParallel(module) if kind == "ddp" else fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    watching = torch_unickpt.witness(model, optimizer, options)
    torch.manual_seed(dist.get_rank())
    for step in range(1, 7):
        if fault is not None:
            module.blocks[1].fault = fault(step)
        for _ in range(2):
            model(torch.randn(3, 8, requires_grad=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if isinstance(model, FSDPModule):
        model.reshard()
    return [p.detach().to_local() if kind == "fsdp" else p.detach() for p in model.parameters()], watching


@scenario(4)
def what_the_backward_pass_computes_again_is_equal_or_named(folder: Path) -> None:
    on = {"every": 2, "checks": ["self", "rest", "nonfinite"]}
    for kind in ("ddp", "fsdp"):
        expected, _ = _checkpointed(kind, None)
        found, watching = _checkpointed(kind, on)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        assert watching.verdicts == []
        assert watching.passed == Passed(4, ("rest", "self"))
        watching.close()

        def fault(step: int) -> Any:  # in the forward pass, or when it is computed again
            sick = (step, dist.get_rank()) in ((4, 1), (6, 3))
            return _once([0], 1 if step == 4 else 2, lambda x: x * 1.001) if sick else lambda x: x

        _, watching = _checkpointed(kind, {"every": 2, "checks": ["self"]}, fault)
        named = [(Kind.SDC_COMPUTE, "blocks.1.drop", step, (rank,)) for step, rank in ((4, 1), (6, 3))]
        assert told(watching) == named, (kind, told(watching))  # the layer after the fault
        assert watching.passed == Passed(2, ("self",))
        watching.close()


def _updated(options: dict[str, Any] | None, wrong: tuple[int, int] | None = None) -> tuple[list[torch.Tensor], Any]:
    """Train shards. ``wrong``: step and rank that computes the step of the optimizer wrongly, in all parameters."""
    torch.manual_seed(3)
    model: Any = fully_shard(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 16)))
    optimizer, steps = torch.optim.AdamW(model.parameters(), lr=0.01), [0]

    def stepped(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        steps[0] += 1
        if wrong == (steps[0], dist.get_rank()):
            for parameter in model.parameters():
                flip(parameter, bit=3)

    optimizer.register_step_post_hook(stepped)
    watching = torch_unickpt.witness(model, optimizer, options)
    torch.manual_seed(dist.get_rank())
    for _ in range(6):
        model(torch.randn(3, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach().to_local() for each in model.parameters()], watching


@scenario(2, 4)
def a_wrong_step_of_the_optimizer_is_named(folder: Path) -> None:
    expected, _ = _updated(None)
    found, watching = _updated({"every": 2, "checks": ["update", "rest"]})
    assert all(map(torch.equal, expected, found))
    assert (watching.verdicts, watching.passed) == ([], Passed(4, ("rest", "update")))
    watching.close()
    _, watching = _updated({"every": 2, "checks": ["update"]}, wrong=(4, 1))
    (each,) = told(watching)
    assert each[1] in ("0.weight", "0.bias", "2.weight", "2.bias")
    named = (Kind.SDC_UPDATE, (1,)) if dist.get_world_size() > 2 else (Kind.NO_MAJORITY, (0, 1))
    assert (each[0], each[2], each[3]) == (named[0], 4, named[1])
    assert watching.passed == Passed(2, ("update",))
    watching.close()
