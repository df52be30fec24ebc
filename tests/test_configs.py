"""The ready JSONs in ``configs/deepspeed`` are switched on, and each resumes what any other saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds_unickpt.config import read_options
from tests.config_worker import NAMES
from tests.launch import REPO, torchrun

CONFIGS = sorted((REPO / "configs" / "deepspeed").glob("*.json"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_key_is_there_and_right(path: Path) -> None:
    options = read_options(json.loads(path.read_text()))
    assert options is not None
    assert options.enabled


def test_every_json_but_those_for_hugging_face_is_tried() -> None:
    assert {path.stem for path in CONFIGS if not path.stem.startswith("hf_")} == set(NAMES)


@pytest.mark.timeout(600)
def test_every_json_resumes_what_every_other_saved(tmp_path: Path) -> None:
    torchrun(2, "tests.config_worker", "save", str(tmp_path))
    torchrun(1, "tests.config_worker", "load", str(tmp_path))
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results) == len(NAMES) ** 2
    assert {pair: problems for pair, problems in results.items() if problems} == {}
