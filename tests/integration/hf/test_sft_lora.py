"""TRL's SFTTrainer with PEFT adapters: only the adapters are saved, and resumed under other layouts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.jobs.hf.jobs import (
    ResumedRun,
    assert_log_continues,
    assert_same_state,
    losses,
    losses_of,
    recorded,
    run,
    shipped,
)  # fmt: skip
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.cli.main import main

pytestmark = [pytest.mark.hf, pytest.mark.timeout(600)]

STEPS = 9
COMMON = (
    "--use_cpu", "--max_steps", str(STEPS), "--save_steps", "3", "--logging_steps", "1", "--learning_rate", "5e-2",
    "--warmup_steps", "2", "--bf16", "False", "--gradient_checkpointing", "False",
    "--report_to", "none", "--disable_tqdm", "True",
)  # fmt: skip


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sft")


@pytest.fixture(scope="module")
def base(work: Path) -> str:
    """Save a base model and its tokenizer for ``from_pretrained``, and return the folder."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from tests.jobs.hf.train_sft_lora import WORDS

    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(WORDS))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(work / "base")
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(work / "base")
    return str(work / "base")


@pytest.fixture(scope="module")
def alone(work: Path, base: str) -> Path:
    """ZeRO-2 on 1 process, without interruption."""
    run("train_sft_lora", 1, work / "zero2x1", shipped("hf_zero2_auto"), *COMMON, "--save_strategy", "no", "--base", base)
    return work / "zero2x1"


@pytest.fixture(scope="module")
def to_one(work: Path, base: str, alone: Path) -> ResumedRun:
    """ZeRO-2 on 2 processes to ZeRO-3 on 1, with ``resume_from_checkpoint=True`` and a moved checkpoint."""
    source, target = work / "zero2x2", work / "zero3x1"
    run("train_sft_lora", 2, source, shipped("hf_zero2_auto"), *COMMON, "--base", base)
    shutil.copytree(source / "checkpoint-3", target / "checkpoint-3")
    run("train_sft_lora", 1, target, shipped("hf_zero3_auto"), *COMMON, "--base", base, "--resume", "last")
    return ResumedRun(source, target, 3, alone)


@pytest.fixture(scope="module")
def to_three(work: Path, base: str, to_one: ResumedRun) -> ResumedRun:
    """ZeRO-3 on 1 process to ZeRO-1 on 3 processes."""
    target = work / "zero1x3"
    resume = ("--resume", str(to_one.resumed / "checkpoint-6"))
    run("train_sft_lora", 3, target, shipped("hf_zero2_auto", stage=1), *COMMON, "--base", base, *resume)
    return ResumedRun(to_one.resumed, target, 6, to_one.elsewhere)


@pytest.fixture(scope="module", params=["to_one", "to_three"])
def resume(request: pytest.FixtureRequest) -> ResumedRun:
    found: ResumedRun = request.getfixturevalue(request.param)
    return found


def test_adapters_and_their_moments_are_equal_bit_for_bit_after_a_resume(resume: ResumedRun) -> None:
    saved, _ = recorded(resume.uninterrupted, f"save-{resume.step}")
    found, facts = recorded(resume.resumed, "begin")
    assert facts["step"] == resume.step
    assert_same_state(found, saved)  # the frozen base too, which comes from its own folder


def test_losses_and_learning_rates_equal_those_of_an_uninterrupted_run(resume: ResumedRun) -> None:
    """A resume without the moments is off by 9e-3 or more."""
    _, uninterrupted = recorded(resume.uninterrupted, "end")
    _, resumed = recorded(resume.resumed, "end")
    assert_log_continues(losses(resumed["log"]), losses(uninterrupted["log"]), losses_of(resume.elsewhere))
    assert losses(resumed["log"], "learning_rate") == losses(uninterrupted["log"], "learning_rate")


def test_only_adapters_are_trained_and_saved(resume: ResumedRun) -> None:
    state, _ = recorded(resume.uninterrupted, f"save-{resume.step}")
    weights = {name.removesuffix("|weight") for name in state if name.endswith("|weight")}
    trained = {name.removesuffix("|exp_avg") for name in state if name.endswith("|exp_avg")}
    assert trained == {name for name in weights if "lora_" in name}
    checkpoint = Checkpoint.open(resume.uninterrupted / f"checkpoint-{resume.step}" / f"global_step{resume.step}")
    assert {info.name for info in checkpoint.index.tensors if info.kind != "object"} == trained
    assert set(checkpoint.manifest.excluded) == weights - trained


def test_exported_adapters_are_those_that_trainer_saves(to_one: ResumedRun, tmp_path: Path) -> None:
    """Of the engine's checkpoint alone, as a loop without Trainer leaves it."""
    trainers = to_one.uninterrupted / f"checkpoint-{to_one.step}"
    source = str(trainers / f"global_step{to_one.step}")
    arguments = ["--to", "peft", "--lora-alpha", str(json.loads((trainers / "adapter_config.json").read_text())["lora_alpha"])]
    assert main(["export", source, str(tmp_path / "adapter"), *arguments]) == 0
    found, expected = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "adapter", trainers))
    assert_same_state(found, expected)


def test_a_resume_that_restores_no_trained_parameter_is_refused(work: Path, base: str, to_one: ResumedRun) -> None:
    """The adapters are on other modules than in the checkpoint, so they would start from random values at step 3."""
    options = ("--base", base, "--resume", str(to_one.uninterrupted / "checkpoint-3"), "--adapters", "k_proj", "o_proj")
    process = run("train_sft_lora", 1, work / "others", shipped("hf_zero2_auto"), *COMMON, *options, record=False, check=False)
    assert process.returncode != 0
    assert "lora_A" in process.stdout, "the error names what is missing"
