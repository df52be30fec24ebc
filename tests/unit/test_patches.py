"""The patches apply, and do what the runtime hook does.

Megatron-LM's are tried on the tree that ``MEGATRON_LM=/path/to/Megatron-LM`` names.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron_unickpt.hooks import DECLARED
from tests.support.needs import needs
from tests.support.repository import REPO
from unickpt.testing.launch import environment, torchrun

PATCHES = sorted((REPO / "patches" / "deepspeed").glob("*.patch"))
MEGATRON_PATCHES = sorted((REPO / "patches" / "megatron").glob("*.patch"))
MEGATRON = os.environ.get("MEGATRON_LM", "")
LOSS = re.compile(r"iteration +(\d+)/.*lm loss: ([0-9.E+-]+)")
JOB = """
import sys, torch, deepspeed
deepspeed.ops.__compatible_ops__.clear()  # compile nothing: what DeepSpeed compiles is of the path of its sources
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


@needs("deepspeed")
def test_a_patched_deepspeed_needs_no_hook_at_import(tmp_path: Path) -> None:
    """And an unpatched one without the hook saves its own format: the control."""
    spec = find_spec("deepspeed")
    assert spec is not None
    assert spec.origin is not None
    tree = tmp_path / "tree"
    shutil.copytree(Path(spec.origin).parent, tree / "deepspeed", ignore=shutil.ignore_patterns("*.pyc"))
    patch = REPO / "patches" / "deepspeed" / f"{version('deepspeed').split('+')[0]}.patch"
    assert patch in PATCHES, "no patch for the installed version"
    env = environment(UNICKPT_AUTOLOAD="0", PYTHONPATH=f"{tree}{os.pathsep}{REPO}", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    for patched in (False, True):
        if patched:
            apply(patch, tree)
        out = tmp_path / str(patched)
        done = subprocess.run([sys.executable, "-c", JOB, str(out)], env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        assert (out / "x" / "manifest.json").exists() == patched
        assert bool(list((out / "x").glob("*.pt"))) != patched


@pytest.mark.parametrize("patch", PATCHES, ids=lambda p: p.stem)
def test_every_patch_of_deepspeed_is_small_and_applies(tmp_path: Path, patch: Path) -> None:
    assert 0 < added_lines(patch) < 10
    source = Path(os.environ.get("DEEPSPEED_TREES", "/nonexistent")) / patch.stem / "deepspeed"
    if source.is_dir():
        shutil.copytree(source, tmp_path / "deepspeed")
        apply(patch, tmp_path)


@pytest.mark.parametrize("patch", MEGATRON_PATCHES, ids=lambda p: p.stem)
def test_every_patch_of_megatron_is_small_and_applies(tmp_path: Path, patch: Path) -> None:
    assert 0 < added_lines(patch) < 60
    hooks = {line.split('"')[1] for line in patch.read_text().splitlines() if line.startswith("+") and "@unickpt(" in line}
    assert hooks <= {hook.name for hook in DECLARED}
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


def megatron_tree(tmp_path: Path, *, patched: bool) -> Path:
    """A copy of the tree that is given."""
    tree = tmp_path / "tree"
    shutil.copytree(MEGATRON, tree, ignore=shutil.ignore_patterns("*.pyc", ".git", ".python-version", "docs", "tests"))
    if patched:
        apply(patch_of_megatron(Path(MEGATRON)), tree)
    return tree


def pretrain(world: int, tree: Path, arguments: str, **env: str) -> str:
    """Output of ``pretrain_gpt.py`` of a tree."""
    arguments += " --vocab-size 4095"  # the mock data of versions before 0.16 has tokens up to 4094
    env = {"MEGATRON_LM": str(tree), "GLOO_SOCKET_IFNAME": "lo", **env}
    return torchrun(world, "tests.jobs.megatron.pretrain", *arguments.split(), env=env, check=False).stdout


@pytest.mark.skipif(not MEGATRON, reason="MEGATRON_LM names no Megatron-LM tree")
@needs("megatron")
def test_a_patched_megatron_behaves_like_a_hooked_one(tmp_path: Path) -> None:
    tree = megatron_tree(tmp_path, patched=True)
    seen = {}
    for name, where, autoload in (("patched", tree, "0"), ("hooked", Path(MEGATRON), "1")):
        out = tmp_path / name
        base = f"--ckpt-format unickpt --bf16 --train-iters 4 --save {out} --load {out} --save-interval 2"
        first = pretrain(2, where, f"{base} --exit-interval 2 --use-distributed-optimizer", UNICKPT_AUTOLOAD=autoload)
        manifest = json.loads((out / "iter_0000002/manifest.json").read_text())
        second = pretrain(2, where, f"{base} --pipeline-model-parallel-size 2 --async-save", UNICKPT_AUTOLOAD=autoload)
        assert (out / "iter_0000004/manifest.json").is_file(), second[-3000:]
        assert not list(out.rglob("*.pt"))
        assert "generators re-seeded" in second
        seen[name] = (LOSS.findall(first), LOSS.findall(second), manifest["files"], manifest["optimizer"])
    assert len(seen["hooked"][0]) == len(seen["hooked"][1]) == 2
    assert seen["patched"] == seen["hooked"]


@pytest.mark.skipif(not MEGATRON, reason="MEGATRON_LM names no Megatron-LM tree")
@needs("megatron")
@pytest.mark.parametrize("case", ["unpatched", "patched, unickpt not installed"])
def test_without_patch_or_package_megatron_does_not_know_the_format(tmp_path: Path, case: str) -> None:
    tree = megatron_tree(tmp_path, patched=case != "unpatched")
    env = {"UNICKPT_AUTOLOAD": "0", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    if case != "unpatched":
        env["WITHOUT_UNICKPT"] = "1"
    refused = pretrain(1, tree, f"--ckpt-format unickpt --bf16 --train-iters 2 --save {tmp_path / 'out'}", **env)
    assert "invalid choice: 'unickpt'" in refused, refused[-3000:]
    stock = pretrain(1, tree, f"--bf16 --train-iters 2 --save-interval 2 --save {tmp_path / 'out'}", **env)
    assert (tmp_path / "out/iter_0000002/.metadata").is_file(), stock[-3000:]
