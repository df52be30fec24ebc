"""Optimizers, parameter groups, offload and fp16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from ds_unickpt.framework import internals
from tests.jobs.deepspeed.jobs import build, train
from tests.jobs.deepspeed.model import Model
from tests.jobs.deepspeed.odd_optimizers import Averaging, Pulled, equal_states, raw_states
from tests.jobs.deepspeed.resumes import ADAM, assert_resumes, assert_trains_on, assert_weights_equal, here
from tests.jobs.deepspeed.scenario_worker import scenario
from tests.jobs.deepspeed.truth import consolidated, differences, optimizer_of


def _client_optimizer(make: Any, stage: int, seed: int, **extra: Any) -> Any:
    """Build an engine with a torch optimizer of the user, which DeepSpeed wraps."""
    torch.manual_seed(seed)
    model = Model()
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    return build(here(stage), seed=seed, model=model, client_optimizer=optimizer, scheduler={}, **extra)


@scenario(2)
def sgd_with_momentum(folder: Path) -> None:
    def make(params: Any) -> Any:
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)

    for a, b in ((0, 3), (3, 1), (2, 0)):
        assert_resumes(folder / f"{a}{b}", _client_optimizer(make, a, 1), _client_optimizer(make, b, 2), ("momentum_buffer",))


@scenario(2, long=True)
def rmsprop_adamax_and_nadam(folder: Path) -> None:
    cases: list[tuple[Any, tuple[str, ...]]] = [
        (lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True), ("square_avg", "momentum_buffer", "grad_avg")),
        (lambda p: torch.optim.Adamax(p, lr=1e-3), ("exp_avg", "exp_inf")),
        (lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True), ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")),
    ]
    for number, (make, states) in enumerate(cases):
        assert_resumes(folder / str(number), _client_optimizer(make, 1, 1), _client_optimizer(make, 3, 2), states)


@scenario(2, long=True)
def adagrad(folder: Path) -> None:
    def make(params: Any) -> Any:
        return torch.optim.Adagrad(params, lr=0.05)

    for a, b in ((0, 1), (1, 3), (3, 0)):
        assert_resumes(folder / f"{a}{b}", _client_optimizer(make, a, 1), _client_optimizer(make, b, 2), ("sum",))


def _offloaded(stage: int, seed: int, kind: str, *, parameters_too: bool = False) -> Any:
    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": {"device": "cpu"}, "sub_group_size": 1500}
    if parameters_too:
        zero["offload_param"] = {"device": "cpu"}
    return build(here(stage), seed=seed, zero_optimization=zero, optimizer={"type": kind, "params": {"lr": 1e-2}})


@scenario(2)
def cpu_adam_offloaded(folder: Path) -> None:
    """DeepSpeedCPUAdam: the optimizer is on the CPU under ZeRO 1, 2 and 3, and the parameters under ZeRO 3."""
    assert_resumes(folder / "12", _offloaded(1, 1, "AdamW"), _offloaded(2, 2, "AdamW"))
    assert_resumes(folder / "23", _offloaded(2, 1, "AdamW"), _offloaded(3, 2, "AdamW", parameters_too=True))
    assert_resumes(folder / "31", _offloaded(3, 1, "AdamW", parameters_too=True), _offloaded(1, 2, "AdamW"))


@scenario(2)
def cpu_adam_to_torch_adam_and_back(folder: Path) -> None:
    """Another implementation of the optimizer has the same states. Each keeps its own type of ``step``."""
    for name, source, target in (
        ("there", _offloaded(2, 1, "AdamW"), build(here(3), seed=2)),
        ("back", build(here(1), seed=1), _offloaded(2, 2, "AdamW")),
    ):
        train(source, 3)
        assert source.save_checkpoint(str(folder / name))
        truth = consolidated(source, ADAM)
        target.load_checkpoint(str(folder / name))
        assert differences(truth, consolidated(target, ADAM), ignore=("groups",)) == []
        kinds = {type(s["step"]) for s in optimizer_of(target).state.values()}
        assert kinds == ({torch.Tensor} if name == "there" else {int}), kinds
        train(target, 1)


@scenario(2, long=True)
def lion(folder: Path) -> None:
    """DeepSpeed compiles its C++ operator first, which takes a minute, so it is a long scenario."""
    assert_resumes(folder, _offloaded(2, 1, "Lion"), _offloaded(3, 2, "Lion"), ("exp_avg",))


@scenario(2)
def fused_adam_without_zero_in_bf16(folder: Path) -> None:
    """FP16_Optimizer has flat fp32 groups and bf16 parameters, replicated on all ranks."""

    def fused(stage: int, seed: int) -> Any:
        return build(here(stage, "bf16"), seed=seed, optimizer={"type": "AdamW", "params": {"lr": 1e-2}})

    source, target = fused(0, 1), fused(2, 2)
    assert type(source.optimizer).__name__ == "FP16_Optimizer"
    train(source, 3)
    assert source.save_checkpoint(str(folder))
    target.load_checkpoint(str(folder))
    expected = source.optimizer.fp32_groups_flat[0]
    got = torch.cat([consolidated(target, ())[f"master/{n}"].reshape(-1) for n in _order(source)])
    assert torch.equal(expected, got)
    again = fused(0, 3)
    target.save_checkpoint(str(folder / "back"))
    again.load_checkpoint(str(folder / "back"))
    assert torch.equal(again.optimizer.fp32_groups_flat[0], expected)
    for key in ADAM:
        a, b = (o.optimizer.optimizer.state[o.optimizer.fp32_groups_flat[0]][key] for o in (source, again))
        assert torch.equal(a, b)
    assert train(source, 2) == train(again, 2)


def _order(engine: Any) -> list[str]:
    names = {p: n for n, p in engine.module.named_parameters()}
    return [names[p] for p in engine.optimizer.fp16_groups[0]]


def _two_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    def size(p: Any) -> int:
        return len(getattr(p, "ds_shape", p.shape))

    params = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in params if size(p) > 1], "lr": 1e-3, "weight_decay": 0.1},
        {"params": [p for p in params if size(p) < 2], "lr": 5e-3, "weight_decay": 0.0},
    ]


@scenario(2)
def two_groups_with_different_hyperparameters(folder: Path) -> None:
    """DeepSpeed's own universal checkpoints give the second group the values of the first one under ZeRO-3."""
    for a, b in ((0, 1), (1, 3), (3, 2), (3, 0)):
        place = folder / f"{a}{b}"
        source, target = (build(here(s), seed=s + 7, parameters=_two_groups, scheduler={}) for s in (a, b))
        for group in optimizer_of(target).param_groups:
            group["lr"], group["weight_decay"] = 77.0, 88.0
        train(source, 3)
        source.save_checkpoint(str(place))
        target.load_checkpoint(str(place))
        assert [g["lr"] for g in optimizer_of(target).param_groups] == [1e-3, 5e-3]
        assert [g["weight_decay"] for g in optimizer_of(target).param_groups] == [0.1, 0.0]
        assert_weights_equal(source, target)
        assert_trains_on(target, train(source, 2), place)


