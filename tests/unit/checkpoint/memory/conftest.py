from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.memory_jobs import Job, jobs_in


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    yield from jobs_in(tmp_path)
