"""Predicted errors, from handmade checkpoints, and the command that plans with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import unickpt
from unickpt.base.errors import ConfigError, FormatError, MismatchError
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.dtypes import name_of
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.format.manifest import Writer
from unickpt.cli.main import main
from unickpt.transform.convert.pipeline import Portion, Source, SourcePart, convert
from unickpt.transform.quantise.inputs import InputStatistics, read_inputs
from unickpt.transform.quantise.rounding import restored, rounded
from unickpt.transform.quantise.scheme import Scheme

SHAPES = {
    "self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64), "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (96, 64), "mlp.up_proj": (96, 64), "mlp.down_proj": (64, 96),
}  # fmt: skip
LAYERS = 3
UNITS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
CHOICES = ("4/32", "8/channel")
CONFIG = {
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": LAYERS,
}


def tensors(moments: bool) -> dict[tuple[str, str], torch.Tensor]:
    """Weights of unlike scale, and moments."""
    made = torch.Generator().manual_seed(3)
    found = {
        ("model.embed_tokens.weight", "weight"): torch.randn(20, 64, generator=made),
        ("lm_head.weight", "weight"): torch.randn(20, 64, generator=made),
    }
    for layer in range(LAYERS):
        for name, shape in SHAPES.items():
            key = f"model.layers.{layer}.{name}.weight"
            found[key, "weight"] = torch.randn(shape, generator=made) * (0.02 + layer)
            if moments:
                found[key, "exp_avg_sq"] = torch.rand(shape, generator=made) / (1 + 100 * layer)
        found[f"model.layers.{layer}.input_layernorm.weight", "weight"] = torch.ones(64)
    return {key: value.bfloat16() if key[1] == "weight" else value for key, value in found.items()}


def checkpoint(folder: Path, moments: bool = True) -> dict[tuple[str, str], torch.Tensor]:
    """Write a checkpoint under the names of transformers, with its configuration."""
    made = tensors(moments)
    parts = []
    for (name, state), value in made.items():
        info = TensorInfo(
            name, state, name_of(value.dtype), tuple(value.shape), "parameter" if state == "weight" else "optimizer"
        )
        parts.append(SourcePart(info, Box.whole(info.shape), lambda box, value=value: value[box.slices()].reshape(-1)))  # type: ignore[misc]
    convert(Source("test", [Portion("all", parts, [])], Writer("test", "", "", "", "huggingface", {})), folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return made


def planned(folder: Path, memory: int | list[int], **more: Any) -> dict[str, Any]:
    return unickpt.plan_bits(folder, memory, config=folder, **{"schemes": ("4/32", "8/channel", "16"), **more})


def change(value: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    return (restored(*rounded(value, scheme, torch.bfloat16)).double() - value.double()).square()


def test_errors_are_those_of_the_indicator(tmp_path: Path) -> None:
    made = checkpoint(tmp_path / "ck")
    name = "model.layers.1.mlp.down_proj"
    weight, moment = made[f"{name}.weight", "weight"], made[f"{name}.weight", "exp_avg_sq"]
    linear = torch.nn.Linear(96, 64)
    inputs = torch.randn(50, 96, generator=torch.Generator().manual_seed(1)) * torch.linspace(0.1, 3, 96) + 0.5
    model = torch.nn.ModuleDict({"x": linear})
    with InputStatistics(model) as statistics:
        linear(inputs[:20])
        linear(inputs[20:].view(3, 10, 96))
    linear(inputs)  # not recorded any more
    recorded = statistics.statistics()["x"]
    assert torch.allclose(recorded.mean_square, inputs.square().mean(0))
    assert recorded.variance == pytest.approx(float(inputs.var(unbiased=False)), rel=1e-4)

    small = planned(tmp_path / "ck", 500_000, indicator="second-moment", schemes=["4/32"])
    (found,) = (each for each in small["units"] if each["unit"] == name)
    squared = change(weight, Scheme(4, 32))
    assert found["error"] == pytest.approx(float((squared * moment).sum() / 2))
    assert found["relative_error"] == pytest.approx(float(squared.sum().sqrt() / weight.double().norm()))
    assert (found["bits"], found["group"], found["bytes"]) == (4, 32, 64 * 96 // 2 + 64 * 3 * 2)
    (found,) = (
        each
        for each in planned(tmp_path / "ck", 500_000, indicator="weight-error", schemes=["4/32"])["units"]
        if each["unit"] == name
    )
    assert found["error"] == pytest.approx(float(squared.sum()))
    _, scales = rounded(weight, Scheme(8), torch.bfloat16)
    (found,) = (
        each
        for each in planned(tmp_path / "ck", 500_000, indicator="variance", schemes=["8/channel"])["units"]
        if each["unit"] == name
    )
    assert found["error"] == pytest.approx(float(scales.double().square().sum() * 96 / 4))


def test_statistics_of_inputs_weigh_the_errors(tmp_path: Path) -> None:
    made = checkpoint(tmp_path / "ck")
    linears = {name.replace(".", "_"): torch.nn.Linear(shape[1], shape[0]) for name, shape in SHAPES.items()}
    model = torch.nn.Module()
    model.model = torch.nn.Module()
    model.model.layers = torch.nn.ModuleList(torch.nn.ModuleDict() for _ in range(LAYERS))
    for layer in model.model.layers:
        layer.self_attn, layer.mlp = torch.nn.Module(), torch.nn.Module()
        for name, linear in zip(SHAPES, linears.values(), strict=True):
            parent, _, last = name.partition(".")
            setattr(getattr(layer, parent), last, linear.__class__(linear.in_features, linear.out_features))
    inputs = {
        width: torch.randn(40, width, generator=torch.Generator().manual_seed(2)) * torch.linspace(0, 2, width)
        for width in (64, 96)
    }
    with InputStatistics(model) as statistics:
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module(inputs[module.in_features])
    statistics.save(tmp_path / "inputs.safetensors")
    plan = planned(tmp_path / "ck", 500_000, indicator="weight-error", schemes=["4/32"], inputs=tmp_path / "inputs.safetensors")
    assert plan["inputs"]
    name = "model.layers.2.mlp.down_proj"
    (found,) = (each for each in plan["units"] if each["unit"] == name)
    expected = (change(made[f"{name}.weight", "weight"], Scheme(4, 32)) * inputs[96].square().mean(0)).sum()
    assert found["error"] == pytest.approx(float(expected), rel=1e-5)
    (tmp_path / "other").write_text("x")
    with pytest.raises(FormatError):
        read_inputs(tmp_path / "other")


def test_a_plan_fits_is_better_than_uniform_and_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(tmp_path / "ck")
    low, high = (planned(tmp_path / "ck", 10**9, schemes=[scheme]) for scheme in ("4/32", "16"))
    middle = (low["total_bytes"] + high["total_bytes"]) // 2
    arguments = ["plan", "bits", str(tmp_path / "ck"), "--memory", str(middle / 1e9), "--choices", "4/32,8/channel,16"]
    assert main([*arguments, "--out", str(tmp_path / "plan.json"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((tmp_path / "plan.json").read_text())
    assert found["indicator"] == "second-moment"
    assert found["exact"]
    assert low["total_bytes"] < found["total_bytes"] <= middle
    assert high["error"] == 0 < found["error"] < low["error"]
    assert found["error"] == pytest.approx(sum(each["error"] for each in found["layers"]))
    assert len({(each["bits"], each["group"]) for each in found["units"]}) > 1
    assert (
        main(["export", str(tmp_path / "ck"), str(tmp_path / "out"), "--to", "vllm", "--bits", str(tmp_path / "plan.json")])
        == 0
    )
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["total_bytes"] == found["total_bytes"]
    assert main(arguments) == 0
    assert "predicted error" in capsys.readouterr().out


def test_devices_of_unlike_memory_get_layers_and_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(tmp_path / "ck")
    assert main(["plan", "bits", str(tmp_path / "ck"), "--device", "small=0.00004", "--device", "large=0.00016"]) == 0
    out = capsys.readouterr().out
    assert "vLLM: VLLM_PP_LAYER_PARTITION=1,2" in out
    assert main(["plan", "bits", str(tmp_path / "ck"), "--device", "a=0.00001", "--device", "b=0.00001"]) == 1
    assert "no plan: memory binds" in capsys.readouterr().out
    assert main(["plan", "bits", str(tmp_path / "ck")]) == 2


def test_the_cache_takes_memory_from_the_weights(tmp_path: Path) -> None:
    checkpoint(tmp_path / "ck")
    without, held = (planned(tmp_path / "ck", 10**9, schemes=["16"], tokens=tokens)["total_bytes"] for tokens in (0, 100))
    assert held - without == LAYERS * 100 * 2 * 2 * 16 * 2  # keys and values of 2 heads of 16, in bfloat16


def test_what_an_indicator_needs_is_told(tmp_path: Path) -> None:
    checkpoint(tmp_path / "ck", moments=False)
    with pytest.raises(MismatchError, match="has no exp_avg_sq"):
        planned(tmp_path / "ck", 10**9, indicator="second-moment")
    assert planned(tmp_path / "ck", 10**9)["indicator"] == "weight-error"
    with pytest.raises(MismatchError, match="no plan"):
        planned(tmp_path / "ck", 1000)


def test_a_plan_takes_the_measured_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(tmp_path / "ck")
    errors = {f"model.layers.{layer}.{unit}": {"4/32": 1.0, "8/channel": 0.5} for layer in range(LAYERS) for unit in UNITS}
    chosen = "model.layers.1.self_attn.o_proj"
    errors[chosen]["4/32"] = 3.0
    file = tmp_path / "errors.json"
    file.write_text(json.dumps({"schema": 1, "errors": errors}))
    low = planned(tmp_path / "ck", 10**9, schemes=["4/32"], errors=file)
    assert low["indicator"] == "divergence"
    assert low["error"] == pytest.approx(4 * LAYERS + 2)
    (own,) = (each["bytes"] for each in low["units"] if each["unit"] == chosen)
    memory = low["total_bytes"] + Scheme.parse("8/channel").size_bytes((64, 64), 2) - own
    found = planned(tmp_path / "ck", memory, schemes=CHOICES, errors=file)
    assert [each["unit"] for each in found["units"] if each["bits"] == 8] == [chosen]
    command = ["plan", "bits", str(tmp_path / "ck"), "--memory", "1", "--choices", ",".join(CHOICES), "--errors", str(file)]
    assert main(command) == 0
    assert "(divergence)" in capsys.readouterr().out


def test_missing_or_doubtful_errors_are_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path / "ck")
    file = tmp_path / "errors.json"
    file.write_text(json.dumps({"schema": 1, "errors": {}}))
    with pytest.raises(MismatchError, match="has no error of"):
        planned(tmp_path / "ck", 10**9, schemes=CHOICES, errors=file)
    assert planned(tmp_path / "ck", 10**9, schemes=["16"], errors=file)["error"] == 0
    with pytest.raises(ConfigError):
        planned(tmp_path / "ck", 10**9, indicator="variance", errors=file)
    for text in ("{}", '{"schema": 1, "errors": {"x": {"4": null}}}', '{"schema": 1, "errors": {"x": 3}}'):
        file.write_text(text)
        with pytest.raises(FormatError):
            planned(tmp_path / "ck", 10**9, schemes=["16"], errors=file)
