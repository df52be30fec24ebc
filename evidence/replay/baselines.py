"""Predictions of a step without a graph, to compare a replay with."""

from __future__ import annotations

import numpy as np

from unickpt.base.arrays import Floats
from unickpt.planning.plan.links import shape_of
from unickpt.planning.replay.alike import pieces_of
from unickpt.planning.replay.edits import others_own_times
from unickpt.planning.replay.graph import Graph, graph_of
from unickpt.planning.replay.trace import Trace, window_of


def sums_s(trace: Trace, steps: tuple[int, int], like_peers: int | None = None) -> float:
    """Return the step of the rank with the largest sum of its computation and of bytes by bandwidth, in seconds.

    The bandwidth is that of all transfers of a kind of group together. Waits for other ranks are not part of the sum.

    Args:
        trace: records of the job.
        steps: first and last step.
        like_peers: global rank that computes like its peers.
    """
    window = window_of(trace, steps)
    graph = graph_of(window)
    pieces = pieces_of(graph)
    own = pieces.own_ns
    if like_peers is not None:
        chosen = trace.ranks[pieces.rank] == like_peers
        own = np.where(chosen, np.nan_to_num(others_own_times(graph, pieces)), own)
    compute = np.bincount(pieces.rank, own, minlength=len(trace.ranks))
    total = compute + np.bincount(window.trace.calls["rank"], _call_ns(graph), minlength=len(trace.ranks))
    return float(total.max()) * 1e-9 / len(window.steps)


def _call_ns(graph: Graph) -> Floats:
    """Return float64 ``[calls]``: bytes of each call by the bandwidth of its kind of group."""
    trace, moved = graph.window.trace, graph.transfers
    sizes = {(int(each["op"]), int(each["comm"])): 0.0 for each in trace.calls}
    for op, comm in sizes:
        sizes[op, comm] = shape_of(op, max(len(trace.groups[comm].members), 2))[1]
    volume = np.array([sizes[int(each["op"]), int(each["comm"])] for each in trace.calls]) * trace.calls["bytes"]
    labels = [group.label for group in trace.groups]
    kinds = {label: at for at, label in enumerate(dict.fromkeys(labels))}
    kind = np.array([kinds[label] for label in labels])[trace.calls["comm"]]
    of = kind[moved.call]
    sent = np.bincount(of, volume[moved.call], minlength=len(kinds))
    took = np.bincount(of, moved.took_ns, minlength=len(kinds))
    return volume * (took / np.maximum(sent, 1.0))[kind]
