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
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from unickpt.base.hook_sources import ReadText, SourceTree, from_folders  # noqa: E402
from unickpt.base.hooks import Hook, fingerprint_of_source  # noqa: E402


def hooks_of(framework: str) -> list[Hook]:
    adapter = {
        "deepspeed": "ds_unickpt",
        "megatron": "megatron_unickpt",
        "transformers": "ds_unickpt",
        "torch": "torch_unickpt",
    }[framework]
    declared: list[Hook] = import_module(f"{adapter}.hooks").DECLARED
    if find_spec(f"{adapter}.measuring") is not None:
        declared = [*declared, *import_module(f"{adapter}.measuring.timing").all_timing_hooks()]
    return [hook for hook in declared if hook.module.partition(".")[0] == framework]


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
    parser.add_argument("framework", choices=("deepspeed", "megatron", "transformers", "torch"))
    parser.add_argument("versions", nargs="+", help="trees, or with --repository tags or commits")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--repository", type=Path, help="git repository that holds the versions")
    form.add_argument("--release", action="store_true", help="the versions are those of releases on the package index")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trees = {}
        for version in args.versions:
            if args.repository is not None:
                trees[version] = SourceTree(from_repository(args.repository, version))
            elif args.release:
                place = Path(folder, version)
                place.mkdir()
                trees[version] = SourceTree(from_folders([released(args.framework, version, place)]))
            else:
                trees[Path(version).name] = SourceTree(from_folders([Path(version)]))
        hooks = hooks_of(args.framework)
        if args.release:
            hooks = [hook for hook in hooks if not hook.module.startswith("megatron.training")]
        return _show(hooks, trees, changes_only=args.release)


def _show(hooks: list[Hook], trees: dict[str, SourceTree], *, changes_only: bool) -> int:
    """Print the fingerprints of each hook. Returns 1 if only changes are wanted and there are some."""
    changed = False
    for hook in hooks:
        seen: dict[str, list[str]] = defaultdict(list)
        for version, tree in trees.items():
            source = tree.function(hook.module, hook.attribute)
            seen[fingerprint_of_source(source.text) if source else "absent"].append(version)
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
