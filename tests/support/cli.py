"""Helpers for tests of the command line."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.support import handmade
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.save.shards import Shard
from unickpt.cli.main import main

REPOSITORY = Path(__file__).resolve().parents[2]


def box_of(fragment: dict[str, Any]) -> Box:
    return Box(tuple(fragment["start"]), tuple(fragment["shape"]))


def scalar(name: str) -> Shard:
    return Shard(TensorInfo(name, "weight", "F32", (), "parameter"), Box((), ()), torch.tensor(1.0))


def trainer_run(folder: Path, *steps: int) -> Path:
    """Create the output directory of a Trainer run: ``checkpoint-N`` with Trainer's own state and a save directory."""
    for step in steps:
        run = folder / f"checkpoint-{step}"
        handmade.save_single(run, f"global_step{step}", step=step)
        (run / "trainer_state.json").write_text("{}")
    return folder


def json_of(*argv: str) -> dict[str, Any]:
    """Return the JSON document that a command of ``unickpt`` prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main([*argv, "--json"]) == 0, printed.getvalue()
    found: dict[str, Any] = json.loads(printed.getvalue())
    return found


def python(*argv: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, argv)]
    found = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == code, found.stderr
    return found


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True
