"""Optimizers other than Adam under one of Megatron's wrappers: CPU offload, Muon, and states that are not elementwise."""

from __future__ import annotations

import importlib.util
import inspect
import unittest
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

import megatron_unickpt
from megatron_unickpt.framework.errors import MegatronSaveError
from megatron_unickpt.framework.remainders import divided
from megatron_unickpt.testing.cpu import FusedAdam
from megatron_unickpt.testing.jobs import Job
from megatron_unickpt.testing.layouts import Layout
from tests.support.extent import FULL
from tests.jobs.megatron.moved import moved_losses
from tests.jobs.megatron.scenarios import scenario
from tests.support.rounding import assert_continues
from unickpt.checkpoint.load.checkpoint import Checkpoint


def _stored(where: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of a checkpoint by its key."""
    checkpoint = Checkpoint.open(where)
    found = [info for info in checkpoint.index.tensors if info.kind != "object"]
    return {f"{info.state}/{info.name}": checkpoint.read_tensor(info.name, info.state) for info in found}


def _steps(where: Path) -> dict[str, float]:
    """Return the step of every parameter whose optimizer counts steps."""
    record = Checkpoint.open(where).manifest.optimizer
    assert record is not None
    return {
        n: entry.hyperparameters["step"]
        for entry in record.scalars
        for n in entry.parameters
        if "step" in entry.hyperparameters
    }


def _assert_resumes(
    folder: Path,
    source: Layout,
    target: Layout,
    *,
    exact: bool = False,
    ties_up: bool = False,
    trains: bool = True,
    **options: Any,
) -> None:
    """Save, load into a job of another seed, save again: the two checkpoints are equal, and with ``trains`` training continues.

    With ``ties_up`` the weights are those that belong to remainders, which rounds ties of the masters up.
    """
    job = Job(source, **options)
    job.train(2)
    megatron_unickpt.save(folder / "a", job.chunks, job.optimizer, iteration=2)
    losses = job.train(1) if trains else []
    moved = [] if exact or not trains else [moved_losses(job, folder / "a", 2, 1, seed=seed) for seed in range(3)]
    job = Job(target, seed=5, **options)
    megatron_unickpt.load(folder / "a", job.chunks, job.optimizer)
    job.step = 2
    megatron_unickpt.save(folder / "b", job.chunks, job.optimizer, iteration=2)
    if exact:
        assert job.train(1) == losses
    elif trains:
        assert_continues(job.train(1), losses, losses, *moved)
    expected, found = _stored(folder / "a"), _stored(folder / "b")
    assert expected.keys() == found.keys(), sorted(expected.keys() ^ found.keys())
    if ties_up:
        for key in [key for key in expected if key.startswith("weight/")]:
            expected[key] = divided(expected[key.replace("weight/", "master/", 1)])[0]
    unequal = [key for key, value in expected.items() if not torch.equal(value, found[key])]
    assert not unequal, unequal
    assert _steps(folder / "a") == _steps(folder / "b")
    dist.barrier()


@scenario(2)
def a_job_with_cpu_offload_resumes_under_another_layout_and_without_it(folder: Path) -> None:
    """``HybridDeviceOptimizer``: half of the parameters is stepped on the host by torch, half on the device by a fused Adam."""
    offload = Layout(dp=2, optimizer="offload")
    _assert_resumes(folder / "same", offload, offload, exact=True)
    _assert_resumes(folder / "into", Layout(tp=2), offload)
    _assert_resumes(folder / "out of", offload, Layout(pp=2, optimizer="plain"), trains=FULL)


@scenario(2)
def a_precision_aware_optimizer_with_remainders_resumes_under_another_layout_and_without_it(folder: Path) -> None:
    """``store_param_remainders``: the masters are 16 bits beside the bf16 weights."""
    aware = Layout(dp=2, optimizer="aware")
    _assert_resumes(folder / "other", Layout(tp=2, optimizer="aware"), aware)
    _assert_resumes(folder / "into", Layout(tp=2), aware, ties_up=True, trains=FULL)
    if FULL:
        _assert_resumes(folder / "out of", aware, Layout(pp=2, optimizer="plain"))


def _needs_emerging_optimizers() -> None:
    if importlib.util.find_spec("emerging_optimizers") is None:
        raise unittest.SkipTest("needs NVIDIA's emerging_optimizers, which is on no package index")


@scenario(2)
def muon_resumes_under_another_layout(folder: Path) -> None:
    """Muon's momentum and the moments of Adam, which steps on embeddings and vectors."""
    _needs_emerging_optimizers()
    layers = Layout(dp=2, optimizer="muon")
    _assert_resumes(folder / "same", layers, layers, exact=True)
    _assert_resumes(folder / "tp", layers, Layout(tp=2, optimizer="muon"))
    _assert_resumes(folder / "dp", Layout(pp=2, optimizer="muon"), layers)


@scenario(2)
def states_that_are_not_elementwise_load_where_the_parameter_is_divided_alike(folder: Path) -> None:
    """The row norms of NorMuon and the factors of SOAP: another pipeline and data parallel size, but not another TP."""
    _needs_emerging_optimizers()
    if importlib.util.find_spec("megatron.core.optimizer.emerging_optimizers") is None:
        raise unittest.SkipTest("needs the emerging optimizers of 0.18")
    for kind in ("normuon", "soap"):
        layers = Layout(dp=2, optimizer=kind)
        _assert_resumes(folder / kind, layers, layers, exact=True)
        _assert_resumes(folder / f"{kind} pp", layers, Layout(pp=2, optimizer=kind))
        cut = Job(Layout(tp=2, optimizer=kind))
        with pytest.raises(CheckpointingException, match="of another shape"):
            megatron_unickpt.load(folder / kind / "a", cut.chunks, cut.optimizer)


class _Experts(torch.nn.Module):
    """The weights of four experts, in one parameter as in TransformerEngine's grouped linear, or in one for each expert."""

    def __init__(self, *, grouped: bool, seed: int) -> None:
        super().__init__()
        whole = torch.rand(4, 6, 8, generator=torch.Generator().manual_seed(seed))
        parts = [whole] if grouped else list(whole)
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(part.clone()) for part in parts)

    def sharded_state_dict(self, **_: Any) -> dict[str, Any]:
        each = list(self.weights[0].unbind()) if len(self.weights) == 1 else list(self.weights)
        key, rank = "mlp.experts.linear_fc2.weight", dist.get_rank()
        return {
            f"weight{at}": ShardedTensor.from_rank_offsets(key, data, (0, at, 4), replica_id=(0, 0, rank), prepend_axis_num=1)
            for at, data in enumerate(each)
        }

    def load_state_dict(self, *_: Any, **__: Any) -> Any:
        """Do nothing: the tensors are filled in place."""


