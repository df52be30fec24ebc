"""Damaged copies of a checkpoint, and the errors that a load of them raises."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deepspeed import comm as dist

from tests.jobs.deepspeed.jobs import build, train
from tests.jobs.deepspeed.resumes import here
from unickpt.base.errors import UnickptError
from unickpt.checkpoint.format import manifest as manifest_module
from unickpt.checkpoint.format.checksums import digest

TAG = "global_step1"

_saved: list[Path] = []


def damaged(folder: Path, damage: Callable[[Path], None]) -> Path:
    """Return a damaged copy of a valid checkpoint."""
    if not _saved:
        engine = build(here(1), seed=1)
        train(engine, 1)
        engine.save_checkpoint(str(folder / "good"))
        _saved.append(folder / "good")
    copy = folder / "bad"
    if dist.get_rank() == 0:
        shutil.copytree(_saved[0], copy)
        damage(copy / TAG)
    dist.barrier()
    return copy


def untouched(_: Path) -> None:
    """Do not damage the copy."""


def assert_refused(folder: Path, pattern: str, damage: Callable[[Path], None], *, stage: int = 3, **load: Any) -> None:
    """Assert that loading the damaged copy raises this error on every rank."""
    place = damaged(folder, damage)
    engine = build(here(stage), seed=2)
    with pytest.raises(UnickptError, match=pattern):
        engine.load_checkpoint(str(place), tag=TAG, **load)


def rewrite(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest, and update its checksum."""
    path = directory / "manifest.json"
    body = json.loads(path.read_text())
    change(body)
    body["checksum"] = digest(manifest_module._canonical(body))
    path.write_text(json.dumps(body))


def data(directory: Path, rank: int = 0) -> Path:
    return directory / "data" / f"rank{rank:05d}.safetensors"
