"""How much the tests run: what CI has time for, or all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

import pytest

T = TypeVar("T")

VARIABLE = "UNICKPT_FULL_MATRIX"
FULL = os.environ.get(VARIABLE) == "1"
in_full = pytest.mark.skipif(not FULL, reason=f"{VARIABLE}=1 runs it")


def some(values: Sequence[T], number: int) -> list[T]:
    """Return all values for the full matrix, and otherwise the first ``number``: put those that differ most there."""
    return [*values] if FULL else [*values[:number]]
