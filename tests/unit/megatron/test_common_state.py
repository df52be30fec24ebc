"""The step of a checkpoint whose caller names none."""

from __future__ import annotations

import pytest

from megatron_unickpt.held_state.common_state import step_of


@pytest.mark.parametrize(
    ("directory", "step"),
    [
        ("/run/global_step_10/actor/model", 10),  # verl
        ("/run/checkpoint-20/iter_0000030", 30),  # ms-swift: the nearest counts
        ("/run/epoch1epochstep2globalstep40", 40),  # AReaL
        ("/run/tmp_step_50/policy/weights", 50),  # NeMo-RL
        ("s3://bucket/run/step70", 70),
        ("/mnt/checkpoint3/user/run/dist_ckpt", 0),  # the name of a disk
        ("/run/iterations/2026", 0),
        ("/step_9/a/b/c/d/e", 0),  # too far above
    ],
)
def test_the_step_is_in_the_nearest_name_that_has_one(directory: str, step: int) -> None:
    assert step_of({}, directory) == step
    assert step_of({"iteration": 3}, directory) == 3
    assert step_of(None, directory) == step
