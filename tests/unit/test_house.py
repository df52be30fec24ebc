"""What keeps the house in order: directions of imports, an entry point that costs nothing, hooks that let go."""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.specifiers import SpecifierSet

from tests.support.needs import needs, program
from tests.support.repository import REPO
from unickpt.base import hooks
from unickpt.base.hooks import accepts, fingerprint_of_source
from unickpt.testing.launch import environment


def python(code: str, **env: str) -> str:
    """Run code in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(**env), cwd=REPO, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def test_the_core_imports_no_framework() -> None:
    modules = [
        str(p.relative_to(REPO)).replace("/", ".").removesuffix(".py").removesuffix(".__init__")
        for p in (REPO / "unickpt").rglob("*.py")
    ]
    code = f"""
import sys, importlib
for name in {modules!r}:
    importlib.import_module(name)
print([m for m in ("deepspeed", "megatron", "transformers", "ds_unickpt", "megatron_unickpt") if m in sys.modules])
"""
    assert python(code) == "[]"


def test_the_public_testing_modules_need_only_the_installed_dependencies() -> None:
    """``psutil`` and the like come with an extra: functions that need one import it themselves."""
    code = """
import importlib, pkgutil, sys
import torch
import unickpt.testing as package
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
print([m for m in ("psutil", "pytest", "deepspeed", "megatron", "transformers", "tests") if m in sys.modules])
"""
    assert python(code) == "[]"


def test_import_directions() -> None:
    done = subprocess.run([program("lint-imports")], capture_output=True, text=True, cwd=REPO, timeout=120)
    assert done.returncode == 0, done.stdout[-3000:]


class _File(NamedTuple):
    """What the tests below look at. Names, and no nodes: a thousand trees would slow every garbage collection.

    Attributes:
        imports: dotted names that it imports, also inside functions and in programs that are string literals.
        members: of ``from``-imports: module and name.
        defined: names that it defines, sets or imports, at any depth.
        commands: string literals that are names of modules in ``evidence``.
    """

    imports: tuple[str, ...]
    members: tuple[tuple[str, str], ...]
    defined: frozenset[str]
    commands: tuple[str, ...]


_PROGRAM_IMPORT = re.compile(r"(?:^|[;\n])\s*(?:from|import) ((?:tests|evidence|scripts|benchmarks|examples)[\w.]*)")


@functools.cache
def _read(path: Path) -> _File:
    imports: list[str] = []
    members: list[tuple[str, str]] = []
    defined: set[str] = set()
    commands: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            defined |= {alias.asname or alias.name for alias in node.names}
        if isinstance(node, ast.Import):
            imports += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imports += [f"{node.module}.{alias.name}" for alias in node.names]
            members += [(node.module or "", alias.name) for alias in node.names]
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            imports += _PROGRAM_IMPORT.findall(node.value)
            commands += [node.value] * bool(re.fullmatch(r"evidence(\.\w+)+", node.value))
    return _File(tuple(imports), tuple(members), frozenset(defined), tuple(commands))


@functools.cache
def _files(folder: str) -> list[Path]:
    return sorted((REPO / folder).rglob("*.py"))


def _found_imports(folders: Iterable[str], wanted: str) -> list[str]:
    """Return ``file: name`` of every import below the folders whose dotted name matches a regular expression."""
    return [
        f"{path.relative_to(REPO)}: {name}"
        for folder in folders
        for path in _files(folder)
        for name in _read(path).imports
        if re.match(wanted, name)
    ]


def test_no_test_module_imports_another_test_module() -> None:
    """Shared code belongs to ``tests/support``, to ``tests/jobs`` or to a fixture."""
    assert _found_imports(["tests"], r"tests\.(unit|integration|hostile|jobs|support)\.(.+\.)?test_") == []


_OURS = ("unickpt", "ds_unickpt", "megatron_unickpt", "torch_unickpt", "tests", "evidence", "benchmarks")
_PRODUCT = ("examples", "scripts", "benchmarks", "unickpt", "ds_unickpt", "megatron_unickpt", "torch_unickpt")


def test_only_tests_and_evidence_import_tests() -> None:
    assert _found_imports(_PRODUCT, r"tests(\.|$)") == []


def test_nothing_imports_or_runs_evidence() -> None:
    """Its commands take minutes to hours. What a test needs of them belongs to ``tests/jobs`` or ``tests/support``."""
    assert _found_imports([*_PRODUCT, "tests"], r"evidence(\.|$)") == []
    commands = [f"{path.relative_to(REPO)}: {text}" for path in _files("tests") for text in _read(path).commands]
    assert commands == []


def test_commands_that_no_test_runs_import_what_exists() -> None:
    """mypy does not read them, and an editable installation of another checkout may hide a module that has moved."""

    @functools.cache
    def names_of(module: str) -> frozenset[str] | None:
        place = REPO / module.replace(".", "/")
        file = next((each for each in (place.with_suffix(".py"), place / "__init__.py") if each.exists()), None)
        return None if file is None else _read(file).defined

    def exists(module: str, name: str) -> bool:
        return name in (names_of(module) or ()) or names_of(f"{module}.{name}") is not None

    assert not [
        f"{path.relative_to(REPO)}: {module}.{name}"
        for folder in ("evidence", "benchmarks", "scripts", "examples", "tests")
        for path in _files(folder)
        for module, name in _read(path).members
        if module.partition(".")[0] in _OURS
        and not module.startswith("tests.unit_tests")  # Megatron's own
        and module != "unickpt"
        and not name.startswith("_")
        and not exists(module, name)
    ]


def test_integration_has_only_tests() -> None:
    """Programs that tests start are in ``tests/jobs``."""
    names = {path.name for path in (REPO / "tests/integration").rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert {name for name in names if not name.startswith("test_")} == {"__init__.py", "conftest.py"}


@pytest.mark.parametrize("command", [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]], ids=" ".join)
def test_style_and_types(command: list[str]) -> None:
    done = subprocess.run([program(command[0]), *command[1:]], capture_output=True, text=True, cwd=REPO)
    assert done.returncode == 0, done.stdout[-3000:]


def test_the_generated_docs_are_up_to_date() -> None:
    done = subprocess.run([sys.executable, "scripts/make_docs.py", "--check"], env=environment(), cwd=REPO)
    assert done.returncode == 0, "run python scripts/make_docs.py"


def test_a_fragment_of_the_changelog_has_a_kind() -> None:
    kinds = re.findall(r'tool\.towncrier\.type\]\]\ndirectory = "(\w+)"', (REPO / "pyproject.toml").read_text())
    names = [path.name for path in (REPO / "changes").iterdir() if path.name != "README.md"]
    assert kinds
    assert [name for name in names if not re.fullmatch(rf"(\d+|\+[\w-]+)\.({'|'.join(kinds)})\.md", name)] == []


def test_the_entry_point_imports_nothing_heavy() -> None:
    """It runs in every ``import torch`` of every program on the machine."""
    code = """
