"""Commands that install this package: none of them names it to an index before the name there is this project's."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.repository import REPO
from unickpt.base import installation
from unickpt.base.installation import PUBLISHED, extra_command, install_command, shipped_file, source_tree

# pip install unickpt, pip install -U 'unickpt[metrics]==0.2', but not unickpt-0.2.0-py3-none-any.whl or a path
NAMED = re.compile(r"""\bpip3? (?:install|download|wheel)\b[^\n`]*?[ '"]unickpt(?=[\s'"`\[=<>~.,;:)]|$)(?!\.\w)""")
PLACES = (
    "unickpt",
    "ds_unickpt",
    "megatron_unickpt",
    "docs",
    "configs",
    "examples",
    "patches",
    "scripts",
    "benchmarks",
    "evidence",
)


def texts() -> Iterator[Path]:
    for place in PLACES:
        yield from (
            file for file in (REPO / place).rglob("*") if file.suffix in {".py", ".md", ".sh", ".json", ".yaml", ".patch"}
        )
    yield from (file for file in REPO.glob("*") if file.suffix in {".py", ".md", ".toml"} and file.name != "CHANGELOG.md")


@pytest.mark.skipif(PUBLISHED, reason="the name is published")
def test_nothing_names_the_package_to_an_index_before_it_is_published() -> None:
    found = [f"{file.relative_to(REPO)}: {match[0]}" for file in texts() for match in NAMED.finditer(file.read_text())]
    assert found == []
    assert not NAMED.search(f"{extra_command('metrics')}\n{install_command()}")


@pytest.mark.skipif(not PUBLISHED, reason="the name is not published")
def test_the_page_names_the_published_package() -> None:
    assert NAMED.search((REPO / "docs/start/install.md").read_text())


@pytest.mark.parametrize(
    ("text", "names_it"),
    [
        ("pip install unickpt", True),
        ("python -m pip install -U unickpt.", True),
        ('pip install "unickpt[metrics]"', True),
        ("pip install 'unickpt[traces]==0.2'", True),
        ("pip install torch unickpt==0.2", True),
        ('pip install ".[deepspeed]"', False),
        ("pip install dist/unickpt-0.2.0-py3-none-any.whl", False),
        ("pip install unickpt-0.2.0-py3-none-any.whl", False),
        ("pip install --editable '/src/unickpt[metrics]'", False),
        ("pip uninstall unickpt", False),
    ],
)
def test_what_counts_as_naming_the_package(text: str, names_it: bool) -> None:
    assert (NAMED.search(text) is not None) is names_it


def test_in_a_checkout_an_extra_is_installed_from_it() -> None:
    assert extra_command("metrics") == f"pip install --editable '{REPO}[metrics]'"


def test_before_that_an_installed_copy_names_the_packages_of_an_extra(tmp_path: Path) -> None:
    """And what all installations need is not repeated."""
    for name in ("__init__.py", "base/__init__.py", "base/installation.py"):
        (tmp_path / "unickpt" / name).parent.mkdir(parents=True, exist_ok=True)
        text = (REPO / "unickpt" / name).read_text().replace("PUBLISHED = True", "PUBLISHED = False")
        (tmp_path / "unickpt" / name).write_text(text)
    info = tmp_path / "unickpt-0.2.0.dist-info"
    info.mkdir()
    needs = ("torch>=2.4", 'prometheus-client>=0.17; extra == "metrics"', 'pyarrow>=14; extra == "traces"')
    head = ["Metadata-Version: 2.1", "Name: unickpt", "Version: 0.2.0"]
    (info / "METADATA").write_text("\n".join([*head, *(f"Requires-Dist: {each}" for each in needs), ""]))
    code = "from unickpt.base.installation import *; "
    code += "print(source_tree(), shipped_file('configs'), extra_command('metrics'), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [
        "None",
        f"{tmp_path}/unickpt/shipped/configs",
        "pip install 'prometheus-client>=0.17'",
    ], done.stderr


def test_once_published_the_name_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "PUBLISHED", True)
    monkeypatch.setattr(installation, "source_tree", lambda: None)
    assert (install_command(), extra_command("metrics")) == ("pip install unickpt", "pip install 'unickpt[metrics]'")


def test_the_source_tree_is_this_one() -> None:
    assert source_tree() == REPO
    assert shipped_file("configs/dialects").is_dir()
