"""Lists of names in messages."""

from __future__ import annotations

from collections.abc import Iterable


def some(names: Iterable[object], most: int = 8, *, separator: str = ", ") -> str:
    """Return the first names as text, and how many there are more."""
    every = list(names)
    more = f"{separator.rstrip(', ')} and {len(every) - most:,} more" if len(every) > most else ""
    return separator.join(map(str, every[:most])) + more


def listed(what: str, names: Iterable[object], *, most: int = 10, separator: str = ", ") -> list[str]:
    """Return what the names have in common, how many they are, and the first ones, as one text; [] if there are none."""
    every = list(names)
    return [f"{what} ({len(every):,}): {some(every, most=most, separator=separator)}"] if every else []
