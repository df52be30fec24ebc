"""``import torch`` survives whatever lies in the working directory under the name of this package."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.needs import needs
from tests.support.repository import REPO
from unickpt.testing.launch import environment

MINE = "print('mine is executed'); raise RuntimeError('mine')\n"

# An editable installation as setuptools makes it: its finder comes after all folders of sys.path.
EDITABLE = """
import sys
from importlib.machinery import PathFinder
from importlib.util import spec_from_file_location
from pathlib import Path

class Editable:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        for found in (Path({repo!r}, name, "__init__.py"), Path({repo!r}, name + ".py")):
            if path is None and found.exists():
                return spec_from_file_location(name, found)

sys.meta_path.insert(sys.meta_path.index(PathFinder) + 1, Editable)
"""


def run(code: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, env=environment(**env))


def hide(folder: Path, kind: str) -> None:
    """Something of the user's by our name."""
    if kind == "module":
        (folder / "unickpt.py").write_text(MINE)
        return
    (folder / "unickpt").mkdir()
    if kind == "package":
        (folder / "unickpt" / "__init__.py").write_text(MINE)


@pytest.fixture
def installed(tmp_path: Path) -> str:
    """The entry points of this release as an installation has them, whatever is installed here; for ``PYTHONPATH``."""
    (entry,) = re.findall(r'entry-points."torch.backends"\]\n(?:#.*\n)*unickpt = "(.+)"', (REPO / "pyproject.toml").read_text())
    info = tmp_path / "installed" / "unickpt-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: unickpt\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(f"[torch.backends]\nunickpt = {entry}\n")
    return f"{info.parent}:{REPO}"


@pytest.mark.parametrize("kind", ["module", "package", "folder"])
def test_torch_imports_next_to_other_files_named_unickpt(tmp_path: Path, installed: str, kind: str) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    hide(folder, kind)
    code = "import torch, sys; print('imported', any(type(f).__module__ == '_unickpt_autoload' for f in sys.meta_path))"
    done = run(code, folder, PYTHONPATH=installed)
    assert done.stdout == "imported True\n", done.stderr[-2000:]


@pytest.mark.parametrize("kind", ["module", "package"])
def test_a_file_that_hides_the_package_is_named_and_not_run(tmp_path: Path, kind: str) -> None:
    """When the framework is there: then the adapter would be imported."""
    hide(tmp_path, kind)
    done = run("import _unickpt_autoload as a; a._install('ds_unickpt:install'); print('goes on')", tmp_path)
    assert done.stdout == "goes on\n", done.stderr
    assert "failed to initialise; the framework runs without it: ImportError: unickpt is " in done.stderr
    assert str(tmp_path / "unickpt") in done.stderr
    assert "Rename it" in done.stderr


@needs("deepspeed")
def test_a_clone_in_the_working_directory_does_not_hide_an_editable_installation(tmp_path: Path) -> None:
    hide(tmp_path, "folder")
    code = EDITABLE.format(repo=str(REPO)) + (
        "import _unickpt_autoload as a\n"
        "for name in ('unickpt', 'ds_unickpt'): a._uncover(name)\n"
        "import unickpt.base.errors, ds_unickpt; print(unickpt.__file__)"
    )
    done = run(code, tmp_path, PYTHONPATH="", UNICKPT_AUTOLOAD="0")
    assert done.stdout == f"{REPO / 'unickpt' / '__init__.py'}\n", done.stderr


def test_switching_it_off_is_understood(tmp_path: Path) -> None:
    code = """
import os, sys
from _unickpt_autoload import arm
for value in ("0", "false", "False", "no", "NO", "off", "", " ", "1"):
    os.environ["UNICKPT_AUTOLOAD"] = value
    arm()
    print(repr(value), any(type(f).__name__ == "_Finder" for f in sys.meta_path))
"""
    lines = run(code, tmp_path).stdout.splitlines()
    assert [line for line in lines if line.endswith("True")] == ["'1' True"], lines


def test_an_older_editable_installation_works(tmp_path: Path) -> None:
    """It has the entry point ``unickpt.base.autoload:arm``, and knows the packages alone."""
    code = EDITABLE.format(repo=str(REPO)).replace('name + ".py"', '"nothing"')
    code += "import unickpt.base.autoload as a; a.arm(); print(any(type(f).__name__ == '_Finder' for f in sys.meta_path))"
    done = run(code, tmp_path, PYTHONPATH="", UNICKPT_AUTOLOAD="1")
    assert done.stdout == "True\n", done.stderr


@needs("deepspeed")
def test_a_job_that_requires_unickpt_does_not_start_where_it_is_switched_off(tmp_path: Path) -> None:
    required = {"UNICKPT_AUTOLOAD": "0", "UNICKPT_REQUIRE": "1"}
    done = run("import torch, deepspeed", tmp_path, **required)
    assert done.returncode == 1
    assert "UNICKPT_REQUIRE=1 and UNICKPT_AUTOLOAD=0 are set: this job requires unickpt, which is switched off" in done.stderr
    by_hand = run("import torch, ds_unickpt, deepspeed; print('on')", tmp_path, **required)
    assert by_hand.stdout.splitlines()[-1:] == ["on"], by_hand.stderr[-2000:]
