"""The JSON documents have the members that the reference lists."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.support import handmade
from tests.support.cli import REPOSITORY


def test_docs_cli_names_every_member_of_the_json(
    ranks: Path, tmp_path: Path, run_json: Any, hooks_in_a_process: tuple[str, str]
) -> None:
    text = (REPOSITORY / "docs/reference/cli.md").read_text()
    described = set(re.findall(r"`\.?(?:checkpoint\.)?(\w+)`", text))
    handmade.save_single(tmp_path / "several")
    inspected, listed = (run_json("inspect", directory)[1] for directory in (ranks, tmp_path / "several"))
    tensors, verified = run_json("inspect", ranks, "--tensor", "layer.weight")[1], run_json("verify", ranks)[1]
    for member in ("writer", "files", "optimizer", "objects", "aliases"):  # as the manifest has them
        del inspected["checkpoint"][member]
    newest = run_json("latest", ranks)[1]
    documents = [inspected, listed["save_directory"], tensors, verified, newest, json.loads(hooks_in_a_process[0])]
    assert {key for document in documents for key in _members(document)} <= described


def _members(value: Any) -> set[str]:
    if isinstance(value, list):
        return {key for item in value for key in _members(item)}
    if not isinstance(value, dict):
        return set()
    return set(value) | {key for item in value.values() for key in _members(item)}
