"""Time of a transfer by its operation, number of members and size, fitted from the records of a job.

The model is the usual one of rings: a transfer of ``b`` bytes among ``n`` ranks takes ``alpha * steps + beta * volume * b``. An
all-reduce has ``2 (n - 1)`` steps and the volume ``2 (n - 1) / n``. A reduce-scatter and an all-gather have half of both, and a
message has one step and the volume 1. Collectives and messages, and groups within a host and across hosts, have constants of
their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unickpt.base.arrays import Floats
from unickpt.diagnosis.recording.records import Op
from unickpt.planning.replay.edits import operations_of_transfers
from unickpt.planning.replay.graph import PAIRS, Graph

_HALF = (int(Op.REDUCE_SCATTER), int(Op.ALL_GATHER))
SMALL_BYTES = 1 << 16  # transfers up to this size show the latency of a link, not its bandwidth


@dataclass(frozen=True, slots=True)
class Line:
    """Constants of the model.

    Attributes:
        alpha_s: seconds for each step of the ring.
        beta_s: seconds for each byte.
        points: number of different operations, sizes and numbers of members that it was fitted to.
        error: median relative distance to them.
    """

    alpha_s: float
    beta_s: float
    points: int = 0
    error: float = 0.0


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """Times of transfers.

    Attributes:
        lines: (whether it is a message of a pair, whether it leaves the host) -> constants.
    """

    lines: Mapping[tuple[bool, bool], Line]

    def seconds(self, op: Op, members: int, size: float, *, leaves_host: bool = False) -> float:
        """Return the time of a transfer. Without a measured line of its kind it is that of the nearest kind; 0 without any.

        Args:
            op: operation.
            members: ranks of the communicator.
            size: bytes: the larger one of input and output.
            leaves_host: whether the members are on several hosts.
        """
        pair = int(op) in PAIRS
        if members < 2:
            return 0.0
        order = ((pair, leaves_host), (pair, not leaves_host), (not pair, leaves_host), (not pair, not leaves_host))
        line = next((self.lines[each] for each in order if each in self.lines), Line(0.0, 0.0))
        steps, volume = shape_of(int(op), members)
        return line.alpha_s * steps + line.beta_s * volume * size


def shape_of(op: int, members: int) -> tuple[float, float]:
    """Return steps and volume of an operation."""
    if op in PAIRS:
        return 1.0, 1.0
    rounds = 1.0 if op in _HALF else 2.0
    return rounds * (members - 1), rounds * (members - 1) / members


def link_costs(graph: Graph) -> LinkCosts:
    """Fit the constants to the transfers of a window: the lower median of each operation, number of members and size."""
    trace = graph.window.trace
    if not len(graph.transfers.call):
        return LinkCosts({})
    call = trace.calls[graph.transfers.call]
    pair = call["source"] >= 0
    members = np.array([len(group.members) for group in trace.groups] or [0], np.int64)[call["comm"]]
    members = np.where(pair, 2, members)
    away = np.array([len({trace.hosts[at] for at in _places(graph, group.members)}) > 1 for group in trace.groups] or [False])
    leaves = away[call["comm"]]
    hosts = np.unique(trace.hosts, return_inverse=True)[1]
    ends = [np.minimum(np.searchsorted(trace.ranks, call[name]), len(hosts) - 1) for name in ("source", "destination")]
    leaves = np.where(pair, hosts[ends[0]] != hosts[ends[1]], leaves)
    operation = operations_of_transfers(graph)
    usable = (members > 1) & np.isin(operation, [int(Op.ALL_REDUCE), *_HALF, int(Op.RECEIVE)])
    names = np.stack([pair, leaves, operation, members, call["bytes"]], axis=1).astype(np.int64)[usable]
    took = graph.transfers.took_ns[usable] * 1e-9
    kinds, of = np.unique(names, axis=0, return_inverse=True)
    middle = np.array([np.sort(took[of.reshape(-1) == at])[(int((of == at).sum()) - 1) // 2] for at in range(len(kinds))])
    lines = {}
    for key in {(bool(row[0]), bool(row[1])) for row in kinds.tolist()}:
        here = (kinds[:, 0] == key[0]) & (kinds[:, 1] == key[1])
        lines[key] = fitted(kinds[here, 2:], middle[here])
    return LinkCosts(lines)


def _places(graph: Graph, members: tuple[int, ...]) -> list[int]:
    ranks = graph.window.trace.ranks
    return [at for at in np.searchsorted(ranks, members).tolist() if at < len(ranks)]


def fitted(kinds: npt.NDArray[np.int64], seconds: Floats) -> Line:
    """Return the constants with the least relative error, none of them negative. Small sizes alone give no time per byte.

    Args:
        kinds: int64 ``[points, 3]``, operation, members and bytes.
        seconds: float64 ``[points]``.
    """
    shapes = np.array([shape_of(op, members) for op, members, _ in kinds.tolist()])
    columns = np.stack([shapes[:, 0], shapes[:, 1] * kinds[:, 2]], axis=1)
    weight = 1.0 / np.maximum(seconds, 1e-9)
    scaled = columns * weight[:, None]
    small = int(kinds[:, 2].max(initial=0)) <= SMALL_BYTES
    known = len(seconds) > 1 and not small
    both = np.linalg.lstsq(scaled, np.ones(len(seconds)), rcond=None)[0] if known else np.array([-1.0, -1.0])
    if (both < 0).any():  # then one of them is zero: the one that fits worse alone
        alone = []
        for at in (0, 1):
            own = scaled[:, at]
            value = float(own.sum() / max(float((own**2).sum()), 1e-300))
            alone.append((float(((own * value - 1) ** 2).sum()), at, value))
        (constant_error, _, alpha), (size_error, _, beta) = alone
        by_size = not small and size_error <= constant_error + 1e-9  # also if both fit, as with one point
        both = np.array([0.0, beta] if by_size else [alpha, 0.0])
    error = float(np.median(np.abs(scaled @ both - 1.0)))
    return Line(float(both[0]), float(both[1]), len(seconds), error)