import sys
before = set(sys.modules)
from _unickpt_autoload import arm
arm()
print(sorted({m.split(".")[0] for m in set(sys.modules) - before}))
"""
    assert set(json.loads(python(code).replace("'", '"'))) <= {"_unickpt_autoload", "importlib", "__future__"}


def test_importing_torch_loads_neither_deepspeed_nor_the_adapter() -> None:
    code = (
        "import torch, sys; print('deepspeed' in sys.modules, 'ds_unickpt' in sys.modules, '_unickpt_autoload' in sys.modules)"
    )
    assert python(code) == "False False True"


@needs("deepspeed")
@pytest.mark.parametrize(
    ("code", "env", "expected"),
    [
        ("import torch, deepspeed", {}, "True"),
        ("import torch, deepspeed", {"UNICKPT_AUTOLOAD": "0"}, "False"),
        ("import torch, deepspeed, ds_unickpt", {"UNICKPT_AUTOLOAD": "0"}, "True"),
        ("import torch, deepspeed, ds_unickpt", {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "True"),
        ("import ds_unickpt, deepspeed", {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "True"),
        ("import ds_unickpt, deepspeed; ds_unickpt.uninstall()", {}, "False"),
    ],
)
def test_deepspeed_is_hooked_by_installation_or_by_import(code: str, env: dict[str, str], expected: str) -> None:
    check = "; from deepspeed.runtime.engine import DeepSpeedEngine as E"
    check += "; print(hasattr(E.__dict__['save_checkpoint'], '__wrapped__'))"
    assert python(code + check, **env).splitlines()[-1] == expected


@needs("deepspeed")
def test_an_unknown_deepspeed_with_the_same_source_is_hooked() -> None:
    code = """
