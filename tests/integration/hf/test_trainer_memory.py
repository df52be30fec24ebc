"""Trainer with a memory tier: all ranks are killed after a save in memory, twice, and the job resumes from there.

The last resume is on another number of processes and at another ZeRO stage.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ds_unickpt.loops import trainer_folders
from tests.jobs.hf.jobs import (
    ENVIRONMENT,
    assert_log_continues,
    assert_same_state,
    log_of,
    losses,
    recorded,
    run,
    shipped,
)  # fmt: skip
from tests.support.extent import in_full
from unickpt.testing.launch import environment

pytestmark = [pytest.mark.hf, pytest.mark.timeout(900)]

COMMON = (
    "--use_cpu", "--max_steps", "12", "--save_steps", "2", "--logging_steps", "1", "--save_total_limit", "2",
    "--learning_rate", "5e-3", "--warmup_steps", "2", "--report_to", "none", "--disable_tqdm", "True",
)  # fmt: skip
# Without an interruption: on disk 2 (the first), 8 (every third) and 12 (the last), in memory 4, 6 and 10.


@in_full
def test_a_killed_trainer_resumes_from_memory_twice_and_on_another_layout(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    two, three = shipped("hf_zero2_auto"), shipped("hf_zero3_auto")
    two["unickpt"]["memory"] = three["unickpt"]["memory"] = {"to_disk_every": 3, "folder": str(tmp_path / "memory")}
    whole, job = tmp_path / "whole", tmp_path / "job"
    run("train_memory", 2, whole, shipped("hf_zero2_auto"), *COMMON)

    killed = run("train_memory", 2, job, two, *COMMON, "--die", "7", check=False)
    assert "saved in memory" in killed.stdout + killed.stderr, killed.stdout + killed.stderr
    assert sorted(path.name for path in job.glob("checkpoint-*")) == ["checkpoint-2"]
    saved, _ = recorded(job, "step-6")
    again = run("train_memory", 2, job, two, *COMMON, "--resume", "last", "--die", "11", check=False)
    found, facts = recorded(job, "begin")
    assert facts["step"] == 6, again.stdout + again.stderr
    assert_same_state(found, saved)
    assert [entry["step"] for entry in facts["log"]] == [1, 2, 3, 4, 5, 6]

    saved, before = recorded(job, "step-10")
    last = run("train_memory", 1, job, three, *COMMON, "--resume", "last")
    found, facts = recorded(job, "begin")
    assert facts["step"] == 10, last.stdout + last.stderr
    assert_same_state(found, saved)
    assert facts["scheduler"] == before["scheduler"]

    expected, seen = losses(log_of(whole / "checkpoint-12")), losses(log_of(job / "checkpoint-12"))
    run("train_memory", 1, tmp_path / "alone", shipped("hf_zero2_auto"), *COMMON)
    assert_log_continues(seen, expected, losses(log_of(tmp_path / "alone" / "checkpoint-12")))
    assert {step: seen[step] for step in range(1, 11)} == {step: expected[step] for step in range(1, 11)}
    assert sorted(path.name for path in job.glob("checkpoint-*")) == ["checkpoint-12", "checkpoint-2"]


@in_full
def test_a_planned_stop_writes_the_newest_checkpoint_to_disk_with_the_files_of_trainer(tmp_path: Path) -> None:
    """Trainer's own optimizer and scheduler, ZeRO-3. The stop comes after the save of step 6 in memory."""
    (tmp_path / "memory").mkdir()
    config, job = shipped("hf_zero3_auto", optimizer=False), tmp_path / "job"
    config["unickpt"]["memory"] = {"to_disk_every": 10, "folder": str(tmp_path / "memory")}
    stopped = run("train_memory", 2, job, config, *COMMON, "--die", "7", "--signal", "SIGTERM", check=False)
    saved, before = recorded(job, "step-6")
    assert trainer_folders.unusable(str(job / "checkpoint-6")) == "", stopped.stdout + stopped.stderr
    present = {path.name for path in (job / "checkpoint-6").iterdir()}
    wanted = {"trainer_state.json", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth", "config.json", "latest"}
    assert wanted <= present, present
    shutil.rmtree(tmp_path / "memory")
    config["unickpt"].pop("memory")
    run("train_memory", 1, job, config, *COMMON, "--resume", "last")
    found, facts = recorded(job, "begin")
    assert (facts["step"], facts["scheduler"]) == (6, before["scheduler"])
    assert_same_state(found, saved)


@in_full
def test_a_damaged_generation_is_an_error_once_and_then_an_older_one_is_used(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    config, job = shipped("hf_zero2_auto"), tmp_path / "job"
    config["unickpt"]["memory"] = {"to_disk_every": 10, "folder": str(tmp_path / "memory")}
    run("train_memory", 2, job, config, *COMMON, "--die", "7", check=False)
    newest = max((tmp_path / "memory").glob("*/g*"), key=lambda path: path.name)
    for path in (newest / "data").iterdir():
        data = bytearray(path.read_bytes())
        data[len(data) // 3] ^= 1  # of the engine's state, which lies between the objects
        path.write_bytes(data)
    failed = run("train_memory", 2, job, config, *COMMON, "--resume", "last", check=False)
    assert failed.returncode != 0
    assert "Start again: the next start uses another one" in failed.stdout + failed.stderr
    run("train_memory", 2, job, config, *COMMON, "--resume", "last")
    found, facts = recorded(job, "begin")
    assert facts["step"] == 4
    assert_same_state(found, recorded(job, "step-4")[0])


REASONS = """
import json, sys
import deepspeed, peft
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from ds_unickpt.trainer.trainer_memory import not_in_memory

class OnSave(TrainerCallback):
    def on_save(self, *args, **kwargs): ...

class Own(Trainer):
    def _save(self, *args, **kwargs): super()._save(*args, **kwargs)

def model():
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 8}
    return LlamaForCausalLM(LlamaConfig(**sizes))

def reason(kind=Trainer, trial=None, callbacks=(), lora=False, best=None, **arguments):
    args = TrainingArguments(sys.argv[1], use_cpu=True, report_to="none", save_steps=1, **arguments)
    wrapped = peft.get_peft_model(model(), peft.LoraConfig(target_modules=["q_proj"])) if lora else model()
    trainer = kind(model=wrapped, args=args, callbacks=list(callbacks), eval_dataset=[0])
    trainer.state.best_global_step = best
    return not_in_memory(trainer, trial)

print("FOUND" + json.dumps({
    "plain": reason(), "limit": reason(save_total_limit=1), "weights": reason(save_only_model=True),
    "best": reason(load_best_model_at_end=True, eval_strategy="steps", eval_steps=1),
    "metric": reason(metric_for_best_model="loss"), "resumed best": reason(best=3), "nodes": reason(save_on_each_node=True),
    "search": reason(trial={}), "callback": reason(callbacks=[OnSave()]), "class": reason(Own), "lora": reason(lora=True),
}))
"""


def test_settings_whose_files_on_disk_somebody_may_expect_keep_saves_on_disk(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", REASONS, str(tmp_path)], capture_output=True, text=True, timeout=200,
        env=environment() | ENVIRONMENT,
    )  # fmt: skip
    assert "FOUND" in done.stdout, done.stderr
    found = json.loads(done.stdout.partition("FOUND")[2].splitlines()[0])
    assert (found.pop("plain"), found.pop("limit")) == ("", "")
    words = {
        "weights": "save_only_model", "best": "load_best_model_at_end", "metric": "metric_for_best_model",
        "resumed best": "metric_for_best_model", "nodes": "save_on_each_node", "search": "hyperparameters",
        "callback": "OnSave", "class": "Own has its own _save", "lora": "PEFT",
    }  # fmt: skip
    assert found.keys() == words.keys()
    assert all(word in found[name] for name, word in words.items()), found
