"""Slowdown of a job, and the price of every rank, host, link, stage, group and cause.

A price is the time of a step that a change would save: the replay with measured durations minus the replay with the change. A
change that would make the job slower has the price 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from unickpt.base.arrays import Floats, Ints
from unickpt.base.errors import FormatError
from unickpt.diagnosis.recording.records import Op
from unickpt.planning.replay import edits
from unickpt.planning.replay.alike import PAUSES, like_all, like_others, stages_of
from unickpt.planning.replay.edits import Durations
from unickpt.planning.replay.graph import Graph
from unickpt.planning.replay.interleaved import interleaved_gain_s
from unickpt.planning.replay.microbatches import microbatches_of, with_microbatches
from unickpt.planning.replay.model import ReplayModel, model_of
from unickpt.planning.replay.order import with_order
from unickpt.planning.replay.schedule import schedule_of
from unickpt.planning.replay.trace import Trace

MOST_PRICED = 64  # ranks, hosts, links and groups; those with the largest excess. The others have the price 0
MOST_ROWS = 100  # of the table in the report
SMALLEST = 0.001  # smallest price that is shown, of a step
_NS = 1e-9


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a step would take with one change.

    Attributes:
        question: the change as text.
        step_s: predicted step time: the measured one minus the gain.
        gain_s: seconds of a step that the change saves; negative if it costs time.
        error_s: error of both: the error bar of the analysis, in proportion to the step where it becomes longer.
    """

    question: str
    step_s: float
    gain_s: float
    error_s: float


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Result of an analysis. All times are seconds of one step, as a mean over the window.

    Attributes:
        steps: first and last step of the window.
        ranks: number of ranks.
        step_s: measured step time.
        replayed_s: step time of the replay with all measured durations. It shows whether the graph holds all dependencies.
        undelayed_s: the same if every host went on at once when the transfer that it waits for is over.
        typical_s: the same if every step had the median durations of the window: a prediction of other steps.
        error_s: error bar of prices and predictions: the larger distance of the first two from ``step_s``, at least the
            error of the clocks.
        ideal_s: predicted step time if no rank pauses, every rank is like its peers and every transfer like its class.
        slowdown: ``step_s / ideal_s``.
        by_rank: global rank -> seconds that it costs.
        without_peers: ranks whose role no other rank has. Their price compares totals with other stages, and includes an
            uneven partition of the model.
        by_host, by_stage, by_link, by_group, by_cause: name -> seconds.
        exposed: kind of group -> seconds that its transfers cost at most: the bound for hiding them behind computation.
        exposed_operations: the same for each operation and size of a kind of group, such as the reduce-scatters after one kind
            of layer: what a kernel that computes and communicates (Flux, arXiv 2406.06858) gains at most. Those that
            take longest.
        measured_steps_s, replayed_steps_s: time of each step of the window.
        answers: answers to the questions of the caller.
    """

    steps: tuple[int, int]
    ranks: int
    step_s: float
    replayed_s: float
    undelayed_s: float
    typical_s: float
    error_s: float
    ideal_s: float
    slowdown: float
    by_rank: Mapping[int, float]
    without_peers: tuple[int, ...]
    by_host: Mapping[str, float]
    by_stage: Mapping[int, float]
    by_link: Mapping[str, float]
    by_group: Mapping[str, float]
    by_cause: Mapping[str, float]
    exposed: Mapping[str, float]
    exposed_operations: Mapping[str, float]
    measured_steps_s: tuple[float, ...]
    replayed_steps_s: tuple[float, ...]
    answers: tuple[Prediction, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the result as JSON types, with keys as text."""
        found = {name: getattr(self, name) for name in self.__slots__}
        found |= {name: {str(key): value for key, value in found[name].items()} for name in _TABLES}
        return found | {
            "steps": list(self.steps), "without_peers": list(self.without_peers),
            "measured_steps_s": list(self.measured_steps_s), "replayed_steps_s": list(self.replayed_steps_s),
            "answers": [{name: getattr(each, name) for name in each.__slots__} for each in self.answers],
        }  # fmt: skip

    def for_report(self) -> dict[str, Any]:
        """Return the data of the table in the HTML report: the ``MOST_ROWS`` largest prices beyond the error."""
        tables = [(kind, getattr(self, name)) for kind, name in zip(_KINDS, _TABLES, strict=True)]
        rows = [(kind, str(name), seconds) for kind, table in tables for name, seconds in table.items()]
        least = max(self.error_s, SMALLEST * self.step_s)
        kept = sorted((row for row in rows if row[2] > least), key=lambda row: -row[2])
        named = ("step_s", "ideal_s", "slowdown", "error_s")
        shown = {"steps": list(self.steps), "rows": kept[:MOST_ROWS], "left": max(len(kept) - MOST_ROWS, 0)}
        return {name: getattr(self, name) for name in named} | shown


