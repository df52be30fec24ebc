"""Results that a rank of a job prints for the test that started it, among the lines of all ranks."""

from __future__ import annotations

import re
import sys


def print_result(name: str, value: object) -> None:
    """Print one line, ``NAME value``.

    It is one write: ``print`` writes the end of the line by itself, and a thread that logs can come between the two.
    """
    sys.stdout.write(f"\n{name} {value}\n")
    sys.stdout.flush()


def results_in(output: str, name: str) -> list[str]:
    """Return the values that were printed with a name, in their order."""
    return re.findall(rf"^{name} (.*)$", output, re.MULTILINE)
