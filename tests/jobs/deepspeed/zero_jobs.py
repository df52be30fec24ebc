"""Engines of the matrix of ZeRO stages. Their saves are asynchronous: the jobs train on while a checkpoint is written."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.jobs.deepspeed import jobs
from tests.jobs.deepspeed.parallel_jobs import STATES
from tests.jobs.deepspeed.truth import Truth, consolidated
from tests.jobs.deepspeed.zero_names import Layout

LAYOUT = Layout
build = partial(jobs.build, unickpt={"enabled": True})
train, scramble = jobs.train, jobs.scramble


def mark(engine: Any) -> None:
    """Give modules a state outside of tensors: this model has none."""


def truth_of(engine: Any) -> Truth:
    """Return the whole state. Collective."""
    return consolidated(engine, STATES)


def common(truth: Truth, found: Truth) -> tuple[Truth, Truth]:
    """Return what a source and a target have in common: everything."""
    return dict(truth), found
