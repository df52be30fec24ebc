"""For all tests."""

import gc
import logging
import threading
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import settings

from tests.support.fork_server import shared_interpreters
from tests.support.repository import REPO

# no test may fail because the machine is busy
settings.register_profile("unickpt", deadline=None)
settings.load_profile("unickpt")

# Seconds for a test without a framework, unless it has a bound of its own: the longest takes 50 on two cores. A product that
# waits forever is then a failure after minutes. Jobs with frameworks have their own bounds (``fork_ranks``).
HANGS_AFTER_S = 300
WITHOUT_FRAMEWORK = (REPO / "tests/unit", REPO / "tests/hostile")


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    for item in items:
        if any(item.path.is_relative_to(folder) for folder in WITHOUT_FRAMEWORK) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(HANGS_AFTER_S))


def pytest_collection_finish() -> None:
    """Collections look at what tests make, and not at all modules: half a second each, in a process that has imported torch."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _interpreters() -> Iterator[None]:
    """Jobs of one package share their imports, which take a tenth of the time of all tests."""
    with shared_interpreters():
        yield


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What this test says: a thread that an earlier test has left may still speak, of something else."""
    left = set(threading.enumerate()) - {threading.current_thread()}

    def is_of_this_test(_: logging.LogRecord) -> bool:
        return threading.current_thread() not in left

    caplog.handler.addFilter(is_of_this_test)
    yield caplog
    caplog.handler.removeFilter(is_of_this_test)
