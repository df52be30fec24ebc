"""Details that a load keeps: settings that appear late, types of scalars, names, buffers, frozen parameters."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.checkpoint import ds_to_universal
from deepspeed.runtime.data_pipeline.data_routing.basic_layer import RandomLayerTokenDrop
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.jobs.deepspeed.damaged_checkpoints import rewrite
from tests.jobs.deepspeed.jobs import Layout, build, scramble, train
from tests.jobs.deepspeed.logs import Log
from tests.jobs.deepspeed.model import Model
from tests.jobs.deepspeed.scenario_worker import scenario
from tests.jobs.deepspeed.truth import consolidated, differences, optimizer_of
from tests.support.extent import some
from unickpt.base.errors import UnickptError
from unickpt.cli.main import main


def here(stage: int, precision: str = "fp32") -> Layout:
    return Layout(stage, dist.get_world_size(), precision)


# ---------------------------------------------------------------- settings and scalars


class LateAdam(torch.optim.Optimizer):
    """An optimizer that counts steps in its groups, as apex's FusedAdam, and creates settings in its first step."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group.setdefault("seen", torch.zeros((), dtype=torch.int32)).add_(1)
            group["mode"] = "warm" if group["step"] < 2 else "hot"
            correction = 1 - group["betas"][1] ** group["step"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg_sq"] = torch.zeros_like(p)
                    state["scale"] = torch.ones((), dtype=torch.float64)
                    state["count"] = 0
                    state["ratio"] = 0.5
                    state["shaped"] = torch.zeros(1, dtype=torch.bfloat16)
                state["count"] += 1
                state["ratio"] *= 1.25
                state["shaped"] += 0.5
                state["scale"] *= 1 + p.grad.double().abs().max().clamp(max=0.5)  # of this rank's partition alone
                state["exp_avg_sq"].mul_(group["betas"][1]).addcmul_(p.grad, p.grad, value=1 - group["betas"][1])
                p.addcdiv_(p.grad, (state["exp_avg_sq"] / correction).sqrt() + 1e-6, value=-group["lr"])


def late(stage: int, seed: int) -> Any:
    torch.manual_seed(seed)
    model = Model()
    optimizer = LateAdam([p for p in model.parameters() if p.requires_grad])
    return build(here(stage), seed=seed, model=model, client_optimizer=optimizer, scheduler={})


def raw(engine: Any) -> list[Any]:
    """Return all values that are not elementwise states, in DeepSpeed's own order, with their types."""
    base = optimizer_of(engine)
    settings = [{k: v for k, v in g.items() if k != "params"} for g in base.param_groups]
    wrapper = engine.optimizer
    masters = getattr(wrapper, "fp32_partitioned_groups_flat", None) or [p for g in base.param_groups for p in g["params"]]
    states = [{k: v for k, v in base.state[m].items() if k != "exp_avg_sq"} for m in masters]
    return [
        (key, type(v).__name__, getattr(v, "dtype", None), getattr(v, "shape", None), v.tolist() if hasattr(v, "tolist") else v)
        for values in (*settings, *states)
        for key, v in sorted(values.items())
        if not key.startswith("_ds")
    ]


@scenario(*some((2, 1), 1))
def settings_that_appear_in_the_first_step_and_scalars_of_every_type(folder: Path) -> None:
    for stage in some((0, 3, 1, 2), 2):
        source, target = late(stage, 1), late(stage, 2)
        train(source, 3)
        assert source.save_checkpoint(str(folder / str(stage))) is True
        assert source.checkpoint_engine.last_save.committed, source.checkpoint_engine.last_save
        target.load_checkpoint(str(folder / str(stage)))
        assert raw(target) == raw(source), stage
        entries = {e.name: e for e in target.checkpoint_engine.last_report.entries if e.state == "hyperparameter"}
        assert {entries[f"param_groups[0].{key}"].outcome for key in ("step", "seen", "mode", "lr", "betas")} == {"restored"}
        assert train(target, 2) == train(source, 2)


@scenario(2)
def late_settings_at_another_stage(folder: Path) -> None:
    source = late(1, 1)
    train(source, 3)
    with Log() as log:
        assert source.save_checkpoint(str(folder)) is True
    message = [line for line in log.lines if "scalars of the optimizer" in line]
    assert len(message) == (1 if dist.get_rank() == 0 else 0), log.lines
    scale = [optimizer_of(source).state[p]["scale"] for g in optimizer_of(source).param_groups for p in g["params"]]
    dist.broadcast(scale[0], src=0)
    for stage in (0, 2, 3):
        target = late(stage, 2)
        target.load_checkpoint(str(folder))
        for group in optimizer_of(target).param_groups:
            assert (group["step"], group["seen"], group["mode"]) == (3, torch.tensor(3, dtype=torch.int32), "hot")
            assert group["seen"].dtype == torch.int32
        for state in optimizer_of(target).state.values():
            assert (state["count"], state["ratio"], type(state["count"])) == (3, 0.5 * 1.25**3, int)
            assert (state["shaped"].dtype, state["shaped"].shape) == (torch.bfloat16, (1,))
            assert state["scale"].dtype == torch.float64
            assert stage == 2 or torch.equal(state["scale"], scale[0])  # rank 0's, for which ZeRO 2 is the same layout
        assert any("scalars of the optimizer" in line for line in target.checkpoint_engine.last_report.lines())


@scenario(2)
def a_step_in_a_checkpoint_of_an_earlier_release(folder: Path) -> None:
    """Such a checkpoint does not record whether ``step`` belongs to the group, nor the type of a scalar."""
    source = late(1, 1)
    train(source, 3)
    source.save_checkpoint(str(folder))

    def older(body: dict[str, Any]) -> None:
        for group in (*body["optimizer"]["groups"], *body["optimizer"]["scalars"]):
            group.pop("tensors")
            group.pop("repeated")
        for group in body["optimizer"]["groups"]:
            for key in ("step", "seen", "mode"):
                group["hyperparameters"].pop(key)
        body.pop("notes")

    if dist.get_rank() == 0:
        rewrite(folder / "global_step3", older)
    dist.barrier()
    target = late(3, 2)
    target.load_checkpoint(str(folder))
    assert {group["step"] for group in optimizer_of(target).param_groups} == {3}
    entries = [e for e in target.checkpoint_engine.last_report.entries if e.name.endswith("(group)")]
    assert entries, target.checkpoint_engine.last_report.lines()
    assert {e.outcome for e in entries} == {"cast"}
    assert json.dumps(target.checkpoint_engine.last_report.to_json())


# ---------------------------------------------------------------- frozen parameters


@scenario(2)
def excluded_frozen_parameters_are_missed_by_a_strict_load(folder: Path) -> None:
    source, target = build(here(2), seed=1), build(here(3), seed=2)
    train(source, 2)
    source.save_checkpoint(str(folder), exclude_frozen_parameters=True)
    with pytest.raises(UnickptError, match=r"positions\.weight.*exclude_frozen_parameters.*load_module_strict=False"):
        target.load_checkpoint(str(folder))
    target.load_checkpoint(str(folder), load_module_strict=False)
    entry = next(e for e in target.checkpoint_engine.last_report.entries if e.name == "positions.weight")
    assert entry.outcome == "left out", entry


# ---------------------------------------------------------------- names of compiled and wrapped modules

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "random_ltd_layer")


