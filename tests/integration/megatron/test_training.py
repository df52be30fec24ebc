"""``pretrain_gpt.py`` with ``--ckpt-format unickpt``. Needs a Megatron-LM tree: ``MEGATRON_LM=/path/to/Megatron-LM``."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from unickpt.testing.launch import torchrun
from tests.jobs.megatron import deepspeed_leg as leg
from unickpt.checkpoint.format import manifest as manifest_module
from unickpt.checkpoint.format.checksums import digest
from tests.support.rounding import assert_continues, in_steps
from unickpt.cli.main import main
from unickpt.diagnosis.recording.ring_folder import read_folder
from unickpt.diagnosis.recording.records import Op

TREE = os.environ.get("MEGATRON_LM", "")
# The NullTokenizer of the development branch counts its end-of-document token among --vocab-size.
COUNTED = "" if (Path(TREE) / "megatron/training/tokenizer").is_dir() else f" --vocab-size {leg.LLAMA['vocab_size']}"
MEGATRON = leg.MEGATRON + COUNTED
_FLAG = "--dist-ckpt-optim-fully-reshardable"  # since 0.15; before, it is how Megatron saves in parallel
_ARGUMENTS = Path(TREE) / "megatron/training/arguments.py"
RESHARDABLE = _FLAG if _ARGUMENTS.is_file() and _FLAG in _ARGUMENTS.read_text() else "--ckpt-fully-parallel-save"
pytestmark = pytest.mark.skipif(not TREE, reason="MEGATRON_LM names no Megatron-LM tree")

LOSS = re.compile(r"iteration +(\d+)/.*lm loss: ([0-9.E+-]+)")


def run(
    world: int, arguments: str, *, check: bool = True, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    given = {"MEGATRON_LM": TREE, "GLOO_SOCKET_IFNAME": "lo", **(env or {})}
    return torchrun(world, "tests.jobs.megatron.pretrain", *arguments.split(), env=given, timeout_s=300, check=check)


def losses(output: str) -> dict[int, float]:
    return {int(at): float(value) for at, value in LOSS.findall(output)}


def common(directory: Path, upto: int) -> str:
    return f"--save {directory} --load {directory} --save-interval 3 {until(upto)} --ckpt-format unickpt"


def until(iteration: int) -> str:
    """Return the arguments to stop at an iteration. Megatron's scheduler needs the same end in every leg."""
    return f"--train-iters 9 --exit-interval {iteration}"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    where = tmp_path_factory.mktemp("whole")
    return losses(run(2, f"{common(where, 9)} --bf16 --use-distributed-optimizer --tensor-model-parallel-size 2").stdout)


