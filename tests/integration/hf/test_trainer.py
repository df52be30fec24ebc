"""Trainer, unchanged, resumes on another number of processes and another ZeRO stage."""

from __future__ import annotations

import json
import re
import shlex
import threading
import time
from pathlib import Path
from subprocess import CompletedProcess

import psutil
import pytest
import torch

from tests.jobs.hf.jobs import (
    ENVIRONMENT,
    GLOBAL_BATCH,
    ResumedRun,
    assert_log_continues,
    assert_same_state,
    log_of,
    losses,
    losses_of,
    recorded,
    run,
    shipped,
)  # fmt: skip
from tests.support.forked_jobs import fork_ranks
from unickpt.cli.main import main

pytestmark = [pytest.mark.hf, pytest.mark.timeout(600)]

STEPS, SAVED, TORN = 9, 3, 6  # an epoch has five steps: step 3 is in the first one, step 9 in the second
COMMON = (
    "--use_cpu", "--max_steps", str(STEPS), "--save_steps", str(SAVED), "--logging_steps", "1",
    "--learning_rate", "5e-3", "--warmup_steps", "2", "--report_to", "none", "--disable_tqdm", "True",
)  # fmt: skip
# The highest loss counts as best, so the best checkpoint is the first one and not the latest.
BEST = (
    "--eval_strategy", "steps", "--eval_steps", str(SAVED), "--per_device_eval_batch_size", "4",
    "--load_best_model_at_end", "--metric_for_best_model", "loss", "--greater_is_better", "True",
)  # fmt: skip
GPT2_BF16 = ("--model", "gpt2", "--bf16", "True")
UNSAVED = ("--save_strategy", "no")

REFUSAL = "The checkpoint being loaded used a DP world size of 2 but the current world size is 1"


class Killing(threading.Thread):
    """Kills every rank with SIGKILL when a folder contains a file."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self._folder = folder
        self.killed = 0

    def run(self) -> None:
        end = time.monotonic() + 200
        while time.monotonic() < end and not any(self._folder.glob("*")):
            time.sleep(0.02)
        ranks = [p for p in psutil.process_iter(["cmdline"]) if self._is_rank(p.info["cmdline"] or [])]
        for rank in ranks:
            rank.kill()
        self.killed = len(ranks)

    def _is_rank(self, command: list[str]) -> bool:
        return str(self._folder.parent.parent.parent) in command and "torch.distributed.run" not in command


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainer")


@pytest.fixture(scope="module")
def zero2_zero3(work: Path) -> ResumedRun:
    """Llama in fp32. The JSON has optimizer and scheduler, and both runs load the best model at the end."""
    source, target = work / "zero2x2", work / "zero3x1"
    (work / "memory").mkdir()
    with_memory = shipped("hf_zero2_auto")
    with_memory["unickpt"]["memory"] = {"to_disk_every": 3, "folder": str(work / "memory")}
    run("train_trainer", 2, source, with_memory, *COMMON, *BEST)
    resume = ("--resume", str(source / f"checkpoint-{SAVED}"))
    run("train_trainer", 1, target, shipped("hf_zero3_auto"), *COMMON, *BEST, *resume)
    run("train_trainer", 1, work / "zero2x1", shipped("hf_zero2_auto"), *COMMON, *UNSAVED)
    return ResumedRun(source, target, SAVED, work / "zero2x1")


@pytest.fixture(scope="module")
def zero3_zero1(work: Path) -> ResumedRun:
    """GPT-2 with tied embeddings in bf16, Trainer's own optimizer (two parameter groups) and scheduler.

    Without the gathered weights Trainer saves every ZeRO-3 checkpoint twice, under the same tag.
    """
    source, target = work / "zero3x2", work / "zero1x3"
    ungathered = shipped("hf_zero3_auto", optimizer=False, stage3_gather_16bit_weights_on_model_save=False)
    run("train_trainer", 2, source, ungathered, *COMMON, *GPT2_BF16)
    resume = ("--resume", str(source / f"checkpoint-{SAVED}"), "--save_total_limit", "1")
    run("train_trainer", 3, target, shipped("hf_zero2_auto", optimizer=False, stage=1), *COMMON, *GPT2_BF16, *resume)
    alike = shipped("hf_zero3_auto", optimizer=False)
    run("train_trainer", 1, work / "zero3x1bf16", alike, *COMMON, *GPT2_BF16, *UNSAVED)
    return ResumedRun(source, target, SAVED, work / "zero3x1bf16")


@pytest.fixture(scope="module", params=["zero2_zero3", "zero3_zero1"])
def pair(request: pytest.FixtureRequest) -> ResumedRun:
    found: ResumedRun = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def stock(work: Path) -> Path:
    """The JSON without the key, ZeRO-2 on 2 processes: DeepSpeed's own checkpoints."""
    run("train_trainer", 2, work / "stock", shipped("hf_zero2_auto", enabled=None), *COMMON)
    return work / "stock"


