"""Checkpoints to attack."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support import handmade


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return handmade.save_ranks(tmp_path_factory.mktemp("sound") / "global_step3", world=2)


@pytest.fixture
def victim(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "victim"))
