"""What every reader of a foreign format promises: errors that say what is wrong, and a size that its files account for."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from unickpt.converting import Source
from unickpt.errors import FormatError, UnickptError

SOURCE_BYTES, SOURCE_FACTOR = 64 << 20, 256
_ODD = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, RuntimeError, AssertionError)
_HALF = re.compile("[\ud800-\udfff]")
_Read = TypeVar("_Read", bound=Callable[..., Source])


def bounded(read: _Read) -> _Read:
    """Wrap a reader of a format.

    A file may hold a value of any type anywhere. Readers check what they use where a mix-up would go unnoticed; the rest ends
    here, as a FormatError with the original error as its cause.
    """

    @functools.wraps(read)
    def checked(folder: Path, *args: Any, **named: Any) -> Source:
        try:
            source = read(folder, *args, **named)
            _check_size(folder, source)
            _check_names(folder, source)
            return source
        except (UnickptError, OSError):
            raise
        except MemoryError as err:
            raise FormatError(f"{folder}: needs more memory than there is to be read") from err
        except _ODD as err:
            raise FormatError(
                f"{folder}: a file holds a value in another form than the framework writes; the file is damaged, or a newer "
                f"release has written it ({type(err).__name__}: {err!s:.200})"
            ) from err

    return cast(_Read, checked)


def _check_size(folder: Path, source: Source) -> None:
    """Refuse a checkpoint that would be far larger than what it is made of, because its tensors share their bytes."""
    inputs = {path for portion in source.portions for path in portion.inputs}
    there = sum(os.stat(path).st_size for path in inputs)
    if source.size_bytes > SOURCE_BYTES + SOURCE_FACTOR * there:
        raise FormatError(
            f"{folder}: its tensors would take {source.size_bytes:,} bytes, the files that they are in have {there:,}: "
            "the same bytes are named again and again"
        )


def _check_names(folder: Path, source: Source) -> None:
    """Refuse names that are not text: the half of a surrogate pair, which UTF-8 cannot hold."""
    tensors = [part.tensor for portion in source.portions for part in portion.parts]
    for info in {info.key: info for info in (*tensors, *source.tensors)}.values():
        if _HALF.search(info.name) or _HALF.search(info.state):
            raise FormatError(f"{folder}: the name {info.name[:80]!r} is not text, and no checkpoint can hold it")
