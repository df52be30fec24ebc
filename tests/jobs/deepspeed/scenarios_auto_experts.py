"""AutoEP beyond the matrix: names in a checkpoint, models that do not fit, frozen parameters, what is refused, exports."""

from __future__ import annotations

import math
import sys
import unittest.mock
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm as dist
from safetensors import safe_open

from tests.jobs.deepspeed.auto_expert_jobs import HIDDEN, Model, build, scramble, train, truth_of
from tests.jobs.deepspeed.auto_expert_names import EXPERTS, AutoExpertLayout
from tests.jobs.deepspeed.logs import Log
from tests.jobs.deepspeed.model import WIDTH
from tests.jobs.deepspeed.odd_optimizers import BlockwiseMomentum, equal_states, raw_states
from tests.jobs.deepspeed.scenario_worker import scenario
from tests.jobs.deepspeed.truth import Truth, differences
from unickpt.base.errors import LanguageError, MismatchError
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.cli.main import main

EXPERTS_OF = "model.layers.{}.mlp.experts.{}"


def _saved(folder: Path, layout: AutoExpertLayout, **job: Any) -> Truth:
    engine = build(layout, seed=1, **job)
    train(engine, 2)
    assert engine.save_checkpoint(str(folder)) is True
    assert engine.checkpoint_engine.last_save is not None, "DeepSpeed has saved by itself"
    return truth_of(engine)


@scenario(4)
def experts_of_all_ranks_are_one_tensor_that_is_stored_once(folder: Path) -> None:
    _saved(folder, AutoExpertLayout(2, 4, 1))
    saved = Checkpoint.open(folder / "global_step2")
    assert saved.manifest.notes == ()
    assert saved.manifest.writer.topology["expert"] == 2
    shapes = {"w1": (EXPERTS, HIDDEN, WIDTH), "w2": (EXPERTS, WIDTH, HIDDEN), "w3": (EXPERTS, HIDDEN, WIDTH)}
    expected = {EXPERTS_OF.format(layer, name): shape for layer in range(2) for name, shape in shapes.items()}
    assert {info.name: info.shape for info in saved.index.tensors if ".experts." in info.name} == expected
    for position, info in enumerate(saved.index.tensors):
        if info.kind != "object" and info.derived_from is None:
            assert sum(saved.index.box(row).numel for row in saved.index.rows_of(position)) == math.prod(info.shape), info
    trained = [name for group in saved.manifest.optimizer.groups for name in group.parameters]
    assert len(trained) == len(set(trained))
    assert expected.keys() <= set(trained)
    if dist.get_rank() == 0:
        assert main(["verify", str(folder / "global_step2")]) == 0


@scenario(2)
def an_export_has_the_names_of_transformers_files(folder: Path) -> None:
    truth = _saved(folder, AutoExpertLayout(2, 2, 1))
    if dist.get_rank() == 0:
        assert main(["export", str(folder / "global_step2"), str(folder / "exported"), "--to", "hf"]) == 0
        (path,) = (folder / "exported").glob("*.safetensors")
        with safe_open(path, "pt") as file:
            for expert in range(EXPERTS):
                for name in ("w1", "w2", "w3"):
                    found = file.get_tensor(f"model.layers.1.block_sparse_moe.experts.{expert}.{name}.weight")
                    assert torch.equal(found, truth[f"weight/{EXPERTS_OF.format(1, name)}[{expert}]"]), (expert, name)
            gate = file.get_tensor("model.layers.0.block_sparse_moe.gate.weight")
            assert torch.equal(gate, truth["weight/model.layers.0.mlp.router.gate.weight"])
            assert not any(".w1" in name and "experts.w1" in name for name in file.keys())  # noqa: SIM118 - not a dict