_KINDS = ("rank", "host", "pipeline stage", "link", "group", "cause", "communication of", "communication of")
_TABLES = ("by_rank", "by_host", "by_stage", "by_link", "by_group", "by_cause", "exposed", "exposed_operations")


@dataclass(frozen=True, slots=True)
class Questions:
    """Changes that the caller asks for.

    Attributes:
        without_ranks: global ranks that compute in no time and never let others wait.
        like_peers: global ranks that are like their peers.
        links: pairs of global ranks whose transfers are like others of their class.
        hidden: kinds of groups whose transfers take no time.
        speeds: links of another speed: a pair of global ranks or a kind of group, and the multiple of the measured speed.
        microbatches: numbers of microbatches of a step.
        chunks: numbers of chunks of a pipeline stage.
        orders: orders of ranks: for each rank, ascending, the global rank whose place it takes.
    """

    without_ranks: tuple[int, ...] = ()
    like_peers: tuple[int, ...] = ()
    links: tuple[tuple[int, int], ...] = ()
    hidden: tuple[str, ...] = ()
    speeds: tuple[tuple[tuple[int, int] | str, float], ...] = ()
    microbatches: tuple[int, ...] = ()
    chunks: tuple[int, ...] = ()
    orders: tuple[tuple[int, ...], ...] = ()


def analyse(trace: Trace, steps: tuple[int, int] | None = None, questions: Questions | None = None) -> WhatIf:
    """Replay a window of a job (``model_of``), price its parts, and answer questions.

    Raises:
        FormatError: no step is known on all ranks, the records contradict each other, or a question names an unknown rank.
    """
    model = model_of(trace, steps)
    graph, pieces, window = model.graph, model.pieces, model.graph.window
    others_ns = edits.others_own_times(graph, pieces)
    ranks = window.trace.ranks
    bare = edits.without_delays(model.now, graph)
    table = model.steps_s([model.now, bare, edits.ideal(model.now, graph, pieces), edits.typical(model.now, graph, pieces)])
    whole, undelayed, ideal_s, typical_s = table.mean(axis=0).tolist()
    step_s = window.step_ns * _NS
    error_s = max(abs(step_s - whole), abs(step_s - undelayed), trace.clock_error_ns * _NS)
    ideal_s = step_s - (whole - ideal_s)

    def priced(changes: Iterable[tuple[Any, Durations]]) -> dict[Any, float]:
        names: list[Any] = []

        def each() -> Iterator[Durations]:
            for name, change in changes:
                names.append(name)
                yield change

        found = list(model.means_s(each()))
        return {name: max(whole - seconds, 0.0) for name, seconds in zip(names, found, strict=True)}

    by_rank = {int(rank): 0.0 for rank in ranks} | priced(_each_rank(model, others_ns))
    peers = edits.has_peers(pieces, len(ranks))
    measured_steps = np.diff(window.ends_ns, axis=1, prepend=window.begin_ns[:, None]).mean(axis=0) * _NS
    asked = list(_asked(model, others_ns, questions or Questions()))
    answered = list(zip((text for text, _ in asked), model.means_s(change for _, change in asked), strict=True))
    answered += _other_graphs(model, questions or Questions())
    return WhatIf(
        (int(window.steps[0]), int(window.steps[-1])), len(ranks), step_s, whole, undelayed, typical_s, error_s, ideal_s,
        step_s / ideal_s, by_rank, tuple(int(rank) for rank, has in zip(ranks, peers, strict=True) if not has),
        priced(_each_host(model)), _by_stage(model), priced(_each_party(model, pairs=True)),
        priced(_each_party(model, pairs=False)), priced(_each_cause(model)), priced(_each_kind(model)),
        priced(_each_operation(model)),
        tuple(measured_steps.tolist()), tuple(table[:, 0].tolist()),
        tuple(
            Prediction(question, step_s - (whole - seconds), whole - seconds, error_s * max(seconds / whole, 1.0))
            for question, seconds in answered
        ),
    )  # fmt: skip


