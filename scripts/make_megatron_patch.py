"""Write the patch for a Megatron-LM tag from the declared hooks: ``patches/megatron/<tag>.patch``.

    python scripts/make_megatron_patch.py /path/to/Megatron-LM core_v0.16.1

Each function that a hook wraps at run time gets a decorator in the source instead: ``@unickpt("<name of the hook>")``.
"""

from __future__ import annotations

import ast
import difflib
import sys
from collections import defaultdict
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from megatron_unickpt.hooks import DECLARED  # noqa: E402

MODULE = "megatron/core/unickpt.py"
SOURCE = '''"""unickpt in the source instead of at run time: does nothing if unickpt is not installed."""

try:
    from unickpt.base.hooks import in_source
except ImportError:
    in_source = None


def unickpt(name):
    """Send a call that is unickpt's to the hook of that name, see docs/developing/hooks.md of unickpt."""
    return in_source("megatron_unickpt.hooks", name) if in_source else lambda function: function
'''
IMPORT = "from megatron.core.unickpt import unickpt\n"


def place_of(tree: ast.Module, attribute: str) -> ast.FunctionDef | None:
    """Return the function ``name`` or ``Class.name`` of a module."""
    body: list[ast.stmt] = tree.body
    *classes, name = attribute.split(".")
    for part in classes:
        body = next((node.body for node in body if isinstance(node, ast.ClassDef) and node.name == part), [])
    return next((node for node in body if isinstance(node, ast.FunctionDef) and node.name == name), None)


def decorated(source: str, hooks: dict[str, str]) -> str:
    """Return a module's source with decorators. ``hooks`` maps attributes of the module to names of hooks."""
    tree = ast.parse(source)
    lines = source.splitlines(keepends=True)
    insertions: list[tuple[int, str]] = []
    for attribute, name in hooks.items():
        node = place_of(tree, attribute)
        if node is not None:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            insertions.append((first, f'{" " * node.col_offset}@unickpt("{name}")\n'))
    if not insertions:
        return source
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    insertions.append(((imports[-1].end_lineno or 0) + 1, IMPORT))
    for line, text in sorted(insertions, reverse=True):
        lines.insert(line - 1, text)
    return "".join(lines)


def main() -> None:
    root, tag = Path(sys.argv[1]), sys.argv[2]
    files: dict[str, dict[str, str]] = defaultdict(dict)
    for hook in DECLARED:
        files[hook.module.replace(".", "/") + ".py"][hook.attribute] = hook.name
    changes = {MODULE: ("", SOURCE)}
    for path, hooks in sorted(files.items()):
        if (root / path).is_file():
            old = (root / path).read_text()
            changes[path] = (old, decorated(old, hooks))
    text = ""
    for path, (old, new) in changes.items():
        before = f"a/{path}" if old else "/dev/null"
        text += "".join(difflib.unified_diff(old.splitlines(True), new.splitlines(True), before, f"b/{path}", n=2))
    (REPO / "patches" / "megatron" / f"{tag}.patch").write_text(text)


if __name__ == "__main__":
    main()
