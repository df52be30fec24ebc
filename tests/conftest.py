"""For all tests."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from unickpt.testing.fork_server import shared_interpreters

# no test may fail because the machine is busy
settings.register_profile("unickpt", deadline=None)
settings.load_profile("unickpt")


@pytest.fixture(scope="session", autouse=True)
def _interpreters() -> Iterator[None]:
    """Jobs of one package share their imports, which take a tenth of the time of all tests."""
    with shared_interpreters():
        yield
