"""Check what wheels and source distributions hold: ``python scripts/check_distributions.py [--tag v0.2.0] FILE...``.

With ``--tag`` also what a release needs: the version of the tag, a section of the changelog, and the address of the repository.
Only the standard library is needed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email.parser import HeaderParser
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
EXTENSIONS = {
    "unickpt/diagnosis/recording/_fast.abi3.so",
    "unickpt/checkpoint/format/_casts.abi3.so",
    "unickpt/checkpoint/format/_checksums.abi3.so",
    "unickpt/checkpoint/load/_checked_read.abi3.so",
}
NEEDED = {
    "_unickpt_autoload.py",
    "unickpt/VERSION",
    "unickpt/py.typed",
    "unickpt/cli/main.py",
    "unickpt/cli/doctor/hooks.json",
    "unickpt/diagnosis/reports/report.html",
    "unickpt/shipped/configs/dialects/megatron-core.llama.toml",
    "unickpt/shipped/configs/deepspeed/zero2.json",
    "unickpt/shipped/examples/python_api.py",
    "ds_unickpt/engine.py",
    "megatron_unickpt/hooks.py",
}
ROOTS = {"_unickpt_autoload.py", "unickpt", "ds_unickpt", "megatron_unickpt", "torch_unickpt"}
ADDED = {"PKG-INFO", "setup.cfg", "unickpt/VERSION"}  # to what git has, in a source distribution
PLACEHOLDER = ".invalid/"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tag", default="", help="tag of the release that the files are for")
    parser.add_argument("files", nargs="+", type=Path)
    args = parser.parse_args()
    problems = [f"{file.name}: {each}" for file in args.files for each in _problems(file, args.tag)]
    print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)
    return bool(problems)


def _problems(file: Path, tag: str) -> Iterator[str]:
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as wheel:
            names = {name for name in wheel.namelist() if not name.endswith("/")}
            (info,) = {name.split("/")[0] for name in names if name.split("/")[0].endswith(".dist-info")}
            metadata, facts = (wheel.read(f"{info}/{name}").decode() for name in ("METADATA", "WHEEL"))
            version = wheel.read("unickpt/VERSION").decode().strip()
        yield from _wheel(names, info, facts)
    else:
        with tarfile.open(file) as archive:
            root = file.name.removesuffix(".tar.gz")
            names = {each.name.removeprefix(f"{root}/") for each in archive.getmembers() if each.isfile()}
            metadata, version = (_text(archive, f"{root}/{name}") for name in ("PKG-INFO", "unickpt/VERSION"))
        yield from _source(names)
    yield from _metadata(metadata, version.strip(), tag)
    print(f"{file}: {len(names)} files")


def _text(archive: tarfile.TarFile, name: str) -> str:
    found = archive.extractfile(name)
    if found is None:
        raise ValueError(f"{name} is not a file")
    return found.read().decode()


def _wheel(names: set[str], info: str, facts: str) -> Iterator[str]:
    yield from _lacks(names, NEEDED)
    if strangers := sorted(name for name in names if name.split("/")[0] not in {*ROOTS, info}):
        yield f"should not hold {strangers}"
    tags = re.findall(r"^Tag: (.*)$", facts, re.M)
    built = {name for name in names if name.endswith(".so")}
    if built != (set() if tags == ["py3-none-any"] else EXTENSIONS):
        yield f"has the tags {tags}, and the extensions {sorted(built)}"


def _source(names: set[str]) -> Iterator[str]:
    done = subprocess.run(["git", "-C", str(REPO), "ls-files", "-z"], capture_output=True, text=True, check=False)
    if done.returncode:  # this is an unpacked source distribution
        return
    tracked = {name for name in done.stdout.split("\0") if (REPO / name).is_file()}
    yield from _lacks(names, tracked)
    if strangers := sorted(name for name in names - tracked - ADDED if not name.startswith("unickpt.egg-info/")):
        yield f"should not hold {strangers}"


def _lacks(names: set[str], needed: set[str]) -> Iterator[str]:
    if missing := sorted(needed - names):
        yield f"lacks {missing}"


def _metadata(text: str, version: str, tag: str) -> Iterator[str]:
    found = HeaderParser().parsestr(text)
    if found["Version"] != version:
        yield f"the metadata has version {found['Version']}, and the package {version}"
    page = found.get_payload()
    if relative := re.findall(r"\]\((?!\w+:|#)([^)\s]+)\)", page if isinstance(page, str) else ""):
        yield f"the description links to {relative}, which an index does not have"
    if tag:
        yield from _release(text, version, tag)


def _release(metadata: str, version: str, tag: str) -> Iterator[str]:
    if tag != f"v{version}":
        yield f"is version {version}, and not of the tag {tag}"
    if PLACEHOLDER in metadata:
        yield "has no address of the repository: set REPOSITORY in unickpt/base/installation.py"
    if f"\n## {version} (" not in (REPO / "CHANGELOG.md").read_text(encoding="utf-8"):
        yield f"CHANGELOG.md has no section for {version}: towncrier build --version {version}"


if __name__ == "__main__":
    sys.exit(main())
