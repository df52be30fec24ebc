"""Find slow ranks and slow links of a job that makes progress."""

from __future__ import annotations

import numpy as np

from unickpt.diagnosis.detectors.all_slower import slower_than_before
from unickpt.diagnosis.detectors.losses import losses
from unickpt.diagnosis.detectors.observations import CpuStarvation, RotatingPauses
from unickpt.diagnosis.detectors.p2p_links import by_hosts, slow_links, transfers_of
from unickpt.diagnosis.detectors.slow_layers import slow_layers
from unickpt.diagnosis.detectors.stragglers import stragglers
from unickpt.diagnosis.detectors.tcp_links import LinkHistory, Links
from unickpt.diagnosis.detectors.verdicts import Cause, Syndrome, Verdict
from unickpt.diagnosis.snapshot.snapshot import WARM_UP, Snapshot

STARVED, CROWDED_FOR_NS = 0.5, 5_000_000_000  # share of time, and time, without a processor: slow for that reason alone
CROWDED, CROWDED_TIMES = 0.15, 2.0  # share of time, and ratio to the median, from which a rank is starved
LATE, LATE_OF = 6, 8  # late in LATE of the LATE_OF newest steps: links are not judged then


def slowness(snapshot: Snapshot, links: Links, usual: LinkHistory | None) -> list[Verdict]:
    """Return verdicts on slow links by their own past, and on slow ranks; else on slow links by their transfers.

    This look is added to ``usual``, the past of the links, if it is known.
    """
    starved = starved_ranks(snapshot)
    short_of_cpu = _short_of_cpu(snapshot, starved)
    # without traffic from a late rank, acknowledgements are delayed, too
    late = bool(short_of_cpu or stragglers(snapshot.steps, last=LATE_OF, fewest=LATE))
    slow_ranks = stragglers(snapshot.steps) or short_of_cpu or slow_layers(snapshot)
    hosts = {rank: one.host for rank, one in snapshot.ranks.items()}
    lost = [] if slow_ranks else losses(snapshot.steps, hosts)
    in_turn = [each for each in lost if isinstance(each.evidence[0], RotatingPauses)]  # says nothing about links
    slow_ranks = slow_ranks or [each for each in lost if each not in in_turn]
    slow: list[Verdict] = []
    if usual is not None and late:
        usual.forget()
    elif usual is not None:
        judged = links[~np.isin(links["source"], starved) & ~np.isin(links["destination"], starved)]
        slow = usual.slow(judged, snapshot.now_ns, hosts)
    verdicts = [*slow, *slow_ranks]
    kernel = len(snapshot.windows) > 0  # its counters are better evidence than transfers
    if not verdicts and not late and not kernel and _in_motion(snapshot):
        verdicts = slow_links(transfers_of(snapshot.calls))
    verdicts = [*by_hosts(verdicts, hosts), *in_turn]
    return verdicts or slower_than_before(snapshot.steps, hosts, snapshot.cpu_waits)


def _in_motion(snapshot: Snapshot) -> bool:
    """Return whether training is beyond the first steps, which allocate and compile."""
    return max((one.step for one in snapshot.ranks.values()), default=0) >= WARM_UP + LATE_OF


def starved_ranks(snapshot: Snapshot) -> list[int]:
    """Return ranks that wait for a processor much more than the others. Their links look slow for that reason."""
    cpu_wait = {rank: one.cpu_wait for rank, one in snapshot.ranks.items()}
    usual = float(np.median(list(cpu_wait.values()))) if cpu_wait else 0.0
    return [rank for rank, share in cpu_wait.items() if share > max(CROWDED, CROWDED_TIMES * usual)]


def _short_of_cpu(snapshot: Snapshot, starved: list[int]) -> list[Verdict]:
    """Return a verdict on the one rank that waits for a processor most of the time, if the others do not."""
    most = [rank for rank in starved if snapshot.ranks[rank].cpu_wait > STARVED]
    if len(most) != 1 or not _in_motion(snapshot):
        return []
    (rank,) = most
    others = float(np.median([one.cpu_wait for number, one in snapshot.ranks.items() if number != rank]))
    evidence = CpuStarvation(snapshot.ranks[rank].cpu_wait, others)
    since_ns, victims = snapshot.now_ns - CROWDED_FOR_NS, len(snapshot.ranks) - 1
    return [
        Verdict(Syndrome.NON_COMMUNICATION_SLOW, (rank,), since_ns, victims=victims, cause=Cause.COMPUTE, evidence=(evidence,))
    ]
