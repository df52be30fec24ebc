"""The patches apply, and do what the runtime hook does.

Megatron-LM's are tried on the tree that ``MEGATRON_LM=/path/to/Megatron-LM`` names.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.launch import REPO, environment, torchrun

PATCHES = sorted((REPO / "patches" / "deepspeed").glob("*.patch"))
MEGATRON_PATCHES = sorted((REPO / "patches" / "megatron").glob("*.patch"))
MEGATRON = os.environ.get("MEGATRON_LM", "")
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


def added_lines(patch: Path) -> int:
    return sum(line.startswith("+") and not line.startswith("+++") for line in patch.read_text().splitlines())


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
    assert 0 < added_lines(patch) < 10
    source = Path(os.environ.get("DEEPSPEED_TREES", "/nonexistent")) / patch.stem / "deepspeed"
    if source.is_dir():
        shutil.copytree(source, tmp_path / "deepspeed")
        apply(patch, tmp_path)


@pytest.mark.parametrize("patch", MEGATRON_PATCHES, ids=lambda p: p.stem)
def test_every_patch_of_megatron_is_small_and_applies_to_the_tree_that_is_given(tmp_path: Path, patch: Path) -> None:
    assert 0 < added_lines(patch) < 12
    source = Path(os.environ.get("MEGATRON_TREES", "/nonexistent")) / patch.stem / "megatron"
    if source.is_dir():
        shutil.copytree(source, tmp_path / "megatron")
        apply(patch, tmp_path)


def patch_of_megatron(tree: Path) -> Path:
    """The one for the tree's version; skips for a version without one."""
    text = (tree / "megatron/core/package_info.py").read_text()
    numbers = [re.search(rf"^{part} = (\d+)", text, re.MULTILINE) for part in ("MAJOR", "MINOR", "PATCH")]
    patch = REPO / "patches" / "megatron" / f"core_v{'.'.join(found[1] for found in numbers if found)}.patch"
    if patch not in MEGATRON_PATCHES:
        pytest.skip(f"no {patch.name}")
    return patch


@pytest.mark.skipif(not MEGATRON, reason="MEGATRON_LM names no Megatron-LM tree")
@pytest.mark.parametrize("case", ["patched", "unpatched", "patched, unickpt not installed"])
def test_a_patched_megatron_needs_no_hook_at_import(tmp_path: Path, case: str) -> None:
    """The controls: an unpatched one does not know the format; a patched one alone knows that somebody is missing."""
    tree, out = tmp_path / "tree", tmp_path / "out"
    shutil.copytree(MEGATRON, tree, ignore=shutil.ignore_patterns("*.pyc", ".git", ".python-version", "docs", "tests"))
    if case != "unpatched":
        apply(patch_of_megatron(Path(MEGATRON)), tree)
    env = {"MEGATRON_LM": str(tree), "UNICKPT_AUTOLOAD": "0", "GLOO_SOCKET_IFNAME": "lo"}
    if case.endswith("not installed"):
        (tree / "megatron_unickpt.py").write_text("raise ImportError('not installed')")
    arguments = f"--ckpt-format unickpt --bf16 --train-iters 2 --save {out} --save-interval 2"
    arguments += " --vocab-size 4095"  # the mock data of versions before 0.16 has tokens up to 4094
    done = torchrun(1, "tests.megatron.pretrain", *arguments.split(), env=env, check=False)
    assert (done.returncode == 0) == (case == "patched"), done.stdout[-3000:]
    assert (out / "iter_0000002/manifest.json").is_file() == (case == "patched")
    assert not list(out.rglob("*.pt"))
    assert ("invalid choice: 'unickpt'" in done.stdout) == (case == "unpatched"), done.stdout[-3000:]
    assert ("--ckpt-format unickpt is not switched on" in done.stdout) == case.endswith("not installed"), done.stdout[-3000:]
