"""Adapters merged without peft, a few rows at a time, against ``merge_and_unload`` of peft on models of transformers."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from unickpt import converting
from unickpt.cli.main import main
from unickpt.converting import Part, Portion, Source, convert
from unickpt.dtypes import name_of
from unickpt.fragments import Box
from unickpt.index import TensorInfo
from unickpt.loading import Checkpoint
from unickpt.manifest import OptimizerRecord, ParameterGroup, Writer

pytestmark = [pytest.mark.hf, pytest.mark.timeout(600)]


def llama(dtype: torch.dtype) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=150, hidden_size=96, intermediate_size=200, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(dtype)


def gpt2(dtype: torch.dtype) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=150, n_positions=16, n_embd=96, n_layer=2, n_head=4)).to(dtype)


CASES: dict[str, tuple[Any, torch.dtype, dict[str, Any]]] = {
    "plain": (llama, torch.bfloat16, {"target_modules": ["q_proj", "v_proj"]}),
    "float32": (llama, torch.float32, {"target_modules": "all-linear", "r": 70, "lora_alpha": 11}),
    "half": (llama, torch.float16, {"target_modules": ["down_proj"], "use_rslora": True}),
    "patterns": (
        llama, torch.bfloat16,
        {"target_modules": ["q_proj", "k_proj"], "rank_pattern": {"k_proj": 3}, "alpha_pattern": {r"1\.self_attn\.q_proj": 5}},
    ),
    "embedding": (llama, torch.bfloat16, {"target_modules": ["embed_tokens", "o_proj"], "modules_to_save": ["lm_head"]}),
    "transposed": (gpt2, torch.bfloat16, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
}  # fmt: skip


def adapted(case: str) -> Any:
    """A model with adapters that add something, as peft makes it."""
    from peft import LoraConfig, get_peft_model

    build, dtype, options = CASES[case]
    model = get_peft_model(build(dtype), LoraConfig(**{"r": 8, "lora_alpha": 12, "task_type": "CAUSAL_LM", **options}))
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def saved(model: Any, folder: Path, *, frozen: bool = True) -> None:
    """A checkpoint as a training of it has it: masters and moments of what is trained; the rest only if asked for."""
    parts: list[Part] = []
    derived: list[TensorInfo] = []

    def add(name: str, state: str, kind: str, value: torch.Tensor) -> None:
        value = value.detach().clone()
        info = TensorInfo(name, state, name_of(value.dtype), tuple(value.shape), kind)
        parts.append(Part(info, Box.whole(info.shape), partial(_box_of, value)))

    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    excluded = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            add(name, "master", "parameter", parameter.float())
            add(name, "exp_avg", "optimizer", torch.ones_like(parameter).float())
            derived.append(TensorInfo(name, "weight", name_of(parameter.dtype), tuple(parameter.shape), "parameter", "master"))
        elif frozen:
            add(name, "weight", "parameter", parameter)
        else:
            excluded.append(name)
    aliases = {
        name: first for name, value in model.named_parameters(remove_duplicate=False)
        for first in [next(n for n, p in model.named_parameters() if p is value)] if first != name
    }  # fmt: skip
    convert(
        Source(
            "test", [Portion("all", parts, [])], Writer("deepspeed", "", "", "", "huggingface", {}), step=5, tensors=derived,
            optimizer=OptimizerRecord("AdamW", (ParameterGroup({"lr": 1.0}, tuple(trained)),), ()), aliases=aliases,
            excluded=tuple(excluded),
        ),
        folder,
    )  # fmt: skip


def _box_of(value: torch.Tensor, box: Box) -> torch.Tensor:
    return value[box.slices()].reshape(-1)


def assert_merged(found: Checkpoint, model: Any, *adapters: str) -> None:
    """The model that peft makes: names, types and every bit, and nothing besides."""
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
def test_what_is_merged_is_what_peft_merges(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = adapted(case)
    saved(model, tmp_path / "trained")
    model.peft_config["default"].save_pretrained(str(tmp_path))
    monkeypatch.setattr(converting, "FRAGMENT_BYTES", 1000)  # a few rows at a time
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
    """A model whose weights have one dtype, and its adapters another one."""
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


def test_adapters_alone_find_their_weights_in_another_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = adapted("plain")
    saved(model, tmp_path / "trained", frozen=False)
    llama(torch.bfloat16).save_pretrained(str(tmp_path / "base"))
    assert main(["convert", str(tmp_path / "base"), str(tmp_path / "converted")]) == 0
    arguments = ["edit", str(tmp_path / "trained"), str(tmp_path / "merged"), "--merge-lora", "--lora-alpha", "12"]
    assert main(arguments) == 2
    assert "it was saved without it" in capsys.readouterr().err
    assert not (tmp_path / "merged").exists()
    assert main([*arguments, "--lora-base", str(tmp_path / "converted")]) == 0
    assert_merged(Checkpoint.open(tmp_path / "merged"), model)


def test_one_of_two_adapters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = adapted("embedding")
    model.add_adapter("other", model.peft_config["default"])
    for name, parameter in model.named_parameters():
        if ".other." in name:
            torch.nn.init.normal_(parameter, std=0.3)
    saved(model, tmp_path / "trained")
    arguments = ["edit", str(tmp_path / "trained"), str(tmp_path / "merged"), "--merge-lora", "--lora-alpha", "12"]
    assert main(arguments) == 2
    assert "has the adapters default, other; --lora-adapter says which is meant" in capsys.readouterr().err
    assert main([*arguments, "--lora-adapter", "default"]) == 0
    assert_merged(Checkpoint.open(tmp_path / "merged"), model, "default")
