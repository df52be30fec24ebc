"""Class name of an optimizer from the keys of its tensor states, for formats that do not store the name."""

from __future__ import annotations

from collections.abc import Collection

_CLASSES = (({"exp_avg", "exp_avg_sq"}, "AdamW"), ({"exp_avg"}, "Lion"), ({"momentum_buffer"}, "SGD"), ({"sum"}, "Adagrad"))


def class_of_states(states: Collection[str]) -> str:
    """Return the class name, or ``unknown``."""
    return next((name for keys, name in _CLASSES if keys <= set(states)), "unknown")
