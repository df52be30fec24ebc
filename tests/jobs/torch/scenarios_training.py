"""Scenarios of ``save_training``, ``load_training`` and ``resume_or_start``."""

from __future__ import annotations

import os
import time
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.optim import ZeroRedundancyOptimizer

import torch_unickpt
import unickpt
from tests.jobs.torch.layouts import Layout
from tests.jobs.torch.model import Job
from tests.jobs.torch.pairs_worker import differences
from tests.jobs.torch.registry import ADAMW, apart, job_of, logged, scenario, set_state_dict_of, state_dict_of
from tests.support.switch import switched
from unickpt.checkpoint.load.checkpoint import Checkpoint


@scenario(2)
def a_state_dict_and_a_training_load_each_other(folder: Path) -> None:
    job = job_of("fsdp2", 1)
    job.train(2)
    with switched():
        dcp.save(state_dict_of(job), checkpoint_id=folder / "last")
    unickpt.save_training(job.model, job.optimizer, folder / "step-2", step=2)
    other = job_of("ddp2", 3)
    unickpt.load_training(other.model, other.optimizer, folder / "last")
    assert Checkpoint.open(folder / "last").manifest.step == 2, "as the optimizer counts"
    assert apart(job.truth(), other.truth()) == []
    other = job_of("fsdp2", 3)
    state = state_dict_of(other) | {"step": 0}
    del state["extra"], state["step"]
    dcp.load(state, checkpoint_id=folder / "step-2")
    set_state_dict_of(other, {**state, "step": 2})
    assert apart(job.truth(), other.truth()) == []


@scenario(2)
def a_job_starts_and_resumes_and_falls_back_from_a_damaged_checkpoint(folder: Path) -> None:
    job = job_of("fsdp2", 1)
    start = torch_unickpt.resume_or_start(job.model, job.optimizer, folder / "out", scheduler=job.scheduler)
    assert (start.resumed, start.step) == (False, 0)
    truths = {}
    for step in (1, 2):
        job.train(1)
        result = unickpt.save_training(
            job.model, job.optimizer, folder / "out" / f"step{step}", step=step, samples=10 * step, scheduler=job.scheduler
        )
        assert isinstance(result, unickpt.SaveResult)
        assert result.complete
        truths[step] = job.truth()
    other = job_of("ddp2", 8)
    start = torch_unickpt.resume_or_start(other.model, other.optimizer, folder / "out", scheduler=other.scheduler)
    assert (start.step, start.samples) == (2, 20)
    assert differences(truths[2], other.truth()) == []
    dist.barrier()
    if dist.get_rank() == 0:
        damaged = next((folder / "out" / "step2" / "data").iterdir())
        data = bytearray(damaged.read_bytes())
        data[-100] ^= 1
        damaged.write_bytes(data)
    dist.barrier()
    start = torch_unickpt.resume_or_start(other.model, other.optimizer, folder / "out", scheduler=other.scheduler)
    assert start.step == 1
    assert differences(truths[1], other.truth()) == []


@scenario(2)
def an_asynchronous_save_has_the_state_of_its_call(folder: Path) -> None:
    job = job_of("fsdp2", 1)
    job.train(1)
    truth = job.truth()
    saved = unickpt.save_training(
        job.model, job.optimizer, folder / "step1", step=1, scheduler=job.scheduler,
        options=unickpt.SaveOptions(asynchronous=True),
    )  # fmt: skip
    job.train(2)
    assert not isinstance(saved, unickpt.SaveResult)
    saved.wait()
    assert saved.result is not None
    assert saved.result.complete
    other = job_of("fsdp2", 6)
    unickpt.load_training(other.model, other.optimizer, folder / "step1", scheduler=other.scheduler)
    assert differences(truth, other.truth()) == []


@scenario(2)
def urls_of_an_object_store_are_folders(folder: Path) -> None:
    url = os.environ.get("UNICKPT_TEST_URL")
    if url is None:
        raise unittest.SkipTest("tests/integration/storage runs it beside an S3 server")
    job = job_of("fsdp2", 1)
    job.train(1)
    unickpt.save_training(job.model, job.optimizer, f"{url}/torch/step1", step=1, scheduler=job.scheduler)
    writer = torch_unickpt.UnickptWriter(f"{url}/torch-dcp/step1")
    dcp.save({"model": job.module.state_dict()}, storage_writer=writer)
    other = job_of("ddp2", 2)
    start = torch_unickpt.resume_or_start(other.model, other.optimizer, f"{url}/torch", scheduler=other.scheduler)
    assert start.step == 1
    assert differences(job.truth(), other.truth()) == []
    other = job_of("fsdp2", 3)
    dcp.load({"model": other.module}, storage_reader=torch_unickpt.UnickptReader(f"{url}/torch-dcp/step1"))
    assert torch.equal(job.truth()["wide.weight"], other.truth()["wide.weight"])


