"""Contract and common checks of the readers of foreign formats."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from unickpt.base.errors import FormatError, UnickptError
from unickpt.transform.convert.pipeline import Source

SOURCE_BYTES, SOURCE_FACTOR = 64 << 20, 256
_UNEXPECTED = (
    TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, RuntimeError, AssertionError,
)  # fmt: skip
_SURROGATE = re.compile("[\ud800-\udfff]")
_Read = TypeVar("_Read", bound=Callable[..., Source])


def bounded(read: _Read) -> _Read:
    """Wrap the reader of a format, which returns the ``Source`` of a checkpoint.

    A file may contain a value of any type anywhere. Readers check values where a wrong type would go unnoticed. This wrapper
    turns all other type errors into a FormatError with the original error as its cause.

    Every reader has the same arguments and errors:

    Args of the reader:
        folder: directory of the checkpoint; for DeepSpeed and Megatron, of one tag or iteration.
        files: open files to read through.
        also: additional class names that pickles may contain, as for ``safe_pickle.load``.

    Raised by the reader:
        NotACheckpointError: the folder does not have this format.
        FormatError: a file is missing, damaged, or has content that is not supported.
        OSError: a file cannot be read.
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
            raise FormatError(f"{folder}: not enough memory to read the checkpoint") from err
        except _UNEXPECTED as err:
            raise FormatError(
                f"{folder}: a file contains a value of an unexpected type. The file is damaged, or a newer release "
                f"wrote it ({type(err).__name__}: {err!s:.200})"
            ) from err

    return cast(_Read, checked)


def _check_size(folder: Path, source: Source) -> None:
    """Refuse a checkpoint whose tensors share bytes so often that it is far larger than its files."""
    inputs = {path for portion in source.portions for path in portion.inputs}
    there = sum(os.stat(path).st_size for path in inputs)
    if source.size_bytes > SOURCE_BYTES + SOURCE_FACTOR * there:
        raise FormatError(
            f"{folder}: its tensors would take {source.size_bytes:,} bytes, but their files have {there:,} bytes: "
            "many tensors share the same bytes"
        )


def _check_names(folder: Path, source: Source) -> None:
    """Refuse names with unpaired surrogates, which UTF-8 cannot encode."""
    tensors = [part.tensor for portion in source.portions for part in portion.parts]
    for info in {info.key: info for info in (*tensors, *source.tensors)}.values():
        if _SURROGATE.search(info.name) or _SURROGATE.search(info.state):
            raise FormatError(f"{folder}: the name {info.name[:80]!r} is not valid Unicode text")
