"""Models with experts: transformers has other names in memory than in files. Checkpoints of both are interchangeable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.jobs.journeys.families import FAMILIES, huggingface_model
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.cli.main import main
from unickpt.transform.dialects.hf_layouts import as_wanted, in_files, in_memory

_SMALL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_MORE: dict[str, dict[str, Any]] = {  # families without a counterpart in Megatron
    "qwen2_moe": {
        **_SMALL, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "deepseek_v2": {
        **_SMALL, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
        "q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
        "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    },
}  # fmt: skip
EXPERTS = [*(name for name, family in FAMILIES.items() if family.moe), *_MORE]
Tensors = dict[str, torch.Tensor]


def model_of(family: str) -> Any:
    """Return the model of a family with the same random weights at every call."""
    if family not in _MORE:
        return huggingface_model(family, seed=3)
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **_MORE[family]))


def read(checkpoint: Checkpoint) -> Tensors:
    return {info.name: checkpoint.read_tensor(*info.key) for info in checkpoint.index.tensors}


def equal(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.fixture(params=EXPERTS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(family: str, tmp_path: Path) -> Tensors:
    """Return the tensors in memory. The files are in ``model``, their conversion in ``from-files``."""
    made = model_of(family)
    made.save_pretrained(tmp_path / "model", max_shard_size="50KB")
    assert main(["convert", str(tmp_path / "model"), str(tmp_path / "from-files")]) == 0
    return dict(made.state_dict())


def files_in(folder: Path) -> Tensors:
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


def test_names_in_files_and_in_memory_are_the_same_model(model: Tensors, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tmp_path / "from-files")
    files = files_in(tmp_path / "model")
    assert equal(read(checkpoint), files)
    assert not equal(files, model)
    memory = in_memory(checkpoint)
    assert equal(read(memory), model)
    assert in_memory(memory) is memory
    assert equal(read(in_files(memory)), files)
    assert in_files(checkpoint) is checkpoint


def test_a_job_loads_a_checkpoint_under_its_own_names(model: Tensors, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tmp_path / "from-files")
    wanted = {name: tuple(value.shape) for name, value in model.items()}
    assert equal(read(as_wanted(checkpoint, wanted)), model)
    files = files_in(tmp_path / "model")
    assert as_wanted(checkpoint, {name: value.shape for name, value in files.items()}) is checkpoint
    assert equal(read(as_wanted(in_memory(checkpoint), {name: value.shape for name, value in files.items()})), files)
    more = {**wanted, "model.score.weight": (3, 32)}  # a tensor that the checkpoint lacks is missing under both names
    assert equal(read(as_wanted(checkpoint, more)), model)
    assert as_wanted(checkpoint, {"model.score.weight": (3, 32)}) is checkpoint


def under_auto_ep(family: str) -> Tensors:
    """Return the tensors of the same model after DeepSpeed's AutoEP has replaced its blocks, with all experts on one rank.

    What AutoEP does after that fails with transformers 5.24: it looks for the outputs that transformers records.
    """
    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.module_inject.auto_ep_config import parse_autoep_config

    model = model_of(family)
    auto = AutoEP(model, parse_autoep_config({"enabled": True, "autoep_size": 1, "use_grouped_mm": False}))
    found = auto.ep_parser()
    assert found
    for spec in found:
        auto._replace_moe_layer_without_retarget(spec, 1, 0)
    own = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}  # a router has two names
    return {name: value for name, value in model.state_dict().items() if name in own}


def test_a_job_with_auto_ep_and_a_plain_one_load_each_other(family: str, model: Tensors, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tmp_path / "from-files")
    expected = under_auto_ep(family)
    assert not equal(expected, model)
    wanted = {name: tuple(value.shape) for name, value in expected.items()}
    for source in (checkpoint, in_memory(checkpoint)):
        view = as_wanted(source, wanted)
        assert equal(read(view), expected)
        assert equal(read(in_memory(view)), model)
        assert equal(read(in_files(view)), files_in(tmp_path / "model"))
        assert equal(read(as_wanted(view, {name: tuple(value.shape) for name, value in model.items()})), model)
        assert as_wanted(view, wanted) is view


def test_an_export_has_the_names_of_files(model: Tensors, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assert main(["export", str(tmp_path / "from-files"), str(folder), "--config", str(tmp_path / "model")]) == 0
    assert equal(files_in(folder), files_in(tmp_path / "model"))
    assert equal(dict(AutoModelForCausalLM.from_pretrained(folder).state_dict()), model)


def test_a_missing_expert_is_an_error(model: Tensors, tmp_path: Path) -> None:
    """The tensor of all experts is missing, and the other experts have no counterpart, so a load raises."""
    names = sorted(
        name
        for name in files_in(tmp_path / "model")
        if "layers.1." in name and name.endswith(("down_proj.weight", "w2.weight"))
    )
    lost, *rest = [name for name in names if "experts." in name and "shared" not in name]
    edited = tmp_path / "edited"
    assert main(["edit", str(tmp_path / "from-files"), str(edited), "--drop", lost]) == 0
    view = in_memory(Checkpoint.open(edited))
    assert model.keys() - read(view).keys() == {"model.layers.1.mlp.experts.down_proj"}
    assert list(view.untranslated) == rest
