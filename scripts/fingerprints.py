"""Print the fingerprint of every hooked function, per version of its framework, and mark those that no hook declares.

    python scripts/fingerprints.py deepspeed TREE...
    python scripts/fingerprints.py megatron TREE...
    python scripts/fingerprints.py megatron --repository GIT_FOLDER core_v0.16.1 core_v0.19.0
    python scripts/fingerprints.py deepspeed --release latest

With ``--release`` the arguments are versions on the package index, or ``latest``. They are downloaded, and only what no hook
declares is printed; the exit code is 1 if there is something. A wheel of megatron-core has no training scripts.

A tree is a folder that holds the framework's package, ``TREE/deepspeed/...``. With ``--repository`` the arguments are tags or
commits of a git repository. Add the fingerprints marked NEW to ``<adapter>/fingerprints.py`` after the adapter's tests pass
with that version.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from unickpt.base.hooks import Hook, fingerprint_of_source  # noqa: E402

ReadText = Callable[[str], str | None]  # path in the tree -> its text


def hooks_of(framework: str) -> list[Hook]:
    adapter = {"deepspeed": "ds_unickpt", "megatron": "megatron_unickpt", "transformers": "ds_unickpt"}[framework]
    declared: list[Hook] = import_module(f"{adapter}.hooks").DECLARED
    declared = [*declared, *import_module(f"{adapter}.measuring.timing").all_timing_hooks()]
    return [hook for hook in declared if hook.module.partition(".")[0] == framework]


def source_of(read: ReadText, module: str, attribute: str) -> str | None:
    """Return the source text, decorators included, of ``function`` or ``Class.method`` in a module of a tree."""
    path = module.replace(".", "/")
    text = read(f"{path}.py")
    package = text is None
    if text is None:
        text = read(f"{path}/__init__.py")
    if text is None:
        return None
    tree = ast.parse(text)
    scope: ast.AST = tree
    for name in attribute.split("."):
        found = [node for node in ast.iter_child_nodes(scope) if getattr(node, "name", None) == name]
        if not found:
            return _imported(read, tree, module if package else module.rpartition(".")[0], attribute)
        scope = found[-1]
    if not isinstance(scope, ast.FunctionDef):
        return None
    first = min([scope.lineno, *(d.lineno for d in scope.decorator_list)])
    return "".join(text.splitlines(keepends=True)[first - 1 : scope.end_lineno])


def _imported(read: ReadText, tree: ast.Module, package: str, attribute: str) -> str | None:
    """Return the source of a function that a module imports by name from another one of its package."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.level == 1 and any(alias.name == attribute for alias in node.names):
            return source_of(read, f"{package}.{node.module}", attribute)
    return None


def from_tree(tree: Path) -> ReadText:
    return lambda path: (tree / path).read_text() if (tree / path).is_file() else None


def from_repository(folder: Path, commit: str) -> ReadText:
    def read(path: str) -> str | None:
        done = subprocess.run(["git", "-C", str(folder), "show", f"{commit}:{path}"], capture_output=True, text=True)
        return done.stdout if done.returncode == 0 else None

    return read


def released(framework: str, version: str, folder: Path) -> Path:
    """Download a release into a folder, unpack it, and return its tree. Nothing of it runs, except a setup.py for metadata."""
    package = {"megatron": "megatron-core"}.get(framework, framework)
    wanted = package if version == "latest" else f"{package}=={version}"
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--no-build-isolation", "-d", str(folder), wanted]
    subprocess.run(command, check=True, env=os.environ | {"DS_BUILD_OPS": "0"})
    (archive,) = folder.iterdir()
    if archive.suffix == ".whl":
        shutil.unpack_archive(archive, folder / "tree", "zip")
    else:
        shutil.unpack_archive(archive, folder / "tree", filter="data")
    print(archive.name)
    return next(found.parent for found in sorted((folder / "tree").rglob(framework)) if found.is_dir())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("framework", choices=("deepspeed", "megatron", "transformers"))
    parser.add_argument("versions", nargs="+", help="trees, or with --repository tags or commits")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--repository", type=Path, help="git repository that holds the versions")
    form.add_argument("--release", action="store_true", help="the versions are those of releases on the package index")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        readers = {}
        for version in args.versions:
            if args.repository is not None:
                readers[version] = from_repository(args.repository, version)
            elif args.release:
                place = Path(folder, version)
                place.mkdir()
                readers[version] = from_tree(released(args.framework, version, place))
            else:
                readers[Path(version).name] = from_tree(Path(version))
        hooks = hooks_of(args.framework)
        if args.release:
            hooks = [hook for hook in hooks if not hook.module.startswith("megatron.training")]
        return _show(hooks, readers, changes_only=args.release)


def _show(hooks: list[Hook], readers: dict[str, ReadText], *, changes_only: bool) -> int:
    """Print the fingerprints of each hook. Returns 1 if only changes are wanted and there are some."""
    changed = False
    for hook in hooks:
        seen: dict[str, list[str]] = defaultdict(list)
        for version, read in readers.items():
            source = source_of(read, hook.module, hook.attribute)
            seen[fingerprint_of_source(source) if source else "absent"].append(version)
        if changes_only:
            seen = {value: versions for value, versions in seen.items() if value not in hook.fingerprints}
        if seen:
            print(f"{hook.name}: {hook.module}.{hook.attribute}")
        for value, versions in seen.items():
            mark = "" if value == "absent" else "known" if value in hook.fingerprints else "NEW"
            print(f"  {value:12}  {mark:5}  {', '.join(versions)}")
        changed |= changes_only and bool(seen)
    if changes_only and not changed:
        print(f"{len(hooks)} hooks, all with known source")
    return int(changed)


if __name__ == "__main__":
    sys.exit(main())
