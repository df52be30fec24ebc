"""Which generations stay in memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unickpt.checkpoint.memory.generations import kept, passed


@pytest.mark.parametrize(
    ("count", "needed", "expected"),
    [(2, None, [9]), (3, None, [9, 8]), (2, 5, [9]), (3, 5, [9, 5]), (4, 5, [9, 8, 5]), (3, 8, [9, 8]), (3, 4, [9, 8])],
)
def test_the_newest_stays_and_the_passed_one_takes_the_place_of_the_oldest(
    count: int, needed: int | None, expected: list[int]
) -> None:
    assert kept([9, 8, 7, 5], count, needed) == expected


@given(every=st.integers(1, 9), saves=st.integers(1, 4), count=st.integers(3, 5), steps=st.integers(1, 60))
def test_with_three_generations_the_job_can_always_go_back_to_memory(every: int, saves: int, count: int, steps: int) -> None:
    """The witness has passed a checked step when the next step begins. Each save knows what it has passed."""
    safe: list[int] = []
    known: dict[int, tuple[int, int]] = {}
    until = 0
    for step in range(1, steps + 1):
        until = step - 1 if (step - 1) % every == 0 else until
        if step % saves:
            continue
        keep = kept(safe, count, passed({number: known[number] for number in safe}))
        safe = [step, *keep]
        known[step] = step, until
        best = max((each for each in known if each <= until), default=None)
        assert len(safe) <= count
        assert keep[:1] == safe[1:2]
        assert best is None or best in safe
