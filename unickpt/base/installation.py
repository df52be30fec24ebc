"""Where this package comes from, and the commands that install it and more of it.

A command names this package to an index only when the name there is this project's: a stranger can register a free name.
"""

from __future__ import annotations

import shlex
from pathlib import Path

# True once the name on the package index is this project's. Until then no message and no page has "pip install" with the name.
PUBLISHED = False
# The owner sets it before the first release (CONTRIBUTING.md). Nobody can register a domain under "invalid".
REPOSITORY = "https://repository.invalid/unickpt"

_NAME = "unickpt"
_PACKAGE = Path(__file__).resolve().parents[1]


def source_tree(package: Path = _PACKAGE) -> Path | None:
    """Return the checkout, or the unpacked source distribution, that a package is part of; None for an installed copy.

    Args:
        package: folder ``unickpt``.
    """
    project = package.parent / "pyproject.toml"  # a vendored copy may lie beside that of another project
    if not project.is_file() or f'\nname = "{_NAME}"\n' not in project.read_text(encoding="utf-8"):
        return None
    return package.parent


def shipped_file(path: str) -> Path:
    """Return a file or folder of ``configs`` or ``examples``. ``setup.py`` copies both into a wheel.

    Args:
        path: below the root of the repository.
    """
    return (source_tree() or _PACKAGE / "shipped") / path


def install_command() -> str:
    """Return how to install this package on another machine."""
    return f"pip install {_NAME}" if PUBLISHED else "pip install . in a checkout of its repository"


def build_command() -> str:
    """Return the command that builds the extensions of this installation."""
    tree = source_tree()
    if tree is None:
        return f"{install_command()}, with a C compiler"
    return f"cd {shlex.quote(str(tree))} && python setup.py build_ext --inplace"


def extra_command(extra: str) -> str:
    """Return the command that adds the packages of an extra to this environment.

    Args:
        extra: name in ``project.optional-dependencies`` of ``pyproject.toml``.
    """
    if (tree := source_tree()) is not None:
        return f"pip install --editable {shlex.quote(f'{tree}[{extra}]')}"
    needed = [f"{_NAME}[{extra}]"] if PUBLISHED else _requirements(extra)
    return f"pip install {' '.join(map(shlex.quote, needed))}"


def _requirements(extra: str) -> list[str]:
    """Return what an extra of the installed package adds to its requirements."""
    from importlib import metadata

    from packaging.requirements import Requirement

    found = []
    for requirement in map(Requirement, metadata.requires(_NAME) or ()):
        marker, requirement.marker = requirement.marker, None
        if marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""}):
            found.append(str(requirement))
    return found
