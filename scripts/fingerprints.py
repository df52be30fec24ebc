"""Fingerprints of the DeepSpeed functions that are hooked, for unpacked source trees.

    python scripts/fingerprints.py TREE [TREE ...]      (each TREE holds deepspeed/)

Prints, per function, every distinct fingerprint and the versions that have it. Review what
changed in a new one before it is added to ``ds_unickpt/hooks.py``.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path

from ds_unickpt.hooks import HOOKS
from unickpt.hooks import fingerprint_of_source


def source_of(tree: Path, module: str, attribute: str) -> str | None:
    """Source text, decorators included, of ``Class.method`` in a module of an unpacked tree."""
    path = tree / (module.replace(".", "/") + ".py")
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    scope: ast.AST = ast.parse(text)
    for name in attribute.split("."):
        found = [node for node in ast.iter_child_nodes(scope) if getattr(node, "name", None) == name]
        if not found:
            return None
        scope = found[-1]
    assert isinstance(scope, ast.FunctionDef)
    first = min([scope.lineno, *(d.lineno for d in scope.decorator_list)])
    return "".join(lines[first - 1 : scope.end_lineno])


def main() -> None:
    for hook in HOOKS:
        seen: dict[str, list[str]] = defaultdict(list)
        for tree in map(Path, sys.argv[1:]):
            source = source_of(tree, hook.module, hook.attribute)
            seen[fingerprint_of_source(source) if source else "absent"].append(tree.name)
        print(hook.attribute)
        for value, trees in seen.items():
            known = "known" if value in hook.fingerprints else "NEW"
            print(f"  {value}  {known:5}  {', '.join(trees)}")


if __name__ == "__main__":
    main()