@scenario(2)
def a_newer_checkpoint_in_memory_is_loaded_first(folder: Path) -> None:
    memory, job, truths = torch_unickpt.MemoryOptions(to_disk_every=3), job_of("fsdp2", 1), {}
    for step in (1, 2, 3, 4):  # 3 on disk, 4 in memory
        job.train(1)
        saved = unickpt.save_training(
            job.model, job.optimizer, folder / f"step{step}", step=step, scheduler=job.scheduler, memory=memory
        )
        assert isinstance(saved, unickpt.SaveResult) == (step == 3)
        if not isinstance(saved, unickpt.SaveResult):
            saved.wait()
        truths[step] = job.truth()
    dist.barrier()
    assert [each.name for each in folder.glob("step*") if (each / "manifest.json").exists()] == ["step3"]
    for options, step in ((memory, 4), (None, 3)):
        other = job_of("ddp2", 5)
        start = torch_unickpt.resume_or_start(other.model, other.optimizer, folder, scheduler=other.scheduler, memory=options)
        assert start.step == step
        assert differences(truths[step], other.truth()) == []


class _Loader:
    """Holds samples between steps."""

    def __init__(self, buffer: list[int]) -> None:
        self.buffer = buffer

    def state_dict(self) -> dict[str, Any]:
        return {"buffer": self.buffer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.buffer = state["buffer"]

    def reshard(self, states: Any, ranks: int) -> list[dict[str, Any]]:
        return [{"buffer": each} for each in unickpt.deal_samples([state["buffer"] for state in states], ranks)]


@scenario(2)
def loaders_generators_and_stateful_objects_continue(folder: Path) -> None:
    rank, job = dist.get_rank(), job_of("fsdp2", 1)
    loader, meter = _Loader([rank, rank + 10]), torch.nn.BatchNorm1d(2)
    meter(torch.randn(4, 2, generator=torch.Generator().manual_seed(rank)))
    torch.manual_seed(100 + rank)
    unickpt.save_training(
        job.model, job.optimizer, folder / "step1", step=1, loader=loader, stateful={"meter": meter},
        client_state={"epoch": 2},
    )  # fmt: skip
    expected, mean = torch.rand(3), meter.running_mean.clone()
    dist.broadcast(mean, 0)
    other, loader, meter = job_of("fsdp2", 9), _Loader([]), torch.nn.BatchNorm1d(2)
    start = unickpt.load_training(other.model, other.optimizer, folder / "step1", loader=loader, stateful={"meter": meter})
    assert torch.equal(torch.rand(3), expected)
    assert loader.buffer == [rank, rank + 10]
    assert start.client_state == {"epoch": 2}
    assert torch.equal(meter.running_mean, mean)
    alone = [dist.new_group([each]) for each in range(2)][rank]
    single, loader = Job(Layout.parse(f"one-{ADAMW}"), 3), _Loader([])
    unickpt.load_training(single.model, single.optimizer, folder / "step1", loader=loader, group=alone)
    assert loader.buffer == [0, 1, 10, 11]


@scenario(2)
def a_loader_on_one_rank_alone_continues(folder: Path) -> None:
    """Such as the rank that reads for all."""
    rank, job = dist.get_rank(), job_of("fsdp2", 1)
    for reads in range(2):
        loader = _Loader([5, 6]) if rank == reads else None
        unickpt.save_training(job.model, job.optimizer, folder / f"step{reads}", step=reads, loader=loader)
        loader = _Loader([]) if rank == reads else None
        unickpt.load_training(job.model, job.optimizer, folder / f"step{reads}", loader=loader)
        assert loader is None or loader.buffer == [5, 6]
    unickpt.save_training(job.model, job.optimizer, folder / "none", step=3)
    alone = [dist.new_group([each]) for each in range(2)][rank]
    single, loader = Job(Layout.parse(f"one-{ADAMW}"), 3), _Loader([])
    with pytest.raises(unickpt.MismatchError, match="of 2 ranks, only 1 saved the state of a data loader"):
        unickpt.load_training(single.model, single.optimizer, folder / "step1", loader=loader, group=alone)
    plain: Any = torch.nn.BatchNorm1d(2)  # without reshard
    start = unickpt.load_training(single.model, single.optimizer, folder / "none", loader=plain, group=alone)
    assert "  left out: data_loader: none was saved: it keeps its own state" in start.report.lines()


@scenario(2)
def a_parameter_that_was_frozen_needs_a_decision(folder: Path) -> None:
    job = job_of("fsdp2", 1)
    job.train(1)
    frozen = [p for n, p in job.module.named_parameters() if "wide" in n]
    for group in job.optimizer.param_groups:
        group["params"] = [p for p in group["params"] if all(p is not each for each in frozen)]
    for each in frozen:
        job.optimizer.state.pop(each)
    unickpt.save_training(job.model, job.optimizer, folder / "step1", step=1)
    other = job_of("fsdp2", 2)
    before = other.truth()
    with pytest.raises(unickpt.MismatchError, match=r"exp_avg.*wide|wide"):
        unickpt.load_training(other.model, other.optimizer, folder / "step1")
    assert differences(before, other.truth()) == []
    start = unickpt.load_training(other.model, other.optimizer, folder / "step1", missing_state="fresh")
    fresh = {each.name for each in start.report.entries if each.outcome == "re-seeded" and each.state != "object"}
    assert fresh == {"wide.weight", "wide.bias"}
    other.train(1)


@scenario(2)
def optimizers_of_every_kind_continue(folder: Path) -> None:
    """Also those whose constructor makes the states, with states of other shapes, and with frozen parameters."""
    makers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "adagrad": torch.optim.Adagrad, "adafactor": torch.optim.Adafactor, "nadam": torch.optim.NAdam,
        "radam": torch.optim.RAdam, "adamax": torch.optim.Adamax, "rmsprop": torch.optim.RMSprop, "asgd": torch.optim.ASGD,
        "rprop": torch.optim.Rprop, "adadelta": torch.optim.Adadelta,
        "amsgrad": lambda parameters: torch.optim.AdamW(parameters, amsgrad=True),
        "plain": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    }  # fmt: skip
    for name, make in makers.items():
        jobs = []
        for seed, shape in ((1, "ddp2" if name in ("adafactor", "rprop") else "fsdp2"), (2, "ddp2")):
            job = job_of(shape, seed)
            job.optimizer = make([p for p in job.module.parameters() if p.requires_grad or name == "nadam"])
            job.scheduler = torch.optim.lr_scheduler.LambdaLR(job.optimizer, lambda _: 1.0)
            jobs.append(job)
        one, two = jobs
        one.train(2)
        unickpt.save_training(one.model, one.optimizer, folder / name, step=2, scheduler=one.scheduler)
        unickpt.load_training(two.model, two.optimizer, folder / name, scheduler=two.scheduler)
        problems = differences(one.truth(), two.truth())
        assert problems == [], (name, problems)
        two.step = 2
        apart = [abs(a - b) for a, b in zip(one.train(2), two.train(2), strict=True)]
        assert max(apart) < 1e-3, (name, apart)


