"""The layers of the ranks of this host, beside those of earlier jobs.

The files of sampled layers are those of ``recording.layer_times``. The times of earlier jobs are in the store of the user
(``unickpt.diagnosis.layer_costs.store``), to which the agent adds this job once, without ranks that are slower than the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from unickpt.base.errors import FormatError
from unickpt.base.private_files import read_text
from unickpt.diagnosis.detectors.slow_layers import limit_of
from unickpt.diagnosis.layer_costs.compute import ComputeCosts, key_of
from unickpt.diagnosis.layer_costs.measured import SUFFIX, MeasuredLayer, layers_of
from unickpt.diagnosis.layer_costs.store import remember, remembered
from unickpt.diagnosis.recording.rank_ranges import MOST_RANKS
from unickpt.diagnosis.snapshot.snapshot import LayerSample

MOST_BYTES = 8 << 20  # of the file of a rank
_UNREADABLE = OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError, FormatError  # the data is untrusted
SETTLED = 25  # steps after which the layers of this job are remembered: slow ranks are known by then


@dataclass(frozen=True, slots=True)
class RankSample:
    """The sampled layers of one rank.

    Attributes:
        steps: number of sampled steps.
        layers: measured layers.
        step_s: for each layer, seconds of a step in the newest sampled steps.
        calls: for each layer, calls in a step.
    """

    steps: int
    layers: Sequence[MeasuredLayer]
    step_s: Sequence[float]
    calls: Sequence[float]

    def beside(self, costs: ComputeCosts) -> LayerSample | None:
        """Return its times beside those of earlier jobs; None if these have no such layer on such a device."""
        took = expected = 0.0
        errors = []
        for layer, step_s, calls in zip(self.layers, self.step_s, self.calls, strict=True):
            one = costs.expected(layer)
            if one is not None:
                took, expected = took + step_s, expected + one * calls
                errors.append((costs.error(layer), one * calls))
        if not expected:
            return None
        return LayerSample(took, expected, sum(error * share for error, share in errors) / expected, self.steps)


class LayerPrior:
    """Compares the ranks of a folder with earlier jobs.

    Args:
        folder: folder of the rings.
        store: layers of earlier jobs; read when the first rank has sampled its layers.
    """

    def __init__(self, folder: Path, store: Path) -> None:
        self._folder, self._store = folder, store
        self._seen: dict[Path, tuple[int, int, int]] = {}
        self._ranks: dict[int, RankSample] = {}
        self._samples: dict[int, LayerSample] = {}
        self._earlier: list[MeasuredLayer] | None = None
        self._costs = ComputeCosts(())
        self._remembered = False

    def look(self) -> Mapping[int, LayerSample]:
        """Read the files that have changed. Return the ranks whose layers are known from earlier jobs."""
        changed = False
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            try:
                status = path.stat()
                version = status.st_ino, status.st_mtime_ns, status.st_size
                if self._seen.get(path) == version:
                    continue
                self._seen[path] = version
                rank, sample = parsed(json.loads(read_text(path, MOST_BYTES)), str(path))
            except _UNREADABLE:
                continue
            self._ranks[rank], changed = sample, True
        if changed and self._earlier is None:
            self._earlier = remembered(self._store)
            self._costs = ComputeCosts(self._earlier)
        if changed:
            found = {rank: sample.beside(self._costs) for rank, sample in self._ranks.items()}
            self._samples = {rank: sample for rank, sample in found.items() if sample is not None}
        return self._samples

    def remember(self, step: int) -> None:
        """Add the layers of this job to the store, once, when its ranks have come to a step from which slow ones are known.

        Raises:
            FormatError: the store cannot be written.
        """
        if self._remembered or step < SETTLED or not self._ranks:
            return
        self._remembered = True
        remember(self._store, usual_layers(self._ranks.values(), self._earlier or []))


def usual_layers(ranks: Iterable[RankSample], earlier: Sequence[MeasuredLayer]) -> list[MeasuredLayer]:
    """Return one layer for each class, data type, size and device, with median times of the ranks that are not slow."""
    ranks = list(ranks)
    costs = ComputeCosts([*earlier, *(layer for each in ranks for layer in each.layers)])
    alike: dict[tuple[Any, ...], list[MeasuredLayer]] = {}
    for each in ranks:
        sample = each.beside(costs)
        if sample is not None and sample.took_s <= sample.expected_s * limit_of(sample.error):
            for layer in each.layers:
                alike.setdefault((*key_of(layer), layer.tokens, layer.parameters), []).append(layer)
    return [
        replace(same[0], forward_s=median(each.forward_s for each in same), backward_s=median(each.backward_s for each in same))
        for same in alike.values()
    ]


def parsed(document: Any, where: str) -> tuple[int, RankSample]:
    """Return the rank of a parsed file, and its layers; ``where`` is the file, for messages.

    Raises:
        FormatError, ValueError, TypeError, KeyError: it is no file of sampled layers.
    """
    layers = layers_of(document, where)
    rank, steps = document["rank"], document["steps"]
    calls = [row["calls"] for row in document["layers"]]
    recent = [row["recent_s"] for row in document["layers"]]
    if type(rank) is not int or not 0 <= rank < MOST_RANKS or type(steps) is not int or steps < 1:
        raise ValueError(f"{where}: rank {rank!r} and {steps!r} sampled steps")
    if not all(type(each) is int and each > 0 for each in calls):
        raise ValueError(f"{where}: numbers of calls must be whole and positive")
    if not all(isinstance(each, int | float) and 0 <= each < 1e9 for each in recent):
        raise ValueError(f"{where}: recent_s must be a number of seconds")
    per_step = [each / steps for each in calls]
    return rank, RankSample(steps, layers, [took * per for took, per in zip(recent, per_step, strict=True)], per_step)
