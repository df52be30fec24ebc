"""The jobs of ``megatron_jobs.py`` whose norms are parameters to average: each tensor-parallel rank has values of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.jobs.deepspeed import megatron_jobs
from tests.jobs.deepspeed.megatron_jobs import AVERAGED, INFO, LAYOUT, WHOLE, common, mark, scramble, train, truth_of

__all__ = ["LAYOUT", "build", "common", "mark", "norms_to_average", "scramble", "train", "truth_of"]
_NORMS = r"\d+.norm.(weight|bias)"


def _average_norms() -> None:
    INFO.update({AVERAGED: [_NORMS], WHOLE: [pattern for pattern in INFO[WHOLE] if pattern != _NORMS]})


@contextmanager
def norms_to_average() -> Iterator[None]:
    """Let ``universal_checkpoint_info`` list the norms as parameters to average."""
    kept = dict(INFO)
    _average_norms()
    try:
        yield
    finally:
        INFO.clear()
        INFO.update(kept)


def build(layout: LAYOUT, *, seed: int, **more: Any) -> Any:
    """Return the engine of ``megatron_jobs.build``. This process averages the norms from then on."""
    _average_norms()
    return megatron_jobs.let_ranks_differ(megatron_jobs.build(layout, seed=seed, **more))
