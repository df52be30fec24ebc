"""What the caller of a save passed as ``client_state``: that of rank 0, and those of other ranks that had another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CLIENT = "client_state"


def of_rank(
    job: Mapping[str, Any], ranks: Mapping[int, Mapping[str, Any]], rank: int, before: int, world: int
) -> tuple[dict[str, Any], str]:
    """Return the one for this rank, and why it is not that of the same rank, or ''.

    Args:
        job: the objects of the saving job.
        ranks: the objects of its ranks: of rank 1 if there was one, and of this one if there was.
        rank: this rank.
        before, world: number of ranks of the saving job, and of this one.
    """
    first = dict(job.get(CLIENT) or {})
    if before == world:
        return dict(ranks.get(rank, {}).get(CLIENT, first)), ""
    if CLIENT not in ranks.get(1, {}):
        return first, ""
    return first, f"that of rank 0: the {before} ranks that saved had different ones, and this job has another number of ranks"
