"""Rules of a job's membership, as a value."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Rules of a job, equal on all hosts.

    Attributes:
        min_nodes, max_nodes: bounds of the number of hosts of a round.
        sizes: numbers of hosts that are allowed, for instance because the batch must be divisible; empty for all.
        join_s: time that the first round waits for more hosts when ``min_nodes`` hosts have arrived.
        arrive_s: time that a round waits for hosts of the previous round that have not stopped their workers, and for members
            that have not connected to its stores.
        expiry_s: time without a sign of life after which a host is out.
        settle_s: time that a running round waits for more hosts before it grows.
        grow: whether a running round grows when hosts arrive.
        lone: whether exactly half of the hosts, or fewer, may go on without a proof that the others have ended. See
            ``quorum.quorum``.
        fruitful_s: time after which a round counts as progress, whatever its steps are. See ``membership.fruitful``.
        boundary_s: time that a running round waits for a checkpoint before it grows.
        out_s, longest_out_s: time that a host stays out for a fault, which doubles each time, and its limit.
        retries: rounds in a row without progress after which workers that fail end the job; None: no limit.
        self_check: whether a host measures itself before it is admitted after a fault.
        start_check: what is done about a host whose first measurement shows a fault: ``off``, ``log`` or ``refuse``.
        check_share: share of the median of other hosts that it must reach.
        order: names of hosts in the order of their ranks. Hosts that are not in it are spares, and fill gaps.
    """

    min_nodes: int
    max_nodes: int
    sizes: frozenset[int] = frozenset()
    join_s: float = 30.0
    arrive_s: float = 60.0
    expiry_s: float = 15.0
    settle_s: float = 1.0
    grow: bool = True
    lone: bool = False
    fruitful_s: float = 1800.0
    retries: int | None = None
    boundary_s: float = 1800.0
    out_s: float = 300.0
    longest_out_s: float = 86_400.0
    self_check: bool = True
    start_check: str = "log"
    check_share: float = 0.5
    order: tuple[str, ...] = ()

    def out_for_s(self, times: int) -> float:
        """Return how long a host stays out for a fault after it has been out so many times."""
        return min(self.out_s * 2.0 ** min(times, 64), self.longest_out_s)

    def place(self, name: str) -> int:
        """Return the place of a host in the order; behind all others if it has none."""
        return self.order.index(name) if name in self.order else len(self.order)

    def out_of_order(self, members: Collection[str]) -> str:
        """Return how the hosts of a round differ from the order, as a text; '' if they do not, or if there is no order."""
        if not self.order:
            return ""
        absent = [name for name in self.order if name not in members]
        others = [name for name in members if name not in self.order]
        texts = [f"not in this round: {', '.join(absent)}"] if absent else []
        return "; ".join(texts + ([f"not in the order: {', '.join(others)}"] if others else []))

    def size(self, available: int) -> int:
        """Return the number of hosts of a round when ``available`` hosts are there; 0 if they are not enough."""
        for count in range(min(available, self.max_nodes), self.min_nodes - 1, -1):
            if not self.sizes or count in self.sizes:
                return count
        return 0
