"""The version comes from the tag of the checkout, or from the file that a distribution holds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

import unickpt
from tests.support.repository import REPO
from unickpt.base.version import UNKNOWN, UNTAGGED, version_of
from unickpt.testing.launch import environment

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a source tree without git."""
    tree = tmp_path / "tree"
    (tree / "unickpt").mkdir(parents=True)
    shutil.copy(REPO / "pyproject.toml", tree)
    return tree


def git(tree: Path, *arguments: str) -> str:
    identity = {f"GIT_{role}_{what}": "a@b" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | identity
    done = subprocess.run(["git", "-C", str(tree), *arguments], env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(tree: Path) -> str:
    git(tree, "commit", "--quiet", "--allow-empty", "--message", "x")
    return git(tree, "rev-parse", "--short", "HEAD")


@needs_git
def test_a_checkout_has_the_version_of_its_newest_tag(tree: Path) -> None:
    git(tree, "init", "--quiet")
    commit(tree)
    second = commit(tree)
    assert version_of(tree / "unickpt") == f"0.0.0.dev2+g{second}"
    git(tree, "tag", "v0.2.0")
    git(tree, "tag", "something-else")
    assert version_of(tree / "unickpt") == "0.2.0"
    commit(tree)
    newest = commit(tree)
    assert version_of(tree / "unickpt") == f"0.2.0.post2+g{newest}"
    git(tree, "tag", "v0.3.0rc1")
    assert version_of(tree / "unickpt") == "0.3.0rc1"
    git(tree, "tag", "--delete", "v0.3.0rc1")
    git(tree, "tag", "v9-of-something-else")
    assert version_of(tree / "unickpt") == f"0.0.0.dev4+g{newest}"


@needs_git
def test_a_shallow_clone_without_tags_says_so(tree: Path, tmp_path: Path) -> None:
    git(tree, "init", "--quiet")
    git(tree, "add", ".")
    commit(tree)
    git(tree, "tag", "v0.2.0")
    newest = commit(tree)
    git(tmp_path, "clone", "--quiet", "--no-tags", "--depth", "1", f"file://{tree}", "clone")
    assert version_of(tmp_path / "clone" / "unickpt") == f"{UNTAGGED}+g{newest}", "its commits are not those of the repository"


@needs_git
def test_the_git_of_another_repository_does_not_count(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A git hook sets GIT_DIR, and a vendored copy lies in the repository of another project."""
    git(tree, "init", "--quiet")
    newest = commit(tree)
    monkeypatch.setenv("GIT_DIR", str(REPO / ".git"))
    assert version_of(tree / "unickpt") == f"0.0.0.dev1+g{newest}"
    (tree / "pyproject.toml").write_text('[project]\nname = "another"\n')
    assert version_of(tree / "unickpt") == UNKNOWN


def test_a_distribution_holds_its_version(tree: Path) -> None:
    assert version_of(tree / "unickpt") == UNKNOWN
    (tree / "unickpt" / "VERSION").write_text("0.2.0\n")
    assert version_of(tree / "unickpt") == "0.2.0"


def test_every_version_is_one_that_pip_knows() -> None:
    for text in (
        unickpt.__version__,
        UNKNOWN,
        UNTAGGED,
        f"{UNTAGGED}+g1a2b3c4",
        "0.0.0.dev57+g1a2b3c4",
        "0.2.0.post3+g1a2b3c4",
        "0.2.0rc1.post3+g1a2b3c4",
    ):
        assert str(Version(text)) == text
    assert Version(f"{UNTAGGED}+gfffffff") < Version("0.0.0.dev9+gfffffff") < Version("0.0.0.dev10+g1a2b3c4") < Version(UNKNOWN)
    assert Version("0.2.0") < Version("0.2.0.post3+g1a2b3c4") < Version("0.2.1")


def test_the_version_is_read_when_it_is_asked_for() -> None:
    code = "import sys, unickpt; print('subprocess' in sys.modules, unickpt.__version__, unickpt.__version__)"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), cwd=REPO, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", unickpt.__version__, unickpt.__version__]
