"""Merges of adapters without peft, a few rows at a time, equal peft's ``merge_and_unload`` on transformers models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.adapters import CASES, adapted, gpt2, llama, saved
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.cli.main import main
from unickpt.transform.convert import pipeline

pytestmark = [pytest.mark.hf, pytest.mark.timeout(600)]


def assert_merged(found: Checkpoint, model: Any, *adapters: str) -> None:
    """Assert that the result equals peft's model: names, dtypes and every bit, and no further tensors."""
    merged = model.merge_and_unload(adapter_names=list(adapters) or None)
    expected = dict(merged.named_parameters())
    assert {info.key for info in found.index.tensors if info.kind != "object"} == {(name, "weight") for name in expected}
    for name, value in expected.items():
        got = found.read_tensor(name, "weight")
        assert got.dtype == value.dtype, name
        assert torch.equal(got, value), name
    everywhere = {name for name, _ in merged.named_parameters(remove_duplicate=False)}
    assert found.manifest.aliases.keys() == everywhere - expected.keys()
    assert found.manifest.optimizer is None
    assert found.manifest.excluded == ()


@pytest.mark.parametrize("case", CASES)
def test_a_merge_equals_pefts(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = adapted(case)
    saved(model, tmp_path / "trained")
    model.peft_config["default"].save_pretrained(str(tmp_path))
    monkeypatch.setattr(pipeline, "FRAGMENT_BYTES", 1000)  # a few rows at a time
    arguments = ["--merge-lora", "--lora-config", str(tmp_path / "adapter_config.json")]
    assert main(["edit", str(tmp_path / "trained"), str(tmp_path / "merged"), *arguments]) == 0
    out = capsys.readouterr().out
    assert "merged into" in out
    assert "left out: adapters: " in out
    assert "left out: the optimizer: " in out
    assert_merged(Checkpoint.open(tmp_path / "merged"), model)


HALVES = (torch.float32, torch.bfloat16, torch.float16)
MIXED = {
    "linear": (llama, {"target_modules": ["q_proj", "down_proj"]}),
    "rslora": (llama, {"target_modules": ["k_proj"], "use_rslora": True, "r": 5}),
    "embedding": (llama, {"target_modules": ["embed_tokens"]}),
    "transposed": (gpt2, {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
}


def in_dtypes(kind: str, base: torch.dtype, adapter: torch.dtype) -> Any:
    """Weights and adapters have different dtypes."""
    from peft import LoraConfig, get_peft_model

    build, options = MIXED[kind]
    config = LoraConfig(**{"r": 8, "lora_alpha": 12, "task_type": "CAUSAL_LM", **options})
    model = get_peft_model(build(base), config, autocast_adapter_dtype=False)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(adapter)
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("kind", MIXED)
@pytest.mark.parametrize("adapter", HALVES, ids=str)
@pytest.mark.parametrize("base", HALVES, ids=str)
def test_every_pair_of_dtypes_is_merged_as_peft_merges_it(
    kind: str, base: torch.dtype, adapter: torch.dtype, tmp_path: Path
) -> None:
    from peft import PeftModel

    model = in_dtypes(kind, base, adapter)
    model.save_pretrained(str(tmp_path / "adapter"))
    saved(model, tmp_path / "trained")
    arguments = ["edit", str(tmp_path / "trained"), "--merge-lora", "--lora-config", str(tmp_path / "adapter")]
    assert main([*arguments[:2], str(tmp_path / "merged"), *arguments[2:]]) == 0
    loaded = PeftModel.from_pretrained(MIXED[kind][0](base), str(tmp_path / "adapter"))
    assert_merged(Checkpoint.open(tmp_path / "merged"), loaded)
    assert main([*arguments[:2], str(tmp_path / "kept"), *arguments[2:], "--lora-keep-dtype"]) == 0
    assert_merged(Checkpoint.open(tmp_path / "kept"), model)


def test_settings_that_change_the_arithmetic_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = in_dtypes("linear", torch.float32, torch.float32)
    model.save_pretrained(str(tmp_path / "adapter"))
    saved(model, tmp_path / "trained", frozen=False)
    llama(torch.float32).save_pretrained(str(tmp_path / "base"))
    assert main(["convert", str(tmp_path / "base"), str(tmp_path / "converted")]) == 0
    path = tmp_path / "adapter" / "adapter_config.json"
    sound = json.loads(path.read_text())
    arguments = ["edit", str(tmp_path / "trained"), str(tmp_path / "merged"), "--merge-lora", "--lora-config", str(path)]
    arguments += ["--lora-base", str(tmp_path / "converted")]
    for setting in ({"use_dora": True}, {"kasa_config": {"a": 1}}, {"init_lora_weights": "mica"}, {"not_known_yet": True}):
        path.write_text(json.dumps({**sound, **setting}))
        assert main(arguments) == 2
        assert next(iter(setting)) in capsys.readouterr().err
    for changed in ("pissa_niter_4", "olora"):  # peft changes the base weights when the training starts
        path.write_text(json.dumps({**sound, "init_lora_weights": changed}))
        assert main(arguments) == 2
        err = capsys.readouterr().err
        assert changed in err
        assert "base weights" in err
    path.write_text(json.dumps(sound))
    assert main(arguments) == 0


def test_adapters_without_weights_use_those_of_another_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = adapted("plain")
    saved(model, tmp_path / "trained", frozen=False)
    llama(torch.bfloat16).save_pretrained(str(tmp_path / "base"))
    assert main(["convert", str(tmp_path / "base"), str(tmp_path / "converted")]) == 0
    arguments = ["edit", str(tmp_path / "trained"), str(tmp_path / "merged"), "--merge-lora", "--lora-alpha", "12"]
    assert main(arguments) == 2
    assert "was saved without it" in capsys.readouterr().err
    assert not (tmp_path / "merged").exists()
    assert main([*arguments, "--lora-base", str(tmp_path / "converted")]) == 0
    assert_merged(Checkpoint.open(tmp_path / "merged"), model)
    assert main(["export", str(tmp_path / "merged"), str(tmp_path / "hf")]) == 0  # with the configuration of the base
    assert (tmp_path / "hf" / "config.json").is_file()


def test_one_of_two_adapters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = adapted("embedding")
    model.add_adapter("other", model.peft_config["default"])
    for name, parameter in model.named_parameters():
        if ".other." in name:
            torch.nn.init.normal_(parameter, std=0.3)
    saved(model, tmp_path / "trained")
    arguments = ["edit", str(tmp_path / "trained"), str(tmp_path / "merged"), "--merge-lora", "--lora-alpha", "12"]
    assert main(arguments) == 2
    assert "has the adapters default, other; choose one with --lora-adapter" in capsys.readouterr().err
    assert main([*arguments, "--lora-adapter", "default"]) == 0
    assert_merged(Checkpoint.open(tmp_path / "merged"), model, "default")
