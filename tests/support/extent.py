"""How much the tests run: what CI has time for, or all."""

from __future__ import annotations

import os

import pytest

VARIABLE = "UNICKPT_FULL_MATRIX"
FULL = os.environ.get(VARIABLE) == "1"
in_full = pytest.mark.skipif(not FULL, reason=f"{VARIABLE}=1 runs it")