@scenario(2)
def an_optimizer_divided_among_ranks_and_a_whole_one_continue_each_other(folder: Path) -> None:
    def divided(seed: int) -> Job:
        job = job_of("ddp2", seed)
        groups = [{key: each[key] for key in ("params", "weight_decay")} for each in job.optimizer.param_groups]
        job.optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=0.01)
        job.scheduler = torch.optim.lr_scheduler.LambdaLR(job.optimizer, lambda step: 1 / (1 + step))
        return job

    whole, last = job_of("ddp2", 1), folder / "step0"
    unickpt.save_training(whole.model, whole.optimizer, last, step=0, scheduler=whole.scheduler)
    for step, next_job in ((1, divided(2)), (3, divided(3)), (5, job_of("ddp2", 4))):
        start = unickpt.load_training(next_job.model, next_job.optimizer, last, scheduler=next_job.scheduler)
        next_job.step, last = start.step, folder / f"step{step}"
        next_job.train(step - start.step)
        unickpt.save_training(next_job.model, next_job.optimizer, last, step=step, scheduler=next_job.scheduler)
    whole.train(5)
    assert differences(whole.truth(), next_job.truth()) == []
    whole.optimizer = ZeroRedundancyOptimizer(whole.module.parameters(), torch.optim.AdamW, overlap_with_ddp=True)
    with pytest.raises(unickpt.SaveFailedError, match="overlap_with_ddp=True is not supported"):
        unickpt.save_training(whole.model, whole.optimizer, folder / "step6", step=6)


