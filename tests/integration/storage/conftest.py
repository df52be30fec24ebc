"""A real S3 server, buckets in it, and a relay that disturbs requests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.support.s3 import CREDENTIALS, Bucket, Relay, server

_numbers = itertools.count()


@pytest.fixture(scope="package")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with server(tmp_path_factory.mktemp("s3") / "server.log") as found:
        yield found


def _bucket(port: int, endpoint: int, patch: pytest.MonkeyPatch) -> Bucket:
    """Create a bucket for one test. Connections are cached per bucket, so tests must not share one."""
    for key, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{endpoint}"}.items():
        patch.setenv(key, value)
    return Bucket(port, f"bucket-{next(_numbers)}")


@pytest.fixture
def bucket(port: int, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    return _bucket(port, port, monkeypatch)


@pytest.fixture
def relay(port: int) -> Iterator[Relay]:
    found = Relay(port)
    found.start()
    yield found
    found.stop()


@pytest.fixture
def relayed(port: int, relay: Relay, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A bucket that unickpt accesses through the relay, and the test directly."""
    return _bucket(port, relay.port, monkeypatch)
