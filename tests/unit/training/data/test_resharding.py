"""Samples that ranks hold when the number of ranks changes: none is lost, and the next ones stay next."""

from __future__ import annotations

import random
from itertools import chain

import pytest

from unickpt import ConfigError, deal_samples


def test_items_that_were_next_stay_next() -> None:
    assert deal_samples([["a", "c", "e"], ["b", "d"]], 3) == [["a", "d"], ["b", "e"], ["c"]]
    assert deal_samples([[0, 2, 4], [1, 3, 5]], 1) == [[0, 1, 2, 3, 4, 5]]
    assert deal_samples([], 2) == [[], []]


@pytest.mark.parametrize("seed", range(20))
def test_no_item_is_lost_and_the_shares_are_even(seed: int) -> None:
    choose = random.Random(seed)
    items = iter(range(1000))
    buffers = [[next(items) for _ in range(choose.randrange(9))] for _ in range(choose.randrange(1, 7))]
    dealt = deal_samples(buffers, choose.randrange(1, 7))
    assert sorted(chain(*dealt)) == sorted(chain(*buffers))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    assert deal_samples(deal_samples(dealt, len(buffers)), len(dealt)) == dealt, "there and back again"


def test_the_same_number_of_ranks_keeps_even_buffers() -> None:
    buffers = [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert deal_samples(buffers, 3) == buffers


def test_no_ranks_is_an_error() -> None:
    with pytest.raises(ConfigError, match="ranks is 0"):
        deal_samples([[1]], 0)
