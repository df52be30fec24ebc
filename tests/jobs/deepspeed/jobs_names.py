"""Names of the layouts of the matrix. Does not import DeepSpeed."""

from __future__ import annotations


def layout_names(world: int) -> list[str]:
    """Return the names of ``tests.jobs.deepspeed.jobs.layouts``."""
    names = [f"z{stage}w{world}{precision}" for precision in ("fp32", "bf16") for stage in (0, 1, 2, 3)]
    return [*names, f"z1w{world}bf16o"]
