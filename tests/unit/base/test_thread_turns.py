"""Turns of threads are short while a save works, and as before afterwards."""

from __future__ import annotations

import sys

import pytest

from unickpt.base.thread_turns import TURN_S, short_turns


def test_turns_are_short_until_the_last_user_has_ended() -> None:
    before = sys.getswitchinterval()
    with short_turns():
        with short_turns():
            assert sys.getswitchinterval() == pytest.approx(TURN_S)
        assert sys.getswitchinterval() == pytest.approx(TURN_S)
    assert sys.getswitchinterval() == pytest.approx(before)


def test_an_interval_that_other_code_has_set_stays() -> None:
    before = sys.getswitchinterval()
    try:
        with short_turns():
            sys.setswitchinterval(0.02)
        assert sys.getswitchinterval() == pytest.approx(0.02)
        with short_turns():
            assert sys.getswitchinterval() == pytest.approx(TURN_S)
        assert sys.getswitchinterval() == pytest.approx(0.02)
    finally:
        sys.setswitchinterval(before)
