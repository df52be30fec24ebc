"""Another order of hosts or ranks, with which the job's groups avoid slow places and links.

Candidates are orders in which blocks exchange their places: the hosts, or the ranks of a job on one host. Each candidate is
replayed (``replay.order``), so that slow places, slow links and shared links count with what they cost of a step.
With few blocks all orders are tried. With more, the best exchange of two blocks is made until none helps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice, permutations

import numpy as np

from unickpt.base.errors import FormatError
from unickpt.planning.replay.model import model_of
from unickpt.planning.replay.order import with_order
from unickpt.planning.replay.trace import Trace

ALL_ORDERS = 6  # blocks of which all orders are tried
MOST_TRIED = 20_000  # orders
LEAST_GAIN = 0.001  # of a step, for an exchange that is worth it
_TOGETHER = 32  # orders that are replayed together

RankOrder = tuple[int, ...]
PredictOrders = Callable[[Sequence[RankOrder]], list[float | None]]


@dataclass(frozen=True, slots=True)
class OrderPlan:
    """The best order found.

    Attributes:
        order: for each position of a rank, the position whose place it takes.
        step_s: predicted step with this order.
        now_s: predicted step with the present order: the replay.
        tried: number of orders that were replayed.
        unknown: number of orders that cannot be predicted, because no transfer like theirs was measured.
    """

    order: RankOrder
    step_s: float
    now_s: float
    tried: int
    unknown: int


def blocks_of(trace: Trace) -> list[list[int]]:
    """Return the positions of the ranks that move together: those of a host; each rank of a job on one host.

    Raises:
        FormatError: hosts have different numbers of ranks.
    """
    hosts = list(dict.fromkeys(trace.hosts))
    if len(hosts) == 1:
        return [[at] for at in range(len(trace.ranks))]
    blocks = [[at for at, name in enumerate(trace.hosts) if name == host] for host in hosts]
    if len({len(block) for block in blocks}) > 1:
        raise FormatError("hosts have different numbers of ranks, so they cannot exchange their places")
    return blocks


def best_order(blocks: Sequence[Sequence[int]], predict: PredictOrders) -> OrderPlan:
    """Return the best order of the blocks.

    Args:
        blocks: positions of the ranks of each block.
        predict: returns the predicted step of each order in seconds; None if it cannot be predicted.
    """
    now = tuple(range(len(blocks)))
    start = predict([_order(blocks, now)])[0]
    assert start is not None  # the present order moves nothing
    best, best_s, tried, unknown = now, start, 1, 0
    rounds: Iterator[Iterator[RankOrder]]
    rounds = iter([islice(permutations(now), 1, None)]) if len(blocks) <= ALL_ORDERS else _exchanges(lambda: best)
    for candidates in rounds:
        better = best_s * (1 - LEAST_GAIN)
        found = best
        while some := list(islice(candidates, min(_TOGETHER, MOST_TRIED - tried))):
            for each, seconds in zip(some, predict([_order(blocks, each) for each in some]), strict=True):
                unknown += seconds is None
                if seconds is not None and seconds < better:
                    found, better = each, seconds
            tried += len(some)
        if found == best:
            break
        best, best_s = found, better
    return OrderPlan(_order(blocks, best), best_s, start, tried, unknown)


def _exchanges(best: Callable[[], RankOrder]) -> Iterator[Iterator[RankOrder]]:
    """Yield rounds of exchanges of two blocks of the best order."""
    while True:
        now = best()
        yield (_exchanged(now, a, b) for a, b in combinations(range(len(now)), 2))


def _exchanged(order: RankOrder, a: int, b: int) -> RankOrder:
    found = list(order)
    found[a], found[b] = found[b], found[a]
    return tuple(found)


def _order(blocks: Sequence[Sequence[int]], of: RankOrder) -> RankOrder:
    """Return the order of ranks from the order of blocks."""
    found = [0] * sum(map(len, blocks))
    for own, taken in zip(blocks, (blocks[each] for each in of), strict=True):
        for rank, place in zip(own, taken, strict=True):
            found[rank] = place
    return tuple(found)


def plan_order(trace: Trace, steps: tuple[int, int] | None = None) -> OrderPlan:
    """Return the best order of the hosts of a job, or of its ranks on one host. ``steps``: as of ``model_of``.

    Raises:
        FormatError: no step is known on all ranks, or hosts have different numbers of ranks.
    """
    model = model_of(trace, steps)

    def predict(orders: Sequence[RankOrder]) -> list[float | None]:
        found: list[float | None] = [None] * len(orders)
        known = {}
        for at, order in enumerate(orders):
            with contextlib.suppress(FormatError):
                known[at] = with_order(model.now, model.graph, model.pieces, np.array(order, np.int64))
        for at, seconds in zip(known, model.means_s(known.values()), strict=True):
            found[at] = seconds
        return found

    return best_order(blocks_of(trace), predict)


def host_order(trace: Trace, order: RankOrder) -> list[str]:
    """Return the hosts in the order in which the next run should number their ranks."""
    return list(dict.fromkeys(trace.hosts[place] for place in order))


def hostfile(trace: Trace, order: RankOrder) -> str:
    """Return DeepSpeed's and MPI's host file: ``HOST slots=N`` for each host in order."""
    return "".join(f"{host} slots={trace.hosts.count(host)}\n" for host in host_order(trace, order))


def rendezvous_order(trace: Trace, order: RankOrder) -> str:
    """Return the option of ``--rdzv-conf`` with which the rendezvous backend numbers the hosts in this order."""
    return f"order={'+'.join(host_order(trace, order))}"


def rankfile(trace: Trace, order: RankOrder) -> str:
    """Return a rank file of Open MPI: ``rank N=HOST slot=M`` for each rank."""
    lines = []
    for rank, place in enumerate(order):
        slot = trace.hosts[:place].count(trace.hosts[place])
        lines.append(f"rank {int(trace.ranks[rank])}={trace.hosts[place]} slot={slot}\n")
    return "".join(lines)
