"""What has to survive a save and a load: optimizers, groups, offload, odd parameters, generators, flags."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import pytest
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from ds_unickpt import internals
from tests.deepspeed.jobs import Layout, build, scramble, train
from tests.deepspeed.model import Model
from tests.deepspeed.scenario_worker import scenario
from tests.deepspeed.truth import consolidated, differences, optimizer_of

ADAM = ("exp_avg", "exp_avg_sq")


def here(stage: int, precision: str = "fp32") -> Layout:
    return Layout(stage, dist.get_world_size(), precision)


def hand_over(
    folder: Path, source: Any, target: Any, states: tuple[str, ...] = ADAM, *, ignore: tuple[str, ...] = (), **load: Any
) -> dict[str, Any]:
    """Train, save, load elsewhere, compare everything; then both go on and the losses agree."""
    train(source, 3)
    assert source.save_checkpoint(str(folder)) is True, source.checkpoint_engine.last_save
    truth = consolidated(source, states)
    scramble(target)
    path, client_state = target.load_checkpoint(str(folder), **load)
    assert path is not None
    problems = differences(truth, consolidated(target, states), ignore=ignore)
    assert problems == [], problems
    a, b = train(source, 2), train(target, 2)
    assert a == pytest.approx(b, abs=2e-6), (a, b)
    found: dict[str, Any] = client_state
    return found


# ---------------------------------------------------------------- optimizers


def _client_optimizer(make: Any, stage: int, seed: int, **extra: Any) -> Any:
    """A torch optimizer that the user made; DeepSpeed wraps it."""
    torch.manual_seed(seed)
    model = Model()
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    return build(here(stage), seed=seed, model=model, client_optimizer=optimizer, scheduler={}, **extra)


@scenario(2)
def sgd_with_momentum(folder: Path) -> None:
    def make(params: Any) -> Any:
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)

    for a, b in ((0, 3), (3, 1), (2, 0)):
        hand_over(folder / f"{a}{b}", _client_optimizer(make, a, 1), _client_optimizer(make, b, 2), ("momentum_buffer",))


@scenario(2)
def rmsprop_adamax_and_nadam(folder: Path) -> None:
    cases: list[tuple[Any, tuple[str, ...]]] = [
        (lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True), ("square_avg", "momentum_buffer", "grad_avg")),
        (lambda p: torch.optim.Adamax(p, lr=1e-3), ("exp_avg", "exp_inf")),
        (lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True), ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")),
    ]
    for number, (make, states) in enumerate(cases):
        hand_over(folder / str(number), _client_optimizer(make, 1, 1), _client_optimizer(make, 3, 2), states)


@scenario(2)
def adagrad(folder: Path) -> None:
    def make(params: Any) -> Any:
        return torch.optim.Adagrad(params, lr=0.05)

    for a, b in ((0, 1), (1, 3), (3, 0)):
        hand_over(folder / f"{a}{b}", _client_optimizer(make, a, 1), _client_optimizer(make, b, 2), ("sum",))


def _offloaded(stage: int, seed: int, kind: str, *, parameters_too: bool = False) -> Any:
    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": {"device": "cpu"}, "sub_group_size": 1500}
    if parameters_too:
        zero["offload_param"] = {"device": "cpu"}
    return build(here(stage), seed=seed, zero_optimization=zero, optimizer={"type": kind, "params": {"lr": 1e-2}})


@scenario(2)
def cpu_adam_offloaded(folder: Path) -> None:
    """DeepSpeedCPUAdam: optimizer on the CPU under ZeRO 1, 2, 3, and parameters too under ZeRO 3."""
    hand_over(folder / "12", _offloaded(1, 1, "AdamW"), _offloaded(2, 2, "AdamW"))
    hand_over(folder / "23", _offloaded(2, 1, "AdamW"), _offloaded(3, 2, "AdamW", parameters_too=True))
    hand_over(folder / "31", _offloaded(3, 1, "AdamW", parameters_too=True), _offloaded(1, 2, "AdamW"))


@scenario(2)
def cpu_adam_to_torch_adam_and_back(folder: Path) -> None:
    """The same states under another implementation of the optimizer; each keeps its own form of ``step``."""
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
    """Its C++ is compiled first, which takes a minute. SGD, too, has one state, and DeepSpeedCPUAdam is of the same make."""
    hand_over(folder, _offloaded(2, 1, "Lion"), _offloaded(3, 2, "Lion"), ("exp_avg",))


@scenario(2)
def fused_adam_without_zero_in_bf16(folder: Path) -> None:
    """FP16_Optimizer: flat fp32 groups beside bf16 parameters, replicated."""

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


# ---------------------------------------------------------------- groups and layouts within ZeRO


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
    """Stock universal checkpoints give the second group the first one's values under ZeRO-3."""
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
        _weights_equal(source, target)
        assert train(source, 2) == pytest.approx(train(target, 2), abs=2e-6)


