"""Sources of functions, read from files, equal what Python says of the imported functions."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from unickpt.base.hook_sources import SourceTree, from_folders

_ENGINE = '''\
"""A framework."""
import functools

from .saving import save

MAJOR, PATCH = 1, 2
version = other = "1.2"
RELEASE: str = "no"
__version__ = ".".join(version)

def unchanged(function):
    return function

class Engine:
    async def wait(self, *names, seconds=1, **more):
        return seconds

    @functools.lru_cache(maxsize=None)
    @unchanged
    def load(self, tag, /, strict=True):
        # a note

        return tag

    load_again = None


'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    folder = tmp_path / "second" / "pretended_framework"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("from .saving import save\n")
    (folder / "engine.py").write_text(_ENGINE)
    (folder / "saving.py").write_text("def save(path, *, tag=None):\n    return path\n")
    monkeypatch.syspath_prepend(tmp_path / "second")
    yield folder.name
    for name in [name for name in sys.modules if name.startswith(folder.name)]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("module", "attribute"), [("engine", "Engine.wait"), ("engine", "Engine.load"), ("engine", "save"), ("", "save")]
)
def test_text_and_parameters_are_those_of_the_imported_function(
    module: str, attribute: str, package: str, tmp_path: Path
) -> None:
    name = f"{package}.{module}".rstrip(".")
    found = SourceTree(from_folders([tmp_path / "first", tmp_path / "second"])).function(name, attribute)
    assert found is not None
    assert package not in sys.modules
    function: Any = import_module(name)
    for part in attribute.split("."):
        function = getattr(function, part)
    function = inspect.unwrap(function)
    assert found.text == inspect.getsource(function)
    assert found.parameters == tuple(inspect.signature(function).parameters)


def test_what_is_not_there_is_none(package: str, tmp_path: Path) -> None:
    tree = SourceTree(from_folders([tmp_path / "second"]))
    assert tree.has(f"{package}.engine")
    assert tree.constants(f"{package}.engine") == {"version": "1.2", "other": "1.2"}
    assert tree.constants(f"{package}.gone") == {}
    assert not tree.has(f"{package}.gone")
    for module, attribute in (("gone", "save"), ("engine", "gone"), ("engine", "Engine.gone"), ("engine", "Engine.load_again")):
        assert tree.function(f"{package}.{module}", attribute) is None
    assert tree.function(f"{package}.engine", "Engine") is None  # a class is no function