def test_all_processes_save_one_step_when_one_of_them_is_told_to_end(work: Path, stock: Path) -> None:
    folder, config = work / "preempted", shipped("hf_zero2_auto")
    stopped = run("train_trainer_preempted", 2, folder, config, *COMMON, "--save_steps", "1000", check=False)
    said = stopped.stdout + stopped.stderr
    assert "rank 1 on" in said
    assert "all ranks save at the same step boundary" in said
    (saved,) = folder.glob("checkpoint-*")
    assert 3 <= int(saved.name.removeprefix("checkpoint-")) < STEPS, saved
    run("train_trainer", 2, folder, config, *COMMON, "--resume", "last")
    found, expected = losses_of(folder), losses_of(stock)
    assert found == expected, "as if nobody had told it to end"


def test_weights_and_moments_are_equal_bit_for_bit_after_a_resume(pair: ResumedRun) -> None:
    saved, _ = recorded(pair.uninterrupted, f"save-{SAVED}")
    found, _ = recorded(pair.resumed, "begin")
    assert_same_state(found, saved)


def test_trainer_without_deepspeed_has_the_optimizer_of_a_checkpoint_from_deepspeed(
    zero2_zero3: ResumedRun, tmp_path: Path
) -> None:
    """Trainer itself starts optimizer and schedule anew."""
    saved, _ = recorded(zero2_zero3.uninterrupted, f"save-{SAVED}")
    folder = str(zero2_zero3.uninterrupted / f"checkpoint-{SAVED}")
    fork_ranks(2, "tests.jobs.hf.train_plain", str(tmp_path), folder, str(STEPS), timeout_s=240, env=ENVIRONMENT)
    begin = torch.load(tmp_path / "begin.pt")
    rate = 5e-3 * (STEPS - SAVED) / (STEPS - 2)  # of this job's schedule, which decays after two steps of warm-up
    assert (begin["step"], begin["lr"]) == (SAVED, [pytest.approx(rate)] * 2)
    for name, found in begin["state"].items():
        key = name.replace("|weight", "|master") if name.replace("|weight", "|master") in saved else name
        assert found is not None, name
        assert torch.equal(found.flatten(), saved[key].flatten()), name


def test_a_resume_continues_at_the_step_of_the_checkpoint(pair: ResumedRun) -> None:
    _, begin = recorded(pair.resumed, "begin")
    _, end = recorded(pair.resumed, "end")
    assert (begin["step"], end["step"]) == (SAVED, STEPS)
    assert sorted(losses(end["log"])) == list(range(1, STEPS + 1))


def test_the_learning_rate_continues_from_the_checkpoint(pair: ResumedRun) -> None:
    _, saved = recorded(pair.uninterrupted, f"save-{SAVED}")
    _, begin = recorded(pair.resumed, "begin")
    assert begin["scheduler"] == saved["scheduler"]
    assert begin["lr"] == saved["lr"]
    _, uninterrupted = recorded(pair.uninterrupted, "end")
    _, resumed = recorded(pair.resumed, "end")
    assert losses(resumed["log"], "learning_rate") == losses(uninterrupted["log"], "learning_rate")


