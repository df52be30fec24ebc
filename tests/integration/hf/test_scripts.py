"""The scripts of these tests are ordinary user scripts. They do not import or mention unickpt."""

from __future__ import annotations

import ast

import pytest

from tests.support.repository import REPO

FOLDER = REPO / "tests" / "jobs" / "hf"


@pytest.mark.parametrize("name", ["train_trainer", "train_accelerate", "train_sft_lora", "train_lightning", "recorder"])
def test_no_script_imports_this_project(name: str) -> None:
    imported = set()
    for node in ast.walk(ast.parse((FOLDER / f"{name}.py").read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module or "")
    assert imported, "there is something to look at"
    assert not {module for module in imported if module.split(".")[0] in ("unickpt", "ds_unickpt")}