@scenario(2)
def wrappers_leave_no_trace_in_the_names(folder: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    torch.manual_seed(0)
    inner = torch.nn.Sequential(torch.nn.Linear(4, 4), checkpoint_wrapper(torch.nn.Linear(4, 4)))
    model: Any = torch.compile(inner, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    unickpt.save_training(model, optimizer, folder / "step1", step=1)
    names = {info.name for info in Checkpoint.open(folder / "step1").index.tensors if info.kind == "parameter"}
    assert names == {"0.weight", "0.bias", "1.weight", "1.bias"}


@scenario(2)
def stages_with_other_names_save_one_checkpoint(folder: Path) -> None:
    """As pipeline stages do: no rank has all names. Each stage's mesh has one rank here."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = torch.nn.ModuleDict({f"stage{rank}": torch.nn.Linear(3, 3), "norm": torch.nn.LayerNorm(3)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    sum(p.sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    unickpt.save_training(model, optimizer, folder / "step1", step=1)
    found = Checkpoint.open(folder / "step1")
    record = found.manifest.optimizer
    assert record is not None
    assert {name for group in record.groups for name in group.parameters} == {
        f"{module}.{kind}" for module in ("stage0", "stage1", "norm") for kind in ("weight", "bias")
    }
    assert torch.equal(found.read_tensor(f"stage{rank}.weight", "weight"), model[f"stage{rank}"].weight)
    again = torch.nn.ModuleDict({f"stage{rank}": torch.nn.Linear(3, 3), "norm": torch.nn.LayerNorm(3)})
    unickpt.load_training(again, torch.optim.AdamW(again.parameters()), folder / "step1")
    assert torch.equal(again[f"stage{rank}"].weight, model[f"stage{rank}"].weight)


class Counting(torch.nn.Module):
    """Its count is the extra state."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight, self.count = torch.nn.Parameter(torch.ones(2)), count

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


@scenario(2)
def extra_states_of_all_stages_are_stored_and_of_copies_those_of_the_first_rank(folder: Path) -> None:
    rank = dist.get_rank()

    def stage(counts: int) -> torch.nn.ModuleDict:
        return torch.nn.ModuleDict({f"stage{rank}": Counting(counts), "both": Counting(counts + 1)})

    model, again = stage(10 * rank), stage(99)
    unickpt.save_training(model, None, folder / "step1", step=1)
    unickpt.load_training(again, None, folder / "step1")
    assert (again[f"stage{rank}"].count, again["both"].count) == (10 * rank, 1)
    whole = torch.nn.ModuleDict({"stage0": Counting(99), "stage1": Counting(99), "both": Counting(99)})
    start = unickpt.load_training(whole, None, folder / "step1")
    assert [each.count for each in whole.values()] == [0, 10, 1]
    assert {entry.outcome for entry in start.report.entries if entry.name != "rng"} == {"restored"}


@scenario(2)
def buffers_that_differ_between_ranks_are_those_of_the_first(folder: Path) -> None:
    model = torch.nn.BatchNorm1d(3)
    model.running_mean.fill_(dist.get_rank() + 1)
    unickpt.save_training(model, None, folder / "step1", step=1)
    again = torch.nn.BatchNorm1d(3)
    unickpt.load_training(again, None, folder / "step1")
    assert again.running_mean.tolist() == [1, 1, 1]


@scenario(2)
def each_rank_gets_its_own_client_state_back(folder: Path) -> None:
    rank, model = dist.get_rank(), torch.nn.Linear(2, 2)
    for number, client in enumerate(({"cursor": 7}, {"cursor": rank, "seen": torch.arange(rank)}, {} if rank else {"a": 1})):
        unickpt.save_training(model, None, folder / str(number), step=1, client_state=client)
        found = unickpt.load_training(model, None, folder / str(number)).client_state
        assert repr(found) == repr(client)
        objects = Checkpoint.open(folder / str(number)).rank_objects(1).value
        assert ("client_state" in objects) == (number > 0)
        alone = [dist.new_group([each]) for each in range(2)][rank]
        start = unickpt.load_training(model, None, folder / str(number), group=alone)
        told = [each for each in start.report.entries if (each.name, each.outcome) == ("client_state", "set")]
        assert ["that of rank 0" in each.reason for each in told] == [True] * (number > 0)
        assert start.client_state.keys() == {0: {"cursor"}, 1: {"cursor", "seen"}, 2: {"a"}}[number]


@scenario(2)
def plain_parameters_that_differ_between_ranks_are_told(folder: Path) -> None:
    job = job_of("ddp2", 1)
    job.train(1)
    for step in (1, 2, 3):
        unequal = step == 2
        if unequal:
            job = job_of("ddp2", 1)
            job.train(1)
            with torch.no_grad():
                job.module.wide.weight.add_(dist.get_rank())
        with logged() as lines:
            unickpt.save_training(job.model, job.optimizer, folder / f"step{step}", step=step)
        told = [each for each in lines if "differs between rank 1 and rank 0: wide.weight. These are plain tensors" in each]
        assert len(told) == (unequal and dist.get_rank() == 0), lines
        notes = Checkpoint.open(folder / f"step{step}").manifest.notes
        assert len(notes) == unequal


@scenario(2)
def what_cannot_be_described_is_refused_by_name_on_every_rank(folder: Path) -> None:
    job = job_of("fsdp2", 1)
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2, 3))], lr=0.1) if dist.get_rank() else job.optimizer
    with pytest.raises(unickpt.SaveFailedError, match=r"rank 1: .*shape \(2, 3\)"):
        unickpt.save_training(job.model, other, folder / "step1", step=1)
    averages = {name: each.detach().clone() for name, each in job.module.named_parameters()}
    for given in ({"client_state": {"ema": [averages]}}, {"stateful": {"optimizer": job.optimizer}}):
        job.train(1)
        with pytest.raises(unickpt.SaveFailedError, match=r"(ema|optimizer).*: divided among the ranks"):
            unickpt.save_training(job.model, job.optimizer, folder / "step1", step=1, **given)
    with torch.device("meta"):
        empty = torch.nn.Linear(3, 3)
    unickpt.save_training(torch.nn.Linear(3, 3), None, folder / "step2", step=1)
    with pytest.raises(unickpt.ConfigError, match="to_empty"):
        unickpt.load_training(empty, None, folder / "step2")


