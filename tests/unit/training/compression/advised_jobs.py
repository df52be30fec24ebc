"""Jobs whose best compression is known, as records."""

from __future__ import annotations

from tests.support.replay_traces import Made, made_trace
from unickpt.diagnosis.recording.records import Op
from unickpt.planning.replay.trace import Trace, TraceGroup
from unickpt.training.compression.advisor import Candidate

MS = 1_000_000
RANKS, STEPS = 4, 6
GROUP = "data parallel"
MEGABYTE = 1 << 20
FREE, DEAR = Candidate(0.1, 0.0), Candidate(0.1, 1e-6)


def job(
    took_ms: list[int], *, each_ms: int = 10, after_ms: int = 0, sizes: list[int] | None = None, blocks: bool = False
) -> Trace:
    """Return a job that calls an all-reduce after each part of its backward pass.

    Transfers of the group run one after the other. The hosts wait for all of them at the end, or (``blocks``) in each call.
    """
    sizes = sizes or [MEGABYTE] * len(took_ms)
    calls: list[Made] = []
    ends: list[list[int]] = [[] for _ in range(RANKS)]
    begin = 0
    for step in range(STEPS):
        over, rows = begin, []
        called = [begin + each_ms * (at + 2) for at in range(len(took_ms))]
        for number, took in enumerate(took_ms):
            at = over + each_ms if blocks else called[number]
            over = max(over, at) + took
            rows.append((at, over))
        waits = called[-1] + after_ms
        end = over if blocks else max(waits, over)
        for rank in range(RANKS):
            for number, (at, over) in enumerate(rows):
                wait, seq = at if blocks else waits, step * len(took_ms) + number
                seen = max(over, wait)
                calls.append(Made(rank, Op.ALL_REDUCE, 0, seq, at * MS, wait * MS, seen * MS, size=sizes[number]))
            ends[rank].append((end + 1) * MS)
        begin = end + 1
    calls.sort(key=lambda each: (each.rank, each.call_ns))
    return made_trace([TraceGroup(GROUP, tuple(range(RANKS)))], calls, ends)