def test_losses_equal_those_of_an_uninterrupted_run(pair: ResumedRun) -> None:
    _, uninterrupted = recorded(pair.uninterrupted, "end")
    _, resumed = recorded(pair.resumed, "end")
    expected = losses(uninterrupted["log"])
    assert expected[STEPS] < expected[1] - 0.3, "the model learns, so a wrong state would show"
    assert_log_continues(losses(resumed["log"]), expected, losses_of(pair.elsewhere))


def test_the_best_model_is_loaded_into_the_live_engine(zero2_zero3: ResumedRun) -> None:
    best, _ = recorded(zero2_zero3.uninterrupted, f"save-{SAVED}")
    for folder in (zero2_zero3.uninterrupted, zero2_zero3.resumed):
        last, _ = recorded(folder, f"save-{STEPS}")
        end, facts = recorded(folder, "end")
        assert facts["best"] == str(zero2_zero3.uninterrupted / f"checkpoint-{SAVED}")
        assert not torch.equal(last["lm_head.weight|master"], best["lm_head.weight|master"])
        assert_same_state(end, best)


def test_saves_of_trainer_go_to_disk_although_memory_is_set(zero2_zero3: ResumedRun) -> None:
    """Trainer writes its own state into ``checkpoint-N``, which would look complete without the engine's."""
    assert list((zero2_zero3.uninterrupted.parent / "memory").iterdir()) == []
    for step in (SAVED, TORN, STEPS):
        folder = zero2_zero3.uninterrupted / f"checkpoint-{step}"
        assert (folder / f"global_step{step}" / "manifest.json").is_file()
        assert (folder / "latest").read_text() == f"global_step{step}"


def test_folders_have_trainers_names(pair: ResumedRun) -> None:
    for folder, step in ((pair.uninterrupted, SAVED), (pair.resumed, STEPS)):
        checkpoint = folder / f"checkpoint-{step}"
        assert [path.name for path in checkpoint.glob("global_step*")] == [f"global_step{step}"]
        assert (checkpoint / "latest").read_text() == f"global_step{step}"
        assert (checkpoint / f"global_step{step}" / "manifest.json").is_file()
        assert not list((checkpoint / f"global_step{step}").glob("*.pt"))
        assert {"trainer_state.json", "training_args.bin"} <= {path.name for path in checkpoint.iterdir()}


def test_save_total_limit_keeps_a_complete_checkpoint(zero3_zero1: ResumedRun) -> None:
    assert [path.name for path in zero3_zero1.resumed.glob("checkpoint-*")] == [f"checkpoint-{STEPS}"]
    assert (zero3_zero1.resumed / f"checkpoint-{STEPS}" / f"global_step{STEPS}" / "manifest.json").is_file()


def test_hugging_faces_config_keeps_the_key(pair: ResumedRun) -> None:
    _, facts = recorded(pair.uninterrupted, f"save-{SAVED}")
    assert facts["config"]["unickpt"]["enabled"] is True
    assert "auto" not in json.dumps(facts["config"]), "the values beside it are filled in"


def test_without_the_key_trainer_fails_on_another_number_of_processes_and_names_the_command_that_helps(
    stock: Path, work: Path
) -> None:
    checkpoint = stock / f"checkpoint-{SAVED}"
    assert list((checkpoint / f"global_step{SAVED}").glob("*optim_states.pt"))
    config = shipped("hf_zero2_auto", enabled=None)
    process = run("train_trainer", 1, work / "refused", config, *COMMON, "--resume", str(checkpoint), record=False, check=False)
    assert process.returncode != 0
    assert REFUSAL in process.stdout
    (command,) = set(re.findall(r"^ {4}unickpt (convert .*)$", process.stdout, re.MULTILINE))
    assert main(shlex.split(command)) == 0
    new = stock / "converted" / f"checkpoint-{SAVED}"
    assert f"Then resume with --resume_from_checkpoint {new}" in process.stdout
    theirs = {path.name for path in checkpoint.iterdir()} - {"zero_to_fp32.py", "zero_to_torch.py"}
    assert {path.name for path in new.iterdir()} == theirs
    run("train_trainer", 1, work / "converted", shipped("hf_zero2_auto"), *COMMON, "--resume", str(new))
    saved, _ = recorded(stock, f"save-{SAVED}")
    found, facts = recorded(work / "converted", "begin")
    assert_same_state(found, saved)
    assert facts["step"] == SAVED


