"""The schedule of the soak is the same in every piece, and its arithmetic is the same on any number of ranks."""

from __future__ import annotations

import torch

from evidence.sixty_four.soak import exact
from evidence.sixty_four.soak.faults import KINDS, kind_of


def test_each_kind_comes_once_before_any_comes_twice_and_a_later_piece_has_the_same_schedule() -> None:
    first = [kind_of(number, seed=1) for number in range(3 * len(KINDS))]
    assert first == [kind_of(number, seed=1) for number in range(3 * len(KINDS))]
    cycles = [first[at : at + len(KINDS)] for at in range(0, len(first), len(KINDS))]
    assert [sorted(cycle) for cycle in cycles] == [sorted(KINDS)] * 3
    assert cycles[0] != cycles[1]
    assert first != [kind_of(number, seed=2) for number in range(3 * len(KINDS))]


def test_a_step_is_equal_in_all_bits_whatever_samples_a_rank_has() -> None:
    """A rank adds the gradients of its samples one by one with autograd, and the uninterrupted run all at once without."""
    values = torch.stack([exact.Data()[index][1] for index in range(exact.BATCH)])
    whole, parts = exact.Model(), [exact.Model() for _ in range(4)]
    exact.gradients(whole, values)
    for number, part in enumerate(parts):
        for value in values[number::4]:
            part(value).backward()
    for name in ("inner", "outer"):
        added = sum(getattr(part, name).grad for part in reversed(parts))
        assert torch.equal(added, getattr(whole, name).grad)
