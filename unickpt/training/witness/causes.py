"""Why values are not finite, or far too large: other ranks repeat the micro-batch before the step uses it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unickpt.base.private_files import replacing
from unickpt.training.witness.agreeing import Ranks
from unickpt.training.witness.counting import Counters, all_finite
from unickpt.training.witness.nonfinite import Cause, NonFinite, Place, Repeat, cause
from unickpt.training.witness.recalling import Kept, Recalled
from unickpt.training.witness.replicas import Replicas, each_alone
from unickpt.training.witness.schedule import buddies, seconds

# what a rank asks: nothing, why its values are not finite, and with such weights, and why they are far too large
_NONE, _FOUND, _WEIGHTS, _LARGE = range(4)
MOST_FILES = 8  # with micro-batches, of a rank


class Causes:
    """Finds out why values are not finite, or far too large.

    Its methods that exchange something are called on every rank, in every step.

    Args:
        recalled: micro-batches of this rank.
        counters: of this rank.
        ranks: replicas of one another.
        folders: where the micro-batches may be written, the best first.
        replicas: of the job, and which ranks compute parts of the same layers (``replicas_of``); None: each rank is a replica.
    """

    def __init__(
        self,
        recalled: Recalled,
        counters: Counters,
        ranks: Ranks,
        folders: Callable[[], list[str]],
        replicas: Replicas | None = None,
    ) -> None:
        self.recalled, self._counters, self._ranks, self._folders = recalled, counters, ranks, folders
        self._own = ranks.ranks.index(ranks.rank)
        self._replicas = replicas or each_alone(ranks)
        self._beside = next(unit for unit in self._replicas.units if self._own in unit)
        self._asked = False
        self._not_before = 0
        self._files = 0

    def close(self) -> None:
        """Keep no more micro-batches."""
        self.recalled.close()
        self.recalled.tap.close()

    def cause_of(self, place: Place | None, step: int, *, weights: bool, large: bool = False) -> Cause | None:
        """Return why values are not finite, or far too large, on this rank.

        All ranks repeat something, so that those that meet do not wait.

        Args:
            place: where; None if all are.
            step: that begins now.
            weights: of this rank are not finite, as well.
            large: values are finite, and far larger than before.

        Returns:
            None if the values came to this rank from another one, which tells of them.
        """
        asks = _NONE if place is None else _LARGE if large else _WEIGHTS if weights else _FOUND
        own = (0, 0) if place is None else (place.micro_batch, self._counters.order(place))
        told = self._ranks.gather(torch.tensor([asks, *own], device="cpu"))
        every = told[:, 0]
        self._asked = bool(every.any())
        if not self._asked or bool((every == _WEIGHTS).all()) or step < self._not_before:
            return Cause.UNDECIDED
        first_of_all = self._first(told)
        number = first_of_all[0]  # ranks that compute together repeat the same one
        data, kept = self.recalled.data(number), self.recalled.kept(number)
        can = self._ranks.gather(
            torch.tensor([len(data), kept is not None and bool(kept.of_output) and not kept.large], device="cpu")
        )
        if not bool(can[:, 0].all()):
            return Cause.UNDECIDED
        backward = bool(can[:, 1].all())
        if self.recalled.tap.gathering and not backward:  # layers expect the backward pass after their forward pass
            return Cause.UNDECIDED
        found: list[Repeat] = []
        first, second = buddies(self._replicas.layout, step), seconds(self._replicas.layout, step)
        for by in (first, second, {} if second else {row: row for row in range(len(self._ranks.ranks))}):
            if by:
                found.append(self._by(by, data, backward, (every == _LARGE).tolist()))
        if place is not None and (self._from_others(place, kept) or own != first_of_all):
            return None
        if place is None or (place.backward and not (backward and place.layer)):  # that of the loss comes from outside
            return Cause.UNDECIDED
        return cause(Repeat(self._ranks.rank, self._ranks.host, self._counters.number(place)), found)

    def _first(self, told: torch.Tensor) -> tuple[int, int]:
        """Return micro-batch and order of the first place of all ranks that compute parts of the same layers."""
        places = [(int(told[row, 1]), int(told[row, 2])) for row in self._beside if int(told[row, 0]) != _NONE]
        return min(places, default=(0, 0))

    def _from_others(self, place: Place, kept: Kept | None) -> bool:
        """Return whether such values came from another stage of a pipeline."""
        if kept is None or kept.begun is None:
            return False
        if place.backward:
            return self.recalled.tap.sends and not all_finite(kept.of_output.values())
        return not all_finite(kept.begun.received)

    def ended(self, step: int, *, applied: bool, every: int) -> None:
        """A step has ended. If a loss scaler has left it out, nothing is asked for the next ``every`` steps. Never raises."""
        if self._asked and not applied:
            self._not_before = step + every
        self.recalled.clear()

    def _by(self, by: dict[int, int], data: bytes, backward: bool, large: list[bool]) -> Repeat:
        """Send the micro-batch to the rank that repeats it. Return what it finds. ``large``: what each rank asks for."""
        source = next(row for row, other in by.items() if other == self._own)
        if source != self._own:
            data = self._ranks.pass_on(data, to=by[self._own], source=source)
        results = self._ranks.gather(torch.tensor([self._repeated(data, backward, large[source])], device="cpu"))[:, 0].tolist()
        row = by[self._own]
        return Repeat(self._ranks.ranks[row], self._ranks.hosts[row], results[row] or None)

    def _repeated(self, data: bytes, backward: bool, large: bool) -> int:
        """Return the number of the place with the first values that are asked for: 0 for none, -1 if nobody knows."""
        tap = self.recalled.tap
        try:
            begun, of_output = tap.loaded(data)
            given = {at: each.nan_to_num(1, 1, -1) for at, each in of_output.items() if backward}
            found = self._counters.repeated(partial(self._is_finite, begun, given), large=large)
            return -1 if not found and tap.counts else found  # with other counters than the first time, it says nothing
        except Exception:  # of a model that cannot be repeated
            return -1

    def _is_finite(self, begun: Any, of_output: dict[int, torch.Tensor], seen: Callable[[Any], None]) -> bool:
        gradients: list[bool] = []

        def look(_at: int, gradient: torch.Tensor) -> None:
            gradients.append(all_finite([gradient]))

        output = self.recalled.tap.play(begun, of_output, seen, look)
        return all_finite(output) and all(gradients)

    def written(self, found: NonFinite) -> str:
        """Write the micro-batch into a file, and return its path; '' if there is no folder for it. Never raises."""
        kept = self.recalled.kept(found.place.micro_batch)
        if kept is None or kept.begun is None or self._files >= MOST_FILES:
            return ""
        self._files += 1
        content = {
            "step": found.step, "micro_batch": found.place.micro_batch, "rank": found.rank, "layer": found.place.layer,
            "args": kept.begun.args, "kwargs": kept.begun.kwargs, "random": kept.begun.random, "buffers": kept.begun.buffers,
        }  # fmt: skip
        for folder in self._folders():
            path = (
                Path(folder) / f"{found.kind.lower()}-step{found.step}-rank{found.rank}-micro-batch{found.place.micro_batch}.pt"
            )
            try:
                with replacing(path) as file:
                    torch.save(content, file)
            except Exception:  # no permission, or an object that cannot be pickled
                continue
            return str(path)
        return ""