def _most(excess: npt.NDArray[Any]) -> list[int]:
    """Return the positions with the largest excess, at most ``MOST_PRICED``."""
    return sorted(np.argsort(-excess, kind="stable")[:MOST_PRICED].tolist())


def _each_rank(model: ReplayModel, others_ns: Floats) -> Iterator[tuple[int, Durations]]:
    pieces, ranks = model.pieces, model.graph.window.trace.ranks
    excess = np.bincount(pieces.rank, np.nan_to_num(np.maximum(pieces.own_ns - others_ns, 0.0)), minlength=len(ranks))
    for at in _most(excess):
        yield int(ranks[at]), edits.with_ranks(model.now, pieces, others_ns, np.array([at]))


def _each_host(model: ReplayModel) -> Iterator[tuple[str, Durations]]:
    names, party = np.unique(model.graph.window.trace.hosts, return_inverse=True)
    if len(names) < 2:
        return
    pieces = model.pieces
    wanted = like_others(pieces, pieces.own_ns, without=party)
    excess = np.bincount(party[pieces.rank], np.nan_to_num(np.maximum(pieces.own_ns - wanted, 0.0)), minlength=len(names))
    for at in _most(excess):
        yield str(names[at]), edits.with_ranks(model.now, pieces, wanted, np.flatnonzero(party == at))


def _by_stage(model: ReplayModel) -> dict[int, float]:
    """Return the price of each pipeline stage of an uneven partition. Slow ranks and pauses are not part of it."""
    stages = np.unique(stages_of(model.graph.window.trace)).tolist()
    if len(stages) < 2:
        return {}
    work = like_all(model.pieces, model.pieces.work_ns)
    wanted = [work, *(edits.balanced_stage(model.graph, model.pieces, work, stage) for stage in stages)]
    even, *found = model.means_s(edits.with_own_times(model.now, model.pieces, each) for each in wanted)
    return {stage: max(even - seconds, 0.0) for stage, seconds in zip(stages, found, strict=True)}


def _each_party(model: ReplayModel, *, pairs: bool) -> Iterator[tuple[str, Durations]]:
    """Yield pairs of ranks, or communicators, with their transfers like those of others of their class."""
    graph = model.graph
    if not len(graph.transfers.call):
        return
    trace = graph.window.trace
    call = trace.calls[graph.transfers.call]
    kinds, parties = edits.class_of_transfers(graph), edits.parties_of_transfers(graph)
    counted = (call["source"] >= 0) & (call["destination"] >= 0) if pairs else call["source"] < 0
    excess = np.bincount(parties, np.maximum(model.now.took_ns - edits.like_class(graph, model.now.took_ns), 0.0) * counted)
    for party in _most(excess):
        here = np.flatnonzero((parties == party) & counted)
        took = edits.like_other_parties(model.now.took_ns, np.array([party]), parties, kinds) if len(here) else None
        if took is None:
            continue
        yield _party_name(trace, call[here[0]], pairs=pairs), Durations(model.now.own_ns, took)


def _party_name(trace: Trace, call: Any, *, pairs: bool) -> str:
    if pairs:
        low, high = sorted((int(call["source"]), int(call["destination"])))
        return f"{low}-{high}"
    group = trace.groups[int(call["comm"])]
    members = ",".join(map(str, group.members[:8])) + (",..." if len(group.members) > 8 else "")
    return f"{group.label}[{members}]"


def _each_cause(model: ReplayModel) -> Iterator[tuple[str, Durations]]:
    now, pieces, graph = model.now, model.pieces, model.graph
    for kind in PAUSES:
        if pieces.pauses_ns[kind].any():
            yield kind, edits.without_pauses(now, pieces, (kind,))
    paused = pieces.own_ns - pieces.work_ns
    yield "ranks unlike their peers", edits.with_own_times(now, pieces, paused + like_all(pieces, pieces.work_ns))
    yield "transfers slower than their class", Durations(now.own_ns, edits.like_class(graph, now.took_ns))
    yield "communication that is not hidden", edits.without_time(now, np.arange(len(now.took_ns)))
    yield "hosts late after a transfer", edits.without_delays(now, graph)


def _each_kind(model: ReplayModel) -> Iterator[tuple[str, Durations]]:
    for label, transfers in _by_label(model.graph).items():
        yield label, edits.without_time(model.now, transfers)


