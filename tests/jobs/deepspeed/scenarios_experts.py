"""Experts beyond the matrix: models that do not fit, frozen parameters, names, replicas, checkpoints of DeepSpeed itself.

A group of its own: experts leave global process groups behind in DeepSpeed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from tests.jobs.deepspeed.expert_jobs import OF_EXPERTS, Expert, build, global_name, mark, scramble, train, truth_of
from tests.jobs.deepspeed.expert_names import EXPERTS, ExpertLayout
from tests.jobs.deepspeed.logs import Log
from tests.jobs.deepspeed.resumes import assert_trains_on
from tests.jobs.deepspeed.scenario_worker import scenario
from tests.jobs.deepspeed.truth import Truth, differences, optimizer_of
from tests.support.extent import some
from unickpt.base.errors import MismatchError
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.cli.main import main

FIRST, SECOND = (f"moes.{at}{OF_EXPERTS}" for at in (0, 1))


def _saved(folder: Path, layout: ExpertLayout, **job: Any) -> Truth:
    engine = build(layout, seed=1, **job)
    train(engine, 2)
    mark(engine)
    assert engine.save_checkpoint(str(folder)) is True
    assert engine.checkpoint_engine.last_save is not None, "DeepSpeed has saved by itself"
    return truth_of(engine)


@scenario(2)
def another_number_of_experts_is_refused_by_name_before_anything_is_loaded(folder: Path) -> None:
    _saved(folder, ExpertLayout(2, 2, 1))
    gate = r"moes.0.deepspeed_moe.gate.wg.weight: \(4, 15\) in the checkpoint, \(6, 15\) in this job"
    # the second rank alone lacks experts 4 and 5
    more = rf"in this job but not in the checkpoint \(12\): {FIRST}4.gain, .*; of another shape \(1\): {gate}"
    fewer = rf"in the checkpoint but not in this job \(\d+\): {SECOND}4.down.weight, "
    for layout, experts, message in (
        (ExpertLayout(1, 2, 1), (6, 6), more),
        (ExpertLayout(2, 2, 1), (6, 6), more),
        (ExpertLayout(2, 2, 1), (4, 4), fewer),
        (ExpertLayout(1, 2, 2), (4, 4), fewer),
    ):
        target = build(layout, seed=3, experts=experts)
        before = {name: p.detach().clone() for name, p in target.module.named_parameters()}
        with pytest.raises(MismatchError, match=message):
            target.load_checkpoint(str(folder))
        assert all(torch.equal(p, before[name]) for name, p in target.module.named_parameters())


@scenario(4)
def a_frozen_gate_and_frozen_parameters_of_experts_move_with_them(folder: Path) -> None:
    truth = _saved(folder, ExpertLayout(4, 4, 1), frozen_gate=True)
    assert "exp_avg/moes.0.deepspeed_moe.gate.wg.weight" not in truth
    for layout in (ExpertLayout(2, 4, 2), ExpertLayout(1, 4, 0)):
        target = build(layout, seed=3, frozen_gate=True)
        scramble(target)
        target.load_checkpoint(str(folder))
        assert differences(truth, truth_of(target)) == []
        with pytest.raises(MismatchError, match=r"no optimizer state for 1 parameters .*: moes.0.deepspeed_moe.gate.wg.weight"):
            build(layout, seed=5).load_checkpoint(str(folder))


@scenario(4)
def frozen_parameters_of_every_expert_are_left_out_on_request(folder: Path) -> None:
    source = build(ExpertLayout(4, 4, 1), seed=1)
    train(source, 1)
    assert source.save_checkpoint(str(folder), exclude_frozen_parameters=True) is True
    shifts = {f"{layer}{at}.shift" for layer, number in zip((FIRST, SECOND), EXPERTS, strict=True) for at in range(number)}
    excluded = Checkpoint.open(folder / "global_step1").manifest.excluded
    assert sorted(excluded) == sorted({*shifts, "positions.weight", "moes.0.mlp.shift"})
    target = build(ExpertLayout(2, 4, 1), seed=3)
    scramble(target)
    with pytest.raises(MismatchError, match=r"exclude_frozen_parameters=True left out 12 of them"):
        target.load_checkpoint(str(folder))
    assert target.load_checkpoint(str(folder), load_module_strict=False)[0] is not None
    assert all((p == -7).all() for p in target.module.parameters() if not p.requires_grad)


@scenario(4)
def experts_are_stored_once_under_global_names(folder: Path) -> None:
    _saved(folder, ExpertLayout(2, 4, 1))
    saved = Checkpoint.open(folder / "global_step2")
    assert saved.manifest.notes == ()
    assert saved.manifest.writer.topology["expert"] == 2
    parameters = ("down.weight", "gain", "shift", "up.bias", "up.weight")
    names = {f"{layer}{at}.{inner}" for layer, number in zip((FIRST, SECOND), EXPERTS, strict=True)
             for at in range(number) for inner in (*parameters, "scale")}  # fmt: skip
    assert {info.name for info in saved.index.tensors if OF_EXPERTS in info.name and info.kind != "object"} == names
    for position, info in enumerate(saved.index.tensors):
        if info.kind != "object" and info.derived_from is None:
            assert sum(saved.index.box(row).numel for row in saved.index.rows_of(position)) == math.prod(info.shape), info
    trained = {name for group in saved.manifest.optimizer.groups for name in group.parameters if OF_EXPERTS in name}
    assert trained == {name for name in names if not name.endswith(("shift", "scale"))}
    place = str(folder / "global_step2")
    if dist.get_rank() == 0:
        assert main(["inspect", place, "--tensor", f"{SECOND}5.up.weight"]) == 0
        assert main(["verify", place]) == 0
        assert main(["export", place, str(folder / "exported"), "--to", "dcp"]) == 0
        read = _exported(folder / "exported", [f"{SECOND}5.up.weight"])
        assert torch.equal(read[f"{SECOND}5.up.weight"], saved.read_tensor(f"{SECOND}5.up.weight", "master"))


def _exported(folder: Path, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Read tensors of a checkpoint of ``torch.distributed.checkpoint`` without a process group."""
    from torch.distributed.checkpoint import FileSystemReader, load

    reader = FileSystemReader(folder)
    found = reader.read_metadata().state_dict_metadata
    wanted = {name: next(key for key in found if key == name or key.endswith(f".{name}")) for name in names}
    state = {key: torch.empty(found[key].size, dtype=found[key].properties.dtype) for key in wanted.values()}
    load(state, storage_reader=reader, no_dist=True)
    return {name: state[key] for name, key in wanted.items()}


