"""The steps of a job that was restarted, as one line of steps. Pure, apart from reading the files of ``observed``."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from typing import Any

Epoch = tuple[int, int]


def epoch_of(text: str) -> Epoch:
    """Return the round of a text as ``1.3``: term and number."""
    term, _, number = text.partition(".")
    return int(term), int(number)


@dataclass(frozen=True)
class Step:
    """One optimizer step.

    Attributes:
        ids: ids of its samples over all ranks.
        loss: mean loss.
        epoch: the round that did it.
        ranks: number of ranks that have recorded it.
        first_s, last_s: when the first and the last of them did, in seconds since 1970.
    """

    ids: Counter[Any]
    loss: float
    epoch: Epoch
    ranks: int
    first_s: float
    last_s: float


def steps_of(folder: Path) -> dict[Epoch, dict[int, Step]]:
    """Return all steps in a folder of ``observed``, by round."""
    found: dict[Epoch, dict[int, Step]] = {}
    for path in sorted((folder / "steps").glob("*.jsonl")):
        epoch = epoch_of(path.stem.rpartition("-")[0])
        of_round = found.setdefault(epoch, {})
        for text in path.read_text().splitlines(keepends=True):
            if not text.endswith("\n"):
                continue  # a worker was killed while it wrote
            line = json.loads(text)
            before = of_round.get(line["step"])
            ids = Counter(map(str, line["ids"])) + (before.ids if before is not None else Counter())
            known = line["loss"] if line["loss"] is not None else before.loss if before is not None else nan
            of_round[line["step"]] = Step(
                ids,
                known,
                epoch,
                1 + (before.ranks if before is not None else 0),
                min(line["at"], before.first_s if before is not None else line["at"]),
                max(line["at"], before.last_s if before is not None else 0.0),
            )
    return found


def overlaps(rounds: Mapping[Epoch, Mapping[int, Step]]) -> list[str]:
    """Return which rounds worked at the same time: two parts of one job, which would write the same checkpoints."""
    spans = {
        epoch: (min(step.first_s for step in steps.values()), max(step.last_s for step in steps.values()))
        for epoch, steps in rounds.items()
        if steps
    }
    order = sorted(spans)
    return [
        f"rounds {one} and {other} worked at the same time"
        for one, other in itertools.pairwise(order)
        if spans[one][1] > spans[other][0]
    ]


def lineage(rounds: Mapping[Epoch, Mapping[int, Step]]) -> dict[int, Step]:
    """Return the steps that count: each as the last round that did it has done it."""
    found: dict[int, Step] = {}
    for epoch in sorted(rounds):
        found |= rounds[epoch]
    return dict(sorted(found.items()))


@dataclass(frozen=True)
class Reference:
    """An uninterrupted job on several numbers of ranks.

    Attributes:
        ids: ids of the samples of each step.
        losses: loss of each step, on each number of ranks.
    """

    ids: Mapping[int, Counter[Any]]
    losses: Mapping[int, Sequence[float]]

    @property
    def last(self) -> int:
        """The last step."""
        return max(self.ids)


def reference_of(jobs: Sequence[Mapping[int, Step]]) -> Reference:
    """Return the reference of uninterrupted jobs.

    Raises:
        AssertionError: they do not have the same samples.
    """
    first = jobs[0]
    assert all({at: each.ids for at, each in job.items()} == {at: each.ids for at, each in first.items()} for job in jobs)
    return Reference({at: step.ids for at, step in first.items()}, {at: [job[at].loss for job in jobs] for at in first})


@dataclass(frozen=True)
class Comparison:
    """A job beside its reference.

    Attributes:
        problems: steps with other samples, or without.
        compared: number of steps.
        loss: largest distance from the losses of the reference.
        noise: largest distance among the losses of the reference, in the same steps.
    """

    problems: tuple[str, ...]
    compared: int
    loss: float
    noise: float


def compare(steps: Mapping[int, Step], reference: Reference, world: Mapping[Epoch, int]) -> Comparison:
    """Compare the steps that count with an uninterrupted job. The newest one may not be complete, and is left out."""
    problems, loss, noise = [], 0.0, 0.0
    upto = min(max(steps, default=0) - 1, reference.last)
    for at in range(1, upto + 1):
        step, expected = steps.get(at), reference.losses[at]
        if step is None:
            problems.append(f"step {at} is missing")
        elif step.ids != reference.ids[at]:
            problems.append(
                f"step {at} of round {step.epoch} has other samples ({step.ranks} of {world.get(step.epoch)} ranks)"
            )
        elif not isnan(step.loss):
            loss = max(loss, *(abs(step.loss - each) for each in expected))
            noise = max(noise, max(expected) - min(expected))
    return Comparison(tuple(problems), upto, loss, noise)
