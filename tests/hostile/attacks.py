"""A checkpoint from somebody else: no attack runs code, reaches outside its directory, or exhausts memory by lying about sizes.

Every attack is signed: the manifest vouches for what was tampered with, because an attacker
can compute checksums too. Whatever is then done with the checkpoint ends well or in an
``UnickptError``, within a fixed amount of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.mutation import limited_memory, load_everything
from tests.handmade import IndexParts
from unickpt.cli.main import main
from unickpt.errors import UnickptError
from unickpt.verification import verify

INDEX = "index.safetensors"
DATA = "data/rank00000.safetensors"

Attack = Callable[[Path], None]


def cases(names: Iterable[str]) -> list[Any]:
    """Names of attacks as pytest parameters."""
    return [pytest.param(name, id=name[:40]) for name in names]


def on_index(edit: Callable[[IndexParts], Any]) -> Attack:
    """An attack that changes the index by its columns."""

    def attack(directory: Path) -> None:
        parts = IndexParts(directory)
        edit(parts)
        parts.write()

    return attack


Reasons = dict[str, list[str]]  # words of the refusal -> attacks that must be refused with them


def reason(reasons: Reasons, name: str) -> str:
    """The words with which an attack must be refused, so that no other check can hide that the right one is gone."""
    (words,) = [words for words, names in reasons.items() if name in names]
    return words


def refused(directory: Path) -> list[str]:
    """Load, verify and inspect it; what each of the first two had against it. Nothing but UnickptError may come out."""
    found = []
    with limited_memory():
        try:
            load_everything(directory)
        except UnickptError as err:
            found.append(f"{type(err).__name__}: {err}")
        try:
            found += verify(directory).problems
        except UnickptError as err:
            found.append(f"{type(err).__name__}: {err}")
        for arguments in ([], ["--all", "--objects"], ["--json"], ["--tensor", "layer.weight"]):
            assert main(["inspect", str(directory), *arguments]) in (0, 1, 2)
    return found
