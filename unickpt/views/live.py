"""Measurements of a running job, from what its agents have sent: what Prometheus asks for again and again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from unickpt.diagnosis.transport import links_of
from unickpt.diagnosis.verdicts import Verdict
from unickpt.diagnosis.view import View
from unickpt.timing.processes import State
from unickpt.views.metrics import Measurement, of_verdicts


def live(view: View, verdicts: Sequence[Verdict]) -> list[Measurement]:
    """All values that a view has, of its newest steps.

    Args:
        view: of the job.
        verdicts: on it.
    """
    return [*_of_ranks(view), *_of_steps(view), *_of_groups(view), *_of_links(view), *of_verdicts(verdicts)]


def _of_ranks(view: View) -> Iterator[Measurement]:
    for number, rank in sorted(view.ranks.items()):
        yield Measurement("unickpt_rank_step", {"rank": str(number)}, float(rank.step))
        for state in State:
            labels = {"rank": str(number), "host": rank.host, "state": state.value}
            yield Measurement("unickpt_rank_state", labels, float(rank.state is state))


def _of_steps(view: View) -> Iterator[Measurement]:
    steps = view.steps[np.lexsort((view.steps["number"], view.steps["rank"]))]
    newest = steps[np.append(steps["rank"][1:] != steps["rank"][:-1], True)] if len(steps) else steps
    columns = ["rank", "number", "begin_ns", "end_ns", "own_ns", "data_ns", "garbage_ns"]
    for rank, number, begin, end, own, data, garbage in newest[columns].tolist():
        values = {"own": own, "waiting": end - begin - own, "data": data, "garbage": garbage}
        for name, value in values.items():
            yield Measurement(f"unickpt_rank_{name}_seconds", {"rank": str(rank)}, value / 1e9, number)


def _of_groups(view: View) -> Iterator[Measurement]:
    totals: dict[str, int] = defaultdict(int)
    rows = view.rows[view.rows["source"] < 0]
    for number, group in enumerate(view.groups):
        here = rows["entered"][rows["comm"] == number]
        totals[group.label or group.name] += int(here.max(initial=0))
    for label, count in sorted(totals.items()):
        yield Measurement("unickpt_collectives_total", {"group": label}, float(count))


def _of_links(view: View) -> Iterator[Measurement]:
    for source, destination, ns_per_byte in links_of(view.windows)[["source", "destination", "ns_per_byte"]].tolist():
        if ns_per_byte == ns_per_byte:  # something was sent
            labels = {"source": str(source), "destination": str(destination)}
            yield Measurement("unickpt_link_seconds_per_byte", labels, ns_per_byte / 1e9)
