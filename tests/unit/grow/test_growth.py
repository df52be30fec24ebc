"""Growth: the logits of the grown model are those of the source, in every family and dimension."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import unickpt
from tests.support.grown_models import (
    DIMENSIONS,
    EPSILON,
    FAMILIES,
    WIDTH,
    changes_of,
    difference,
    grown,
    model_of_table,
    source,
    table_of_model,
    value_of,
)  # fmt: skip
from unickpt.base.errors import LanguageError
from unickpt.checkpoint.format.boxes import Box, cut
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.cli.main import main
from unickpt.transform.grow.refusals import NotLosslessError
from unickpt.transform.grow.step import Grow

EXACT = 1e-6  # norms of transformers compute in float32, even in a float64 model
F32, F64 = torch.float32, torch.float64


@pytest.mark.parametrize("dimension", DIMENSIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_do_not_change(family: str, dimension: str) -> None:
    changes = changes_of(family, dimension)
    for tied in (False, True):
        model = source(family, tied=tied)
        larger = grown(model, changes)
        assert larger.num_parameters() > model.num_parameters()
        assert difference(model, larger) < EXACT


@pytest.mark.parametrize("family", FAMILIES)
def test_grown_twice_in_float32(family: str) -> None:
    model = source(family, dtype=F32)
    once = grown(model, changes_of(family, "all"), (0, 2))
    more = {"hidden_size": 96, "num_attention_heads": 12, "num_hidden_layers": 4}
    assert difference(model, grown(once, more, (0, 2, 3), seed=1)) < EXACT


def test_wrong_epsilon_shows() -> None:
    model = source("llama")
    table, config = Grow(WIDTH, config=model.config.to_dict()).result(table_of_model(model))
    assert config["rms_norm_eps"] == pytest.approx(EPSILON * 2 / 3)
    assert difference(model, model_of_table(table, {**config, "rms_norm_eps": EPSILON})) > 1e-4


def test_free_elements_are_trained() -> None:
    """New elements that read are random; their blocks do not depend on how they are read, and another seed gives others."""
    model = source("llama")
    tables = [Grow(WIDTH, None, seed, model.config.to_dict()).apply(table_of_model(model)) for seed in (0, 0, 1)]
    name = "model.layers.1.mlp.gate_proj.weight"
    same, again, other = (value_of(table, name) for table in tables)
    assert torch.equal(same, again)
    assert not torch.equal(same, other)
    assert same[:, 32:].std() == pytest.approx(0.02, rel=0.2)
    read = tables[0].entries[name, "weight"].read
    boxes = cut(Box((3, 5), (40, 40)), 77)
    parts = torch.cat([read(box) for box in boxes])
    assert torch.equal(parts, same[3:43, 5:45].reshape(-1))


def states_of(model: Any) -> dict[str, dict[str, torch.Tensor]]:
    """First and second moments that are powers of the parameters, as if a gradient were the parameter."""
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {"exp_avg": values, "exp_avg_sq": {name: value**2 for name, value in values.items()}}


@pytest.mark.parametrize("zeros", [False, True])
def test_moments(zeros: bool) -> None:
    model = source("llama")
    before = table_of_model(model, **states_of(model))
    changes = {**WIDTH, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 8}
    after = Grow(changes, (0, 2), config=model.config.to_dict(), zero_second_moments=zeros).apply(before)
    norm, scale = "model.norm.weight", (32 / 48) ** 0.5
    old = value_of(before, norm)
    torch.testing.assert_close(value_of(after, norm)[:32], old * scale)
    torch.testing.assert_close(value_of(after, norm, "exp_avg")[:32], old / scale)
    torch.testing.assert_close(value_of(after, norm, "exp_avg_sq")[:32], old**2 / scale**2)
    mean = (old**2).mean() / scale**2
    torch.testing.assert_close(value_of(after, norm, "exp_avg_sq")[32:], (0 * mean if zeros else mean).expand(16))
    key = "model.layers.{}.self_attn.k_proj.weight"
    copies, single = value_of(after, key.format(0), "exp_avg"), value_of(before, key.format(0), "exp_avg")
    heads = copies.view(8, 8, 48)
    torch.testing.assert_close(heads[0, :, :32], single[:8] / 2)  # two queries of one key are now queries of two
    torch.testing.assert_close(heads[1], heads[0])
    squares = value_of(after, key.format(2), "exp_avg_sq").view(8, 8, 48)
    torch.testing.assert_close(squares[3, :, :32], value_of(before, key.format(1), "exp_avg_sq")[8:] / 4)
    new = value_of(after, key.format(1), "exp_avg_sq")
    expected = 0.0 if zeros else float(value_of(before, key.format(0), "exp_avg_sq").mean())
    torch.testing.assert_close(new, torch.full_like(new, expected))
    assert not value_of(after, key.format(1), "exp_avg").any()


@pytest.mark.parametrize(
    ("family", "changes", "kinds"),
    [
        ("llama", {"hidden_size": 16}, ["smaller"]),
        ("llama", {"head_dim": 16}, ["head-dim"]),
        ("llama", {"vocab_size": 128}, ["vocabulary"]),
        ("llama", {"num_attention_heads": 8, "num_key_value_heads": 3}, ["divide"]),
        ("llama", {"num_attention_heads": 6, "num_key_value_heads": 6, "num_hidden_layers": 1}, ["smaller", "place"]),
        ("gpt2", WIDTH, ["square-heads"]),
        ("mixtral", {"num_local_experts": 8}, ["experts"]),
        ("deepseek_v3", {"kv_lora_rank": 32}, ["latent-rank"]),
        ("qwen3", {"colour": 3}, ["unknown-size"]),
    ],
)
def test_refusals(family: str, changes: dict[str, int], kinds: list[str]) -> None:
    model = source(family)
    with pytest.raises(NotLosslessError) as error:
        grown(model, changes)
    assert sorted({each.kind for each in error.value.refusals}) == sorted(kinds)
    assert all(each.text() in str(error.value) for each in error.value.refusals)


def test_refusal_of_fewer_keys() -> None:
    """Four heads with keys of their own cannot share fewer keys, but two keys of two queries can become four."""
    model = source("llama", num_key_value_heads=4)
    with pytest.raises(NotLosslessError) as error:
        grown(model, {"num_attention_heads": 8, "num_key_value_heads": 2})
    assert {each.kind for each in error.value.refusals} == {"smaller", "kv-heads"}


def test_refusal_of_families() -> None:
    table = table_of_model(source("llama"))
    table = replace(table, writer=replace(table.writer, model={}))
    for family, error in (("bert", NotLosslessError), ("gemma", LanguageError)):
        with pytest.raises(error):
            Grow(WIDTH, config={"model_type": family}).apply(table)
    with pytest.raises(NotLosslessError, match="depend on their number"):
        grown(source("gpt2", scale_attn_by_inverse_layer_idx=True), {"num_hidden_layers": 3})


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_command(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder of transformers weights becomes a checkpoint and a folder that transformers loads."""
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM

    model = source(family, dtype=F32)
    model.save_pretrained(tmp_path / "small")
    command = ["grow", str(tmp_path / "small"), str(tmp_path / "large"), "--json"]
    assert main([*command, "--set", "hidden_size=48", "num_hidden_layers=3", "--place", "0,2", "--schedule", "100"]) == 0
    schedule = json.loads((tmp_path / "large" / "schedule.json").read_text())["deepspeed"]["scheduler"]["params"]
    assert schedule == {"total_num_steps": 50, "warmup_num_steps": 2, "cos_min_ratio": 0.1}
    assert json.loads(capsys.readouterr().out)["config"]["hidden_size"] == 48
    facts = Checkpoint.open(tmp_path / "large").manifest.writer.model["facts"]
    assert (facts["layers"], facts["heads"], facts["head_dim"]) == (3, 4, 8)
    assert main(["export", str(tmp_path / "large"), str(tmp_path / "exported")]) == 0
    larger = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", attn_implementation="eager")
    assert larger.config.num_hidden_layers == 3
    assert difference(model, larger) < EXACT
    capsys.readouterr()
    assert main([*command[:2], str(tmp_path / "none"), "--json", "--set", "head_dim=16"]) == 2
    assert [each["kind"] for each in json.loads(capsys.readouterr().out)["refused"]] == ["head-dim"]
    assert not (tmp_path / "none").exists()


def test_functions_and_steps_make_the_same(tmp_path: Path) -> None:
    """Growth of a checkpoint by the function and by a step of edit: equal tensors and configurations."""
    model = source("llama", dtype=F32)
    model.save_pretrained(tmp_path / "small")
    first = unickpt.grow_checkpoint(tmp_path / "small", tmp_path / "first", WIDTH)
    second = unickpt.grow_checkpoint(first.directory, tmp_path / "second", {"num_hidden_layers": 3}, place=(0, 1))
    assert (
        main(["edit", str(first.directory), str(tmp_path / "edited"), "--grow", "num_hidden_layers=3", "--no-optimizer"]) == 0
    )
    config = json.loads((tmp_path / "edited" / "model" / "config.json").read_text())
    assert config == second.config
    assert (config["hidden_size"], config["num_hidden_layers"], config["head_dim"]) == (48, 3, 8)
    one, other = (Checkpoint.open(tmp_path / name) for name in ("second", "edited"))
    assert one.ids.keys() == other.ids.keys()
    assert all(torch.equal(one.read_tensor(*info.key), other.read_tensor(*info.key)) for info in one.index.tensors)
