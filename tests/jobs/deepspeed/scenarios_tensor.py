"""Tensor parallelism (AutoTP) beyond the matrix: models of transformers, weights the user sets, descriptions that are wrong.

A group of its own: AutoTP leaves global process groups behind in DeepSpeed.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm as dist

from tests.jobs.deepspeed.logs import Log
from tests.jobs.deepspeed.odd_optimizers import (
    OF_BLOCKS,
    BlockPreconditioned,
    BlockwiseMomentum,
    adafactor,
    equal_states,
    raw_states,
)
from tests.jobs.deepspeed.scenario_worker import scenario
from tests.jobs.deepspeed.tensor_jobs import build, scramble, train, truth_of
from tests.jobs.deepspeed.tensor_model import division
from tests.jobs.deepspeed.tensor_names import TensorLayout
from tests.jobs.deepspeed.truth import Truth, differences
from tests.support.extent import some
from unickpt.base.errors import MismatchError, UnsupportedLayoutError
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.cli.main import main
from unickpt.training.precision.policy import Policy

FUSED = "blocks.0.qkv_proj.weight"
META = "ds_autotp_universal_checkpoint_meta"


def _saved(folder: Path, layout: TensorLayout, **job: Any) -> Truth:
    engine = build(layout, seed=1, **job)
    train(engine, 3)
    assert engine.save_checkpoint(str(folder)) is True
    assert engine.checkpoint_engine.last_save is not None, "DeepSpeed has saved by itself"
    return truth_of(engine)


def _resumed(folder: Path, layout: TensorLayout, truth: Truth, **job: Any) -> Any:
    """Load into another layout and compare the state. Returns the engine."""
    engine = build(layout, seed=3, **job)
    engine.load_checkpoint(str(folder))
    assert differences(truth, truth_of(engine)) == []
    return engine


def _llama(tensor: int, *, seed: int, tied: bool) -> dict[str, Any]:
    """Return a job with transformers' Llama with grouped keys, divided as the plan of the model says."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=31, hidden_size=32, intermediate_size=11, num_hidden_layers=1, num_attention_heads=8,
        num_key_value_heads=4, tie_word_embeddings=tied, attention_bias=True, mlp_bias=True,
    ))  # fmt: skip
    return {"model": model, **({"tensor_parallel": {"autotp_size": tensor}} if tensor > 1 else {})}


@scenario(4, long=True)
def a_llama_of_transformers_resumes_under_the_plan_of_its_model(folder: Path) -> None:
    for tied in (False, True):
        place = folder / str(tied)
        truth = _saved(place, TensorLayout(2, 2, 1), **_llama(2, seed=1, tied=tied))
        _resumed(place, TensorLayout(4, 1, 2), truth, **_llama(4, seed=3, tied=tied))
        _resumed(place, TensorLayout(1, 4, 3), truth, **_llama(1, seed=5, tied=tied))


@scenario(4)
def every_part_is_stored_once_under_its_global_shape(folder: Path) -> None:
    _saved(folder, TensorLayout(2, 2, 1))
    saved = Checkpoint.open(folder / "global_step3")
    assert saved.manifest.notes == ()
    assert saved.manifest.writer.topology | {"tensor": 2, "data": 2, "world_size": 4} == saved.manifest.writer.topology
    assert saved.info(FUSED, "master").shape == (48, 24)
    for position, info in enumerate(saved.index.tensors):
        if info.kind != "object" and info.derived_from is None:
            assert sum(saved.index.box(row).numel for row in saved.index.rows_of(position)) == math.prod(info.shape), info
    if dist.get_rank() == 0:
        assert main(["verify", str(folder / "global_step3")]) == 0
        assert main(["inspect", str(folder / "global_step3"), "--tensor", FUSED]) == 0


@scenario(4)
def a_weight_that_the_user_sets_is_restored_where_it_lies_in_another_layout(folder: Path) -> None:
    engine = build(TensorLayout(2, 2, 1, "bf16"), seed=1)
    train(engine, 1)
    tensor = engine.get_tensor_parallel_rank()
    with torch.no_grad():
        dict(engine.module.named_parameters())[FUSED][3:5] += 1 + tensor
        dict(engine.module.named_parameters())["blocks.1.mlp.down.weight"][:, -1] = 7
    truth = truth_of(engine)
    assert engine.save_checkpoint(str(folder)) is True
    assert Checkpoint.open(folder / "global_step1").override_boxes
    for layout in some((TensorLayout(4, 1, 0, "bf16"), TensorLayout(1, 4, 3, "bf16"), TensorLayout(2, 2, 2, "bf16")), 2):
        found = build(layout, seed=3)
        found.load_checkpoint(str(folder))
        assert differences(truth, truth_of(found)) == []


@scenario(2)
def a_broken_description_on_one_rank_is_an_error_by_name_on_all(folder: Path) -> None:
    truth = _saved(folder / "whole", TensorLayout(2, 1, 1))
    engine = build(TensorLayout(2, 1, 1), seed=3)
    if dist.get_rank() == 1:
        meta = getattr(dict(engine.module.named_parameters())[FUSED], META)
        del meta["conversion"]["affine_map"]["ranks"][1]["pieces"][0]
    begin = time.monotonic()
    with pytest.raises(
        UnsupportedLayoutError, match=f"{FUSED} on tensor-parallel rank 1 of 2: .* does not describe its layout"
    ):
        engine.load_checkpoint(str(folder / "whole"))
    with Log() as log:
        engine.save_checkpoint(str(folder / "broken"))
    assert time.monotonic() - begin < 10
    assert any(FUSED in line and "DeepSpeed's own" in line for line in log.lines) == (dist.get_rank() == 0), log.lines
    assert not list((folder / "broken").rglob("manifest.json"))
    _resumed(folder / "whole", TensorLayout(1, 2, 2), truth)


