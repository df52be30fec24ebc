"""Checkpoints without a part of the state: saved before the first step, without optimizer, of other parameters or optimizers.

A part of the matrix of ``partial_loads``. ``python -m evidence.deepspeed.partial_loads`` runs all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed import comm as dist

from tests.jobs.deepspeed.jobs import BATCH, build, config, train
from tests.jobs.deepspeed.logs import Log
from tests.jobs.deepspeed.model import Model, batch
from tests.jobs.deepspeed.partial_loads import partly_loaded, rolled_back, start_fresh, state_of, unequal, weights
from tests.jobs.deepspeed.resumes import ADAM, here
from tests.jobs.deepspeed.scenario_worker import scenario
from tests.jobs.deepspeed.truth import consolidated, optimizer_of
from unickpt.base.errors import MismatchError


@scenario(2)
def an_engine_that_has_trained_equals_a_new_one_after_a_load(folder: Path) -> None:
    found = {}
    for wrapper, source in (
        ("ZeRO-3", "before the first step"), ("FP16_UnfusedOptimizer", "of another layout"), ("ZeRO-2 offload", "in mid-run"),
        ("ZeRO-2 fp16", "of another layout before the first step"), ("BF16_Optimizer", "before the first step"),
    ):  # fmt: skip
        found[wrapper, source] = rolled_back(folder / wrapper, wrapper, source)
    assert not any(found.values()), found


@scenario(2)
def the_step_after_a_partial_load_begins_from_what_was_loaded(folder: Path) -> None:
    found = {}
    for wrapper, kind in (
        ("ZeRO-3 offload", "weights only"), ("BF16_Optimizer", "module only"), ("ZeRO-2 round robin", "part of the parameters"),
        ("ZeRO-3 ratio", "another optimizer"), ("FP16_Optimizer", "no optimizer"),
    ):  # fmt: skip
        found[wrapper, kind] = partly_loaded(folder / wrapper, wrapper, kind)
    assert not any(found.values()), found


@scenario(2)
def a_load_within_an_accumulation_drops_its_gradients(folder: Path) -> None:
    more = {"train_micro_batch_size_per_gpu": BATCH // 4, "scheduler": {}}
    for stage, precision in ((1, "bf16o"), (2, "fp32"), (3, "fp32")):
        engines = [build(here(stage, precision), seed=seed, **more) for seed in (1, 2)]
        place = str(folder / f"{stage}{precision}")
        for engine in engines:
            _accumulate(engine, 2)
        engines[0].save_checkpoint(place)
        _accumulate(engines[0], 1)
        states = []
        for engine in engines:
            engine.load_checkpoint(place)
            _accumulate(engine, 2)
            states.append(state_of(engine))
        assert unequal(*states) == [], (stage, precision, unequal(*states))


def _accumulate(engine: Any, times: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for number in range(times):
        engine.backward(engine(*batch(number, BATCH // 2, rank, world)))
        engine.step()


def _with_frozen(stage: int, seed: int, *frozen: str, precision: str = "bf16") -> Any:
    torch.manual_seed(seed)
    model = Model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name != "positions.weight" and not name.startswith(frozen or ("-",)))
    return build(here(stage, precision), seed=seed, model=model)


@scenario(2)
def parameters_that_a_later_phase_trains_start_fresh(folder: Path) -> None:
    for stage, target in ((2, 0), (1, 3)):
        place = str(folder / f"{stage}{target}")
        source = _with_frozen(stage, 1, "blocks.0.mlp", "embed")
        train(source, 3)
        source.save_checkpoint(place)
        truth = consolidated(source, ADAM)
        later = _with_frozen(target, 2)
        with pytest.raises(MismatchError, match=r'did not train them: embed.weight.*"missing_state": "fresh"'):
            later.load_checkpoint(place)
        with Log() as log:
            start_fresh(later).load_checkpoint(place)
        said = [line for line in log.lines if "the optimizer keeps states of 6 parameters; fresh are" in line]
        assert len(said) == (dist.get_rank() == 0), log.lines
        with _states_for_all(later):
            found = consolidated(later, ADAM)
        for key in found.keys() & {key for key in truth if "/" in key}:
            assert torch.equal(truth[key].to(found[key].dtype), found[key]), key
        new = {key for key in found.keys() - truth.keys() if key.startswith(ADAM)}
        assert {key.split("/")[1].split(".")[0] for key in new} == {"blocks", "embed"}
        assert all(not found[key].any() for key in new)
        report = later.checkpoint_engine.last_report
        fresh = {entry.name for entry in report.entries if entry.outcome == "re-seeded" and "fresh" in entry.reason}
        assert len(fresh) == 5, fresh
        train(later, 2)


@contextmanager
def _states_for_all(engine: Any) -> Iterator[None]:
    """Give masters without a state zeros for ``consolidated``. A fresh partition has none before its next step."""
    base = optimizer_of(engine)
    flat = getattr(engine.optimizer, "fp32_partitioned_groups_flat", None)
    masters = flat or [master for group in base.param_groups for master in group["params"]]
    without = [master for master in masters if not base.state.get(master)]
    for master in without:
        base.state[master] = {key: torch.zeros_like(master) for key in ADAM}
    yield
    for master in without:
        del base.state[master]


@scenario(2)
def an_optimizer_of_another_class_keeps_the_states_that_both_have(folder: Path) -> None:
    def engine(make: Any, stage: int, seed: int) -> Any:
        torch.manual_seed(seed)
        model = Model()
        optimizer = make([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        return build(here(stage), seed=seed, model=model, client_optimizer=optimizer, scheduler={})

    source = engine(torch.optim.AdamW, 1, 1)
    train(source, 3)
    source.save_checkpoint(str(folder))
    truth = consolidated(source, ADAM)
    shared = {torch.optim.NAdam: ADAM, torch.optim.RAdam: ADAM, torch.optim.Adamax: ADAM[:1], torch.optim.Adagrad: ()}
    for number, (make, kept) in enumerate(shared.items()):
        target = engine(make, (2, 3, 0, 1)[number], 2)
        with pytest.raises(MismatchError, match=r'this job uses .*"missing_state": "fresh"'):
            target.load_checkpoint(str(folder))
        start_fresh(target).load_checkpoint(str(folder))
        found = consolidated(target, kept)
        for key in (key for key in truth if key.split("/")[0] in ("weight", "master", *kept)):
            assert torch.equal(truth[key], found[key]), (make, key)
        states = [state for state in optimizer_of(target).state.values() if state]
        assert {float(state["step"]) for state in states} == ({3.0} if kept else {0.0})
        if make is torch.optim.NAdam:
            assert {float(state["mu_product"]) for state in states} == {1.0}
        if make is torch.optim.Adamax:
            assert not any(state["exp_inf"].any() for state in states)
        train(target, 2)


@scenario(2)
def an_engine_without_optimizer_loads_and_saves(folder: Path) -> None:
    source = build(here(2, "bf16"), seed=1)
    train(source, 2)
    source.module.blocks[0].out.weight.data[3, :] = 0.25  # not the cast of its master
    source.save_checkpoint(str(folder / "a"), tag="older")
    older = weights(source)
    train(source, 1)
    source.save_checkpoint(str(folder / "a"))
    for stage, precision in ((3, "bf16"), (0, "bf16"), (3, "fp32")):
        cfg = config(here(stage, precision))
        del cfg["optimizer"], cfg["scheduler"]
        engines = [deepspeed.initialize(model=Model(), config=cfg)[0] for _ in range(2)]
        engines[0].load_checkpoint(str(folder / "a"))
        engines[0](*batch(0, BATCH, dist.get_rank(), dist.get_world_size()))  # gathers the persistent parameters
        engines[0].load_checkpoint(str(folder / "a"), tag="older", load_module_only=True)
        place = str(folder / f"{stage}{precision}")
        assert engines[0].save_checkpoint(place) is True
        assert engines[0].checkpoint_engine.last_save.committed
        engines[1].load_checkpoint(place)
        found = [weights(engine) for engine in engines]
        masters = consolidated(source, ()) if precision == "fp32" else {}
        for name, value in found[1].items():
            assert torch.equal(value, found[0][name]), name
            assert masters or torch.equal(value, older[name]), name
        report = engines[0].checkpoint_engine.last_report
        assert not [entry for entry in report.entries if entry.state == "master"]
