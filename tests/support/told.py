"""Values that a rank of a job tells the test that launched it, among the lines that all ranks print."""

from __future__ import annotations

import re
import sys


def tell(name: str, value: object) -> None:
    """Print one line, ``NAME value``.

    It is one write: ``print`` writes the end of the line by itself, and a thread that logs can come between the two.
    """
    sys.stdout.write(f"\n{name} {value}\n")
    sys.stdout.flush()


def told(output: str, name: str) -> list[str]:
    """Return the values with a name, in the order in which ranks told them."""
    return re.findall(rf"^{name} (.*)$", output, re.MULTILINE)
