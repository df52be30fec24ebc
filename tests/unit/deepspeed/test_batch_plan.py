"""The batch on another number of ranks: every spelling, exact, or an error that names the numbers of ranks that can."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("deepspeed")

from ds_unickpt.batch.batch_plan import Asked, allowed_ranks, in_place_of, planned
from ds_unickpt.batch.batches import Batch
from unickpt.base.errors import ConfigError

SAVED = Batch(12, 3, 1, 4)  # four ranks saved


@pytest.mark.parametrize(
    ("asked", "ranks", "expected"),
    [
        (Asked(12, 3), 2, Batch(12, 3, 2, 2)),
        (Asked(12, 3, 1), 2, Batch(12, 3, 2, 2)),
        (Asked(12), 2, Batch(12, 3, 2, 2)),
        (Asked(12), 3, Batch(12, 2, 2, 3)),  # a share of 4 has no part of 3
        (Asked(12), 12, Batch(12, 1, 1, 12)),
        (Asked(12, None, 1), 2, Batch(12, 3, 2, 2)),
        (Asked(None, 3, 1), 2, Batch(12, 3, 2, 2)),
        (Asked(None, 3, 1), 1, Batch(12, 3, 4, 1)),
        (Asked(None, 3), 2, Batch(12, 3, 2, 2)),
        (Asked(24, 3, 2), 2, Batch(24, 3, 4, 2)),  # the configuration names another batch than the checkpoint
        (Asked(None, None, 2), 2, None),  # DeepSpeed has an error for it
    ],
)
def test_the_global_batch_stays(asked: Asked, ranks: int, expected: Batch | None) -> None:
    assert planned(asked, SAVED, ranks) == expected


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (Asked(12, 3), Batch(12, 3, 2, 2)),
        (Asked(12, 3, 1), Batch(12, 3, 2, 2)),
        (Asked(12), None),
        (Asked(None, 3, 1), None),
    ],
)
def test_without_a_checkpoint_the_configuration_decides(asked: Asked, expected: Batch | None) -> None:
    assert planned(asked, None, 2) == expected


@pytest.mark.parametrize("asked", [Asked(12, 3), Asked(12, 3, 1), Asked(None, 3, 1)])
def test_an_impossible_batch_names_the_numbers_of_ranks_that_can(asked: Asked) -> None:
    with pytest.raises(
        ConfigError, match=r"12 cannot be kept on 3 data-parallel ranks with micro batches of 3\. .*: 1, 2, 4\. Start"
    ):
        planned(asked, SAVED, 3)


@pytest.mark.parametrize(
    ("asked", "ranks", "expected"),
    [
        (Asked(1024, 3), 5, Batch(1020, 3, 68, 5)),  # 68.27 micro batches of each rank
        (Asked(1024, 3, 9), 7, Batch(1029, 3, 49, 7)),  # 48.76: rounded up
        (Asked(1024), 5, Batch(1020, 3, 68, 5)),
        (Asked(1024, 4), 8, Batch(1024, 4, 32, 8)),  # exact where that is possible
    ],
)
def test_within_a_tolerance_the_accumulation_is_rounded(asked: Asked, ranks: int, expected: Batch) -> None:
    made = planned(replace(asked, tolerance=0.01), SAVED, ranks)
    assert made is not None
    assert made == expected
    told = in_place_of(replace(asked, tolerance=0.01), made)
    share = expected.total / 1024 - 1
    assert told == (f", in place of 1024: {share:+.2%}, within batch_tolerance 1.00%" if share else "")


def test_beyond_the_tolerance_or_without_a_batch_in_the_json_it_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"kept on 5 .* The nearest batch is 15, 25\.00% away; .* allows 10\.00%\.$"):
        planned(Asked(12, 3, tolerance=0.1), SAVED, 5)
    with pytest.raises(ConfigError, match=r"The nearest batch is 15, .* but only of a train_batch_size in the JSON\.$"):
        planned(Asked(None, 3, tolerance=0.5), SAVED, 5)


def test_only_the_nearest_numbers_are_named() -> None:
    with pytest.raises(
        ConfigError, match=r"on 7 data-parallel ranks\. .*\(the nearest\): 1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 15, 16\. Start"
    ):
        planned(Asked(720), Batch(720, 10, 9, 8), 7)
    with pytest.raises(ConfigError, match=r"12 is no multiple of 5\. Change"):
        planned(Asked(12, 5), None, 2)


def test_allowed_numbers_of_ranks_make_the_batch() -> None:
    for total in range(1, 40):
        for per_device in range(1, 8):
            expected = [ranks for ranks in range(1, total + 1) if total % (per_device * ranks) == 0]
            assert allowed_ranks(total, per_device) == expected
