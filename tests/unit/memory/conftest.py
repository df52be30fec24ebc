from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.memory_jobs import HOSTS, Job


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    started: list[Job] = []

    def start(hosts: Sequence[int] = HOSTS, **options: Any) -> Job:
        for before in started:
            before.end()
        started.append(Job(tmp_path, hosts, **options))
        return started[-1]

    yield start
    for each in started:
        each.end()
