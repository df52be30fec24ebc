"""Parser for untrusted JSON: it enforces limits and raises FormatError for every failure."""

from __future__ import annotations

import json
from typing import Any

from unickpt.base.errors import FormatError

MAX_VALUES = 1 << 25  # values per document; a value of a few bytes takes up to 100 bytes of memory


def parse_json(data: bytes, *, where: str, strict: bool = True) -> Any:
    """Parse a JSON document.

    Args:
        data: UTF-8 text.
        where: name of the file in messages.
        strict: refuse NaN and infinity, and a key that appears twice in one object.

    Raises:
        FormatError: ``data`` is not JSON, has an integer of thousands of digits or more than ``MAX_VALUES`` values,
            or is nested too deeply.
    """
    if data.count(b",") + data.count(b"[") + data.count(b"{") > MAX_VALUES:
        raise FormatError(f"{where}: has more than {MAX_VALUES:,} values")
    try:
        if strict:
            return json.loads(data.decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=_distinct)
        return json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as err:
        raise FormatError(f"{where}: not JSON ({err}); the file is damaged") from None
    except MemoryError:
        raise FormatError(f"{where}: not enough memory to parse the document") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not valid JSON")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a duplicate key")
    return found
