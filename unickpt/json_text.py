"""JSON that somebody else wrote: parsed within limits, every failure a FormatError."""

from __future__ import annotations

import json
from typing import Any

from unickpt.errors import FormatError

MAX_VALUES = 1 << 25  # values of a document; each takes up to 100 bytes of memory, whatever few bytes it has in the file


def parse_json(data: bytes, *, where: str, strict: bool = True) -> Any:
    """The value of a JSON document.

    Args:
        data: UTF-8.
        where: names the file in messages.
        strict: refuse NaN and infinity, and a key that appears twice in one object.

    Raises:
        FormatError: not JSON, an integer of thousands of digits, more than ``MAX_VALUES`` values, or nested too deeply.
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
        raise FormatError(f"{where}: needs more memory than there is to be parsed") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has one key twice")
    return found