def _weights_equal(a: Any, b: Any) -> None:
    """DeepSpeed's accessors miss second groups in some versions; the live, gathered weights do not."""
    for (name, p), (_, q) in zip(a.module.named_parameters(), b.module.named_parameters(), strict=True):
        with deepspeed.zero.GatheredParameters([p], enabled=hasattr(p, "ds_id")):
            left = p.detach().clone()
        with deepspeed.zero.GatheredParameters([q], enabled=hasattr(q, "ds_id")):
            assert torch.equal(left, q.detach()), name


@scenario(2)
def round_robin_partitions(folder: Path) -> None:
    """The flat buffer is in another order than the parameters."""
    _unusual_partitions(folder, {"round_robin_gradients": True})


@scenario(2)
def aligned_partitions(folder: Path) -> None:
    """The flat buffer has padding between the parameters."""
    _unusual_partitions(folder, {"parameter_alignment": True})


def _unusual_partitions(folder: Path, extra: dict[str, Any]) -> None:
    source = build(here(2), seed=1, zero_optimization={"stage": 2, **extra})
    target = build(here(3), seed=2)
    train(source, 3)
    assert source.save_checkpoint(str(folder / "there"))
    target.load_checkpoint(str(folder / "there"))
    _weights_equal(source, target)
    back = build(here(2), seed=3, zero_optimization={"stage": 2, **extra})
    target.save_checkpoint(str(folder / "back"))
    back.load_checkpoint(str(folder / "back"))
    for x, y in zip(
        source.optimizer.single_partition_of_fp32_groups, back.optimizer.single_partition_of_fp32_groups, strict=True
    ):
        assert torch.equal(x, y)
        for key in ADAM:
            assert torch.equal(source.optimizer.optimizer.state[x][key], back.optimizer.optimizer.state[y][key])
    assert train(source, 2) == train(back, 2)


# ---------------------------------------------------------------- parameters


@scenario(1, 2)
def empty_and_one_element_parameters(folder: Path) -> None:
    class Odd(Model):
        def __init__(self) -> None:
            super().__init__(empty=True)
            self.temperature = torch.nn.Parameter(torch.full((1, 1), 1.5))  # DeepSpeed cannot broadcast a 0-d one

        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens, targets) * self.temperature.float().reshape(())

    def odd(stage: int, seed: int) -> Any:
        torch.manual_seed(seed)
        return build(here(stage), seed=seed, model=Odd())

    for a, b in ((0, 1), (1, 2), (2, 0)):
        source, target = odd(a, 1), odd(b, 2)
        train(source, 3)
        assert source.save_checkpoint(str(folder / f"{a}{b}"))
        target.load_checkpoint(str(folder / f"{a}{b}"))
        assert target.module.empty.shape == (0, 3)
        for (name, p), (_, q) in zip(source.module.named_parameters(), target.module.named_parameters(), strict=True):
            assert p.shape == q.shape or p.numel() == 0, name
            assert torch.equal(p.reshape(-1), q.reshape(-1)), name
        assert train(source, 2) == pytest.approx(train(target, 2), abs=2e-6)


@scenario(2)
def tied_weights_meet_untied_ones(folder: Path) -> None:
    tied = build(here(1), seed=1, model=Model())
    torch.manual_seed(2)
    untied = build(here(3), seed=2, model=Model(tied=False))
    train(tied, 2)
    tied.save_checkpoint(str(folder))
    untied.load_checkpoint(str(folder))
    with deepspeed.zero.GatheredParameters([untied.module.head.weight, untied.module.embed.weight]):
        assert torch.equal(untied.module.head.weight, tied.module.embed.weight)
        assert torch.equal(untied.module.embed.weight, tied.module.embed.weight)


