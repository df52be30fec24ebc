"""``unickpt plan pipeline``: what it prints for layers of known times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unickpt.cli.main import main
from unickpt.diagnosis.layer_costs.measured import EMBEDDING, LAYER, LOSS, MeasuredLayer, as_text


@pytest.fixture
def layers(tmp_path: Path) -> str:
    """A model whose loss takes as long as three of its eight layers."""
    found = [MeasuredLayer("embedding", EMBEDDING, 0.0, 0.0, 1_000_000)]
    found += [MeasuredLayer(f"layers.{at}", LAYER, 0.01, 0.02, 2_000_000, 1_000_000) for at in range(8)]
    found += [MeasuredLayer("output_layer", LOSS, 0.03, 0.06, 1_000_000)]
    path = tmp_path / "layers.json"
    path.write_text(as_text(found))
    return str(path)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, object]:
    assert main(["plan", "pipeline", *arguments, "--json"]) == code
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_the_stage_of_the_loss_has_fewer_layers(layers: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, layers, "--stages", "2", "--microbatches", "8")
    assert found["parts"] == [0, 6, 10]
    assert found["megatron_arguments"] == [
        "--pipeline-model-parallel-size", "2", "--pipeline-model-parallel-layout", "Et*5|t*3L",
    ]  # fmt: skip
    assert found["vllm_environment"] == {"VLLM_PP_LAYER_PARTITION": "5,3"}
    steps = found["step_s"]
    assert isinstance(steps, dict)
    assert steps["megatron"] == pytest.approx(7 * 0.18 + 0.15 + 0.18, rel=0.05)
    assert steps["megatron"] <= steps["deepspeed"] < 1.1 * steps["megatron"]


def test_unlike_devices_have_unlike_numbers_of_layers(layers: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, layers, "--device", "new=1.5,80", "--device", "old=1,40")
    assert found["devices"] == ["new", "old"]
    assert found["vllm_environment"] == {"VLLM_PP_LAYER_PARTITION": "7,1"}


def test_a_plan_that_memory_forbids_names_the_limit(layers: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, layers, "--stages", "2", "--device", "small=1,0.1", code=1)
    assert found["unmet"]["binds"] == "memory"  # type: ignore[index]
    assert main(["plan", "pipeline", layers, "--stages", "2", "--device", "small=1,0.01"]) == 1
    assert "no plan: memory binds: layer 0 alone needs 0.018 GB" in capsys.readouterr().out


def test_the_text_names_each_framework(layers: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "pipeline", layers, "--stages", "2"]) == 0
    text = capsys.readouterr().out
    assert "--pipeline-model-parallel-layout 'Et*5|t*3L'" in text
    assert "ds_unickpt.stage_layers(layers, [0, 6, 10])" in text
    assert "VLLM_PP_LAYER_PARTITION=5,3" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", 'expected a JSON object with "layers"'),
        ("{", "cannot be read as JSON"),
        ('{"layers": [{"forward_s": -1}]}', "layer 0: forward_s must be a number from 0, not -1"),
        ('{"layers": [{"role": "head"}]}', "role one of embedding, layer, loss"),
    ],
)
def test_files_of_other_content_are_refused(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "layers.json"
    path.write_text(text)
    assert main(["plan", "pipeline", str(path), "--stages", "2"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--device", "a=0"], ["--device", "a"], ["--microbatches", "0"], ["--device", "a=1,1.1.1"]])
def test_wrong_arguments_are_refused(layers: str, wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "pipeline", layers, *wrong])
    assert "is not" in capsys.readouterr().err


def test_stages_and_devices_must_agree(layers: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--stages", "3", "--device", "a=1", "--device", "b=1"], ["--stages", "-1"]):
        assert main(["plan", "pipeline", layers, *arguments]) == 2
    assert "3 stages need one --device for all or one for each, not 2" in capsys.readouterr().err
