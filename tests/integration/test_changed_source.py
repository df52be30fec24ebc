"""Releases of frameworks that do not exist yet: copies of the installed ones with another version and other source.

CI runs one of them, ``UNICKPT_FULL_MATRIX=1`` all.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from tests.support.extent import in_full
from tests.support.needs import needs
from tests.support.repository import REPO
from unickpt.testing.launch import environment

DEEPSPEED = """
import sys, torch, deepspeed
from ds_unickpt.self_tests.engine import begin
begin()
config = {
    "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    "zero_optimization": {"stage": 1}, "unickpt": {"enabled": True},
}
model = torch.nn.Linear(2, 2)
engine, *_ = deepspeed.initialize(model=model, config=config)
assert engine.save_checkpoint(sys.argv[1], tag="tag")
from unickpt.base import hooks
print({(each.state, each.reason.split(";")[-1].strip()[:24]) for each in hooks.status() if each.hook.name == "deepspeed.save"})
"""
MEGATRON = """
import sys
from megatron_unickpt.testing.jobs import Job
import torch.distributed as dist
import megatron_unickpt
from megatron_unickpt.testing.layouts import Layout
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
job = Job(Layout.parse("gpt-one-fp32"))
job.train(1)
megatron_unickpt.save(sys.argv[1] + "/tag", job.chunks, job.optimizer)
from unickpt.base import hooks
print({(each.state, each.reason.split(";")[-1].strip()[:24]) for each in hooks.status() if each.hook.name == "megatron.save"})
"""


def changed(framework: str, folder: Path, edits: dict[str, tuple[str, str]]) -> Path:
    """Copy an installed framework, and replace text in files of the copy. Returns the folder to put on the path."""
    spec = find_spec(framework)
    assert spec is not None
    assert spec.submodule_search_locations
    shutil.copytree(spec.submodule_search_locations[0], folder / framework, ignore=shutil.ignore_patterns("__pycache__"))
    for name, (before, after) in edits.items():
        path = folder / framework / name
        text = path.read_text()
        assert before in text
        path.write_text(text.replace(before, after))
    return folder


def run(code: str, place: Path, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    rank = {"PYTHONPATH": f"{place}:{REPO}", "DS_ACCELERATOR": "cpu", "RANK": "0", "WORLD_SIZE": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, cwd=folder, timeout=600,
        env=environment(**rank, UNICKPT_CACHE=str(folder / "cache"), **env),
    )  # fmt: skip


DEEPSPEED_VERSION = {"git_version_info_installed.py": ("version='0.", "version='7.")}
MEGATRON_VERSION = {"core/package_info.py": ("MAJOR = 0", "MAJOR = 7")}


@needs("deepspeed")
def test_a_deepspeed_with_other_source_is_used_after_a_self_test(tmp_path: Path) -> None:
    other = {
        "runtime/engine.py": ("        tag = str(tag)\n        commit_info", '        tag = f"{tag}"\n        commit_info')
    }
    done = run(DEEPSPEED, changed("deepspeed", tmp_path / "site", DEEPSPEED_VERSION | other), tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "{('installed', 'its self-test has passed')}"
    assert (tmp_path / "tag" / "manifest.json").exists()


@in_full
@needs("deepspeed")
def test_a_deepspeed_that_unickpt_does_not_understand_keeps_its_own_behaviour(tmp_path: Path) -> None:
    other = {"runtime/engine.py": ("self.checkpoint_engine", "self.ckpt_engine")}
    place = changed("deepspeed", tmp_path / "site", DEEPSPEED_VERSION | other)
    done = run(DEEPSPEED, place, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "refused" in done.stdout.splitlines()[-1]
    (said,) = [line for line in done.stderr.splitlines() if "keeps its own behaviour" in line]
    assert "'DeepSpeedEngine' object has no attribute 'checkpoint_engine'" in said
    assert (tmp_path / "tag").is_dir()  # DeepSpeed's own
    assert not (tmp_path / "tag" / "manifest.json").exists()
    done = run(DEEPSPEED, place, tmp_path, UNICKPT_REQUIRE="1")
    assert done.returncode != 0
    assert "UnsupportedFrameworkError" in done.stderr


@in_full
@needs("megatron")
def test_a_megatron_with_other_source_is_used_after_a_self_test(tmp_path: Path) -> None:
    other = {
        "core/dist_checkpointing/serialization.py": (
            "checkpoint_dir_path = Path(checkpoint_dir)",
            "checkpoint_dir_path = Path(str(checkpoint_dir))",
        )
    }
    done = run(MEGATRON, changed("megatron", tmp_path / "site", MEGATRON_VERSION | other), tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "{('installed', 'its self-test has passed')}"
    assert (tmp_path / "tag" / "manifest.json").exists()
