"""The patches apply, and do what the runtime hook does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.launch import REPO, environment

PATCHES = sorted((REPO / "patches" / "deepspeed").glob("*.patch"))
JOB = """
import sys, torch, deepspeed
config = {"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {"torch_adam": True}}, "unickpt": {"enabled": True}}
model = torch.nn.Linear(2, 2)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
engine.save_checkpoint(sys.argv[1], tag="x")
"""


def apply(patch: Path, tree: Path) -> None:
    done = subprocess.run(["patch", "-p1", "-s", "-i", str(patch)], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("patched", [True, False])
def test_a_patched_deepspeed_needs_no_hook_at_import(tmp_path: Path, patched: bool) -> None:
    """And an unpatched one without the hook saves its own format: the control."""
    spec = find_spec("deepspeed")
    assert spec is not None
    assert spec.origin is not None
    tree = tmp_path / "tree"
    shutil.copytree(Path(spec.origin).parent, tree / "deepspeed", ignore=shutil.ignore_patterns("*.pyc"))
    patch = REPO / "patches" / "deepspeed" / f"{version('deepspeed').split('+')[0]}.patch"
    assert patch in PATCHES, "no patch for the installed version"
    if patched:
        apply(patch, tree)
    env = environment(UNICKPT_AUTOLOAD="0", PYTHONPATH=f"{tree}{os.pathsep}{REPO}", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", JOB, str(tmp_path / "out")], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "out" / "x" / "manifest.json").exists() == patched
    assert bool(list((tmp_path / "out" / "x").glob("*.pt"))) != patched


@pytest.mark.parametrize("patch", PATCHES, ids=lambda p: p.stem)
def test_every_patch_is_small_and_applies_to_the_tree_that_is_given(tmp_path: Path, patch: Path) -> None:
    added = [line for line in patch.read_text().splitlines() if line.startswith("+") and not line.startswith("+++")]
    assert 0 < len(added) < 10
    source = Path(os.environ.get("DEEPSPEED_TREES", "/nonexistent")) / patch.stem / "deepspeed"
    if source.is_dir():
        shutil.copytree(source, tmp_path / "deepspeed")
        apply(patch, tmp_path)
