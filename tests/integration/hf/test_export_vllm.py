"""Models rounded to few bits load in transformers with compressed-tensors, and have the weights of its own rounding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import unickpt
from tests.support.adapters import llama, saved
from unickpt.cli.main import main
from unickpt.transform.quantise.modules import units_of
from unickpt.transform.quantise.rounding import restored, rounded
from unickpt.transform.quantise.scheme import Scheme

pytestmark = [pytest.mark.hf, pytest.mark.timeout(600)]

BITS = ["4/32", "4/channel", "8/channel", "8/8", "mixed"]


def model_folder(folder: Path, dtype: torch.dtype) -> Any:
    """Save a Llama and its configuration. Return the model."""
    model = llama(dtype)
    saved(model, folder / "global_step5")
    (folder / "latest").write_text("global_step5")
    model.config.save_pretrained(str(folder))
    return model


def bits_of(text: str, model: Any, folder: Path) -> str:
    """Return ``--bits``; for ``mixed`` a plan with several schemes."""
    if text != "mixed":
        return text
    units = units_of((name, tuple(value.shape)) for name, value in model.named_parameters())
    schemes = [(4, 32), (8, None), (16, None), (4, None)]
    entries = [{"unit": unit.name, "bits": schemes[at % 4][0], "group": schemes[at % 4][1]} for at, unit in enumerate(units)]
    (folder / "plan.json").write_text(json.dumps({"schema": 1, "units": entries}))
    return str(folder / "plan.json")


def expected(weight: torch.Tensor, scheme: Any) -> torch.Tensor:
    """Return what compressed-tensors makes of a weight: rounded by its functions, and back in the dtype of the weight."""
    from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    args = scheme.weights
    grouped = weight.view(weight.shape[0], -1, args.group_size or weight.shape[1])
    scales, zeros = calculate_qparams(grouped.amin(2), grouped.amax(2), args)
    levels = quantize(weight.float(), scales.float(), zeros.float(), args, dtype=torch.int8)
    found: torch.Tensor = dequantize(levels, scales, zeros, args)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_transformers_computes_with_the_rounded_weights(
    bits: str, dtype: torch.dtype, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationConfig
    from transformers import AutoModelForCausalLM

    model = model_folder(tmp_path / "run", dtype)
    arguments = ["export", str(tmp_path / "run"), str(tmp_path / "out"), "--to", "vllm", "--shard-gigabytes", "1e-4"]
    assert main([*arguments, "--bits", bits_of(bits, model, tmp_path), "--dtype", str(dtype).removeprefix("torch.")]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    groups = QuantizationConfig.model_validate(config).config_groups.values()

    found, message = AutoModelForCausalLM.from_pretrained(str(tmp_path / "out"), output_loading_info=True, dtype=dtype)
    assert not any(message.values()), message
    ids = torch.arange(12)[None]
    with torch.no_grad():
        logits = found(ids).logits  # compressed-tensors decompresses the weights in the first call
    rounded = 0
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        scheme = next(
            (g for g in groups if name not in config["ignore"] and (g.targets == ["Linear"] or name in g.targets)), None
        )
        if scheme is not None:
            module.weight.data = expected(module.weight.data, scheme)
            rounded += 1
        assert torch.equal(found.get_submodule(name).weight, module.weight), name
    assert rounded == (14 if bits != "mixed" else 14 - 2 * 2)
    if dtype == torch.float32:  # in bfloat16, this model's rotary frequencies are rounded, too
        with torch.no_grad():
            assert torch.equal(logits, model(ids).logits)


def test_the_default_is_sixteen_bits_in_bfloat16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = model_folder(tmp_path / "run", torch.float32)
    unickpt.export_checkpoint(tmp_path / "run" / "global_step5", tmp_path / "out", to="vllm", config=tmp_path / "run")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    from safetensors.torch import load_file

    weights = load_file(str(tmp_path / "out" / "model.safetensors"))
    assert all(torch.equal(weights[name], value.bfloat16()) for name, value in model.state_dict().items() if name in weights)


def test_the_python_function_writes_the_files_of_the_command(tmp_path: Path) -> None:
    model_folder(tmp_path / "run", torch.bfloat16)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "one"), "--to", "vllm", "--bits", "4"]) == 0
    made = unickpt.export_checkpoint(
        tmp_path / "run/global_step5", tmp_path / "two", to="vllm", bits="4", config=tmp_path / "run"
    )
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert len(made.notes) == 1  # rows of 96 and 200 values do not divide into groups of 128
    assert made.notes[0].startswith("4/channel instead of 4/128, because of their shapes: model.layers.0.mlp.down_proj")


def test_rounding_needs_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model_folder(tmp_path / "run", torch.bfloat16)
    (tmp_path / "run" / "config.json").unlink()
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--to", "vllm", "--bits", "4"]) == 2
    assert "config.json" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--bits", "4"]) == 2
    assert "--bits needs --to vllm" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--to", "vllm", "--bits", "5"]) == 2
    assert "expected 4, 8 or 16 bits" in capsys.readouterr().err


def test_a_weight_that_is_not_finite_is_not_rounded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = llama(torch.bfloat16)
    model.model.layers[1].mlp.down_proj.weight.data[3, 5] = float("nan")
    saved(model, tmp_path / "step")
    model.config.save_pretrained(str(tmp_path))
    assert main(["export", str(tmp_path / "step"), str(tmp_path / "out"), "--to", "vllm", "--bits", "8"]) == 2
    assert "model.layers.1.mlp.down_proj.weight: has values that are not finite" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*.safetensors*"))


def test_inspect_shows_the_bits_and_convert_refuses_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = model_folder(tmp_path / "run", torch.bfloat16)
    bits = bits_of("mixed", model, tmp_path)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--to", "vllm", "--bits", bits]) == 0
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "out"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    schemes = {each["name"].removeprefix("model.layers."): (each["bits"], each["group"]) for each in found["modules"]}
    assert schemes["0.self_attn.k_proj"] == (4, 32)
    assert schemes["0.self_attn.o_proj"] == (8, None)
    assert schemes["1.mlp.down_proj"] == (4, None)
    assert not any("gate_proj" in name for name in schemes)
    files = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    assert 0 < files - found["total_bytes"] < 10_000  # headers, and the shapes of the packed weights
    assert main(["inspect", str(tmp_path / "out"), "--grep", "o_proj"]) == 0
    text = capsys.readouterr().out
    assert "pack-quantized" in text
    assert "modules with rounded weights (2)" in text
    assert main(["convert", str(tmp_path / "out"), str(tmp_path / "back")]) == 2
    assert "has rounded weights" in capsys.readouterr().err


@pytest.mark.parametrize("bits", ["4/32", "8/channel"])
def test_experts_are_rounded_one_by_one(bits: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Transformers has all experts of a layer in one tensor, and its files have each by itself."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=50, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4,
    )  # fmt: skip
    model = MixtralForCausalLM(config).float()
    model.save_pretrained(str(tmp_path / "hf"))
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "ck")]) == 0
    arguments = ["export", str(tmp_path / "ck"), str(tmp_path / "out"), "--to", "vllm", "--bits", bits, "--dtype", "float32"]
    assert main([*arguments, "--config", str(tmp_path / "hf")]) == 0
    found, message = AutoModelForCausalLM.from_pretrained(str(tmp_path / "out"), output_loading_info=True, dtype=torch.float32)
    assert not any(message.values()), message
    scheme = Scheme.parse(bits)
    experts = {name: value for name, value in model.state_dict().items() if ".experts." in name}
    assert len(experts) == 4
    for name, value in experts.items():
        weights = torch.stack([restored(*rounded(expert, scheme, torch.float32)) for expert in value])
        assert torch.equal(found.state_dict()[name], weights), name


def test_tensors_that_are_not_matrices_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = llama(torch.bfloat16)
    model.model.layers[0].mlp.extra = torch.nn.Parameter(torch.zeros(2, 3, 4))
    saved(model, tmp_path / "step")
    model.config.save_pretrained(str(tmp_path))
    assert main(["export", str(tmp_path / "step"), str(tmp_path / "out"), "--to", "vllm", "--bits", "8/channel"]) == 0
    assert "not rounded, because they are not matrices: model.layers.0.mlp.extra" in capsys.readouterr().out
