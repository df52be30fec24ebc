"""Encoded objects (``unickpt.checkpoint.format.objects``) as text. Nothing is decoded or unpickled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MAX_DEPTH = 64
_PLAIN_BRACKETS = {"$tuple": ("(", ")"), "$set": ("{", "}"), "$frozenset": ("frozenset({", "})"), "$size": ("Size(", ")")}


def render(value: Any, *, most: int | None) -> str:
    """Return one line for an encoded value.

    Args:
        value: JSON as ``unickpt.checkpoint.format.objects.encode`` makes it, possibly hostile.
        most: maximum number of characters, or None for no limit.
    """
    text = _render(value, 0)
    return text if most is None or len(text) <= most else text[: most - 3] + "..."


def render_settings(values: Mapping[str, Any]) -> str:
    """Return settings as text, for example ``lr=0.001 betas=(0.9, 0.999)``."""
    return " ".join(f"{key}={_render(value, 0)}" for key, value in values.items())


def _render(value: Any, depth: int) -> str:
    if depth > _MAX_DEPTH:
        return "..."
    if isinstance(value, list):
        return "[" + _items(value, depth) + "]"
    if not isinstance(value, dict):
        return repr(value)
    if len(value) == 1:
        ((tag, body),) = value.items()
        if tag.startswith("$"):
            return _tagged(tag, body, depth)
    return "{" + ", ".join(f"{key!r}: {_render(item, depth + 1)}" for key, item in value.items()) + "}"


def _items(values: list[Any], depth: int) -> str:
    return ", ".join(_render(item, depth + 1) for item in values)


def _tagged(tag: str, body: Any, depth: int) -> str:
    if tag in _PLAIN_BRACKETS and isinstance(body, list):
        left, right = _PLAIN_BRACKETS[tag]
        return left + _items(body, depth) + ("," if tag == "$tuple" and len(body) == 1 else "") + right
    if tag in ("$dict", "$ordered") and isinstance(body, list) and all(isinstance(p, list) and len(p) == 2 for p in body):
        return "{" + ", ".join(f"{_render(key, depth + 1)}: {_render(item, depth + 1)}" for key, item in body) + "}"
    if tag in ("$int", "$float", "$dtype") and isinstance(body, str):
        return body
    if tag == "$opaque" and isinstance(body, dict):
        return f"<opaque {body.get('type')}: a pickle, loaded with allow_pickle only>"
    if tag == "$lost":
        return f"<lost {body}: it could not be pickled when it was saved>"
    if tag == "$tensor":
        return f"<tensor {body}>"
    return f"{tag[1:]}({_render(body, depth + 1)})"