import deepspeed, deepspeed.git_version_info as g
g.version = "0.99.0"
import ds_unickpt
from deepspeed.runtime.engine import DeepSpeedEngine as E
print(hasattr(E.__dict__["save_checkpoint"], "__wrapped__"))
from unickpt.base import hooks
print({s.state for s in hooks.status()}, hooks.status()[0].reason)
"""
    said = "{'installed'} 0.99.0 is not tested (<0.20,>=0.17.0 is), but the source is the same"
    assert python(code, UNICKPT_AUTOLOAD="0").splitlines()[-2:] == ["True", said]


@needs("deepspeed")
def test_a_changed_source_waits_for_a_self_test() -> None:
    code = """
import inspect, deepspeed.runtime.engine as e
def save_checkpoint(self, save_dir): return 1
e.DeepSpeedEngine.save_checkpoint = save_checkpoint
from unickpt.base import hooks
import ds_unickpt
ds_unickpt.uninstall()
e.DeepSpeedEngine.save_checkpoint = save_checkpoint
hooks.status
inspect.getsource = lambda f: "def save_checkpoint(self): pass"
print(ds_unickpt.install(), hooks.status()[1].state, hooks.status()[1].reason.split("(")[0])
"""
    assert python(code).splitlines()[-1] == "True unverified the source of DeepSpeedEngine.save_checkpoint is unknown"


def test_versions_and_fingerprints() -> None:
    assert accepts(SpecifierSet(">=0.17.0,<0.20"), "0.19.8+unknown")
    assert accepts(SpecifierSet(">=0.17.0,<0.20"), "0.19.9.dev1")
    assert not accepts(SpecifierSet(">=0.17.0,<0.20"), "0.20.0")
    assert not accepts(SpecifierSet(">=0.17.0,<0.20"), "not a version")
    assert fingerprint_of_source("def f():\n    # note\n    return 1\n") == fingerprint_of_source("  def f():\n      return 1")
    assert fingerprint_of_source("def f():\n    return 1") != fingerprint_of_source("def f():\n    return 2")
    assert hooks.ALLOW_UNTESTED == "UNICKPT_ALLOW_UNTESTED"


def _hook(name: str, attribute: str) -> hooks.Hook:
    return hooks.Hook(
        name, __name__, attribute, lambda wrapped, _, args, kwargs: wrapped(*args, **kwargs), SpecifierSet(">=1"),
        frozenset(), "", "", "",
    )  # fmt: skip


def _first() -> int:
    return 1


def _second() -> int:
    return 2


def _decorator_without_wraps(function: Callable[..., int]) -> Callable[..., int]:
    def inner() -> int:
        return function() + 1

    return inner


@_decorator_without_wraps
def _decorated() -> int:
    return 1


def test_the_fingerprint_is_of_the_function_below_its_decorators() -> None:
    source = "@_decorator_without_wraps\ndef _decorated() -> int:\n    return 1\n"
    assert hooks.examine(_hook("decorated", "_decorated"), "1").fingerprint == fingerprint_of_source(source)


def test_all_hooks_of_an_adapter_are_in_place_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_status", {})
    monkeypatch.setattr(hooks, "_installed", {})
    before = (_first, _second)
    lacks = replace(_hook("second", "_second"), parameters=("path",))
    assert not hooks.install([_hook("first", "_first"), lacks], framework="it", version="2")
    assert {status.hook.name: status.state for status in hooks.status()} == {"first": "refused", "second": "refused"}
    assert hooks.status()[0].reason == "second is refused"

    import wrapt

    def broken(function: object, wrapper: object) -> object:
        if function is before[1]:
            raise ImportError("no C extension")
        return wrapt_proxy(function, wrapper)

    wrapt_proxy = wrapt.FunctionWrapper
    monkeypatch.setattr(wrapt, "FunctionWrapper", broken)
    with pytest.raises(ImportError):
        hooks.install([_hook("first", "_first"), _hook("second", "_second")], framework="it", version="2")
    assert {(status.state, status.reason) for status in hooks.status()} == {("failed", "ImportError: no C extension")}
    assert (_first, _second) == before
