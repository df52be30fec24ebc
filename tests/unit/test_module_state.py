"""The adapters keep their state in one object that is passed as an argument. No module global changes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.repository import REPO

ADAPTERS = ("ds_unickpt", "megatron_unickpt")
MODULES = sorted(path for adapter in ADAPTERS for path in (REPO / adapter).rglob("*.py"))
CHANGERS = {
    "add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "reverse", "setdefault", "sort",
    "update",
}  # fmt: skip
IMMUTABLE = {"Fallback", "SpecifierSet", "ScriptCall", "Offer", "SettingNames", "Hook", "TypeVar"}
ITERATORS = {"itertools.count", "itertools.cycle", "count", "cycle", "iter"}
RUNTIME = ("edge.py", "RUNTIME")


def assigned(tree: ast.Module) -> dict[str, ast.expr | None]:
    """Names that a module's own statements bind to a value, with that value."""
    found: dict[str, ast.expr | None] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            found |= {target.id: node.value for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node.value
    return found


def root(node: ast.expr) -> str:
    """The name at the beginning of ``name.attribute[index]``."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def changed_by(node: ast.AST) -> list[ast.expr]:
    """What a statement or call changes in place: ``a.b = ...``, ``a[b] = ...``, ``a.append(...)``."""
    targets: list[ast.expr] = []
    if isinstance(node, (ast.Assign, ast.Delete)):
        targets = list(node.targets)
    elif isinstance(node, ast.AugAssign):
        targets = [node.target]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGERS:
        targets = [node.func]
    return [target for target in targets if isinstance(target, (ast.Attribute, ast.Subscript))]


def state_of(name: str, source: str) -> Iterator[str]:
    """What in a module's source keeps or changes state of a module."""
    tree = ast.parse(source)
    names = assigned(tree)
    imported = {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
        if (getattr(node, "module", "") or alias.name).startswith((*ADAPTERS, "unickpt"))
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield f"global {', '.join(node.names)}"
        text = ast.unparse(node) if isinstance(node, (ast.Subscript, ast.Call)) else ""
        if text.startswith(("sys.modules[", "sys.modules.get(")) and "unickpt" in text:
            yield text
    for function in (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.Lambda))):
        local = {arg.arg for arg in [*function.args.args, *function.args.kwonlyargs, *function.args.posonlyargs]}
        local |= {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        outer = {*names, *imported} - local - {RUNTIME[1]}
        for node in ast.walk(function):
            if any(root(target) in outer for target in changed_by(node)):
                yield ast.unparse(node)
    for constant, value in names.items():
        made = value.func if isinstance(value, ast.Call) else None
        if made is None or (name, constant) == RUNTIME:
            continue
        called = ast.unparse(made)
        if called in ITERATORS or (called[:1].isupper() and called not in IMMUTABLE):
            yield f"{constant} = {called}(...)"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(REPO)))
def test_no_module_keeps_state(path: Path) -> None:
    assert list(state_of(path.name, path.read_text())) == []


@pytest.mark.parametrize(
    "source",
    [
        "last = None\ndef f():\n    global last\n    last = 1",
        "seen = set()\ndef f(x):\n    seen.add(x)",
        "seen = {}\ndef f(x):\n    seen[x] = 1",
        "class Mode: ...\nmode = Mode()",
        "import itertools\ncalls = itertools.count()\ndef f():\n    return next(calls)",
        "from megatron_unickpt.dist_checkpointing import loading\ndef f():\n    loading.last = 1",
        "import sys\ndef f():\n    return sys.modules.get('megatron_unickpt.pretraining.scripts')",
    ],
)
def test_module_state_is_recognised(source: str) -> None:
    assert list(state_of("module.py", source))
