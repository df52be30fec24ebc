"""``export --config``: copied files are in the folder of the user."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from tests.support.llama import saved
from unickpt.cli.main import main

SECRET = "a private key"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    saved(
        tmp_path / "checkpoint", {("w", "weight"): torch.ones(2, 2).bfloat16(), ("w", "master"): torch.ones(2, 2)}, aliases={}
    )
    return tmp_path / "checkpoint"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "x"}')
    (folder / "tokenizer.json").write_text("{}")
    (tmp_path / "secret").write_text(SECRET)
    return folder


def exported(checkpoint: Path, config: Path, to: Path) -> list[str]:
    code = main(["export", str(checkpoint), str(to), "--config", str(config)])
    assert code in (0, 2)
    return [path.read_text(errors="replace") for path in to.rglob("*") if path.is_file()]


@pytest.mark.parametrize("name", ["tokenizer.json", "additional_chat_templates/x.jinja", "additional_chat_templates"])
def test_a_link_out_of_the_folder_is_not_copied(
    checkpoint: Path, config: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (config / name).unlink(missing_ok=True)
    (config / name).parent.mkdir(exist_ok=True)
    if name == "additional_chat_templates":
        (tmp_path / "private").mkdir()
        shutil.copy(tmp_path / "secret", tmp_path / "private" / "x.jinja")
        (config / name).symlink_to(tmp_path / "private")
    else:
        (config / name).symlink_to(tmp_path / "secret")
    assert not any(SECRET in text for text in exported(checkpoint, config, tmp_path / "out"))
    assert "outside of" in capsys.readouterr().err


def test_links_within_the_folder_and_of_the_hub_are_copied(checkpoint: Path, config: Path, tmp_path: Path) -> None:
    (config / "vocab.json").symlink_to("tokenizer.json")
    assert "{}" in exported(checkpoint, config, tmp_path / "out")
    assert (tmp_path / "out" / "vocab.json").read_text() == "{}"
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    shutil.copytree(config, snapshot)
    shutil.move(snapshot / "tokenizer.json", blobs / "123")
    (snapshot / "tokenizer.json").symlink_to(Path("..", "..", "blobs", "123"))
    exported(checkpoint, snapshot, tmp_path / "again")
    assert (tmp_path / "again" / "tokenizer.json").read_text() == "{}"


def test_a_configuration_that_is_a_pipe_does_not_block(checkpoint: Path, config: Path, tmp_path: Path) -> None:
    (config / "config.json").unlink()
    os.mkfifo(config / "config.json")
    exported(checkpoint, config, tmp_path / "out")
