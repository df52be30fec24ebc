"""Pipelines beyond the matrix: values of one stage, models that do not fit, frozen parameters, saves in the background."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.pipe import LayerSpec, TiedLayerSpec

from tests.jobs.deepspeed.pipeline_jobs import build, scramble, train, truth_of
from tests.jobs.deepspeed.pipeline_names import PipelineLayout
from tests.jobs.deepspeed.scenario_worker import scenario
from tests.jobs.deepspeed.truth import differences
from unickpt.base.errors import MismatchError
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.save import shutdown
from unickpt.cli.main import main

TWO_STAGES = PipelineLayout(2, 1, 1)
ONE_STAGE = PipelineLayout(1, 2, 1)


class FrozenBias(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.bias.requires_grad_(False)


def _both_use_the_bias(kind: type, *arguments: int) -> list[Any]:
    return [TiedLayerSpec("e", kind, *arguments), torch.tanh, torch.tanh, TiedLayerSpec("e", kind, *arguments)]


def _fit(engine: Any, steps: int) -> list[float]:
    data = [(torch.ones(2, 4), torch.zeros(2, 4))] * (12 * steps)
    engine.module.loss_fn = torch.nn.functional.mse_loss
    return [float(engine.train_batch(iter(data))) for _ in range(steps)]


def _biases(engine: Any) -> torch.Tensor:
    return engine.module.tied_modules["e"].bias.detach().clone()  # type: ignore[no-any-return]


@scenario(2)
def values_that_each_stage_trains_by_itself_are_not_merged(folder: Path) -> None:
    layers = _both_use_the_bias(torch.nn.Linear, 4, 4)
    source = build(TWO_STAGES, seed=1, layers=layers)
    _fit(source, 2)
    assert source.save_checkpoint(str(folder)) is True
    saved = Checkpoint.open(folder / "global_step2")
    first, second = (saved.read_tensor(f"tied_modules.{name}.bias", "weight") for name in ("e", "e@3"))
    assert not torch.equal(first, second)
    assert torch.equal(_biases(source), second if source.grid.stage_id else first)
    again = build(TWO_STAGES, seed=5, layers=layers)
    again.load_checkpoint(str(folder))
    assert torch.equal(_biases(again), _biases(source))
    assert _fit(again, 1) == _fit(source, 1)
    merged = build(ONE_STAGE, seed=9, layers=layers)
    before = _biases(merged)
    with pytest.raises(MismatchError, match=r"in the checkpoint but not in this job \(1\): tied_modules.e@3.bias"):
        merged.load_checkpoint(str(folder))
    assert torch.equal(_biases(merged), before)
    merged.load_checkpoint(str(folder), load_module_strict=False)
    assert torch.equal(_biases(merged), first)


@scenario(2)
def frozen_values_that_differ_between_stages_are_not_merged(folder: Path) -> None:
    layers = _both_use_the_bias(FrozenBias)
    source = build(TWO_STAGES, seed=1, layers=layers)
    _fit(source, 1)
    assert source.save_checkpoint(str(folder)) is True
    again = build(TWO_STAGES, seed=5, layers=layers)
    again.load_checkpoint(str(folder))
    assert torch.equal(_biases(again), _biases(source))
    with pytest.raises(MismatchError, match=r"in the checkpoint but not in this job \(1\): tied_modules.e@3.bias"):
        build(ONE_STAGE, seed=9, layers=layers).load_checkpoint(str(folder))


@scenario(2)
def a_tensor_that_only_another_stage_lacks_is_an_error_on_every_rank(folder: Path) -> None:
    layers = [LayerSpec(torch.nn.Linear, 4, 4) for _ in range(4)]
    source = build(TWO_STAGES, seed=1, layers=layers)
    _fit(source, 1)
    assert source.save_checkpoint(str(folder)) is True
    for other, message in (
        ([*layers[:3], torch.tanh], r"in the checkpoint but not in this job \(2\): 3.bias, 3.weight"),
        ([*layers, LayerSpec(torch.nn.Linear, 4, 4)], r"in this job but not in the checkpoint \(2\): 4.weight, 4.bias"),
        ([*layers[:3], LayerSpec(torch.nn.Linear, 4, 4, bias=False)], r"not in this job \(1\): 3.bias"),
        ([*layers[:3], LayerSpec(torch.nn.Linear, 4, 5)], r"of another shape \(2\): 3.weight: \(4, 4\) in the checkpoint"),
    ):
        target = build(TWO_STAGES, seed=3, layers=other)
        before = {name: p.detach().clone() for name, p in target.module.named_parameters()}
        with pytest.raises(MismatchError, match=message):
            target.load_checkpoint(str(folder))
        assert all(torch.equal(p, before[name]) for name, p in target.module.named_parameters())


@scenario(2)
def frozen_parameters_of_every_stage_are_left_out_on_request(folder: Path) -> None:
    source = build(TWO_STAGES, seed=1)
    train(source, 1)
    assert source.save_checkpoint(str(folder), exclude_frozen_parameters=True) is True
    names = ("tied_modules.embed.frozen", "tied_modules.embed@6.frozen")
    assert Checkpoint.open(folder / "global_step1").manifest.excluded == names
    target = build(TWO_STAGES, seed=3)
    scramble(target)
    with pytest.raises(MismatchError, match=r"exclude_frozen_parameters=True left out 2 of them"):
        target.load_checkpoint(str(folder))
    assert target.load_checkpoint(str(folder), load_module_strict=False)[0] is not None
    assert all((p == -7).all() for p in target.module.parameters() if not p.requires_grad)


@scenario(2)
def a_pipeline_is_saved_in_the_background_and_weights_load_alone(folder: Path) -> None:
    source = build(TWO_STAGES, seed=1, unickpt={"enabled": True, "async_save": True})
    train(source, 1)
    truth = truth_of(source)
    assert source.save_checkpoint(str(folder)) is True
    train(source, 1)
    shutdown.finish_all()
    assert source.checkpoint_engine.last_save.committed
    target = build(ONE_STAGE, seed=3, unickpt={"enabled": True})
    target.load_checkpoint(str(folder), load_module_only=True)
    found = {f"weight/{name}": p.detach() for name, p in target.module.named_parameters()}
    assert differences({key: truth[key] for key in found}, found) == []
    assert target.global_steps == 0


DIALECT = """
[dialect]
name = "megatron-core"
other = "huggingface"
families = ["chain"]
stack = ["layer"]