@scenario(4)
def only_replicas_of_an_expert_are_compared(folder: Path) -> None:
    engine = build(ExpertLayout(2, 4, 1), seed=1)
    train(engine, 1)
    for name, buffer in engine.module.named_buffers():
        if name == f"{FIRST}0.scale":
            buffer += dist.get_rank()
    with Log() as log:
        assert engine.save_checkpoint(str(folder)) is True
    notes = Checkpoint.open(folder / "global_step1").manifest.notes
    assert [note.split(". ")[0] for note in notes] == [f"differs between rank 2 and rank 0: buffer {FIRST}0.scale"]
    assert any(notes[0] in line for line in log.lines) == (dist.get_rank() == 0)


@scenario(4)
def groups_of_experts_that_deepspeed_splits_are_matched_by_name(folder: Path) -> None:
    truth = _saved(folder, ExpertLayout(4, 4, 2), group_size=200)
    target = build(ExpertLayout(2, 4, 1), seed=3, group_size=10**6)
    target.load_checkpoint(str(folder))
    assert differences(truth, truth_of(target)) == []


@scenario(4)
def a_checkpoint_of_deepspeed_itself_resumes_under_another_expert_parallelism(folder: Path) -> None:
    source = build(ExpertLayout(2, 4, 1), seed=1, kind=Expert, unickpt={"enabled": False})
    train(source, 2)
    source.save_checkpoint(str(folder / "native"))
    truth = truth_of(source)
    if dist.get_rank() == 0:
        assert main(["convert", str(folder / "native"), str(folder / "converted")]) == 0
    dist.barrier()
    for layout in (ExpertLayout(4, 4, 1), ExpertLayout(1, 4, 2)):
        target = build(layout, seed=3, kind=Expert)
        scramble(target)
        target.load_checkpoint(str(folder / "converted"))
        assert differences(truth, truth_of(target)) == []


