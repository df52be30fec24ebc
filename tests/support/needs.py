"""What a test needs beside the core and torch. Without it the test is skipped: ``scripts/test.sh --unit`` has nothing else."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


def needs(*packages: str) -> pytest.MarkDecorator:
    """Mark tests that need packages. Does not import them."""
    absent = [package for package in packages if find_spec(package) is None]
    return pytest.mark.skipif(bool(absent), reason=f"not installed: {', '.join(absent)}")


def program(name: str) -> Path:
    """Return a program of this environment, or skip the test."""
    found = Path(sys.executable).parent / name
    if not found.exists():
        pytest.skip(f"not installed: {name}")
    return found