def compiled(stage: int, seed: int, *, whole: bool) -> Any:
    """``torch.compile`` renames the module's parameters at once. Compilation happens at the first run, which is not here."""
    torch.manual_seed(seed)
    model: torch.nn.Module = Model()
    if whole:
        model = torch.compile(model, backend="eager", disable=True)
    else:
        assert isinstance(model, Model)
        model.blocks[0] = torch.compile(model.blocks[0], backend="eager", disable=True)
    return build(here(stage), seed=seed, model=model)


def wrapped(stage: int, seed: int, wrap: Callable[[torch.nn.Module], torch.nn.Module], **extra: Any) -> Any:
    torch.manual_seed(seed)
    model = Model()
    model.blocks[0] = wrap(model.blocks[0])
    return build(here(stage), seed=seed, model=model, **extra)


@scenario(2)
def wrapped_modules_and_plain_ones_have_the_same_names(folder: Path) -> None:
    makers = {
        "plain": lambda stage, seed: wrapped(stage, seed, lambda block: block),
        "whole": lambda stage, seed: compiled(stage, seed, whole=True),
        "part": lambda stage, seed: compiled(stage, seed, whole=False),
        "recomputed": lambda stage, seed: wrapped(stage, seed, checkpoint_wrapper),
        "dropping": lambda stage, seed: wrapped(stage, seed, RandomLayerTokenDrop),
    }
    for a, b in (
        ("plain", "whole"), ("whole", "plain"), ("part", "plain"), ("whole", "part"),
        ("plain", "recomputed"), ("recomputed", "plain"), ("plain", "dropping"), ("dropping", "recomputed"),
    ):  # fmt: skip
        source, target = makers[a](1, 1), makers[b](3, 2)
        train(source, 2)
        source.save_checkpoint(str(folder / f"{a}{b}"))
        truth = _plainly(consolidated(source, ("exp_avg", "exp_avg_sq")))
        scramble(target)
        target.load_checkpoint(str(folder / f"{a}{b}"))
        assert differences(truth, _plainly(consolidated(target, ("exp_avg", "exp_avg_sq")))) == [], (a, b)
        names = {e.name for e in target.checkpoint_engine.last_report.entries}
        assert not any(wrapper in name for name in names for wrapper in WRAPPERS)


