"""Slowdown of a job, and the parts of it that workers, stages and kinds of operations explain.

The definitions are those of ByteDance's straggler analysis (arXiv 2505.05713). In the ideal step each computation takes the
mean of its kind, and each transfer the median. The slowdown is the step with measured durations divided by the ideal one, both
replayed. The slowdown by a replica, stage or kind is the ideal step with its measured durations alone, divided by the ideal
one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from unickpt.base.arrays import Floats
from unickpt.planning.replay.operations import COMMUNICATION, MESSAGES, OperationGraph, Operations, graph_of_operations

WORST = 0.03  # of the workers


@dataclass(frozen=True, slots=True)
class SlowdownShare:
    """What some operations explain of the slowdown.

    Attributes:
        removed: part of the slowdown that is gone if they are ideal.
        added: part of the slowdown that is there if only they are as measured.
    """

    removed: float
    added: float


@dataclass(frozen=True, slots=True)
class Stragglers:
    """Result of an analysis. All times are seconds of one step, as a mean over the steps.

    Attributes:
        steps: numbers of the steps.
        ranks: number of workers.
        step_s: measured step, from the first begin to the last end of an operation.
        replayed_s: replay with measured durations, without gaps that no operation explains.
        ideal_s: replay of the ideal step.
        slowdown: ``replayed_s / ideal_s``.
        by_step: step -> its replay divided by the replay of the same step if it is ideal.
        by_replica, by_stage: place in the data-parallel group or pipeline -> slowdown by its operations alone.
        by_kind: kind of operations -> slowdown by them alone.
        by_rank: global rank -> slowdown by the worker: the smaller one of its replica's and its stage's.
        worst_ranks: the ``WORST`` of the workers with the largest slowdown, at least one.
        worst: what these workers explain (M_W).
        last_stage: what the operations of the last stage explain (M_S).
    """

    steps: tuple[int, ...]
    ranks: int
    step_s: float
    replayed_s: float
    ideal_s: float
    slowdown: float
    by_step: Mapping[int, float]
    by_replica: Mapping[int, float]
    by_stage: Mapping[int, float]
    by_kind: Mapping[str, float]
    by_rank: Mapping[int, float]
    worst_ranks: tuple[int, ...]
    worst: SlowdownShare
    last_stage: SlowdownShare

    def as_json(self) -> dict[str, Any]:
        """Return the result as JSON types, with keys as text."""
        found: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        for name in ("by_step", "by_replica", "by_stage", "by_kind", "by_rank"):
            found[name] = {str(key): value for key, value in found[name].items()}
        for name in ("worst", "last_stage"):
            found[name] = {"removed": found[name].removed, "added": found[name].added}
        return found | {"steps": list(self.steps), "worst_ranks": list(self.worst_ranks)}


def find_stragglers(found: Operations) -> Stragglers:
    """Return the slowdown of a job and what explains it.

    Raises:
        FormatError: as in ``graph_of_operations``.
    """
    return _Analysis(found).result()


class _Analysis:
    def __init__(self, found: Operations) -> None:
        self.found = found
        self.model: OperationGraph = graph_of_operations(found)
        self.measured = self.model.without_waits(found)
        self.ideal = ideal_durations(found.kind, self.measured)
        self.replayed_s, self.ideal_s = self._mean_s(self.measured), self._mean_s(self.ideal)

    def result(self) -> Stragglers:
        found, shape = self.found, self.measured.shape
        replicas, stages = found.ranks.shape
        of_replica = np.broadcast_to(np.arange(replicas)[None, :, None], shape)
        of_stage = np.broadcast_to(found.stage[:, None, None], shape)
        kinds = [_direction(kind) for kind in found.kind]
        by_replica = {each: self._slowdown_by(of_replica == each) for each in range(replicas)}
        by_stage = {each: self._slowdown_by(of_stage == each) for each in range(stages)}
        by_kind = {
            name: self._slowdown_by(np.broadcast_to(np.array([kind == name for kind in kinds])[:, None, None], shape))
            for name in dict.fromkeys(kinds)
        }
        by_rank = {
            int(found.ranks[replica, stage]): min(by_replica[replica], by_stage[stage])
            for replica in range(replicas)
            for stage in range(stages)
        }
        wanted = max(-(-len(by_rank) * round(WORST * 100) // 100), 1)
        worst = sorted(by_rank, key=lambda rank: (-by_rank[rank], rank))[:wanted]
        chosen = np.isin(found.ranks, worst)[:, found.stage].T  # [ops, replicas]
        begin, end = found.begin_s, found.begin_s + found.took_s
        return Stragglers(
            tuple(found.steps.tolist()), len(by_rank), float((end.max(axis=(0, 1)) - begin.min(axis=(0, 1))).mean()),
            self.replayed_s, self.ideal_s, self.replayed_s / self.ideal_s, self._by_step(),
            by_replica, by_stage, by_kind, by_rank, tuple(worst),
            self._share(np.broadcast_to(chosen[:, :, None], shape)), self._share(of_stage == stages - 1),
        )  # fmt: skip

    def _by_step(self) -> dict[int, float]:
        slowdowns = self.model.step_times(self.measured) / self.model.step_times(self.ideal)
        return dict(zip(self.found.steps.tolist(), slowdowns.tolist(), strict=True))

    def _mean_s(self, took_s: Floats) -> float:
        return float(self.model.step_times(took_s).mean())

    def _slowdown_by(self, here: npt.NDArray[np.bool_]) -> float:
        return self._mean_s(np.where(here, self.measured, self.ideal)) / self.ideal_s

    def _share(self, here: npt.NDArray[np.bool_]) -> SlowdownShare:
        whole = self.replayed_s - self.ideal_s
        if whole == 0:
            return SlowdownShare(0.0, 0.0)
        without, alone = np.where(here, self.ideal, self.measured), np.where(here, self.measured, self.ideal)
        return SlowdownShare((self.replayed_s - self._mean_s(without)) / whole, (self._mean_s(alone) - self.ideal_s) / whole)


def ideal_durations(kind: tuple[str, ...], took_s: Floats) -> Floats:
    """Return float64 ``[ops, replicas, steps]``: the mean of each kind of computation, the median of each kind of transfer."""
    out = np.empty_like(took_s)
    names = np.array(kind)
    for name in dict.fromkeys(kind):
        here = names == name
        out[here] = np.median(took_s[here]) if name in COMMUNICATION else took_s[here].mean()
    return out


def _direction(kind: str) -> str:
    """Return one name for sending and receiving."""
    return f"{kind.split('-')[0]} messages" if kind in MESSAGES else kind