@scenario(2)
def replicas_that_drift_are_named(folder: Path) -> None:
    """DeepSpeed reduces the gradient of a parameter that acts on divided activations only where the plan asks for it."""
    specs = [spec for spec in division("whole") if not spec.get("grad_allreduce")]
    plan = {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": specs}}
    engine = build(TensorLayout(2, 1, 1, "fp32", "whole"), seed=1, tensor_parallel=plan)
    train(engine, 3)
    assert engine.save_checkpoint(str(folder)) is True
    (note,) = Checkpoint.open(folder / "global_step3").manifest.notes
    expected = "differs between rank 1 and rank 0: parameter blocks.0.query_norm, parameter blocks.1.query_norm"
    assert note.split(". ")[0] == expected, note


@scenario(4)
def tensor_parallel_peers_share_their_generators_in_every_layout(folder: Path) -> None:
    engine = build(TensorLayout(2, 2, 1), seed=1)
    torch.manual_seed(100 + dist.get_rank() // 2)
    engine.save_checkpoint(str(folder))
    cases = (TensorLayout(2, 2, 1), [0, 0, 1, 1]), (TensorLayout(4, 1, 1), [0] * 4), (TensorLayout(1, 4, 1), [0, 1])
    for layout, peers in cases:
        target = build(layout, seed=3)
        target.load_checkpoint(str(folder))
        states: list[Any] = [None] * 4
        torch.distributed.all_gather_object(states, torch.get_rng_state())
        for rank, peer in enumerate(peers):
            torch.manual_seed(100 + peer)
            assert torch.equal(torch.get_rng_state(), states[rank]), (layout.name, rank)
        assert layout.tensor > 1 or len({str(state.tolist()) for state in states}) == 4


@scenario(2)
def custom_load_fn_gets_the_part_of_the_rank(folder: Path) -> None:
    truth = _saved(folder, TensorLayout(1, 2, 1))

    def load(src: dict[str, torch.Tensor], dst: torch.nn.Module) -> None:
        dst.load_state_dict(src, strict=False)

    engine = build(TensorLayout(2, 1, 1), seed=3)
    engine.load_checkpoint(str(folder), custom_load_fn=load)
    assert differences(truth, truth_of(engine)) == []


@scenario(4)
def a_checkpoint_of_deepspeed_itself_resumes_under_another_tensor_parallelism(folder: Path) -> None:
    source = build(TensorLayout(2, 2, 1), seed=1, unickpt={"enabled": False})
    train(source, 3)
    source.save_checkpoint(str(folder / "native"))
    truth = truth_of(source)
    if dist.get_rank() == 0:
        assert main(["convert", str(folder / "native"), str(folder / "converted")]) == 0
    dist.barrier()
    for layout in (TensorLayout(4, 1, 1), TensorLayout(1, 4, 2)):
        target = build(layout, seed=3)
        scramble(target)
        target.load_checkpoint(str(folder / "converted"))
        assert differences(truth, truth_of(target)) == []


@scenario(4)
def ranks_that_share_layers_have_a_precision_plan_together_or_not_at_all(folder: Path) -> None:
    def losses(ranks: tuple[int, ...]) -> list[float]:
        path = folder / f"plan{dist.get_rank()}.json"
        path.write_text(json.dumps(Policy({"blocks.0": "bf16"}, ranks=ranks, world=4).as_json()))
        section = {"enabled": True, "async_save": False, **({"precision": str(path)} if ranks else {})}
        return train(build(TensorLayout(2, 2, 1), seed=1, unickpt=section), 2)

    expected = losses(())
    with Log() as log:
        assert losses((1,)) == expected
    told = any("not all ranks that compute the same layers in parts" in line for line in log.lines)
    assert told == (dist.get_rank() == 1), log.lines
    assert losses((0, 1)) != expected


@scenario(2)
def optimizer_states_that_cannot_be_cut_go_to_the_same_parts(folder: Path) -> None:
    """States of blocks, and Adafactor's factors of each rank's part of a matrix.

    Under ZeRO a block has elements of several parameters, so the ranks' copies of a whole parameter differ after a step. A load
    gives them the values of the first rank, so only the states of blocks are compared there.
    """
    for make, stage in some(((BlockPreconditioned, 1), (adafactor, 0), (BlockwiseMomentum, 0), (BlockwiseMomentum, 3)), 2):
        place, same = folder / f"{make.__name__}{stage}", TensorLayout(2, 1, stage)
        source = build(same, seed=1, make=make, scheduler={})
        train(source, 2)
        assert source.save_checkpoint(str(place)) is True
        assert source.checkpoint_engine.last_save is not None, "DeepSpeed has saved by itself"
        states, losses = raw_states(source, OF_BLOCKS if stage else ()), train(source, 2)
        target = build(same, seed=3, make=make, scheduler={})
        train(target, 1)
        assert not equal_states(raw_states(target, OF_BLOCKS if stage else ()), states)
        target.load_checkpoint(str(place))
        assert equal_states(raw_states(target, OF_BLOCKS if stage else ()), states)
        assert stage or train(target, 2) == losses
        for other in (TensorLayout(1, 2, stage), TensorLayout(2, 1, stage, vocabulary="columns")):
            refused = build(other, seed=4, make=make, scheduler={})
            with pytest.raises(MismatchError, match=r"cannot be cut.*tensor-parallel ranks divided the parameters"):
                refused.load_checkpoint(str(place))
            refused.load_checkpoint(str(place), load_optimizer_states=False)
