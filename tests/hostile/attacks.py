"""Hostile checkpoints: no attack runs code, accesses files outside its directory, or exhausts memory with false sizes.

Every attack is signed: the manifest vouches for what was tampered with, because an attacker
can compute checksums too. Whatever is then done with the checkpoint ends well or in an
``UnickptError``, within a fixed amount of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.mutation import limited_memory, load_everything
from tests.support.handmade import IndexParts
from unickpt.base.errors import UnickptError
from unickpt.checkpoint.load.verify import verify_checkpoint
from unickpt.cli.main import main

INDEX = "index.safetensors"
DATA = "data/rank00000.safetensors"

Attack = Callable[[Path], None]


def cases(names: Iterable[str]) -> list[Any]:
    """Return the names of attacks as pytest parameters."""
    return [pytest.param(name, id=name[:40]) for name in names]


def on_index(edit: Callable[[IndexParts], Any]) -> Attack:
    """Return an attack that changes columns of the index."""

    def attack(directory: Path) -> None:
        parts = IndexParts(directory)
        edit(parts)
        parts.write()

    return attack


Reasons = dict[str, list[str]]  # words of the error -> attacks that must be refused with them


def reason(reasons: Reasons, name: str) -> str:
    """Return the words of the error that an attack must raise, so that another check cannot hide a missing one."""
    (words,) = [words for words, names in reasons.items() if name in names]
    return words


def refused(directory: Path) -> list[str]:
    """Load, verify and inspect the checkpoint. Returns the errors of the first two. Only UnickptError may be raised."""
    found = []
    with limited_memory():
        try:
            load_everything(directory)
        except UnickptError as err:
            found.append(f"{type(err).__name__}: {err}")
        try:
            found += verify_checkpoint(directory).problems
        except UnickptError as err:
            found.append(f"{type(err).__name__}: {err}")
        for arguments in ([], ["--all", "--objects"], ["--json"], ["--tensor", "layer.weight"]):
            assert main(["inspect", str(directory), *arguments]) in (0, 1, 2)
    return found