@scenario(2)
def a_model_on_the_meta_device_and_offloaded_to_the_cpu_is_filled(folder: Path) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    unickpt.save_training(model, None, folder / "step1", step=1)
    with torch.device("meta"):
        empty = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    fully_shard(empty, offload_policy=CPUOffloadPolicy(pin_memory=False))
    empty.to_empty(device="cpu")
    unickpt.load_training(empty, torch.optim.AdamW(empty.parameters()), folder / "step1", missing_state="fresh")
    first = model[0].weight.detach().clone()
    dist.broadcast(first, 0)
    assert torch.equal(empty[0].weight.full_tensor(), first)


@scenario(2)
def calls_that_one_rank_made_alone_do_not_count(folder: Path) -> None:
    """Such as a save in the handler of an exception. It ends with an error, and later calls of all ranks meet.

    So do those after a save for which a rank came too late.
    """
    rank, job = dist.get_rank(), job_of("ddp2", 1)
    for alone in (1, 0, 1):
        if rank == alone:
            with pytest.raises(unickpt.CoordinationError, match=f"gave up .* no message from rank {1 - alone}"):
                unickpt.save_training(job.model, job.optimizer, folder / f"alone{alone}", step=1, timeout_s=1)
        dist.barrier()
        for step in (2, 3):
            unickpt.save_training(job.model, job.optimizer, folder / f"all{alone}{step}", step=step, timeout_s=60)
        other = job_of("ddp2", 3)
        unickpt.load_training(other.model, other.optimizer, folder / f"all{alone}3", timeout_s=60)
        assert apart(job.truth(), other.truth()) == []
        time.sleep(4.0 * (rank != alone))
        with pytest.raises(unickpt.CoordinationError, match="gave up"):
            unickpt.save_training(job.model, job.optimizer, folder / f"late{alone}", step=4, timeout_s=1)
        unickpt.save_training(job.model, job.optimizer, folder / f"then{alone}", step=4, timeout_s=60)