def _offloaded(layout: ExpertLayout) -> dict[str, Any]:
    zero = {"stage": layout.stage, "offload_optimizer": {"device": "cpu"}}
    return {"zero_optimization": zero, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}}


@scenario(2)
def experts_whose_optimizer_states_are_on_the_cpu(folder: Path) -> None:
    for number, (a, b) in enumerate(((2, 1), (1, 2))):
        source, target = ExpertLayout(a, 2, 2), ExpertLayout(b, 2, 1)
        truth = _saved(folder / str(number), source, **_offloaded(source))
        for more in (_offloaded(target), {}):
            engine = build(target, seed=3, **more)
            scramble(engine)
            engine.load_checkpoint(str(folder / str(number)))
            assert differences(truth, truth_of(engine), ignore=() if more else ("settings",)) == []
            train(engine, 1)


@scenario(2)
def experts_in_fp16(folder: Path) -> None:
    """DeepSpeed refuses fp16 on its CPU accelerator, but torch supports it, so the check is disabled."""
    get_accelerator().is_fp16_supported = lambda: True
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
    for number, (a, b) in enumerate(some(((1, 2), (2, 0), (0, 1)), 1)):
        source, target = ExpertLayout(2 - number % 2, 2, a, "fp16"), ExpertLayout(1 + number % 2, 2, b, "fp16")
        truth = _saved(folder / str(number), source, **fp16)
        engine = build(target, seed=3, **fp16)
        scramble(engine)
        engine.load_checkpoint(str(folder / str(number)))
        assert differences(truth, truth_of(engine), ignore=("settings",)) == []
        train(engine, 1)


@scenario(2)
def experts_under_muon(folder: Path) -> None:
    """Momenta of whole matrices (ZeRO 1 and 2) and of parameters (without ZeRO) load each other, for every expert."""
    torch._dynamo.config.disable = True  # otherwise its kernels are compiled, for minutes
    muon = {"optimizer": {"type": "Muon", "params": {"lr": 1e-2, "momentum": 0.9}}, "scheduler": {}}
    for stage in some((0, 2, 1), 2):
        source = build(ExpertLayout(2, 2, stage), seed=1, **muon)
        train(source, 2)
        assert source.save_checkpoint(str(folder / str(stage))) is True
        assert source.checkpoint_engine.last_save is not None, "DeepSpeed has saved by itself"
        truth = _stored(folder / str(stage) / "global_step2")
        assert {f"momentum_buffer/{SECOND}{at}.up.weight" for at in range(EXPERTS[1])} < truth.keys()
        if stage == 0:
            assert [key for key, value in _raw(source).items() if not torch.equal(value, truth[key])] == []
        losses = train(source, 2)
        for degree, other in ((2, stage), (1, (stage + 1) % 3)):
            target = build(ExpertLayout(degree, 2, other), seed=3, **muon)
            scramble(target)
            target.load_checkpoint(str(folder / str(stage)))
            target.save_checkpoint(str(folder / f"{stage}{other}"))
            again = _stored(folder / f"{stage}{other}" / "global_step2")
            assert again.keys() == truth.keys()
            assert [key for key, value in again.items() if not torch.equal(value, truth[key])] == []
            if other == 0:
                assert [key for key, value in _raw(target).items() if not torch.equal(value, truth[key])] == []
            if degree == 2:
                assert train(target, 2) == losses
            else:
                assert_trains_on(target, losses, folder / str(stage), training=train)


def _stored(directory: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint by state and name."""
    saved = Checkpoint.open(directory)
    return {f"{i.state}/{i.name}": saved.read_tensor(i.name, i.state) for i in saved.index.tensors if i.kind != "object"}


def _raw(engine: Any) -> dict[str, torch.Tensor]:
    """Return the weights and the states of this rank by state and global name, without DeepSpeed's accessors."""
    state = optimizer_of(engine).state
    found = {}
    for name, p in engine.module.named_parameters():
        held = {key: value for key, value in state.get(p, {}).items() if isinstance(value, torch.Tensor) and key != "step"}
        found |= {f"{key}/{global_name(name, engine)}": t.detach().clone() for key, t in {"weight": p, **held}.items()}
    return found
