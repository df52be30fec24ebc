"""What the records of a job say of the next run: transfers, the time outside of layers, and the tensor parallel size."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from unickpt.planning.plan.layers import RankLayers
from unickpt.planning.plan.links import LinkCosts, link_costs
from unickpt.planning.replay.alike import pieces_of, work_of_ranks
from unickpt.planning.replay.graph import graph_of
from unickpt.planning.replay.trace import Trace, window_of

_TENSOR = re.compile(r"tensor(?:[ _-]model)?[ _-]parallel", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the records say.

    Attributes:
        links: times of transfers.
        rest_s: time of a rank for one microbatch in which it neither computes a layer nor waits; 0 if unknown.
        tensor: tensor parallel size.
    """

    links: LinkCosts = field(default_factory=lambda: LinkCosts({}))
    rest_s: float = 0.0
    tensor: int = 1


def recorded(trace: Trace, ranks: Sequence[RankLayers]) -> Recorded:
    """Return what the newest steps of a job say.

    Raises:
        FormatError: no step is known on all ranks.
    """
    graph = graph_of(window_of(trace))
    own = work_of_ranks(graph, pieces_of(graph))
    rest = [own[each.rank] / each.microbatches - each.layers_s for each in ranks if each.rank in own and each.microbatches > 0]
    sizes = [len(group.members) for group in trace.groups if _TENSOR.match(group.label)]
    return Recorded(link_costs(graph), max(median(rest), 0.0) if rest else 0.0, max(sizes, default=1))