def _plainly(truth: dict[str, Any]) -> dict[str, Any]:
    for wrapper in WRAPPERS:
        truth = {key.replace(f"{wrapper}.", ""): value for key, value in truth.items()}
    return truth


@scenario(2)
def converted_checkpoints_of_wrapped_modules_have_the_names_of_the_plain_one(folder: Path) -> None:
    """DeepSpeed names what its optimizers have after the wrapped module, and strips the names of the module's state dict."""
    steps = {"require_steps": 4, "seq_per_step": 2}
    schedule = {"min_value": 2, "max_value": 8, "schedule_type": "fixed_linear", "schedule_config": steps}
    ltd = {"enabled": True, "total_layer_num": 2, "random_ltd_layer_num": 1, "random_ltd_schedule": schedule}
    routing = {"data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": ltd}}}
    for wrap, extra in ((checkpoint_wrapper, {}), (RandomLayerTokenDrop, routing)):
        for stage in (1, 3):
            place = folder / f"{wrap.__name__}{stage}"
            source = wrapped(stage, 1, wrap, unickpt={"enabled": False}, **extra)
            train(source, 2)
            source.save_checkpoint(str(place / "own"))
            truth = _plainly(consolidated(source, ("exp_avg", "exp_avg_sq")))
            if dist.get_rank() == 0:
                make_universal(place / "own" / "global_step2", place / "universal")
                assert main(["convert", str(place / "own"), str(place / "new")]) == 0
                assert main(["convert", str(place / "universal"), str(place / "newer")]) == 0
            dist.barrier()
            for made in ("new", "newer"):
                target = wrapped(1, 2, lambda block: block)
                target.load_checkpoint(str(place / made))
                assert differences(truth, consolidated(target, ("exp_avg", "exp_avg_sq"))) == [], place / made


def make_universal(source: Path, target: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        ds_to_universal.main(
            argparse.Namespace(
                input_folder=str(source), output_folder=str(target), num_extract_workers=1, num_merge_workers=1,
                keep_temp_folder=False, strict=True, inject_missing_state=True,
            )
        )  # fmt: skip


class Suffixed(torch.nn.Module):
    """A model whose names have the form of those that a checkpoint gives to further tensor-parallel ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.several = torch.nn.ParameterDict({name: torch.randn(4) for name in ("w", "w@tp1", "w@tp2")})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for parameter in self.several.values():
            x = x * parameter
        return x


@scenario(2)
def names_of_a_model_may_have_the_form_of_further_tensor_parallel_ranks(folder: Path) -> None:
    for stage in (0, 3):
        source, target = (build(here(stage), seed=seed, model=seeded(Suffixed, seed)) for seed in (1, 2))
        assert source.save_checkpoint(str(folder / str(stage)))
        target.load_checkpoint(str(folder / str(stage)))
        assert differences(consolidated(source, ()), consolidated(target, ())) == []


def seeded(kind: type[torch.nn.Module], seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return kind()


# ---------------------------------------------------------------- buffers


@scenario(2)
def buffers_that_differ_between_ranks_are_named_by_save_and_load(folder: Path) -> None:
    source = build(here(1), seed=1)
    train(source, 1)
    with Log() as log:
        source.save_checkpoint(str(folder / "alike"))
    assert not any("differs between rank" in line for line in log.lines), log.lines
    source.module.scale.add_(dist.get_rank())
    with Log() as log:
        assert source.save_checkpoint(str(folder / "apart")) is True
    warned = [line for line in log.lines if "differs between rank 1 and rank 0: buffer scale" in line]
    assert len(warned) == (1 if dist.get_rank() == 0 else 0), log.lines
    target = build(here(2), seed=2)
    target.load_checkpoint(str(folder / "apart"))
    lines = target.checkpoint_engine.last_report.lines()
    assert any("differs between rank 1 and rank 0: buffer scale" in line for line in lines), lines


@scenario(1)
def buffers_that_the_model_creates_itself_are_not_reported_as_missing(folder: Path) -> None:
    source, target = build(here(1), seed=1), build(here(1), seed=2)
    source.save_checkpoint(str(folder))
    target.load_checkpoint(str(folder))
    report = target.checkpoint_engine.last_report
    assert report.count()["left out"] == 0, report.lines()
    assert [e.name for e in report.entries if e.outcome == "recreated"] == ["volatile"]
    assert sum("volatile" in line for line in report.lines()) == 1
