"""Arguments and results of save_checkpoint and load_checkpoint, client state, generators and schedulers."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import numpy as np
import pytest
import torch
from deepspeed import comm as dist

import unickpt
from tests.jobs.deepspeed.jobs import build, train
from tests.jobs.deepspeed.model import Model
from tests.jobs.deepspeed.resumes import ADAM, here
from tests.jobs.deepspeed.scenario_worker import scenario
from tests.jobs.deepspeed.truth import consolidated, differences
from torch_unickpt.libraries import trainer as of_trainer
from unickpt.base.errors import MismatchError


@scenario(2)
def load_flags_have_the_meaning_of_deepspeed(folder: Path) -> None:
    source = build(here(1), seed=1)
    train(source, 3)
    source.skipped_steps = 2
    assert source.save_checkpoint(str(folder), tag="first", client_state={"epoch": 5}) is True
    truth = consolidated(source, ADAM)

    weights_only = build(here(2), seed=2)
    before = consolidated(weights_only, ())
    path, client = weights_only.load_checkpoint(str(folder), tag="first", load_module_only=True)
    found = consolidated(weights_only, ())
    weights = tuple(k for k in truth if not k.startswith(("weight/", "master/", "buffer/")))
    assert differences(truth, found, ignore=weights) == []
    assert found["counters"] == [0, 0, 0]
    assert found["groups"] == before["groups"]
    assert path is not None
    assert client["epoch"] == 5
    assert [client[key] for key in ("global_steps", "global_samples", "skipped_steps")] == truth["counters"]
    train(weights_only, 1)

    no_states = build(here(3), seed=3)
    path, client = no_states.load_checkpoint(str(folder), load_optimizer_states=False)
    found = consolidated(no_states, ())
    assert differences(truth, found, ignore=("exp_", "step", "groups", "scheduler")) == []
    assert found["counters"] == [3, 36, 2]
    assert found["scheduler"] == truth["scheduler"]
    assert found["step"] == []

    no_scheduler = build(here(1), seed=4)
    before = no_scheduler.lr_scheduler.state_dict()
    path, client = no_scheduler.load_checkpoint(str(folder), load_lr_scheduler_states=False)
    assert no_scheduler.lr_scheduler.state_dict() == before
    assert client["lr_scheduler"] == truth["scheduler"]


@scenario(2)
def tags_latest_and_return_values(folder: Path) -> None:
    source = build(here(1), seed=1)
    assert source.load_checkpoint(str(folder / "nothing")) == (None, None)
    train(source, 1)
    assert source.save_checkpoint(str(folder)) is True
    assert (folder / "latest").read_text() == "global_step1"
    assert (folder / "global_step1" / "manifest.json").is_file()
    train(source, 1)
    assert source.save_checkpoint(str(folder), tag="other", save_latest=False) is True
    assert (folder / "latest").read_text() == "global_step1"
    target = build(here(2), seed=2)
    path, _ = target.load_checkpoint(str(folder))
    assert path == str(folder / "global_step1" / "manifest.json")
    assert target.global_steps == 1
    assert target.load_checkpoint(str(folder), tag="other")[0] is not None
    assert target.global_steps == 2
    with pytest.raises(ValueError, match="save_dir"):
        source.save_checkpoint("")


@scenario(2)
def client_state_keeps_its_types(folder: Path) -> None:
    rank = dist.get_rank()
    state: dict[str, Any] = {
        "tuple": (1, 2.5, None), "nested": {"a": [True, {"b": "text"}]}, "tensor": torch.arange(5), "array": np.eye(2),
        "nan": float("nan"), "big": 2**80, "keys": {1: "one", (2, 3): "pair"}, "rank": rank, "set": {1, 2},
    }  # fmt: skip
    source, target = build(here(1), seed=1), build(here(3), seed=2)
    assert source.save_checkpoint(str(folder), client_state=state)
    _, found = target.load_checkpoint(str(folder))
    for key in ("tuple", "nested", "big", "keys", "set"):
        assert found[key] == state[key], key
    assert found["rank"] == rank  # with the same number of ranks every rank gets its own value back
    assert torch.equal(found["tensor"], state["tensor"])
    assert (found["array"] == state["array"]).all()
    assert found["nan"] != found["nan"]
    assert found["ds_version"] == deepspeed.__version__


class Unknown:
    """A class that the codec does not know."""

    def __init__(self) -> None:
        self.value = 3


@scenario(1)
def unknown_objects_do_not_fail_a_save_and_load_only_with_allow_pickle(folder: Path) -> None:
    source, target = build(here(1), seed=1), build(here(1), seed=2)
    assert source.save_checkpoint(
        str(folder), client_state={"thing": Unknown(), "lock": __import__("threading").Lock(), "ok": 1}
    )
    _, found = target.load_checkpoint(str(folder))
    assert found["ok"] == 1
    assert "thing" not in found
    reasons = {e.name: e.reason for e in target.checkpoint_engine.last_report.entries if e.name.startswith("client_state.")}
    assert "allow_pickle" in reasons["client_state.thing"], reasons
    trusting = build(here(1), seed=3, unickpt={"enabled": True, "allow_pickle": True})
    _, found = trusting.load_checkpoint(str(folder))
    assert found["thing"].value == 3


@scenario(2)
def generators_continue_on_every_rank(folder: Path) -> None:
    source, target = build(here(1), seed=1), build(here(3), seed=2)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(100 + dist.get_rank())
    source.save_checkpoint(str(folder))
    expected = (random.random(), np.random.rand(), torch.rand(1).item())
    target.load_checkpoint(str(folder))
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected
    left = build(here(3), seed=3, unickpt={"enabled": True, "restore_rng": False})
    torch.manual_seed(5)
    state = torch.get_rng_state()
    left.load_checkpoint(str(folder))
    assert torch.equal(torch.get_rng_state(), state)


@scenario(2)
def named_generators_of_deepspeed_continue_on_every_rank(folder: Path) -> None:
    """A program adds them after ``deepspeed.initialize`` or before: for dropout in layers that are divided."""

    def draws() -> list[float]:
        with tracker.fork():
            return torch.rand(3).tolist()

    def begin(seed: int, name: str = "model-parallel-rng") -> None:
        tracker.reset()
        tracker.add(name, seed + dist.get_rank())

    tracker = deepspeed.checkpointing.get_cuda_rng_tracker()
    source, target = build(here(1), seed=1), build(here(3), seed=2)
    begin(100)
    draws()
    source.save_checkpoint(str(folder))
    expected = draws()
    begin(200)
    target.load_checkpoint(str(folder))
    assert draws() == expected
    begin(200, "another")
    target.load_checkpoint(str(folder))
    assert list(tracker.get_states()) == ["another"]
    (entry,) = [each for each in target.checkpoint_engine.last_report.entries if each.name == "named_generators"]
    assert (entry.outcome, entry.reason) == ("left out", "this process has no model-parallel-rng")
    tracker.reset()


@scenario(2)
def custom_load_fn_gets_the_full_state_dict(folder: Path) -> None:
    source = build(here(1), seed=1)
    train(source, 2)
    source.save_checkpoint(str(folder))
    truth = consolidated(source, ())

    def load(src: dict[str, torch.Tensor], dst: torch.nn.Module) -> None:
        with torch.no_grad():
            for name, p in dst.named_parameters():
                if p.numel():
                    p.copy_(src[name].reshape(p.shape) * 2)

    for stage in (1, 3):
        target = build(here(stage), seed=2)
        target.load_checkpoint(str(folder), custom_load_fn=load)
        found = consolidated(target, ())
        assert torch.equal(found["weight/embed.weight"], truth["weight/embed.weight"] * 2)
        assert torch.equal(found["master/embed.weight"], truth["weight/embed.weight"] * 2)


@scenario(1)
def trainer_without_deepspeed_keeps_the_frozen_weights_that_a_checkpoint_leaves_out(folder: Path) -> None:
    """As those under adapters of PEFT: they come from the program."""

    def frozen_below(seed: int) -> torch.nn.Sequential:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        model[0].requires_grad_(False)
        return model

    cfg = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}, "unickpt": {"enabled": True}}
    below = frozen_below(1)
    source, *_ = deepspeed.initialize(model=below, model_parameters=list(below[1].parameters()), config=cfg)
    source.backward(source(torch.ones(1, 2)).sum())
    source.step()
    source.save_checkpoint(str(folder), exclude_frozen_parameters=True)
    model = frozen_below(2)
    own, optimizer = model[0].weight.clone(), torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    with pytest.raises(MismatchError, match=r"has no 0\.weight"):
        unickpt.load_training(model, optimizer, folder)
    of_trainer.load(SimpleNamespace(model_wrapped=model, optimizer=optimizer, lr_scheduler=None), str(folder / "global_step1"))
    assert torch.equal(model[0].weight, own)
    assert torch.equal(model[1].weight, source.module[1].weight)
    model[0].requires_grad_(True)  # what is trained is not left at its initial value
    with pytest.raises(MismatchError, match=r"has no 0\.weight"):
        unickpt.load_training(model, optimizer, folder, strict=False)


@scenario(1)
def an_engine_without_optimizer(folder: Path) -> None:
    torch.manual_seed(1)
    model = Model()
    cfg = {"train_batch_size": 12, "unickpt": {"enabled": True}}
    engine, *_ = deepspeed.initialize(model=model, config=cfg)
    engine.save_checkpoint(str(folder))
    torch.manual_seed(2)
    other, *_ = deepspeed.initialize(model=Model(), config=cfg)
    other.load_checkpoint(str(folder))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.module.parameters(), strict=True))
    trained = build(here(1), seed=3)
    trained.save_checkpoint(str(folder / "trained"))
    other.load_checkpoint(str(folder / "trained"))
    assert torch.equal(other.module.embed.weight, trained.module.embed.weight)
    with pytest.raises(Exception, match="load_optimizer_states=False"):
        trained.load_checkpoint(str(folder))
    trained.load_checkpoint(str(folder), load_optimizer_states=False)


@scenario(1)
def the_config_can_be_a_file(folder: Path) -> None:
    path = folder / "ds.json"
    cfg = {"train_batch_size": 12, "optimizer": {"type": "Adam", "params": {"torch_adam": True}}, "unickpt": {"enabled": True}}
    path.write_text(json.dumps(cfg))
    model = Model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=str(path))
    assert engine.checkpoint_engine.name == "unickpt"
    assert engine.save_checkpoint(str(folder))


@scenario(2)
def the_switch_of_the_environment_stands_for_the_key(folder: Path) -> None:
    """As in a library that makes the configuration itself. A key counts more."""

    def job(**more: Any) -> Any:
        model = Model()
        config = {  # a new one for each engine: DeepSpeed before 0.19 takes torch_adam out of it
            "train_batch_size": 12, "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
            "zero_optimization": {"stage": 1}, **more,
        }  # fmt: skip
        return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]

    os.environ["UNICKPT"] = "1"
    try:
        off, engine = job(unickpt={"enabled": False}), job()
    finally:
        del os.environ["UNICKPT"]
    assert not hasattr(off.checkpoint_engine, "saver")
    assert engine.checkpoint_engine.name == "unickpt"
    train(engine, 1)
    assert engine.save_checkpoint(str(folder))
    other = build(here(2), seed=2)
    assert other.load_checkpoint(str(folder))[0] is not None
    found, truth = (consolidated(each, ("exp_avg", "exp_avg_sq")) for each in (other, engine))
    different = differences(truth, found, ignore=("scheduler",))
    assert not different, different[:4]


@scenario(2)
def loss_scaler_and_scheduler_of_another_kind_are_left_out_with_a_reason(folder: Path) -> None:
    source = build(here(1), seed=1)
    train(source, 1)
    source.save_checkpoint(str(folder))
    target = build(
        here(1), seed=2, scheduler={"type": "WarmupDecayLR", "params": {"total_num_steps": 50, "warmup_num_steps": 5}}
    )
    target.load_checkpoint(str(folder))
    entry = next(e for e in target.checkpoint_engine.last_report.entries if e.name == "lr_scheduler")
    assert entry.outcome == "left out", entry
    assert "WarmupLR" in entry.reason
    assert "WarmupDecayLR" in entry.reason
