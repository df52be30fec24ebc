"""Lines of files that several processes write, also on a disk that is full for a while."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from unickpt.base.private_files import append

Limit = Callable[[int | None], None]


@pytest.fixture
def most_bytes() -> Iterator[Limit]:
    """Return a function that limits the size of files that this process writes."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda number: resource.setrlimit(resource.RLIMIT_FSIZE, (before[0] if number is None else number, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_line_that_was_cut_takes_no_other_line_with_it(tmp_path: Path, most_bytes: Limit) -> None:
    file = tmp_path / "lines"
    append(file, b"the first line\n")
    most_bytes(20)
    with pytest.raises(OSError, match="lines"):
        append(file, b"a line that is cut\n")
    most_bytes(None)
    append(file, b"the second line\n")
    append(file, b"the third line\n")
    assert file.read_bytes() == b"the first line\na lin\nthe second line\nthe third line\n"
