"""Logs that tests read are of these tests alone."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

import pytest

LOGGER = logging.getLogger("unickpt")


@pytest.fixture
def let_it_speak() -> Iterator[Callable[[], None]]:
    """A thread that an earlier test has left. It logs when it is let."""
    turn = threading.Event()
    left = threading.Thread(target=lambda: turn.wait() and LOGGER.warning("of an earlier test"))
    left.start()

    def let() -> None:
        turn.set()
        left.join()

    yield let
    let()


def test_a_thread_that_an_earlier_test_has_left_is_not_heard(
    let_it_speak: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    let_it_speak()
    own = threading.Thread(target=LOGGER.warning, args=("of this test",))
    own.start()
    own.join()
    assert caplog.messages == ["of this test"]