[sizes]
layer = 4

[[rules]]
here = "decoder.layers.{layer}.weight [out in]"
there = "{layer}.weight [out in]"

[[rules]]
here = "decoder.layers.{layer}.bias [out]"
there = "{layer}.bias [out]"
"""


@scenario(2)
def a_checkpoint_of_another_framework_is_translated_for_all_stages(folder: Path) -> None:
    """Each stage needs some of the names. The tensors of the other stage are not in excess."""
    layers = [LayerSpec(torch.nn.Linear, 4, 4) for _ in range(4)]
    source = build(TWO_STAGES, seed=1, layers=layers)
    _fit(source, 2)
    assert source.save_checkpoint(str(folder), tag="own") is True
    if dist.get_rank() == 0:
        (folder / "chain.toml").write_text(DIALECT)
        assert main(["edit", str(folder / "own"), str(folder / "other"), "--rules", str(folder / "chain.toml")]) == 0
        assert "decoder.layers.3.weight" in {info.name for info in Checkpoint.open(folder / "other").index.tensors}
    dist.barrier()
    unickpt = {"enabled": True, "load_dialect": str(folder / "chain.toml")}
    target = build(TWO_STAGES, seed=3, layers=layers, unickpt=unickpt)
    target.load_checkpoint(str(folder), tag="other")
    tensors = [{key: value for key, value in truth_of(each).items() if torch.is_tensor(value)} for each in (source, target)]
    found = differences(tensors[0], tensors[1])
    assert found == [], found
    assert {f"{kind}/3.weight" for kind in ("weight", "exp_avg", "exp_avg_sq")} <= tensors[0].keys(), tensors[0].keys()
