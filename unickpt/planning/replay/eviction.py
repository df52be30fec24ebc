"""What a job would gain without slow ranks or a slow link: the price of an eviction, for the steering."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unickpt.base.errors import FormatError
from unickpt.diagnosis.snapshot.snapshot import Snapshot
from unickpt.planning.replay import edits
from unickpt.planning.replay.model import model_of
from unickpt.planning.replay.sources import trace_of_snapshot
from unickpt.planning.replay.trace import Trace


def gain_without(trace: Trace, ranks: Sequence[int], links: Sequence[tuple[int, int]] = ()) -> float:
    """Return the fraction of a step, from 0 to 1, that the job would gain if these ranks or these links were like others.

    Global ranks get the own times of their peers. The transfers of links take the median of other pairs with the same size.

    Raises:
        FormatError: no step is known on all ranks, or there is nothing to compare with.
    """
    model = model_of(trace)
    graph, now = model.graph, model.now
    if not links:
        places = np.flatnonzero(np.isin(trace.ranks, list(ranks)))
        if not len(places):
            raise FormatError(f"ranks {', '.join(map(str, ranks))} have no records")
        changed = edits.with_ranks(now, model.pieces, edits.others_own_times(graph, model.pieces), places)
    else:
        alike = edits.with_links_like_others(now, graph, links)
        if alike is None:
            raise FormatError(f"no other pair makes transfers like those of ranks {links[0][0]} and {links[0][1]}")
        changed = alike
    whole, without = model.means_s([now, changed])
    return min(max(1.0 - without / whole, 0.0), 1.0) if whole > 0 else 0.0


def predicted_gain(snapshot: Snapshot, ranks: Sequence[int], links: Sequence[tuple[int, int]]) -> float:
    """Return ``gain_without`` for a snapshot of an agent.

    Raises:
        FormatError: as there; also if the snapshot has no whole step of some rank.
    """
    return gain_without(trace_of_snapshot(snapshot), ranks, links)
