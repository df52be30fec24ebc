"""Version of this package, from the tag of the repository.

``setup.py`` writes it into a wheel and a source distribution as the file ``unickpt/VERSION``. A checkout has no such file:
there git describes the newest tag, also for an editable installation, whose metadata is as old as the installation.
"""

from __future__ import annotations

import re
from pathlib import Path

from unickpt.base.installation import source_tree

UNKNOWN = "0.0.0+unknown"  # sources without git, such as the archive of a branch
UNTAGGED = "0.0.0.dev0"  # a checkout without tags whose commits git does not count, such as a shallow clone
_GIT_TIMEOUT_S = 10
_DESCRIBED = re.compile(r"v(\d+(?:\.\d+)*(?:(?:a|b|rc)\d+)?)-(\d+)-g([0-9a-f]+)")


def version_of(package: Path) -> str:
    """Return the version of the package in a folder: ``0.2.0``, or ``0.2.0.post3+g1a2b3c4`` three commits after its tag.

    Without a tag it is ``0.0.0.dev57+g1a2b3c4`` after 57 commits, so that later ones are newer.

    Args:
        package: folder ``unickpt``.
    """
    written = package / "VERSION"
    if written.is_file():
        return written.read_text(encoding="utf-8").strip()
    tree = source_tree(package)
    return UNKNOWN if tree is None or not (tree / ".git").exists() else _of_checkout(tree)


def _of_checkout(tree: Path) -> str:
    text = _git(tree, "describe", "--tags", "--long", "--always", "--match", "v[0-9]*")
    if (found := _DESCRIBED.fullmatch(text)) is not None:
        tag, commits, commit = found.groups()
        return tag if commits == "0" else f"{tag}.post{commits}+g{commit}"
    if not text:
        return UNTAGGED
    whole = _git(tree, "rev-parse", "--is-shallow-repository") == "false"
    commits = _git(tree, "rev-list", "--count", "HEAD") if whole else ""
    return f"{f'0.0.0.dev{commits}' if commits else UNTAGGED}+g{text.rpartition('-g')[2]}"


def _git(tree: Path, *arguments: str) -> str:
    import subprocess  # 10 ms, for a checkout alone

    # --git-dir: GIT_DIR in the environment, such as that of a git hook, is of another repository
    command = ["git", f"--git-dir={tree / '.git'}", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError):  # no git, or it waits for a file system
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


__version__ = version_of(Path(__file__).resolve().parents[1])