@scenario(2)
def another_number_of_experts_is_refused_by_name(folder: Path) -> None:
    _saved(folder, AutoExpertLayout(2, 2, 1))
    for layout in (AutoExpertLayout(2, 2, 1), AutoExpertLayout(1, 2, 3), AutoExpertLayout(0, 2, 1)):
        target = build(layout, seed=3, experts=6)
        before = [parameter.detach().clone() for parameter in target.module.parameters()]
        shapes = (
            r"router.gate.weight: \(4, 15\) in the checkpoint, \(6, 15\) in this job|has the shape \[6, 15\], .* has \[4, 15\]"
        )
        with pytest.raises((MismatchError, LanguageError), match=shapes):
            target.load_checkpoint(str(folder))
        assert all(torch.equal(p, old) for p, old in zip(target.module.parameters(), before, strict=True))


@scenario(4)
def frozen_experts_move_with_the_others(folder: Path) -> None:
    truth = _saved(folder, AutoExpertLayout(2, 4, 3), frozen=True)
    assert not any(key.startswith("exp_avg/") and ".w2[" in key for key in truth)
    for layout in (AutoExpertLayout(4, 4, 1), AutoExpertLayout(1, 4, 0), AutoExpertLayout(2, 4, 3)):
        target = build(layout, seed=3, frozen=True)
        scramble(target)
        target.load_checkpoint(str(folder))
        assert differences(truth, truth_of(target)) == []


@scenario(4)
def frozen_experts_are_left_out_on_request(folder: Path) -> None:
    source = build(AutoExpertLayout(2, 4, 1), seed=1, frozen=True)
    train(source, 1)
    assert source.save_checkpoint(str(folder), exclude_frozen_parameters=True) is True
    excluded = Checkpoint.open(folder / "global_step1").manifest.excluded
    assert sorted(excluded) == [EXPERTS_OF.format(layer, "w2") for layer in range(2)]


@scenario(2)
def a_weight_that_was_changed_by_hand_is_restored(folder: Path) -> None:
    """The weights of one expert of the second rank are not the cast of their masters."""
    engine = build(AutoExpertLayout(2, 2, 1, "bf16"), seed=1)
    train(engine, 1)
    if dist.get_rank() == 1:
        engine.module.model.layers[0].mlp.experts.w1.data[1] = 3.0
    truth = truth_of(engine)
    assert (truth[f"weight/{EXPERTS_OF.format(0, 'w1')}[3]"] == 3.0).all()
    assert engine.save_checkpoint(str(folder)) is True
    for layout in (AutoExpertLayout(1, 2, 2, "bf16"), AutoExpertLayout(2, 2, 3, "bf16")):
        target = build(layout, seed=3)
        target.load_checkpoint(str(folder))
        assert differences(truth, truth_of(target)) == []


@scenario(2)
def optimizer_states_that_cannot_be_cut_go_to_the_same_experts(folder: Path) -> None:
    def engine(degree: int, stage: int, seed: int) -> Any:
        torch.manual_seed(seed)
        model = Model(frozen=False)
        optimizer = BlockwiseMomentum(list(model.parameters()))
        return build(AutoExpertLayout(degree, 2, stage), seed=seed, model=model, client_optimizer=optimizer, scheduler={})

    for stage in (0, 3):
        source, place = engine(2, stage, 1), str(folder / str(stage))
        train(source, 2)
        assert source.save_checkpoint(place) is True
        assert source.checkpoint_engine.last_save is not None, "DeepSpeed has saved by itself"
        states, losses = raw_states(source), train(source, 2)
        target = engine(2, stage, 3)
        train(target, 1)
        assert not equal_states(raw_states(target), states)
        target.load_checkpoint(place)
        assert equal_states(raw_states(target), states)
        assert train(target, 2) == losses
        with pytest.raises(MismatchError, match="cannot be cut"):
            engine(1, stage, 4).load_checkpoint(place)


@scenario(2)
def a_release_that_does_not_describe_its_experts_saves_by_itself(folder: Path) -> None:
    engine = build(AutoExpertLayout(2, 2, 1), seed=1)
    train(engine, 1)
    with Log() as log, unittest.mock.patch.dict(sys.modules, {"deepspeed.checkpoint.autoep_affine": None}):
        engine.save_checkpoint(str(folder))
    told = [line for line in log.lines if "AutoEP of a DeepSpeed release that does not describe its layout" in line]
    assert len(told) == (dist.get_rank() == 0), log.lines
    assert not list(folder.rglob("manifest.json"))
