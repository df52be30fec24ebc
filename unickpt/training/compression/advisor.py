"""Which buckets of gradients pay for compression, and with which scheme. Pure functions over the replay of a job's records.

For each bucket the replay gives the time of a step that its communication costs: none, if the backward pass hides it. For each
scheme it gives the step with fewer bytes and the time of the code added. A scheme is advised only where that step is shorter
(the role of Espresso's strategy selection, arXiv:2205.14465).
"""

from __future__ import annotations

import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from unickpt.base.arrays import Floats, Ints
from unickpt.base.errors import FormatError
from unickpt.diagnosis.recording.records import Op
from unickpt.planning.replay import edits
from unickpt.planning.replay.edits import Durations
from unickpt.planning.replay.graph import CALLED, Graph
from unickpt.planning.replay.model import model_of
from unickpt.planning.replay.trace import Trace, window_of

NO = "none"
LEAST_GAIN = 0.01  # of a step; below it compression is not advised
STEPS = 5  # newest steps that are replayed
_NS = 1e9
_SEEN = 0.1  # share of a transfer that a host must have waited for it


@dataclass(frozen=True, slots=True)
class LinkModel:
    """Time of a collective: a constant, and a time for each byte of the gradients that it reduces.

    Attributes:
        alpha_s: seconds.
        beta_s: seconds per byte.
    """

    alpha_s: float
    beta_s: float

    @classmethod
    def fitted(cls, sizes: Floats, seconds: Floats) -> LinkModel:
        """Return the line through the median durations of each size; through the origin if there is one size only."""
        distinct = np.unique(sizes)
        medians = np.array([np.median(seconds[sizes == size]) for size in distinct])
        if len(distinct) > 1:
            slope, constant = np.polyfit(distinct, medians, 1)
            if slope > 0 and constant > 0:
                return cls(float(constant), float(slope))
        return cls(0.0, float(medians @ distinct) / max(float(distinct @ distinct), 1.0))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A scheme that may be advised.

    Attributes:
        ratio: bytes on the wire per byte of an uncompressed exchange (``sizes.sent_bytes`` of both).
        code_s: seconds of a rank to code and decode, per byte of gradients.
        device: where the code runs, as text.
    """

    ratio: float
    code_s: float
    device: str = ""


@dataclass(frozen=True, slots=True)
class BucketAdvice:
    """What is advised for one bucket. All times are seconds of a step.

    Attributes:
        number: place among the reductions of a step.
        size_bytes: bytes of its gradients.
        exposed_s: time of a step that its communication costs.
        scheme: name of the candidate, or ``none``.
        gain_s: time of a step that the scheme saves, after the choices for the other buckets before it.
        reason: why, as text.
    """

    number: int
    size_bytes: int
    exposed_s: float
    scheme: str
    gain_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Advice:
    """Result of ``advise``.

    Attributes:
        step_s: replayed step without compression.
        advised_s: replayed step with the advice.
        link: model of the links of the group.
        buckets: one for each reduction of a step.
    """

    step_s: float
    advised_s: float
    link: LinkModel
    buckets: tuple[BucketAdvice, ...]

    @property
    def pays(self) -> bool:
        """Whether compression is advised for any bucket."""
        return any(bucket.scheme != NO for bucket in self.buckets)


class BucketReplay:
    """Replays a window of a job with buckets of other sizes."""

    def __init__(self, trace: Trace, label: str, candidates: Mapping[str, Candidate], steps: tuple[int, int] | None) -> None:
        """Find the buckets of a step.

        Args:
            trace: records of a job that does not compress.
            label: kind of group whose all-reduces are those of gradients.
            candidates: schemes by name.
            steps: first and last step; default: the newest ``STEPS``.

        Raises:
            FormatError: no such step is known, or the reductions differ between steps.
        """
        known = window_of(trace, steps).steps
        self.candidates = candidates
        self._model = model_of(trace, (int(known[-STEPS:][0]), int(known[-1])) if steps is None else steps)
        self._graph, self._now = self._model.graph, self._model.now
        self.transfers = _buckets(self._graph, label)
        calls = self._graph.window.trace.calls
        self.sizes = np.array([int(calls["bytes"][self._graph.transfers.call[each]].max()) for each in self.transfers])
        seen = self._seen()
        sizes = calls["bytes"][self._graph.transfers.call[seen]].astype(np.float64)
        self.link = LinkModel.fitted(sizes, self._now.took_ns[seen] / _NS)
        self._called = [self._events(each) for each in self.transfers]

    def every(self) -> Ints:
        """Return the transfers of all buckets."""
        return np.concatenate([np.zeros(0, np.int64), *self.transfers])

    def _seen(self) -> Ints:
        """Return the transfers that a host waited for: the records do not have the end of the others. All if there are none."""
        every = self.every()
        calls = self._graph.window.trace.calls
        waited = np.zeros(len(self._now.took_ns))
        np.maximum.at(waited, self._graph.transfers.of_call, (calls["end_ns"] - calls["wait_ns"]).astype(np.float64))
        found = every[waited[every] > _SEEN * self._now.took_ns[every]]
        return found if len(found) else every

    def _events(self, transfers: Ints) -> Ints:
        """Return the events that call these transfers, on all ranks."""
        events, of_call = self._graph.events, self._graph.transfers.of_call
        called = np.flatnonzero(events.kind == CALLED)
        return called[np.isin(of_call[events.call[called]], transfers)]

    def with_scheme(self, now: Durations, bucket: int, name: str) -> Durations:
        """Return the durations with another scheme of one bucket. ``now`` has the bucket as it was measured.

        Bytes leave their time on the link; an exchange takes two collectives. The host codes before it calls.
        """
        if name == NO:
            return now
        candidate, size = self.candidates[name], float(self.sizes[bucket])
        took, own = now.took_ns.copy(), now.own_ns.copy()
        here = self.transfers[bucket]
        saved = self.link.beta_s * size * (1 - candidate.ratio) - self.link.alpha_s
        took[here] = np.maximum(took[here] - saved * _NS, 0.0)
        own[self._called[bucket]] += candidate.code_s * size * _NS
        return Durations(own, took)

    def with_schemes(self, names: Sequence[str]) -> Durations:
        """Return the durations with a scheme for each bucket."""
        now = self._now
        for bucket, name in enumerate(names):
            now = self.with_scheme(now, bucket, name)
        return now

    def hidden(self, bucket: int) -> Durations:
        """Return the durations if the communication of a bucket took no time."""
        return edits.without_time(self._now, self.transfers[bucket])

    def steps_s(self, sets: Sequence[Durations]) -> Floats:
        """Return float64 ``[sets]``: mean step in seconds."""
        return np.array(list(self._model.means_s(sets)))


def _buckets(graph: Graph, label: str) -> list[Ints]:
    """Return the transfers of each bucket: its all-reduce in every step of the window."""
    trace = graph.window.trace
    call = trace.calls[graph.transfers.call]
    labels = np.array([group.label for group in trace.groups] or [""])
    found = np.flatnonzero((labels[call["comm"]] == label) & (call["op"] == Op.ALL_REDUCE))
    step = np.searchsorted(graph.window.ends_ns[call["rank"][found][0]], call["call_ns"][found]) if len(found) else found
    found = found[np.lexsort((call["seq"][found], call["comm"][found], step))]
    steps = len(graph.window.steps)
    if len(found) % steps:
        raise FormatError(f"the steps have different numbers of all-reduces of groups {label!r}")
    by_step = found.reshape(steps, -1)
    sizes = trace.calls["bytes"][graph.transfers.call[by_step]]
    kept = np.flatnonzero((sizes == sizes[:1]).all(axis=0))
    return [by_step[:, at] for at in kept]


def advise(
    trace: Trace,
    candidates: Mapping[str, Candidate],
    *,
    label: str = "data parallel",
    steps: tuple[int, int] | None = None,
    least_gain: float = LEAST_GAIN,
) -> Advice:
    """Advise a scheme for each bucket of gradients.

    Buckets are decided one after the other, the one whose best scheme gains most first, each by a replay with the decisions so
    far. Then each is decided once more.

    Args:
        trace: records of a job that does not compress.
        candidates: schemes by name. An empty mapping gives the exposed times alone.
        label: kind of group whose all-reduces are those of gradients.
        steps: first and last step; default: the newest ``STEPS``.
        least_gain: smallest gain of a bucket that is worth it, as a share of the step.

    Raises:
        FormatError: the records do not have the same all-reduces in every step.
    """
    replay = BucketReplay(trace, label, candidates, steps)
    count, names = len(replay.transfers), [NO, *candidates]
    nothing = [NO] * count
    alone = [_with(nothing, bucket, name) for bucket in range(count) for name in candidates]
    sets = [replay.with_schemes(nothing), *map(replay.hidden, range(count)), *map(replay.with_schemes, alone)]
    found = replay.steps_s(sets)
    step_s, exposed = float(found[0]), found[0] - found[1 : count + 1]
    gains = (step_s - found[count + 1 :]).reshape(count, -1) if alone else np.zeros((count, 1))
    chosen, saved = list(nothing), [0.0] * count
    advised_s = step_s
    for bucket in [*np.argsort(-gains.max(axis=1)).tolist()] * 2:
        times = replay.steps_s([replay.with_schemes(_with(chosen, bucket, name)) for name in names])
        best = int(np.argmin(times))
        best = best if times[0] - times[best] > least_gain * step_s else 0
        chosen[bucket], saved[bucket], advised_s = names[best], float(times[0] - times[best]), float(times[best])
    return Advice(
        step_s, advised_s, replay.link,
        tuple(
            BucketAdvice(
                at, int(replay.sizes[at]), max(float(exposed[at]), 0.0), chosen[at], saved[at],
                _reason(chosen[at], float(exposed[at]), saved[at], least_gain * step_s),
            )
            for at in range(count)
        ),
    )  # fmt: skip


def _with(names: Sequence[str], bucket: int, name: str) -> list[str]:
    return [*names[:bucket], name, *names[bucket + 1 :]]


def _reason(scheme: str, exposed_s: float, gain_s: float, least_s: float) -> str:
    if scheme != NO:
        return f"saves {gain_s * 1000:.3g} ms of a step"
    if exposed_s <= least_s:
        return "its communication is hidden, or costs less than is worth a change"
    return "the code would take longer than the bytes that it saves"


def measured_code_s(code: Callable[[], None], size_bytes: int, clock: Callable[[], float], repeats: int = 5) -> float:
    """Return the seconds per byte of a function that codes and decodes ``size_bytes``: the median of some runs.

    Args:
        code: the function; on a device it waits for the result.
        size_bytes: bytes of the gradients that it codes.
        clock: returns seconds.
        repeats: number of runs.
    """
    return float(np.median(timeit.repeat(code, number=1, repeat=repeats, timer=clock))) / size_bytes
