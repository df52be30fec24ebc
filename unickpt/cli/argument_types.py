"""Types of arguments that several commands have."""

from __future__ import annotations

import argparse
import re


def positive(text: str) -> int:
    """Return a whole number from 1."""
    if not re.fullmatch(r"[1-9]\d{0,8}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")
    return int(text)


def steps(text: str) -> tuple[int, int]:
    """Return the first and the last step of ``FIRST:LAST``."""
    found = re.fullmatch(r"(\d+):(\d+)", text)
    if found is None or int(found[1]) > int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not FIRST:LAST, such as 100:119")
    return int(found[1]), int(found[2])
