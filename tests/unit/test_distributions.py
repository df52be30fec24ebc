"""Wheels: what their names promise, what they hold, and what runs from an installed one."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.repository import REPO
from unickpt.testing.launch import environment

PARTS = (
    "unickpt",
    "ds_unickpt",
    "megatron_unickpt",
    "configs",
    "examples",
    "README.md",
    "LICENSE",
    "pyproject.toml",
    "setup.py",
)
COMPILER = shutil.which(os.environ.get("CC", "cc"))
WITHOUT_CASTS = f'#!/bin/sh\ncase "$*" in *_casts.c*) exit 1 ;; esac\nexec {COMPILER} "$@"\n'

Build = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Return a function that builds a wheel of version 0.2.0 into ``tmp_path / "dist"``, without a network."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in (*PARTS, "_unickpt_autoload.py"):
        if (REPO / name).is_dir():
            shutil.copytree(REPO / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.so", "out"))
        else:
            shutil.copy(REPO / name, tree)
    (tree / "unickpt" / "VERSION").write_text("0.2.0\n")

    def call(**env: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index", "--verbose"]
        command += ["--wheel-dir", str(tmp_path / "dist"), str(tree)]
        settings = environment(PYTHONPATH="", PIP_DISABLE_PIP_VERSION_CHECK="1", **env)
        return subprocess.run(command, cwd=tmp_path, env=settings, capture_output=True, text=True, timeout=600)

    return call


def built(folder: Path) -> Path:
    (wheel,) = (folder / "dist").iterdir()
    done = subprocess.run(
        [sys.executable, REPO / "scripts/check_distributions.py", wheel], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return wheel


@pytest.mark.parametrize("compiler", ["none", "for some extensions"])
def test_a_wheel_without_all_extensions_has_none_and_says_so_in_its_name(compiler: str, tmp_path: Path, build: Build) -> None:
    cc = tmp_path / "compiler"
    cc.write_text("#!/bin/sh\nexit 1\n" if compiler == "none" else WITHOUT_CASTS)
    cc.chmod(0o700)
    if compiler != "none" and COMPILER is None:
        pytest.skip("needs a C compiler")
    done = build(CC=str(cc))
    assert done.returncode == 0, done.stdout[-3000:]
    wheel = built(tmp_path)
    assert wheel.name == "unickpt-0.2.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        facts, record = (archive.read(f"unickpt-0.2.0.dist-info/{name}").decode() for name in ("WHEEL", "RECORD"))
    assert "Root-Is-Purelib: true" in facts
    assert ".so," not in record


def test_required_extensions_are_not_left_out(tmp_path: Path, build: Build) -> None:
    done = build(CC="false", UNICKPT_REQUIRE_EXTENSIONS="1")
    assert done.returncode != 0
    assert re.search("error: command .*false", done.stdout + done.stderr, re.IGNORECASE)
    assert not list(tmp_path.glob("dist/*"))


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
def test_an_installed_wheel_has_its_version_its_examples_and_its_dialects(tmp_path: Path, build: Build) -> None:
    done = build(UNICKPT_REQUIRE_EXTENSIONS="1")
    assert done.returncode == 0, done.stdout[-3000:]
    wheel = built(tmp_path)
    assert re.fullmatch(r"unickpt-0\.2\.0-cp310-abi3-linux_\w+\.whl", wheel.name)
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
        page = archive.read("unickpt-0.2.0.dist-info/METADATA").decode()
    assert re.search(r"!\[[^]]*\]\(https://\S+/raw/v0\.2\.0/docs/images/demo\.png\)", page)
    assert re.search(r"\[map of the code\]\(https://\S+/blob/v0\.2\.0/docs/developing/map\.md\)", page)
    code = """
import unickpt
from importlib import import_module, metadata
from unickpt.base.installation import source_tree
from unickpt.cli.main import main
from unickpt.transform.dialects.registry import dialects
extensions = ("diagnosis.recording._fast", "checkpoint.format._casts", "checkpoint.format._checksums")
for name in (*extensions, "checkpoint.load._checked_read"):
    assert import_module(f"unickpt.{name}").__file__.startswith(unickpt.__path__[0])
print(source_tree(), unickpt.__version__, metadata.version("unickpt"), len(dialects()))
main(["example", "zero2.json"])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=site, env=environment(PYTHONPATH=""), capture_output=True, text=True
    )
    first, _, rest = done.stdout.partition("\n")
    assert first == f"None 0.2.0 0.2.0 {len(list((REPO / 'configs/dialects').glob('*.toml')))}", done.stderr
    assert rest == (REPO / "configs/deepspeed/zero2.json").read_text()


def test_the_classifiers_name_the_pythons_that_are_tested() -> None:
    (matrix,) = re.findall(r"^ +python: (\[.*\])$", (REPO / ".github/workflows/ci.yml").read_text(), re.M)
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (REPO / "pyproject.toml").read_text())
    assert named == json.loads(matrix)