class _Layers(torch.nn.Module):
    """Four weights that all ranks have."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        parts = torch.rand(4, 6, 8, generator=torch.Generator().manual_seed(seed))
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(part.clone()) for part in parts)

    def sharded_state_dict(self, **_: Any) -> dict[str, Any]:
        keys, rank = (f"decoder.layers.{at}.weight" for at in range(4)), dist.get_rank()
        return {
            key: ShardedTensor.from_rank_offsets(key, weight, replica_id=(0, 0, rank))
            for key, weight in zip(keys, self.weights, strict=True)
        }

    def load_state_dict(self, *_: Any, **__: Any) -> Any:
        """Do nothing: the tensors are filled in place."""


class _Transposed(_Layers):
    """Weights that are transposed in memory, half of them with gaps between their columns."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        super().__init__(seed)
        wide = [torch.cat([weight.detach(), weight.detach()]).to(dtype) for weight in self.weights]
        turned = (each.t().contiguous().t() for each in wide)
        self.weights = torch.nn.ParameterList(
            torch.nn.Parameter(each[:6] if at % 2 else each) for at, each in enumerate(turned)
        )

    def wrapped(self) -> Any:
        """Return an optimizer of Megatron."""
        inner, low = torch.optim.AdamW(list(self.parameters()), lr=1e-2), self.weights[0].dtype != torch.float32
        config = OptimizerConfig(optimizer="adam", lr=1e-2, bf16=low)
        return Float16OptimizerWithFloat16Params(inner, config, None, None) if low else FP32Optimizer(inner, config, None)


