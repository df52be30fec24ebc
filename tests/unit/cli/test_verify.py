"""``unickpt verify`` names damage and returns it as the exit code."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support import handmade
from tests.support.cli import box_of


def test_verify_of_a_sound_checkpoint(ranks: Path, run: Any, run_json: Any) -> None:
    code, out, err = run("verify", ranks)
    assert (code, err) == (0, "")
    assert out.startswith("sound: ")
    code, document = run_json("verify", ranks)
    assert code == 0
    assert document["sound"] is True
    assert document["problems"] == []
    assert document["files"] == 4
    assert document["size_bytes"] == sum(r["size_bytes"] for r in handmade.read_manifest(ranks)["files"])


def test_verify_names_the_fragment_of_a_flipped_bit(ranks: Path, run: Any, run_json: Any) -> None:
    _, document = run_json("inspect", ranks, "--tensor", "layer.weight", "--state", "exp_avg")
    fragment = document["tensors"][0]["fragments"][2]
    handmade.flip_bit(ranks / fragment["file"], fragment["offset_bytes"] + 3)
    code, out, _ = run("verify", ranks)
    assert code == 1
    problem, verdict = out.splitlines()
    assert f"layer.weight (exp_avg) {box_of(fragment)} is damaged" in problem
    assert fragment["file"] in problem
    assert verdict.startswith("damaged: ")
    code, document = run_json("verify", ranks)
    assert (code, document["sound"], document["problems"]) == (1, False, [problem])


@pytest.mark.parametrize("name", ["data/rank00001.safetensors", "index.safetensors"])
def test_verify_finds_a_truncated_or_missing_file(ranks: Path, name: str, run: Any) -> None:
    whole = (ranks / name).read_bytes()
    (ranks / name).write_bytes(whole[:-1])
    code, out, _ = run("verify", ranks)
    assert code == 1
    assert f"{name}: {len(whole) - 1:,} bytes, expected {len(whole):,} bytes" in out
    (ranks / name).unlink()
    code, out, _ = run("verify", ranks)
    assert code == 1
    assert f"{name}: missing" in out


def test_verify_finds_a_flipped_bit_in_header_index_and_manifest(ranks: Path, tmp_path: Path, run: Any) -> None:
    data, index = "data/rank00000.safetensors", "index.safetensors"
    for name, at in ((data, 40), (index, 40), (index, -1), ("manifest.json", 90)):
        copy = tmp_path / "copy"
        shutil.copytree(ranks, copy)
        handmade.flip_bit(copy / name, at)
        code, out, err = run("verify", copy)
        assert (code, err) == (1, ""), (name, at)
        assert name in out.splitlines()[0]
        shutil.rmtree(copy)


def test_verify_of_a_save_directory_follows_latest(checkpoint: Path, run_json: Any, run: Any) -> None:
    code, document = run_json("verify", checkpoint.parent)
    assert (code, document["directory"]) == (0, str(checkpoint))
    (checkpoint.parent / "latest").unlink()
    code, _, err = run("verify", checkpoint.parent)
    assert code == 2
    assert "name one of the checkpoints there: global_step3" in err


def test_a_folder_of_megatron_is_followed_by_its_tracker_file(tmp_path: Path, run: Any) -> None:
    saved = handmade.save_ranks(tmp_path / "runs" / "iter_0000007", world=2)
    (saved.parent / "latest").unlink(missing_ok=True)
    assert run("verify", saved.parent)[0] == 2
    (saved.parent / "latest_checkpointed_iteration.txt").write_text("7")
    code, out, _ = run("verify", saved.parent)
    assert code == 0
    assert out.startswith("sound: ")