def _averaging(stage: int, seed: int, averages: str) -> Any:
    """Build an engine. ``averages``: of ``Averaging``, or "first" for the first of two groups only."""

    def make(params: Any) -> Any:
        if averages != "first":
            return Averaging(params, averages)
        kinds = {"all": [p for p in params if p.dim() > 1], "none": [p for p in params if p.dim() < 2]}
        return Averaging([{"params": listed, "averages": kind} for kind, listed in kinds.items()])

    return _client_optimizer(make, stage, seed)


def _nones(engine: Any) -> list[tuple[bool, bool]]:
    """Return of the state of each tensor that the optimizer steps on whether ``mean`` and ``seen`` are None."""
    return [(each["mean"] is None, each["seen"] is None) for each in raw_states(engine)]


@scenario(1, 2)
def states_that_are_none_stay_none(folder: Path) -> None:
    """Those of all tensors, or of some. The engine that loads has other states from a step of its own, or none."""
    for averages, pairs in (("none", ((0, 0), (1, 3), (3, 0))), ("first", ((0, 0), (1, 1), (0, 2), (2, 3)))):
        for a, b in pairs:
            place = folder / f"{averages}{a}{b}"
            source, target = _averaging(a, 1, averages), _averaging(b, 2, averages)
            train(source, 3)
            assert source.save_checkpoint(str(place))
            before = raw_states(source)
            for dirty in (False, True):
                if dirty:
                    train(target, 1)
                target.load_checkpoint(str(place))
                entries = target.checkpoint_engine.last_report.entries
                assert {e.outcome for e in entries if e.state in ("momentum", "mean", "seen")} == {"restored"}, entries
                nones = {(True, True)} if averages == "none" else {(True, True), (False, False)}
                assert set(_nones(target)) == nones, (averages, a, b)
                if a == b:
                    assert equal_states(raw_states(target), before), (averages, a, b)
            found, expected = train(target, 2), train(source, 2)
            assert found == (expected if a == b else pytest.approx(expected, rel=1e-4))
            other = folder.parent / f"{folder.name.removesuffix('-w2')}-w1" / place.name
            if dist.get_world_size() == 2 and (other / "latest").exists():
                source.load_checkpoint(str(other))
                assert set(_nones(source)) == nones
                train(source, 1)


