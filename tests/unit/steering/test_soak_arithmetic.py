"""The arithmetic of the soak is the same on any number of ranks."""

from __future__ import annotations

import torch

from tests.jobs.steering import soak_arithmetic as exact


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