def _each_operation(model: ReplayModel) -> Iterator[tuple[str, Durations]]:
    """Yield the operations and sizes of each kind of group that has several, without their time."""
    graph = model.graph
    if not len(graph.transfers.call):
        return
    trace, operation = graph.window.trace, edits.operations_of_transfers(graph)
    call = trace.calls[graph.transfers.call]
    by_label = _by_label(graph)
    kind = np.zeros(len(call), np.int64)
    for number, transfers in enumerate(by_label.values()):
        kind[transfers] = number
    size = np.where(operation == Op.ALL_TO_ALL, 0, call["bytes"])
    names, part = np.unique(np.stack([kind, operation, size], axis=1), axis=0, return_inverse=True)
    part = part.reshape(-1)
    several = np.bincount(names[:, 0])[names[:, 0]] > 1
    labels = list(by_label)
    for at in _most(np.bincount(part, model.now.took_ns) * several):
        if several[at]:
            label, op, size_bytes = labels[int(names[at, 0])], Op(int(names[at, 1])).name.lower(), int(names[at, 2])
            text = f"{label}: {op}" + (f" of {size_bytes:,} bytes" if size_bytes else "")
            yield text, edits.without_time(model.now, np.flatnonzero(part == at))


def _by_label(graph: Graph) -> dict[str, Ints]:
    comm = graph.window.trace.calls["comm"][graph.transfers.call]
    labels = np.array([group.label for group in graph.window.trace.groups] or [""])[comm]
    return {str(label): np.flatnonzero(labels == label) for label in np.unique(labels)}


def _asked(model: ReplayModel, others_ns: Floats, questions: Questions) -> Iterator[tuple[str, Durations]]:
    trace, now, pieces = model.graph.window.trace, model.now, model.pieces

    def place(rank: int) -> Any:
        found = np.flatnonzero(trace.ranks == rank)
        if not len(found):
            raise FormatError(f"rank {rank} has no records here; the job has ranks {trace.ranks[0]} to {trace.ranks[-1]}")
        return found

    for rank in questions.without_ranks:
        yield f"without rank {rank}", edits.with_ranks(now, pieces, np.zeros(len(pieces.rank)), place(rank))
    for rank in questions.like_peers:
        yield f"rank {rank} like its peers", edits.with_ranks(now, pieces, others_ns, place(rank))
    for pair in questions.links:
        changed = edits.with_links_like_others(now, model.graph, [pair])
        if changed is None:
            there = len(edits.transfers_of_link(model.graph, pair)) > 0
            known = "no other pair makes transfers of this size" if there else "the ranks make no point-to-point transfers"
            raise FormatError(f"link {pair[0]}-{pair[1]}: {known}, so there is nothing to compare it with")
        yield f"link {pair[0]}-{pair[1]} like its class", changed
    for label in questions.hidden:
        yield f"{label} hidden behind computation", edits.without_time(now, _of_kind(model.graph, label))
    for name, factor in questions.speeds:
        if isinstance(name, str):
            text, here = name, _of_kind(model.graph, name)
        else:
            text, here = f"link {name[0]}-{name[1]}", edits.transfers_of_link(model.graph, name)
            if not len(here):
                raise FormatError(f"{text}: the ranks make no point-to-point transfers")
        yield f"{text} at {factor:g} times its speed", edits.with_speed(now, model.graph, here, factor)
    for order in questions.orders:
        if sorted(order) != trace.ranks.tolist():
            raise FormatError(f"an order must name each of the {len(trace.ranks)} ranks of the job once")
        places = np.searchsorted(trace.ranks, order)
        yield f"order {','.join(map(str, order))}", with_order(now, model.graph, pieces, places)


def _other_graphs(model: ReplayModel, questions: Questions) -> Iterator[tuple[str, float]]:
    """Yield the changes that need another graph, with the mean step time."""
    for count in questions.microbatches:
        graph = with_microbatches(model.graph, count)
        other = replace(model, graph=graph, schedule=schedule_of(graph))
        seconds = float(other.steps_s([edits.measured(graph)]).mean())
        yield f"{count} microbatches instead of {microbatches_of(model.graph)}", seconds
    whole = float(model.steps_s([model.now]).mean())
    for count in questions.chunks:
        yield f"{count} chunks of each stage, interleaved", whole - interleaved_gain_s(model.graph, model.now, count)


def _of_kind(graph: Graph, label: str) -> Ints:
    """Return the transfers of a kind of group."""
    by_label = _by_label(graph)
    if label not in by_label:
        raise FormatError(f"no transfers of groups {label!r}; there are {', '.join(map(repr, by_label))}")
    return by_label[label]
