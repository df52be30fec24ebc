"""States of data loaders that hold samples, for a job that goes on with another number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from unickpt.base.errors import ConfigError

Item = TypeVar("Item")


class ReshardableLoader(Protocol):
    """A data loader whose states can be divided among another number of ranks.

    A loader needs this if it keeps samples between steps, such as the rest of a packed sequence or a shuffle buffer. A loader
    without such samples needs no state: see ``GlobalOrderSampler``.

    Example:
        ```python
        class Packed:
            def state_dict(self):
                return {"buffer": self.buffer, "read": self.read}  # read: samples read by all ranks

            def load_state_dict(self, state):
                self.buffer, self.read = state["buffer"], state["read"]

            def reshard(self, states, ranks):
                buffers = unickpt.deal_samples([state["buffer"] for state in states], ranks)
                return [{"buffer": buffer, "read": states[0]["read"]} for buffer in buffers]
        ```
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state."""

    def reshard(self, states: Sequence[dict[str, Any]], ranks: int) -> Sequence[dict[str, Any]]:
        """Return one state for each of ``ranks`` ranks, given the states of all ranks of the job that saved.

        Every rank calls it with the same arguments and takes its own part, so the result must not depend on the rank.
        """


def deal_samples(buffers: Sequence[Sequence[Item]], ranks: int) -> list[list[Item]]:
    """Merge the buffers of all ranks, and deal their items to another number of ranks.

    No item is lost or repeated. Items that were next stay next: the first items of all ranks come first. The numbers of items
    of two ranks differ by at most one.

    Example:
        ```python
        deal_samples([["a", "c", "e"], ["b", "d"]], 3)  # [["a", "d"], ["b", "e"], ["c"]]
        ```

    Args:
        buffers: items that each rank of the job that saved still holds, in their order.
        ranks: number of ranks of this job.

    Returns:
        The items of each rank of this job.

    Raises:
        ConfigError: ``ranks`` is less than 1.
    """
    if ranks < 1:
        raise ConfigError(f"deal_samples: ranks is {ranks}, and must be at least 1")
    longest = max(map(len, buffers), default=0)
    merged = [buffer[at] for at in range(longest) for buffer in buffers if at < len(buffer)]
    return [merged[rank::ranks] for rank in range(ranks)]
