"""How far rounding alone sets the losses of one training apart: measured by the test that compares them, never a constant.

Another layout adds the same numbers in another order, and another processor has other kernels. To first order a computation
that rounds otherwise is the exact computation on inputs that differ in the last place (Higham, Accuracy and Stability of
Numerical Algorithms, section 1.5). So a test trains again from the same state and moves every weight in the last place before
each step, or it trains without interruption under a second layout. The losses of both show what rounding does here.
A sum of some hundred terms in float32 is off by some units, so float32 moves by more than one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch

Key = TypeVar("Key")
FACTOR = 8.0  # few runs are a small sample of what rounding does,
UNITS = 8  # and they may agree by chance
FP32_UNIT = 2.0**-23  # relative
MOVED = {torch.float32: 16, torch.float64: 16}  # units in the last place; others: one, because their sums are in float32


def move_weights(weights: Iterable[torch.Tensor], seed: int) -> None:
    """Move every element by some units in the last place (``MOVED``), up or down, in place.

    Args:
        weights: floating point tensors of any shape. Others are not changed.
        seed: another seed gives other directions.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in weights:
            if weight.is_floating_point() and weight.numel():
                up = torch.randint(0, 2, weight.shape, generator=generator, dtype=torch.bool).to(weight.device)
                end = torch.where(up, torch.inf, -torch.inf).to(weight.dtype)
                for _ in range(MOVED.get(weight.dtype, 1)):
                    weight.copy_(torch.nextafter(weight, end))


def rounding_limit(*runs: Sequence[float]) -> float:
    """Return the largest difference of a loss that rounding explains.

    Args:
        runs: losses of the same steps, from the same state, that differ by rounding alone. At least two.
    """
    assert len(runs) > 1, "one run shows no rounding"
    steps = list(zip(*runs, strict=True))
    largest = max(abs(loss) for losses in steps for loss in losses)
    return limit_of(max(max(losses) - min(losses) for losses in steps), largest)


def limit_of(noise: float, loss: float) -> float:
    """Return the largest difference that rounding explains, from a measured one and the size of a loss."""
    return FACTOR * noise + UNITS * FP32_UNIT * abs(loss)


def assert_continues(found: Sequence[float], expected: Sequence[float], *runs: Sequence[float]) -> None:
    """Assert that losses differ from the expected ones by rounding alone.

    Args:
        found: the losses in question.
        expected: losses of the same steps without interruption.
        runs: what ``rounding_limit`` measures. Beside one other run, ``expected`` is the second. ``found`` is never one of
            them, because a wrong one would explain itself.
    """
    limit = rounding_limit(*(runs if len(runs) > 1 else (expected, *runs)))
    apart = [abs(a - b) for a, b in zip(found, expected, strict=True)]
    said = f"losses differ by {max(apart):.3g}, rounding explains {limit:.3g}"
    print(said)  # shown with ``pytest -s``, and in the output of a job
    assert max(apart) <= limit, f"{said}: {found}, {expected}"


def in_steps(losses: dict[Key, float], steps: Iterable[Key]) -> list[float]:
    """Return the losses of some steps, in their order."""
    return [losses[step] for step in steps]
