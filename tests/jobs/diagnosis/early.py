"""Run a job with a slow rank, and return the verdicts about it with the steps in which they came."""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path
from typing import Any

from tests.support.forked_jobs import fork_ranks
from tests.support.result_lines import results_in
from unickpt.diagnosis.agent.telling import VERDICTS

STEPS, LAYER_S, FACTOR = 36, 0.02, 1.5
SLOW = "non-communication slow"


def ran(
    job: tuple[str, str, int],
    rings: Path,
    cache: Path,
    slow: int = -1,
    *,
    since: int = 1,
    steps: int = STEPS,
    layer_s: float = LAYER_S,
    factor: float = FACTOR,
) -> dict[str, Any]:
    """Run a job.

    Args:
        job: framework, layout, ranks.
        rings: folder of the rings.
        cache: cache folder of the user, with the store.
        slow: slow rank; -1 for none.
        since: first step in which it is slow.
        steps: steps of the job.
        layer_s: seconds of the forward computation of a layer.
        factor: multiplies them on the slow rank.

    Returns:
        ``named`` (ranks of each verdict, with the step in which it was written), ``step_s``, and the first ``sentence``.
    """
    kind, layout, world = job
    output = fork_ranks(
        world, "tests.jobs.diagnosis.early_job", kind, layout, str(rings), str(steps), str(layer_s), str(slow),
        str(factor), str(since), timeout_s=400, framework=kind, env={"GLOO_SOCKET_IFNAME": "lo", "XDG_CACHE_HOME": str(cache)},
    ).stdout  # fmt: skip
    (text,) = results_in(output, "ENDS")
    ends = json.loads(text)
    path = rings / VERDICTS
    said = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    said = [each for each in said if each["at_ns"] < ends[-1]]  # ranks end one after the other
    named = [[each["syndrome"], each["ranks"], sum(end < each["at_ns"] for end in ends)] for each in said]
    took = [(after - before) / 1e9 for before, after in itertools.pairwise(ends[5:])]
    return {"named": named, "step_s": statistics.median(took), "sentence": said[0]["sentence"] if said else ""}
