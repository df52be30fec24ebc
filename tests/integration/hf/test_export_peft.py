"""``unickpt export --to peft``: the files that peft itself saves, of a checkpoint that no Trainer has written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.adapters import CASES, adapted, saved
from unickpt.cli.main import main

pytestmark = [pytest.mark.hf, pytest.mark.timeout(600)]

ADAPTER, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def assert_same_file(found: Path, expected: Path) -> None:
    """Assert that two adapters have the same names, dtypes and bits."""
    one, other = load_file(found / ADAPTER), load_file(expected / ADAPTER)
    assert one.keys() == other.keys()
    assert [name for name in one if one[name].dtype != other[name].dtype or not torch.equal(one[name], other[name])] == []


def outputs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(torch.arange(10)[None]).logits
    return found


@pytest.mark.parametrize("frozen", [True, False], ids=["whole", "adapters-alone"])
@pytest.mark.parametrize("case", ["patterns", "embedding", "transposed"])
def test_the_adapter_equals_pefts(case: str, frozen: bool, tmp_path: Path) -> None:
    from peft import PeftModel

    model = adapted(case)
    saved(model, tmp_path / "trained", frozen=frozen)
    model.save_pretrained(str(tmp_path / "peft"), save_embedding_layers=False)
    shutil.copy(tmp_path / "peft" / CONFIG, tmp_path)  # above the checkpoint, where Trainer has it
    assert main(["export", str(tmp_path / "trained"), str(tmp_path / "adapter"), "--to", "peft"]) == 0
    assert_same_file(tmp_path / "adapter", tmp_path / "peft")
    assert json.loads((tmp_path / "adapter" / CONFIG).read_text()) == json.loads((tmp_path / "peft" / CONFIG).read_text())
    build, dtype, _ = CASES[case]
    assert torch.equal(outputs(PeftModel.from_pretrained(build(dtype), tmp_path / "adapter")), outputs(
        PeftModel.from_pretrained(build(dtype), tmp_path / "peft")
    ))  # fmt: skip


@pytest.mark.parametrize("frozen", [True, False], ids=["whole", "adapters-alone"])
@pytest.mark.parametrize("case", ["float32", "half", "embedding"])
def test_a_configuration_is_made_of_names_shapes_and_alpha(
    case: str, frozen: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import PeftModel

    model = adapted(case)
    saved(model, tmp_path / "trained", frozen=frozen)
    model.save_pretrained(str(tmp_path / "peft"), save_embedding_layers=False)
    own = model.peft_config["default"]
    arguments = ["--lora-alpha", str(own.lora_alpha), *(["--lora-rslora"] if own.use_rslora else []), "--lora-base", "base"]
    assert main(["export", str(tmp_path / "trained"), str(tmp_path / "adapter"), "--to", "peft"]) == 2
    assert "pass --lora-config PATH, or --lora-alpha N to make one" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "trained"), str(tmp_path / "adapter"), "--to", "peft", *arguments]) == 0
    assert "adapter_config.json is made of names, shapes and lora_alpha" in " ".join(capsys.readouterr().out.split())
    assert_same_file(tmp_path / "adapter", tmp_path / "peft")
    made = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    assert (made["r"], made["base_model_name_or_path"]) == (own.r, "base")
    assert set(made["target_modules"]) == own.target_modules or case == "float32"
    build, dtype, _ = CASES[case]
    assert torch.equal(outputs(PeftModel.from_pretrained(build(dtype), tmp_path / "adapter")), outputs(
        PeftModel.from_pretrained(build(dtype), tmp_path / "peft")
    ))  # fmt: skip


def test_modules_that_share_a_name_with_others_are_named_whole(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    build, dtype, _ = CASES["float32"]
    target = "model.layers.1.self_attn.q_proj"
    model = get_peft_model(build(dtype), LoraConfig(r=4, lora_alpha=8, target_modules=[target]))
    for frozen in (True, False):
        saved(model, tmp_path / f"trained{frozen}", frozen=frozen)
        out = tmp_path / f"adapter{frozen}"
        assert main(["export", str(tmp_path / f"trained{frozen}"), str(out), "--to", "peft", "--lora-alpha", "8"]) == 0
        assert json.loads((out / CONFIG).read_text())["target_modules"] == [target]


def test_what_does_not_fit_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = adapted("plain")
    saved(model, tmp_path / "trained")
    model.save_pretrained(str(tmp_path / "peft"))
    source = str(tmp_path / "trained")
    config = json.loads((tmp_path / "peft" / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps({**config, "r": 9}))
    assert main(["export", source, str(tmp_path / "x"), "--to", "peft"]) == 2
    assert "have rank 8, the configuration has 9" in capsys.readouterr().err
    assert main(["export", source, str(tmp_path / "peft"), "--to", "peft"]) == 2
    assert "already contains an adapter" in capsys.readouterr().err
    assert main(["export", source, str(tmp_path / "x"), "--to", "hf", "--lora-alpha", "1"]) == 2
    assert "options of adapters need --to peft" in capsys.readouterr().err
    assert main(["export", source, str(tmp_path / "x")]) == 2
    assert "--to peft'" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