@scenario(1, 2)
def entries_of_a_state_dict_beside_states_and_groups(folder: Path) -> None:
    for a, b in ((0, 0), (1, 1), (2, 3), (3, 3)):
        place = folder / f"{a}{b}"
        source, target = _client_optimizer(Pulled, a, 1), _client_optimizer(Pulled, b, 2)
        train(source, 2)
        assert source.save_checkpoint(str(place))
        target.load_checkpoint(str(place))
        assert optimizer_of(target).count == optimizer_of(source).count > 0
        assert [e.outcome for e in target.checkpoint_engine.last_report.entries if e.name == "optimizer.count"] == ["restored"]
        found, expected = train(target, 3), train(source, 3)
        assert found == (expected if a == b else pytest.approx(expected, rel=1e-4))


@scenario(2)
def states_of_which_some_are_none_share_a_partition(folder: Path) -> None:
    """Where ZeRO has one state for several parameters, the elements of a parameter with None begin at 0."""
    source, target = _averaging(0, 1, "matrices"), _averaging(1, 2, "none")
    train(source, 3)
    assert source.save_checkpoint(str(folder))
    own = optimizer_of(source).state
    assert {each["seen"] for each in own.values()} == {3, None}
    train(target, 1)
    target.load_checkpoint(str(folder))
    found = consolidated(target, ("momentum", "mean"))
    for name, p in source.module.named_parameters():
        if p.requires_grad:
            mean = own[p]["mean"]
            assert torch.equal(found[f"mean/{name}"], torch.zeros_like(p) if mean is None else mean), name
            assert torch.equal(found[f"momentum/{name}"], own[p]["momentum"]), name
    assert {each["seen"] for each in raw_states(target)} == {3}
    entries = target.checkpoint_engine.last_report.entries
    assert any("had 3, None; the largest is used" in each.reason for each in entries if each.state == "seen")
    began = {each.name for each in entries if each.state == "mean" and each.outcome == "re-seeded"}
    assert began == {name for name, p in source.module.named_parameters() if p.requires_grad and p.dim() < 2}
    train(target, 2)


@scenario(2)
def a_job_saves_and_loads_before_its_first_step(folder: Path) -> None:
    source, target = build(here(1), seed=1), build(here(3), seed=2)
    source.save_checkpoint(str(folder))
    target.load_checkpoint(str(folder))
    assert_trains_on(target, train(source, 2), folder)


def _fp16(stage: int, seed: int) -> Any:
    """Build an fp16 engine. DeepSpeed refuses fp16 on its CPU accelerator, but torch supports it, so the check is disabled."""
    get_accelerator().is_fp16_supported = lambda: True
    scaling = {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 2, "hysteresis": 1}
    return build(here(stage, "fp16"), seed=seed, fp16=scaling)


def _fp16_pairs(folder: Path, *pairs: tuple[int, int]) -> None:
    """The first steps overflow, so scale, iteration and skipped steps differ from their initial values."""
    for a, b in pairs:
        source, target = _fp16(a, 1), _fp16(b, 2)
        train(source, 12)
        assert source.skipped_steps < 11
        scaler, fresh = internals.loss_scaler(source), internals.loss_scaler(target)
        assert scaler.cur_scale != fresh.cur_scale
        assert source.save_checkpoint(str(folder / f"{a}{b}"))
        truth = consolidated(source, ADAM)
        target.load_checkpoint(str(folder / f"{a}{b}"))
        assert differences(truth, consolidated(target, ADAM)) == []
        common = [f for f in internals.SCALER_FIELDS if hasattr(scaler, f) and hasattr(fresh, f)]
        assert {f: getattr(scaler, f) for f in common} == {f: getattr(fresh, f) for f in common}
        assert target.skipped_steps == source.skipped_steps


@scenario(2)
def fp16_from_zero_1(folder: Path) -> None:
    _fp16_pairs(folder, (1, 3))


@scenario(2)
def fp16_and_its_loss_scaler(folder: Path) -> None:
    _fp16_pairs(folder, (3, 2), (2, 0), (0, 1))
    bf16 = build(here(1, "bf16"), seed=3)
    bf16.load_checkpoint(str(folder / "32"))
    entry = next(e for e in bf16.checkpoint_engine.last_report.entries if e.name == "loss_scaler")
    assert (entry.outcome, entry.reason) == ("left out", "this job does not scale its loss (not fp16)")
    train(bf16, 1)
    bf16.save_checkpoint(str(folder / "bf16"))
    _fp16(2, 4).load_checkpoint(str(folder / "bf16"))
