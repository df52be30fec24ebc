"""Placement of states in DeepSpeed: sequence-parallel peers, offloaded states, Muon's momentum.

A module of its own: DeepSpeed keeps the device mesh of a sequence-parallel job in a global.
"""

from __future__ import annotations

import json
import unittest
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as State

from tests.jobs.deepspeed.jobs import BATCH, Layout, build, scramble, train
from tests.jobs.deepspeed.logs import Log
from tests.jobs.deepspeed.model import Model, batch
from tests.jobs.deepspeed.resumes import assert_trains_on
from tests.jobs.deepspeed.scenario_worker import scenario
from tests.jobs.deepspeed.truth import consolidated, differences, optimizer_of
from tests.support.extent import some
from unickpt.checkpoint.load.checkpoint import Checkpoint

ADAM = ("exp_avg", "exp_avg_sq")


def here(stage: int, precision: str = "fp32") -> Layout:
    return Layout(stage, dist.get_world_size(), precision)


def flats(engine: Any) -> list[torch.Tensor]:
    """Return copies of this rank's raw masters (flat under ZeRO) and their states, in DeepSpeed's own order."""
    base = optimizer_of(engine)
    masters = [p for group in base.param_groups for p in group["params"]]
    if hasattr(engine.optimizer, "fp32_partitioned_groups_flat"):
        masters = list(engine.optimizer.fp32_partitioned_groups_flat)
    states = [base.state[m][key] for m in masters if m in base.state for key in sorted(base.state[m])]
    return [t.detach().clone() for t in [*masters, *(torch.as_tensor(s) for s in states)]]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    """Return whether tensors are equal bit for bit. The padding of a partition is not initialised and may be NaN."""

    def bits(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(-1).view(torch.uint8)

    alike = len(a) == len(b) and all((x.dtype, x.shape) == (y.dtype, y.shape) for x, y in zip(a, b, strict=True))
    return alike and all(torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))


def stored(directory: Path, states: tuple[str, ...] = ADAM) -> dict[str, torch.Tensor]:
    """Return the full tensors of a checkpoint by ``state/name``."""
    checkpoint = Checkpoint.open(directory)
    keys = [info for info in checkpoint.index.tensors if info.state in ("weight", "master", *states)]
    return {f"{info.state}/{info.name}": checkpoint.read_tensor(info.name, info.state) for info in keys}


def lost(truth: dict[str, Any], found: dict[str, torch.Tensor]) -> list[str]:
    """Return the keys of full tensors that differ between ``truth`` and ``found``, bit for bit."""
    kept = {key: value for key, value in truth.items() if key.split("/")[0] in ("weight", "master", *ADAM)}
    return [k for k, v in kept.items() if k not in found or not torch.equal(v.reshape(-1), found[k].reshape(-1))]


# ---------------------------------------------------------------- sequence parallelism through a mesh


