"""How much the tests run: what CI has time for, or all."""

from __future__ import annotations

import os

VARIABLE = "UNICKPT_FULL_MATRIX"
FULL = os.environ.get(VARIABLE) == "1"