@scenario(2)
def a_weight_changed_by_hand_is_not_replaced_by_the_cast_of_its_master(folder: Path) -> None:
    for stage in (0, 1, 3):
        source, target = build(here(stage, "bf16"), seed=1), build(here(2, "bf16"), seed=2)
        train(source, 2)
        with deepspeed.zero.GatheredParameters([source.module.blocks[0].out.weight], modifier_rank=0, enabled=stage == 3):
            source.module.blocks[0].out.weight.data[3, :] = 0.25
        expected = {k: v for k, v in consolidated(source, ()).items() if k.startswith("weight/")}
        source.save_checkpoint(str(folder / str(stage)))
        target.load_checkpoint(str(folder / str(stage)))
        found = consolidated(target, ())
        assert differences(expected, {k: found[k] for k in expected}) == []
        assert (found["weight/blocks.0.out.weight"][3] == 0.25).all()
        assert not (found["master/blocks.0.out.weight"][3] == 0.25).all()


@scenario(2)
def non_persistent_buffers_only_on_request(folder: Path) -> None:
    plain = build(here(1), seed=1)
    plain.save_checkpoint(str(folder / "plain"))
    wanted = {"enabled": True, "non_persistent_buffers": True}
    source = build(here(1), seed=1, unickpt=wanted)
    source.module.volatile.fill_(0.125)
    source.save_checkpoint(str(folder / "asked"))
    target = build(here(2), seed=2, unickpt=wanted)
    target.load_checkpoint(str(folder / "asked"))
    assert (target.module.volatile == 0.125).all()
    other = build(here(2), seed=3)
    before = other.module.volatile.clone()
    other.load_checkpoint(str(folder / "asked"))
    assert torch.equal(other.module.volatile, before)
    entry = [e for e in other.checkpoint_engine.last_report.entries if e.name == "volatile"]
    assert [e.outcome for e in entry] == ["recreated"], entry
    other.load_checkpoint(str(folder / "plain"))


@scenario(2)
def frozen_parameters_can_be_excluded(folder: Path) -> None:
    source, target = build(here(2), seed=1), build(here(3), seed=2)
    train(source, 2)
    source.save_checkpoint(str(folder), exclude_frozen_parameters=True)
    scramble(target)
    target.load_checkpoint(str(folder), load_module_strict=False)
    with deepspeed.zero.GatheredParameters([target.module.positions.weight]):
        assert (target.module.positions.weight == -7.0).all()
    entry = next(e for e in target.checkpoint_engine.last_report.entries if e.name == "positions.weight")
    assert entry.outcome == "left out", entry
    assert "exclude_frozen_parameters" in entry.reason


# ---------------------------------------------------------------- what the caller asks for


@scenario(2)
def load_flags_mean_what_they_mean_in_deepspeed(folder: Path) -> None:
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
def client_state_of_any_kind(folder: Path) -> None:
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
    assert found["rank"] == rank  # on the same number of ranks every rank gets its own back
    assert torch.equal(found["tensor"], state["tensor"])
    assert (found["array"] == state["array"]).all()
    assert found["nan"] != found["nan"]
    assert found["ds_version"] == deepspeed.__version__


class Unknown:
    """Something that the codec has no word for."""

    def __init__(self) -> None:
        self.value = 3


@scenario(1)
def unknown_objects_never_fail_a_save_and_need_an_opt_in_to_load(folder: Path) -> None:
    source, target = build(here(1), seed=1), build(here(1), seed=2)
    assert source.save_checkpoint(
        str(folder), client_state={"thing": Unknown(), "lock": __import__("threading").Lock(), "ok": 1}
    )
    _, found = target.load_checkpoint(str(folder))
    assert found["ok"] == 1
    assert found["thing"].type_name.endswith("Unknown")
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


@scenario(2)
def a_job_that_has_not_stepped_yet(folder: Path) -> None:
    source, target = build(here(1), seed=1), build(here(3), seed=2)
    source.save_checkpoint(str(folder))
    target.load_checkpoint(str(folder))
    assert train(source, 2) == pytest.approx(train(target, 2), abs=2e-6)


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


# ---------------------------------------------------------------- fp16


def _fp16(stage: int, seed: int) -> Any:
    """DeepSpeed refuses fp16 on its CPU accelerator; torch computes it there all the same, so only the check goes."""
    get_accelerator().is_fp16_supported = lambda: True
    scaling = {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 2, "hysteresis": 1}
    return build(here(stage, "fp16"), seed=seed, fp16=scaling)


def _fp16_pairs(folder: Path, *pairs: tuple[int, int]) -> None:
    """The first steps overflow, so scale, iteration and skipped steps are no longer what they started as."""
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