def sequence_parallel(stage: int, seed: int, precision: str = "fp32", **extra: Any) -> Any:
    """Build an engine with pairs of peers: ``deepspeed.initialize(mesh_param=(1, 2))``, or ``(2, 2)`` on 4 ranks."""
    return build(here(stage, precision), seed=seed, mesh=(dist.get_world_size() // 2, 2), **extra)


def train_peers(engine: Any, steps: int, *, apart: bool = False) -> None:
    """Train peers with equal gradients, as after an all-reduce over the sequence; with ``apart`` with different ones."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if not apart:
        rank, world = rank // 2, world // 2
    for _ in range(steps):
        engine.backward(engine(*batch(engine.global_steps, BATCH, rank, world)))
        engine.step()
        engine.module.seen += 1


@scenario(4, long=True)
def two_times_two_peers_are_replicas(folder: Path) -> None:
    _replicas(folder, (0, "fp32"), (2, "bf16"), (3, "fp32"))


@scenario(2)
def sequence_parallel_peers_are_replicas(folder: Path) -> None:
    _replicas(folder, *some(((2, "bf16"), (3, "fp32"), (1, "bf16o"), (0, "fp32"), (1, "fp32")), 3))


def _replicas(folder: Path, *layouts: tuple[int, str]) -> None:
    """From a mesh of data-parallel and sequence-parallel ranks to plain data parallelism at another stage, and back."""
    for stage, precision in layouts:
        place = folder / f"{stage}{precision}"
        source = sequence_parallel(stage, 1, precision)
        train_peers(source, 3)
        torch.manual_seed(100 + dist.get_rank())
        assert source.save_checkpoint(str(place), client_state={"rank": dist.get_rank()}) is True
        assert source.checkpoint_engine.last_save.committed, source.checkpoint_engine.last_save
        drawn = torch.rand(1)
        truth = consolidated(source, ADAM)
        assert lost(truth, stored(place / "global_step3")) == []

        plain = build(here((stage + 1) % 4, precision.removesuffix("o")), seed=2)
        scramble(plain)
        _, client = plain.load_checkpoint(str(place))
        assert client["rank"] == dist.get_rank()
        assert torch.equal(torch.rand(1), drawn)
        found = consolidated(plain, ADAM)
        assert differences(truth, {k: found[k] for k in truth}, ignore=("groups",)) == []
        plain.save_checkpoint(str(place / "back"))

        back = sequence_parallel(stage, 4, precision)
        scramble(back)
        _, client = back.load_checkpoint(str(place / "back"))
        assert differences(truth, consolidated(back, ADAM)) == []
        assert stage == 3 or equal(flats(source), flats(back)), (stage, precision)  # its padding is not set
        same = sequence_parallel(stage, 6, precision)
        _, client = same.load_checkpoint(str(place))
        assert client["rank"] == dist.get_rank()
        assert torch.equal(torch.rand(1), drawn)
        assert differences(truth, consolidated(same, ADAM)) == []
        assert [line for line in same.checkpoint_engine.last_report.lines() if "differ" in line] == [], (stage, precision)
        train_peers(source, 1)
        train_peers(same, 1)
        assert differences(consolidated(source, ADAM), consolidated(same, ADAM)) == []


@scenario(2)
def sequence_parallel_peers_that_drifted_apart_are_named(folder: Path) -> None:
    """DeepSpeed 0.19 does not reduce gradients over the mesh's sequence dimension under ZeRO 0 to 2."""
    for stage in (0, 1, 2):
        source = sequence_parallel(stage, 1)
        train_peers(source, 2, apart=True)
        with Log() as log:
            assert source.save_checkpoint(str(folder / str(stage))) is True
        warned = [line for line in log.lines if "the values of rank 1 differ from those of rank 0" in line]
        assert len(warned) == (1 if dist.get_rank() == 0 else 0), log.lines
        truth = [consolidated(source, ADAM)]
        dist.broadcast_object_list(truth, src=0)
        assert lost(truth[0], stored(folder / str(stage) / "global_step2")) == []
        target = build(here(1), seed=2)
        target.load_checkpoint(str(folder / str(stage)))
        reported = target.checkpoint_engine.last_report.lines()
        assert any("the values of rank 1 differ from those of rank 0" in line for line in reported)


# ---------------------------------------------------------------- states that are offloaded


def _offloaded_raw(engine: Any) -> tuple[list[torch.Tensor], set[str], list[int]]:
    optimizer = engine.optimizer
    flat = optimizer.bit16_groups_flat if hasattr(optimizer, "bit16_groups_flat") else [optimizer.lp_param_buffer]
    tensors = [*flats(engine), *(f.detach().clone() for f in flat)]
    return tensors, {s.value for s in optimizer.offloaded_states}, [f.data_ptr() for f in flat]


VARIANTS: dict[int, list[list[State] | None]] = {
    1: [None, [State.hp_params], [State.optim_states, State.lp_params]],
    2: [None, [State.lp_params], [State.lp_grads]],
    3: [[State.lp_params], [State.lp_params, State.lp_grads, State.contiguous_grad_buffer]],  # others need FusedAdam
}


@scenario(*some((2, 1), 1))
def states_that_are_offloaded_are_saved(folder: Path) -> None:
    for stage, variants in VARIANTS.items():
        for number, include in enumerate(variants):
            for precision in some(("bf16", "fp32"), 1):
                place = folder / f"{stage}{number}{precision}"
                source, twin = (build(here(stage, precision), seed=1, model=_unfrozen(1)) for _ in range(2))
                train(source, 2)
                train(twin, 2)
                truth = consolidated(source, ADAM)
                source.offload_states(include=include, pin_memory=number == 0)
                before = _offloaded_raw(source)
                assert before[1]
                assert source.save_checkpoint(str(place)) is True
                assert source.checkpoint_engine.last_save.committed, source.checkpoint_engine.last_save
                after = _offloaded_raw(source)
                assert equal(before[0], after[0])
                assert before[1:] == after[1:]
                source.reload_states()
                target = build(here((stage % 3) + 1, precision), seed=2, model=_unfrozen(2))
                target.load_checkpoint(str(place))
                assert differences(truth, consolidated(target, ADAM), ignore=("groups",)) == []
                assert train(source, 1) == train(twin, 1)


@scenario(2)
def a_load_while_states_are_offloaded(folder: Path) -> None:
    source = build(here(2, "bf16"), seed=1, model=_unfrozen(1))
    train(source, 2)
    source.module.gain.data.fill_(1.5)  # no longer the cast of its master
    truth = consolidated(source, ADAM)
    source.save_checkpoint(str(folder))
    for stage, variants in VARIANTS.items():
        for number, include in enumerate(variants):
            for trained in some((1, 0), 1):
                target = build(here(stage, "bf16"), seed=2, model=_unfrozen(2))
                train(target, trained)
                target.offload_states(include=include, pin_memory=number == 0)
                held = set(target.optimizer.offloaded_states)
                target.load_checkpoint(str(folder))
                assert set(target.optimizer.offloaded_states) == held
                target.reload_states()
                found = consolidated(target, ())  # after a reload DeepSpeed's accessors do not find optimizer states
                assert differences({k: truth[k] for k in found}, found, ignore=("groups",)) == [], (stage, include, trained)
                target.save_checkpoint(str(folder / "again"), tag="again")
                assert lost(truth, stored(folder / "again" / "again")) == [], (stage, include, trained)
                assert train(target, 1) == train(_fresh(folder, stage), 1), (stage, include, trained)


def _fresh(folder: Path, stage: int) -> Any:
    engine = build(here(stage, "bf16"), seed=3, model=_unfrozen(3))
    engine.load_checkpoint(str(folder))
    return engine


def _unfrozen(seed: int) -> Model:
    """``offload_states`` of ZeRO-3 cannot hold frozen parameters."""
    torch.manual_seed(seed)
    return Model(frozen=False)


@scenario(2, long=True)
def fused_adam_offloads_its_states_under_zero_3(folder: Path) -> None:
    """DeepSpeed compiles its operator first, and leaves ``exp_avg_offload_buffer`` in the state after the reload."""

    def job(seed: int) -> Any:
        kind = {"type": "AdamW", "params": {"lr": 1e-2}}
        return build(here(3, "bf16"), seed=seed, model=_unfrozen(seed), optimizer=kind)

    source, target = job(1), job(2)
    train(source, 2)
    truth = consolidated(source, ADAM)
    source.offload_states()
    assert source.save_checkpoint(str(folder / "away")) is True
    source.reload_states()
    assert source.save_checkpoint(str(folder / "again")) is True
    for place in ("away", "again"):
        assert {
            i.state for i in Checkpoint.open(folder / place / "global_step2").index.tensors if i.kind == "optimizer"
        } == set(ADAM)
        target.offload_states()
        target.load_checkpoint(str(folder / place))
        target.reload_states()
        assert differences(truth, consolidated(target, ADAM), ignore=("groups",)) == []
    assert train(source, 1) == train(target, 1)


# ---------------------------------------------------------------- Muon


def muon(stage: int, seed: int, precision: str = "fp32", **zero: Any) -> Any:
    """Build an engine with Muon for matrices and Adam for the rest, as a client optimizer."""
    try:
        from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
    except ImportError as err:
        raise unittest.SkipTest("this DeepSpeed has no Muon") from err
    torch.manual_seed(seed)
    model = Model()
    for name, p in model.named_parameters():
        p.use_muon = p.dim() > 1 and "embed" not in name
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = MuonWithAuxAdam(
        [
            {"params": [p for p in trained if p.use_muon], "use_muon": True, "lr": 0.02, "momentum": 0.9},
            {"params": [p for p in trained if not p.use_muon], "use_muon": False, "lr": 1e-2},
        ]
    )
    settings = {"stage": stage, "reduce_scatter": False, "sub_group_size": 1500, **zero}
    return build(
        here(stage, precision), seed=seed, model=model, client_optimizer=optimizer, scheduler={}, zero_optimization=settings
    )


def momenta(directory: Path) -> dict[str, torch.Tensor]:
    return {k: v for k, v in stored(directory, (*ADAM, "momentum_buffer")).items() if not k.startswith("weight/")}


@scenario(1, 2)
def muon_between_all_stages(folder: Path) -> None:
    """ZeRO 1 and 2 keep whole momenta, twice if a partition's border cuts a matrix. ZeRO 3 keeps parts."""
    torch._dynamo.config.disable = True  # otherwise its kernels are compiled, for minutes
    saved = {}
    for stage in (1, 2, 3):
        source = muon(stage, 1)
        train(source, 3)
        assert source.save_checkpoint(str(folder / str(stage))) is True
        assert source.checkpoint_engine.last_save.committed, source.checkpoint_engine.last_save
        saved[stage] = (momenta(folder / str(stage) / "global_step3"), flats(source), train(source, 2))
        assert sum("momentum_buffer" in key for key in saved[stage][0]) == 4
    for a in (1, 2, 3):
        for b in some((a % 3 + 1, a, (a + 1) % 3 + 1), 1):
            target = muon(b, 2)
            target.load_checkpoint(str(folder / str(a)))
            if a < 3 and b < 3:  # the padding of ZeRO 3 is not set
                assert equal(flats(target), saved[a][1]), (a, b)
            target.save_checkpoint(str(folder / f"{a}{b}"))
            again = momenta(folder / f"{a}{b}" / "global_step3")
            assert again.keys() == saved[a][0].keys()
            assert [k for k in again if not torch.equal(again[k], saved[a][0][k])] == [], (a, b)
            if a == b:
                assert train(target, 2) == saved[a][2]
            else:
                assert_trains_on(target, saved[a][2], folder / str(a))
    _muon_of_another_world(folder, {stage: losses for stage, (_, _, losses) in saved.items()})


def _muon_of_another_world(folder: Path, losses: dict[int, list[float]]) -> None:
    """The run on one rank comes first. The two ranks load its checkpoint."""
    if dist.get_world_size() == 1:
        (folder / "losses.json").write_text(json.dumps(losses))
        return
    other = folder.parent / f"{folder.name.removesuffix('-w2')}-w1"
    for a in (1, 2, 3) if (other / "losses.json").exists() else ():
        expected = json.loads((other / "losses.json").read_text())[str(a)]
        for b in some((4 - a, a % 3 + 1, (a + 1) % 3 + 1), 1):
            target = muon(b, 2)
            target.load_checkpoint(str(other / str(a)))
            target.save_checkpoint(str(folder / f"w{a}{b}"))
            first, again = momenta(other / str(a) / "global_step3"), momenta(folder / f"w{a}{b}" / "global_step3")
            assert first.keys() == again.keys()
            assert [k for k in first if not torch.equal(first[k], again[k])] == [], (a, b)
            assert_trains_on(target, expected, other / str(a))


@scenario(2)
def muon_momenta_in_all_layouts(folder: Path) -> None:
    """bf16, with ZeRO 3's momentum outside the state, and with BF16_Optimizer, whose momentum is partitioned."""
    torch._dynamo.config.disable = True
    makers = {
        "2": lambda seed: muon(2, seed, "bf16"),
        "3": lambda seed: muon(3, seed, "bf16", save_muon_momentum_buffer_in_memory=True),
        "o": lambda seed: muon(1, seed, "bf16o"),
    }
    for a, b in some((("2", "3"), ("o", "2"), ("3", "3"), ("3", "2"), ("2", "o")), 3):
        source, target = makers[a](1), makers[b](2)
        train(source, 2)
        place = folder / f"{a}{b}"
        assert source.save_checkpoint(str(place)) is True
        assert source.checkpoint_engine.last_save.committed, source.checkpoint_engine.last_save
        target.load_checkpoint(str(place))
        target.save_checkpoint(str(place / "again"))
        first, again = (momenta(p / "global_step2") for p in (place, place / "again"))
        assert first.keys() == again.keys(), (a, b, sorted(first.keys() ^ again.keys()))
        assert [k for k in first if not torch.equal(first[k].to(again[k].dtype), again[k])] == [], (a, b)
        if a == b:  # the others clip at different points
            assert train(target, 2) == train(source, 2)
