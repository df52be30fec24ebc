"""Steps of a program that uses megatron-core as a library."""

from __future__ import annotations

from megatron_unickpt.measuring.timing import StepCounter
from unickpt.diagnosis import session


def test_steps_go_on_from_the_iteration_that_was_loaded() -> None:
    """Inner optimizers of a chained one step within its step."""
    counter, process = StepCounter(), session._process
    before = process._steps
    try:
        session.stands_at(7)
        counter.wrapper(lambda: counter.wrapper(lambda: None, None, (), {}), None, (), {})
        counter.wrapper(lambda: None, None, (), {})
        assert process._steps == 9
    finally:
        session.stands_at(before)