@scenario(1)
def weights_that_are_transposed_in_memory_resume(folder: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        source, target, alone = (_Transposed(seed, dtype) for seed in range(3))
        assert not any(weight.is_contiguous() for weight in source.weights)
        trained, optimizer, follows = (each.wrapped() for each in (source, target, alone))
        mains = [group["params"] for wrapper in (trained, optimizer, follows) for group in wrapper.optimizer.param_groups]
        place = folder / str(dtype)
        for step in range(3):
            for number, weight in enumerate(mains[0]):
                weight.grad = (0.1 * (number + 1)) * weight.detach()
            trained.optimizer.step()
            for weight, main in zip(source.weights, mains[0], strict=True):
                weight.data.copy_(main)
            megatron_unickpt.save(place / f"step_{step}", source, trained)
        megatron_unickpt.load(place / "step_2", target, optimizer)
        megatron_unickpt.load(place / "step_2", alone)
        stored = _stored(place / "step_2")
        for at, (expected, found) in enumerate(zip(mains[0], mains[1], strict=True)):
            name = f"decoder.layers.{at}.weight"
            assert torch.equal(expected, stored[f"master/{name}"])
            assert torch.equal(expected, found)
            assert torch.equal(source.weights[at], target.weights[at])
            assert torch.equal(source.weights[at], alone.weights[at])
            assert torch.equal(mains[2][at], alone.weights[at].float())
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(trained.optimizer.state[expected][key], stored[f"{key}/{name}"])
                assert torch.equal(trained.optimizer.state[expected][key], optimizer.optimizer.state[found][key])


class _Averaging(torch.optim.Optimizer):
    """SGD with momentum that follows the mean of the gradients of some parameters. Other means are None, and so is ``note``."""

    def __init__(self, params: Any, averaged: int) -> None:
        super().__init__(params, {"lr": 1e-2})
        self.averaged = averaged

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: ARG002 - torch's signature
        for at, p in enumerate(self.param_groups[0]["params"]):
            state = self.state[p]
            if not state:
                mean = torch.zeros_like(p) if at < self.averaged else None
                state |= {"momentum": torch.zeros_like(p), "mean": mean, "note": None}
            state["momentum"].mul_(0.9).add_(p.grad)
            if state["mean"] is not None:
                state["mean"].lerp_(p.grad, 0.1)
            p.sub_(self.param_groups[0]["lr"] * state["momentum"])

    @staticmethod
    def tensors_alone(optimizer: Any, _: Any = None) -> None:
        """Make the tensors that a load fills, as Megatron's functions do."""
        for at, p in enumerate(optimizer.param_groups[0]["params"]):
            made = ("momentum", "mean") if at < optimizer.averaged else ("momentum",)
            optimizer.state[p] = {key: torch.zeros_like(p) for key in made} | dict(optimizer.state[p])


@scenario(2)
def states_that_are_none_stay_none(folder: Path) -> None:
    for averaged in (0, 2):
        jobs = []
        for seed in range(2):
            layers = _Layers(seed)
            inner = _Averaging(list(layers.parameters()), averaged)
            wrapped = FP32Optimizer(inner, OptimizerConfig(optimizer="sgd", lr=1e-2), _Averaging.tensors_alone)
            jobs.append((layers, wrapped))
        (source, trained), (target, optimizer) = jobs
        for weight in source.weights:
            weight.grad = torch.ones_like(weight) * weight.detach()
        trained.optimizer.step()
        place = folder / f"{averaged}"
        megatron_unickpt.save(place, source, trained)
        megatron_unickpt.load(place, target, optimizer)
        for at, (a, b) in enumerate(zip(source.weights, target.weights, strict=True)):
            expected, found = trained.optimizer.state[a], optimizer.optimizer.state[b]
            assert expected.keys() == found.keys(), (averaged, at, sorted(found))
            assert torch.equal(expected["momentum"], found["momentum"])
            assert found["note"] is None
            assert (found["mean"] is None) == (expected["mean"] is None) == (at >= averaged)
            assert at >= averaged or torch.equal(expected["mean"], found["mean"])
            b.grad = torch.ones_like(b)
        optimizer.optimizer.step()


@scenario(2)
def experts_in_one_parameter_load_the_state_of_single_ones(folder: Path) -> None:
    for grouped in (True, False):
        jobs = []
        for at, form in enumerate((grouped, not grouped)):
            experts = _Experts(grouped=form, seed=at)
            inner = FusedAdam(list(experts.parameters()))
            jobs.append((experts, FP32Optimizer(inner, OptimizerConfig(optimizer="adam", lr=1e-3), None)))
        (source, trained), (target, optimizer) = jobs
        for number, weight in enumerate(source.weights):
            weight.grad = torch.full_like(weight, 0.1 * (number + 1)) * weight.detach()
        trained.optimizer.step()
        place = folder / f"grouped {grouped}"
        megatron_unickpt.save(place / "a", source, trained)
        megatron_unickpt.load(place / "a", target, optimizer)
        megatron_unickpt.save(place / "b", target, optimizer)
        expected, found = _stored(place / "a"), _stored(place / "b")
        assert {key.partition("/")[0] for key in expected} == {"weight", "master", "exp_avg", "exp_avg_sq"}
        assert expected.keys() == found.keys()
        assert all(torch.equal(value, found[key]) for key, value in expected.items())
        assert _steps(place / "a") == _steps(place / "b")


@scenario(2)
def parts_of_a_parameter_with_names_of_their_own_resume(folder: Path) -> None:
    """``singleton_local_shards``: gate and up of a layer are two tensors. A rank may hold a range of one of them."""
    metadata = {"singleton_local_shards": True}
    source = Job(Layout(dp=2), bucket_size=500)
    source.train(1)
    megatron_unickpt.save(folder / "a", source.chunks, source.optimizer, iteration=1, metadata=metadata)
    other = Job(Layout(tp=2), seed=7)
    megatron_unickpt.load(folder / "a", other.chunks, other.optimizer, metadata=metadata)
    megatron_unickpt.save(folder / "b", other.chunks, other.optimizer, iteration=1, metadata=metadata)
    if dist.get_rank() == 0:
        expected, found = _stored(folder / "a"), _stored(folder / "b")
        assert {"master/decoder.layers.0.mlp.linear_fc1.weight_w", "exp_avg/decoder.layers.0.mlp.linear_fc1.weight_v"} < set(
            expected
        )
        assert expected.keys() == found.keys()
        assert all(torch.equal(value, found[key]) for key, value in expected.items())


def _with_slow_layers(job: Job) -> Job:
    """Give a job an optimizer whose groups divide the layers: the first one, and the others. No schedule has run."""
    options = inspect.signature(get_megatron_optimizer).parameters
    if "config_overrides" not in options:
        pytest.skip("this version has no values of an optimizer by layer")
    from megatron.core.optimizer import ParamKey

    low = job.layout.low
    config = OptimizerConfig(
        optimizer="adam", lr=1e-2, weight_decay=0.1, bf16=low, params_dtype=torch.bfloat16 if low else torch.float32,
        use_distributed_optimizer=job.layout.distributed,
    )  # fmt: skip
    slow = {ParamKey(name="*decoder.layers.0.*"): {"max_lr": 1e-3, "min_lr": 1e-4}}
    job.optimizer = get_megatron_optimizer(config, job.chunks, config_overrides=slow)
    return job


@scenario(1, 2)
def groups_that_divide_the_layers_keep_their_values(folder: Path) -> None:
    """The layers share the names of their tensors."""
    two = dist.get_world_size() == 2
    for kind in ("dist", "fp32"):
        source = _with_slow_layers(Job(Layout(pp=2 if two else 1, optimizer=kind)))
        for group in source.optimizer.param_groups:
            group["lr"] = group["max_lr"] / 2
        source.train(1)
        megatron_unickpt.save(folder / kind, source.chunks, source.optimizer, iteration=1)
        for layout in (source.layout, Layout(dp=2 if two else 1, optimizer=kind)):
            again = _with_slow_layers(Job(layout, seed=7))
            expected = [(g["max_lr"], g["min_lr"], g["max_lr"] / 2) for g in again.optimizer.param_groups if g["params"]]
            megatron_unickpt.load(folder / kind, again.chunks, again.optimizer)
            found = [(g["max_lr"], g["min_lr"], g["lr"]) for g in again.optimizer.param_groups if g["params"]]
            assert found == expected, (kind, layout)
        if not two:
            again.step = 1
            assert again.train(2) == source.train(2)


@scenario(1)
def sgd_gets_no_count_of_steps_by_a_load(folder: Path) -> None:
    for kind in ("plain", "fp32"):
        jobs = []
        for seed in (1, 7):
            job = Job(Layout(optimizer=kind), seed=seed)
            precision = {"bf16": True, "params_dtype": torch.bfloat16} if kind == "plain" else {"params_dtype": torch.float32}
            job.optimizer = get_megatron_optimizer(
                OptimizerConfig(optimizer="sgd", sgd_momentum=0.9, lr=1e-2, **precision), job.chunks
            )
            jobs.append(job)
        source, again = jobs
        source.train(1)
        megatron_unickpt.save(folder / kind, source.chunks, source.optimizer, iteration=1)
        megatron_unickpt.load(folder / kind, again.chunks, again.optimizer)
        inner = getattr(again.optimizer, "chained_optimizers", [again.optimizer])[0].optimizer
        assert {key for state in inner.state.values() for key in state} == {"momentum_buffer"}
        again.step = 1
        assert again.train(1) == source.train(1)
        megatron_unickpt.save(folder / f"{kind} again", again.chunks, again.optimizer, iteration=2)
        record = Checkpoint.open(folder / f"{kind} again").manifest.optimizer
        assert record is not None
        assert (record.stepped, record.scalars) == (True, ())


@scenario(1)
def layers_of_which_some_are_frozen_are_saved_with_names_of_their_own(folder: Path) -> None:
    def frozen(name: str) -> bool:
        return "layers.0." in name

    apart = {"non_homogeneous_layers": True}
    for kind in ("dist", "plain"):
        source = Job(Layout(optimizer=kind), frozen=frozen)
        source.train(1)
        with pytest.raises(MegatronSaveError, match=r"decoder\.layers\..*some are frozen.*non_homogeneous_layers"):
            megatron_unickpt.save(folder / f"{kind} refused", source.chunks, source.optimizer)
        megatron_unickpt.save(folder / kind, source.chunks, source.optimizer, metadata=apart)
        again = Job(Layout(optimizer=kind), seed=7, frozen=frozen)
        megatron_unickpt.load(folder / kind, again.chunks, again.optimizer, metadata=apart)
        again.step = 1
        assert again.train(1) == source.train(1)
    whole = Job(Layout())
    whole.train(1)
    megatron_unickpt.save(folder / "whole", whole.chunks, whole.optimizer)
    megatron_unickpt.load(folder / "whole", again.chunks, again.optimizer)  # a load of all layers needs no names of their own