def test_a_checkpoint_from_before_the_key_is_resumed_and_the_next_one_is_universal(stock: Path, work: Path) -> None:
    """The number of processes is the same, so all losses are equal bit for bit."""
    folder = work / "switched"
    resume = ("--resume", str(stock / f"checkpoint-{SAVED}"))
    run("train_trainer", 2, folder, shipped("hf_zero2_auto"), *COMMON, *resume, record=False)
    assert (folder / f"checkpoint-{STEPS}" / f"global_step{STEPS}" / "manifest.json").is_file()
    assert losses(log_of(folder / f"checkpoint-{STEPS}")) == losses(log_of(stock / f"checkpoint-{STEPS}"))


def test_the_key_changes_nothing_in_training(stock: Path, zero2_zero3: ResumedRun) -> None:
    with_key = log_of(zero2_zero3.uninterrupted / f"checkpoint-{STEPS}")
    assert losses(with_key) == losses(log_of(stock / f"checkpoint-{STEPS}"))


def test_a_checkpoint_is_exported_as_the_model_that_trainer_saves(zero2_zero3: ResumedRun, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    checkpoint = zero2_zero3.uninterrupted / f"checkpoint-{SAVED}"
    assert main(["export", str(checkpoint), str(tmp_path / "hf")]) == 0
    found = []
    for folder in (checkpoint, tmp_path / "hf"):  # the first has Trainer's own model.safetensors
        model, message = AutoModelForCausalLM.from_pretrained(str(folder), output_loading_info=True)
        assert not any(message.values())
        found.append(model(torch.arange(12)[None]).logits)
    assert torch.equal(*found)
    assert not {path.name for path in (tmp_path / "hf").iterdir()} & {"latest", "trainer_state.json", "training_args.bin"}


# ---------------------------------------------------------------- torn and damaged folders


def resumed_at(process: CompletedProcess[str], folder: Path) -> int:
    """Return the step at which a run resumed."""
    assert process.returncode == 0, process.stdout[-4000:]
    _, begin = recorded(folder, "begin")
    return int(begin["step"])


@pytest.fixture(scope="module")
def killed(work: Path) -> Path:
    """A run of two processes, both killed with SIGKILL while the second checkpoint was being written."""
    folder = work / "killed"
    config = shipped("hf_zero2_auto")
    config["unickpt"] |= {"async_save": False, "write_megabytes_per_second": 0.06}
    kill = Killing(folder / f"checkpoint-{TORN}" / f"global_step{TORN}" / "data")
    kill.start()
    process = run("train_trainer", 2, folder, config, *COMMON, check=False, launcher=True)
    kill.join()
    assert kill.killed == 2, process.stdout[-4000:]
    assert process.returncode != 0
    return folder


def test_after_a_kill_during_a_save_the_newest_complete_checkpoint_is_resumed(killed: Path, zero2_zero3: ResumedRun) -> None:
    torn, whole = killed / f"checkpoint-{TORN}", killed / f"checkpoint-{SAVED}"
    assert torn.is_dir()
    assert not (torn / "trainer_state.json").exists()
    explicit = run("train_trainer", 1, killed, shipped("hf_zero2_auto"), *COMMON, "--resume", str(torn), check=False)
    assert explicit.returncode != 0
    assert f"{whole} can be resumed. Pass it as resume_from_checkpoint, or pass True" in explicit.stdout
    process = run("train_trainer", 1, killed, shipped("hf_zero2_auto"), *COMMON, "--resume", "True")
    assert resumed_at(process, killed) == SAVED
    logged = [line for line in process.stdout.splitlines() if "cannot be resumed" in line]
    assert len(logged) == 1, logged
    assert f"checkpoint-{TORN} cannot be resumed: it has no trainer_state.json" in logged[0]
    assert f"Resuming from {whole} instead" in logged[0]
    assert (torn / f"global_step{TORN}" / "manifest.json").is_file(), "saved again, whole"
    expected = losses(log_of(zero2_zero3.uninterrupted / f"checkpoint-{STEPS}"))
    assert_log_continues(losses(log_of(killed / f"checkpoint-{STEPS}")), expected, losses_of(zero2_zero3.elsewhere))


def test_damage_found_during_a_read_ends_one_run_and_the_next_run_skips_the_folder(killed: Path) -> None:
    """All files have the right size, so the folder is selected. Trainer has read its own state before the checksum fails."""
    newest = killed / f"checkpoint-{STEPS}"
    for path in (newest / f"global_step{STEPS}" / "data").iterdir():
        content = bytearray(path.read_bytes())
        content[-64:] = bytes(byte ^ 1 for byte in content[-64:])
        path.write_bytes(content)
    arguments = (*COMMON, "--max_steps", str(STEPS + 1), "--resume", "last")
    first = run("train_trainer", 2, killed, shipped("hf_zero2_auto"), *arguments, check=False)
    assert first.returncode != 0
    assert "is marked as damaged, so resume_from_checkpoint=True skips it from now on" in first.stdout
    half = ("--per_device_train_batch_size", str(GLOBAL_BATCH // 4))
    second = run("train_trainer", 2, killed, shipped("hf_zero2_auto"), *arguments, *half)
    assert resumed_at(second, killed) == TORN
    assert f"checkpoint-{STEPS} cannot be resumed: global_step{STEPS} was found damaged before" in second.stdout
    logged = [line for line in second.stdout.splitlines() if "the global batch changes" in line]
    assert len(logged) == 1, logged
    change = "changes from 12 (12 per device x 1 accumulated x 1 ranks) to 6 (3 per device x 1 accumulated x 2 ranks)"
    assert change in logged[0]
    assert "36 samples are seen twice" in logged[0]
    assert "--gradient_accumulation_steps 2, or --per_device_train_batch_size 6." in logged[0]


@pytest.mark.parametrize("how", ["kill", "full"])
def test_a_save_that_does_not_end_leaves_no_complete_checkpoint_and_keeps_the_previous_one(
    work: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although Trainer deletes older checkpoints when a save returns."""
    folder = work / how
    monkeypatch.setenv("BREAK_SAVE", f"{how}:checkpoint-{2 * SAVED}")
    limit = ("--save_total_limit", "1")
    process = run("train_trainer", 1, folder, shipped("hf_zero2_auto"), *COMMON, *limit, record=False, check=False)
    assert process.returncode != 0
    assert (f"checkpoint-{2 * SAVED}/global_step{2 * SAVED} is not saved" in process.stdout) or how == "kill", process.stdout[
        -3000:
    ]
    assert not (folder / f"checkpoint-{2 * SAVED}" / "trainer_state.json").exists()
    whole = folder / f"checkpoint-{SAVED}"
    assert (whole / "trainer_state.json").is_file()
    assert (whole / f"global_step{SAVED}" / "manifest.json").is_file()
    assert (whole / "latest").read_text() == f"global_step{SAVED}"


def test_a_failed_save_does_not_end_training_if_another_complete_checkpoint_stays(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two checkpoints kept, Trainer's deletion after the failed save leaves a complete one."""
    folder = work / "limit2"
    monkeypatch.setenv("BREAK_SAVE", f"full:checkpoint-{2 * SAVED}")
    process = run(
        "train_trainer", 1, folder, shipped("hf_zero2_auto"), *COMMON, "--save_total_limit", "2", record=False, check=False
    )
    assert process.returncode == 0, process.stdout[-3000:]
    assert "No checkpoint was written; earlier checkpoints are intact" in process.stdout
    assert (folder / f"checkpoint-{STEPS}" / f"global_step{STEPS}" / "manifest.json").is_file()