@pytest.fixture(scope="module")
def resumed_by_megatron(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Iterations 4 to 6 after a resume under the same shape from Megatron's own format."""
    where = tmp_path_factory.mktemp("stock")
    base = f"--save {where} --load {where} --save-interval 3 --ckpt-format torch_dist --bf16 --use-distributed-optimizer"
    run(2, f"{base} --tensor-model-parallel-size 2 {until(3)}")
    return losses(run(2, f"{base} --tensor-model-parallel-size 2 {until(6)}").stdout)


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Iterations 4 to 9 after a resume under another shape by Megatron alone: what rounding does."""
    where = tmp_path_factory.mktemp("elsewhere")
    base = f"--save {where} --load {where} --save-interval 3 --ckpt-format torch_dist --bf16 --use-distributed-optimizer"
    run(2, f"{base} {RESHARDABLE} --tensor-model-parallel-size 2 {until(3)}")
    return losses(run(2, f"{base} {RESHARDABLE} --pipeline-model-parallel-size 2 {until(9)}").stdout)


def assert_close(found: dict[int, float], expected: dict[int, float], elsewhere: dict[int, float]) -> None:
    """Compare the losses with an uninterrupted run, except the second one, which Megatron logs differently."""
    assert found
    alike = [at for at in elsewhere if at != min(elsewhere) + 1]
    steps = [at for at in found if at != min(found) + 1]
    assert_continues(in_steps(found, steps), in_steps(expected, steps), in_steps(expected, alike), in_steps(elsewhere, alike))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three iterations under TP2, with the distributed optimizer."""
    where = tmp_path_factory.mktemp("saved")
    done = run(2, f"{common(where, 3)} --bf16 --use-distributed-optimizer --tensor-model-parallel-size 2")
    assert (where / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert (where / "iter_0000003/manifest.json").is_file()
    assert not list(where.rglob("*.pt")), done.stdout[-2000:]
    return where


def copied(saved: Path, target: Path) -> Path:
    subprocess.run(["cp", "-r", str(saved), str(target)], check=True)
    return target


SHAPES = {
    "same": (2, "--bf16 --use-distributed-optimizer --tensor-model-parallel-size 2"),
    "pp2": (2, "--bf16 --use-distributed-optimizer --pipeline-model-parallel-size 2"),
    "dp2_plain": (2, "--bf16"),
    "one_dist": (1, "--bf16 --use-distributed-optimizer"),
    "tp2pp2": (4, "--bf16 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-distributed-optimizer"),
    "cp2": (2, "--bf16 --context-parallel-size 2 --use-distributed-optimizer"),
    "fp32": (1, ""),
    "parallel_save": (
        2,
        "--bf16 --use-distributed-optimizer --ckpt-fully-parallel-save --ckpt-fully-parallel-load --async-save",
    ),
}


def test_resumes_from_megatrons_torch_format(
    uninterrupted: dict[int, float], elsewhere: dict[int, float], tmp_path: Path
) -> None:
    """With several buckets, converted, and resumed under another shape."""
    saving = f"--save {tmp_path / 'torch'} --save-interval 3 {until(3)} --ckpt-format torch --bf16 --use-distributed-optimizer"
    run(2, f"{saving} --tensor-model-parallel-size 2 --overlap-grad-reduce --ddp-bucket-size 20000")
    where = tmp_path / "converted"
    where.mkdir()
    assert main(["convert", str(tmp_path / "torch"), str(where / "iter_0000003")]) == 0
    (where / "latest_checkpointed_iteration.txt").write_text("3")
    done = run(2, f"{common(where, 6)} --bf16 --use-distributed-optimizer --pipeline-model-parallel-size 2")
    found = losses(done.stdout)
    assert sorted(found) == [4, 5, 6], done.stdout[-3000:]
    assert_close(found, uninterrupted, elsewhere)


@pytest.mark.parametrize("function", ["capture.contribution", "optimizer.sharded_state_dict"])
def test_state_that_one_rank_cannot_describe_is_saved_by_megatron_in_the_same_call(
    uninterrupted: dict[int, float], elsewhere: dict[int, float], tmp_path: Path, function: str
) -> None:
    """Both before and at the point where the ranks wait for each other. The next job resumes from the checkpoint."""
    shape = "--bf16 --use-distributed-optimizer --tensor-model-parallel-size 2"
    done = run(2, f"{common(tmp_path, 3)} {shape} --async-save", env={"BREAK_SAVE": function})
    assert "rank 1: IndexError: list index out of range" in done.stdout
    assert done.stdout.count("in its own format instead") == 1
    assert "Consider increasing the checkpoint interval" not in done.stdout
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert (tmp_path / "iter_0000003/.metadata").is_file()
    assert not (tmp_path / "iter_0000003/manifest.json").exists()
    again = run(2, f"{common(tmp_path, 6)} {shape}")
    assert_close(losses(again.stdout), uninterrupted, elsewhere)
    assert sorted(losses(again.stdout)) == [4, 5, 6]
    assert (tmp_path / "iter_0000006/manifest.json").is_file()


def test_saves_are_asynchronous_only_with_megatrons_flag(tmp_path: Path) -> None:
    base = f"--save {tmp_path} --save-interval 1 --ckpt-format unickpt --bf16 {until(3)}"
    assert "Consider increasing the checkpoint interval" not in (output := run(1, base).stdout)
    assert "scheduled an async checkpoint save" not in output
    assert "scheduled an async checkpoint save" in run(1, f"{base} --async-save").stdout
    assert "scheduled an async checkpoint save" not in run(1, f"{base} --async-save --unickpt-sync-save").stdout


EXPORTS = {
    "pp2": "--bf16 --use-distributed-optimizer --pipeline-model-parallel-size 2",
    "same": "--bf16 --use-distributed-optimizer --tensor-model-parallel-size 2",
    "dp2_plain": "--bf16",
}


@pytest.mark.parametrize("shape", EXPORTS)
def test_megatron_without_unickpt_resumes_from_an_export(saved: Path, tmp_path: Path, shape: str) -> None:
    """``--ckpt-format torch_dist`` without unickpt has the same losses as ``--ckpt-format unickpt``."""
    where = tmp_path / "exported"
    assert main(["export", str(saved / "iter_0000003"), str(where), "--to", "torch-dist"]) == 0
    stop = f"--save-interval 3 {until(6)} {EXPORTS[shape]}"
    alone = run(2, f"--load {where} --ckpt-format torch_dist {stop}", env={"UNICKPT_AUTOLOAD": "0"}).stdout
    adapted = run(2, f"--load {saved} --ckpt-format unickpt {stop}").stdout
    assert sorted(losses(alone)) == [4, 5, 6], alone[-3000:]
    assert losses(alone) == losses(adapted)


@pytest.mark.parametrize("shape", SHAPES)
def test_resumes_under_another_shape(
    saved: Path,
    uninterrupted: dict[int, float],
    elsewhere: dict[int, float],
    resumed_by_megatron: dict[int, float],
    tmp_path: Path,
    shape: str,
) -> None:
    where = copied(saved, tmp_path / "ck")
    world, arguments = SHAPES[shape]
    done = run(world, f"{common(where, 6)} {arguments}")
    found = losses(done.stdout)
    assert sorted(found) == [4, 5, 6], done.stdout[-3000:]
    assert_close(found, uninterrupted, elsewhere)
    assert "unickpt:unickpt" not in done.stdout  # Megatron's format has the name of the logger
    if shape == "same":
        assert found == resumed_by_megatron
        assert done.stdout.count("INFO:unickpt:resumed ") == 1
        assert "bytes read on this rank" not in done.stdout  # a detail, of level DEBUG
    assert "change what the loaded tensors compute" not in done.stdout
    assert ("generators re-seeded" in done.stdout) == (shape not in ("same",)), done.stdout[-3000:]
    assert (where / "latest_checkpointed_iteration.txt").read_text() == "6"


def test_the_old_format_is_read_and_the_new_one_written(
    uninterrupted: dict[int, float], elsewhere: dict[int, float], tmp_path: Path
) -> None:
    shape = "--bf16 --use-distributed-optimizer --tensor-model-parallel-size 2"
    base = f"--save {tmp_path} --load {tmp_path} --save-interval 3"
    run(2, f"{base} {until(3)} --ckpt-format torch_dist {shape}")
    assert not (tmp_path / "iter_0000003/manifest.json").exists()
    done = run(2, f"{base} {until(6)} --ckpt-format unickpt {shape}")
    assert_close(losses(done.stdout), uninterrupted, elsewhere)
    assert (tmp_path / "iter_0000006/manifest.json").is_file()
    back = run(1, f"{base} {until(9)} --ckpt-format torch_dist --bf16 --use-distributed-optimizer")
    assert_close(losses(back.stdout), uninterrupted, elsewhere)
    assert (tmp_path / "iter_0000009/.metadata").is_file()


@pytest.mark.parametrize("own_folder", [False, True])
def test_resumes_from_the_newer_of_persistent_and_non_persistent(
    uninterrupted: dict[int, float], elsewhere: dict[int, float], tmp_path: Path, own_folder: bool
) -> None:
    """A persistent checkpoint of iteration 2, a non-persistent one of 3; then a persistent one of 4."""
    run_folder, scratch = tmp_path / "run", tmp_path / "run/non_persistent"
    base = f"--save {run_folder} --load {run_folder} --save-interval 2 --ckpt-format unickpt --bf16"
    base += " --use-distributed-optimizer --non-persistent-save-interval 3 --non-persistent-ckpt-type global"
    if own_folder:
        scratch = tmp_path / "scratch"
        base += f" --non-persistent-global-ckpt-dir {scratch}"
    run(2, f"{base} {until(3)} --tensor-model-parallel-size 2")
    assert (run_folder / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert (scratch / "iter_0000003/manifest.json").is_file()
    done = run(2, f"{base} {until(4)} --pipeline-model-parallel-size 2")
    assert list(losses(done.stdout)) == [4], done.stdout[-3000:]
    assert_close(losses(done.stdout), uninterrupted, elsewhere)
    assert f"loading distributed checkpoint from {scratch} at iteration 3" in done.stdout
    done = run(1, f"{base} {until(5)}")
    assert list(losses(done.stdout)) == [5], done.stdout[-3000:]
    assert f"loading distributed checkpoint from {run_folder} at iteration 4" in done.stdout


def test_flags_have_megatrons_meaning(saved: Path, tmp_path: Path) -> None:
    where = copied(saved, tmp_path / "ck")
    load = f"--load {where} --ckpt-format unickpt --bf16 {until(5)}"
    for flag in ("--no-load-optim", "--no-load-rng", "--finetune"):
        done = run(1, f"{load} {flag}")
        first = min(losses(done.stdout))
        assert first == (1 if flag == "--finetune" else 4), done.stdout[-2000:]
    tree = run(1, f"{load} --use-checkpoint-args --ckpt-step 3").stdout
    assert min(losses(tree)) == 4
    missing = run(
        1, f"--load {tmp_path / 'nothing'} --ckpt-format unickpt {until(1)} --exit-on-missing-checkpoint", check=False
    )
    assert "exit-on-missing-checkpoint" in missing.stdout
    assert not losses(missing.stdout)


def test_another_model_is_refused_by_name(saved: Path, tmp_path: Path) -> None:
    done = run(1, f"--load {saved} --ckpt-format unickpt --bf16 {until(5)} --ffn-hidden-size 512 --swiglu", check=False)
    assert done.returncode != 0
    assert "ffn_hidden_size: 256 in the checkpoint, 512 in this job" in done.stdout
    assert "swiglu: False in the checkpoint, True in this job" in done.stdout


def test_arguments_that_change_the_function_are_named_with_both_values(saved: Path) -> None:
    other = (
        "--rotary-seq-len-interpolation-factor 2 --qk-l2-norm --norm-epsilon 1e-6 --no-bias-swiglu-fusion --init-method-std 0.1"
    )
    done = run(1, f"--load {saved} --ckpt-format unickpt --bf16 {until(4)} {other}")
    assert "3 arguments change what the loaded tensors compute" in done.stdout
    assert "rotary_seq_len_interpolation_factor: None in the checkpoint, 2 in this job" in done.stdout
    assert "qk_l2_norm: False in the checkpoint, True in this job" in done.stdout
    assert "epsilon: 1e-05 in the checkpoint, 1e-06 in this job" in done.stdout
    assert list(losses(done.stdout)) == [4]


def test_the_strictest_loading_works_under_another_shape(saved: Path) -> None:
    """Generators belong to positions of the old shape. They are re-seeded, which is not a mismatch."""
    load = f"--load {saved} --ckpt-format unickpt --bf16 --use-distributed-optimizer {until(4)}"
    done = run(2, f"{load} --pipeline-model-parallel-size 2 --dist-ckpt-strictness raise_all")
    assert list(losses(done.stdout)) == [4], done.stdout[-3000:]
    assert "generators re-seeded" in done.stdout


def test_another_vocabulary_never_loses_rows(saved: Path) -> None:
    """A tokenizer of 4,096 entries; then of 512, and of 5,001 with other padding."""
    load = f"--load {saved} --ckpt-format unickpt --bf16 {until(4)}"
    done = run(1, f"{load} --vocab-size 511", check=False)
    assert done.returncode != 0
    assert "4,096 rows in the checkpoint, 4,096 of them entries of its tokenizer, 512 in this job" in done.stdout
    assert not losses(done.stdout)
    done = run(1, f"{load} --vocab-size 5000 --make-vocab-size-divisible-by 100")
    assert "the checkpoint's tokenizer has 4,096 entries, this job's has 5,001: rows 4096:5001 are new" in done.stdout
    assert "rows 4096:5001 are not in the checkpoint: initialised by the model" in done.stdout
    assert "rows 4096:5001 are not in the checkpoint: zeros" in done.stdout
    assert list(losses(done.stdout)) == [4]


def test_a_damaged_checkpoint_is_passed_over_and_an_interrupted_one_never_seen(saved: Path, tmp_path: Path) -> None:
    where = copied(saved, tmp_path / "ck")
    run(1, f"{common(where, 6)} --bf16 --use-distributed-optimizer")
    data = next((where / "iter_0000006/data").glob("*"))
    data.write_bytes(data.read_bytes()[:-1] + b"\0\1"[-1:])
    raw = bytearray(data.read_bytes())
    raw[-20] ^= 1
    data.write_bytes(bytes(raw))
    (where / "iter_0000099/data").mkdir(parents=True)  # remains of a killed save
    done = run(1, f"--load {where} --ckpt-format unickpt --bf16 --use-distributed-optimizer {until(4)}")
    assert "iteration 6" in done.stdout
    assert "cannot be used" in done.stdout
    assert min(losses(done.stdout)) == 4
    (where / "latest_checkpointed_iteration.txt").write_text("")
    done = run(1, f"--load {where} --ckpt-format unickpt --bf16 --use-distributed-optimizer {until(4)}")
    assert min(losses(done.stdout)) == 4, done.stdout[-3000:]


def test_a_newer_format_ends_the_job_and_no_older_checkpoint_is_resumed(saved: Path, tmp_path: Path) -> None:
    where = copied(saved, tmp_path / "ck")
    run(1, f"{common(where, 6)} --bf16 --use-distributed-optimizer")
    path = where / "iter_0000006/manifest.json"
    body = {**json.loads(path.read_text()), "version": 99}
    path.write_text(json.dumps({**body, "checksum": digest(manifest_module._canonical(body))}))
    load = f"--load {where} --ckpt-format unickpt --bf16 --use-distributed-optimizer {until(7)}"
    done = run(2, f"{load} --tensor-model-parallel-size 2", check=False)
    assert done.returncode != 0
    assert not losses(done.stdout)
    assert "format version 99, this release reads up to" in done.stdout
    assert "Looking for an older one" not in done.stdout


def test_damage_seen_by_one_rank_makes_all_ranks_load_the_same_older_checkpoint(saved: Path, tmp_path: Path) -> None:
    """The second rank uses a folder of its own, in which the newest checkpoint lacks a file."""
    for rank in (0, 1):
        copied(saved, tmp_path / f"rank{rank}")
        shutil.copytree(tmp_path / f"rank{rank}/iter_0000003", tmp_path / f"rank{rank}/iter_0000002")
        (tmp_path / f"rank{rank}/latest_checkpointed_iteration.txt").write_text("3")
    next((tmp_path / "rank1/iter_0000003/data").iterdir()).unlink()
    shape = "--ckpt-format unickpt --bf16 --use-distributed-optimizer --tensor-model-parallel-size 2"
    done = run(2, f"--load . {shape} {until(4)}", env={"FOLDER_OF_RANK": str(tmp_path / "rank{}")})
    assert "rank 1 could not load it" in done.stdout
    assert "is missing" in done.stdout
    assert "from . at iteration 2" in done.stdout, done.stdout[-3000:]
    assert losses(done.stdout)


def test_a_full_disk_logs_a_warning_and_training_continues(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(small)], check=False).returncode:
        pytest.skip("no right to mount a small tmpfs")
    try:
        done = run(1, f"--save {small} --save-interval 2 --ckpt-format unickpt --bf16 {until(4)}")
    finally:
        subprocess.run(["umount", "-l", str(small)], check=False)
    assert sorted(losses(done.stdout)) == [1, 2, 3, 4]
    assert "Gave up saving" in done.stdout
    assert not (small / "latest_checkpointed_iteration.txt").exists()


def test_the_arguments_are_stored_readable(saved: Path) -> None:
    manifest = json.loads((saved / "iter_0000003/manifest.json").read_text())
    arguments = manifest["objects"]["common"]["args"]["$namespace"]
    assert arguments["num_layers"] == 4
    assert arguments["tensor_model_parallel_size"] == 2
    assert manifest["step"] == 3


# ---------------------------------------------------------------- DeepSpeed


def deepspeed_leg(batches: Path, source: Path | str, first: int, last: int, out: Path, *, ranks: int = 2) -> dict[str, Any]:
    out.mkdir()
    torchrun(ranks, "tests.jobs.megatron.deepspeed_leg", str(batches), str(source), str(first), str(last), str(out))
    found: dict[str, Any] = json.loads((out / "leg.json").read_text())
    return {**found, "losses": {int(at): loss for at, loss in found["losses"].items()}}


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the batches of the script's data loader in nine iterations."""
    file = tmp_path_factory.mktemp("batches") / "batches.pt"
    run(1, f"{until(9)} {MEGATRON}", env={"RECORD_BATCHES": str(file)})
    return file


@pytest.fixture(scope="module")
def deepspeed(batches: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    """Return a folder with a checkpoint of every step, whose ``latest`` names the third, and the losses of nine steps."""
    folder = tmp_path_factory.mktemp("deepspeed") / "folder"
    return folder, deepspeed_leg(batches, "-", 1, 9, folder)["losses"]


@pytest.fixture(scope="module")
def orders(
    deepspeed: tuple[Path, dict[int, float]], batches: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[list[float]]:
    """Return the losses of nine steps on two ranks and on one, which add the same gradients in another order."""
    on_one = deepspeed_leg(batches, "-", 1, 9, tmp_path_factory.mktemp("one rank") / "folder", ranks=1)["losses"]
    return [in_steps(each, sorted(on_one)) for each in (deepspeed[1], on_one)]


def test_from_deepspeed_to_the_script_and_back(
    deepspeed: tuple[Path, dict[int, float]], orders: list[list[float]], batches: Path, tmp_path: Path
) -> None:
    """Three iterations each, compared with one DeepSpeed job of nine, all in float32.

    The two sum in other orders, and Megatron's log rounds to seven digits.
    """
    folder, whole = deepspeed
    files = sorted(folder.rglob("*"))
    first = f"--load {folder} --save {tmp_path / 'megatron'} --save-interval 3 --ckpt-format unickpt"
    done = run(2, f"{first} {until(6)} {MEGATRON} --use-distributed-optimizer --tensor-model-parallel-size 2")
    found = losses(done.stdout)
    assert sorted(found) == [4, 5, 6], done.stdout[-3000:]
    expected = {at: whole[at] for at in found}
    expected[5] = (expected[4] + expected[5]) / 2  # the second loss after a start: Megatron logs the mean of both
    assert_continues(*(in_steps(each, [4, 5, 6]) for each in (found, expected)), *orders)
    assert re.search(r"iteration +6/.*consumed samples: +48 ", done.stdout)
    message = [line for line in done.stdout.splitlines() if "unickpt:" in line]
    for name in ("iteration", "consumed_train_samples", "opt_param_scheduler"):
        assert any(f" set: {name}: " in line for line in message), message
    assert any("generators of deepspeed are not Megatron's: seeded with" in line for line in message)
    assert sorted(folder.rglob("*")) == files, "it is another framework's folder"
    back = deepspeed_leg(batches, tmp_path / "megatron", 7, 9, tmp_path / "back")
    resumed = back["resumed"]
    assert (resumed["steps"], resumed["samples"], resumed["last_epoch"]) == (6, 48, 6)
    assert resumed["rate"] == pytest.approx(94 / 96 * 1e-3)
    assert_continues(list(back["losses"].values()), in_steps(whole, back["losses"]), *orders)
    assert any(" set: lr_scheduler: " in line and "set to step 6" in line for line in resumed["report"])


def test_flags_and_folders_of_deepspeed(
    deepspeed: tuple[Path, dict[int, float]], orders: list[list[float]], tmp_path: Path
) -> None:
    folder, whole = deepspeed
    shape = f"--ckpt-format unickpt {MEGATRON}"
    weights = run(1, f"--load {folder} --ckpt-step 2 --no-load-optim {until(3)} {shape}")
    assert list(losses(weights.stdout)) == [3]
    assert_continues([losses(weights.stdout)[3]], [whole[3]], *orders)
    assert "change what the loaded tensors compute" not in weights.stdout
    itself = run(1, f"--load {folder / 'global_step3'} --finetune {until(1)} {shape} --rotary-base 500000 --norm-epsilon 1e-3")
    assert re.search(r"rotary_base: [0-9.]+ in the checkpoint, 500000 in this job", itself.stdout)
    assert re.search(r"norm_epsilon: [0-9.e-]+ in the checkpoint, 0.001 in this job", itself.stdout)
    assert list(losses(itself.stdout)) == [1]
    assert "--finetune: only weights" in itself.stdout
    same = tmp_path / "same"
    shutil.copytree(folder, same)
    run(1, f"--load {same} --save {same} --save-interval 1 {until(4)} {shape}")
    again = run(1, f"--load {same} {until(5)} {shape}")
    assert list(losses(again.stdout)) == [5]
    assert_continues([losses(again.stdout)[5]], [whole[5]], *orders)


def test_timing_is_an_argument(tmp_path: Path) -> None:
    """``--unickpt-timing``: every rank records its steps and calls, under Megatron's names for the groups."""
    rings = tmp_path / "rings"
    shape = "--bf16 --use-distributed-optimizer --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    done = run(4, f"{until(3)} {shape} --unickpt-timing --unickpt-timing-folder {rings}")
    assert f"collectives are timed; rings in {rings}" in done.stdout + done.stderr
    found = read_folder(rings)
    assert sorted(found.ranks) == [0, 1, 2, 3]
    for rank in found.ranks.values():
        assert rank.closed
        assert int((rank.records["op"] == Op.STEP).sum()) == 2  # of three steps; the beginning of the first one is unknown
        labels = {entry["label"] for entry in rank.communicators}
        assert labels >= {"tensor model parallel", "pipeline model parallel", "data parallel"}, labels
    assert {rank.step for rank in found.ranks.values()} == {3}
    assert main(["diagnose", str(rings), "--after", "2"]) == 0
