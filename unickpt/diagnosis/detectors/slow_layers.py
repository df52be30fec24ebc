"""Find slow ranks by the times of their layers in earlier jobs: before enough steps exist, and ranks without peers.

``stragglers`` needs 21 steps, and other ranks that make the same calls. Less is enough where the layers of a rank were sampled
and earlier jobs have left the times of such layers on such a device:

- A rank with peers takes longer than they do in its first steps, and its layers take longer than in earlier jobs. Either alone
  may be chance: a busy machine, or another clock rate of all devices.
- A rank without peers, such as a stage of a pipeline without data parallelism, is compared with its own layers of earlier jobs,
  and this ratio with that of the other ranks.

The limit is four times the spread of the earlier times, and at least a quarter of them (CDMPP, arXiv 2311.09690, predicts times
of unseen programs to 11 to 14%).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from unickpt.diagnosis.detectors.observations import SlowLayers
from unickpt.diagnosis.detectors.stragglers import peers_known, stragglers
from unickpt.diagnosis.detectors.verdicts import Cause, Syndrome, Verdict
from unickpt.diagnosis.snapshot.snapshot import LayerSample, Snapshot
from unickpt.diagnosis.snapshot.steps import StepRows

MARGIN, SPREADS = 0.25, 4.0  # smallest excess over the expected time, and as a multiple of the spread
SAMPLES = 3  # steps in which the layers were sampled
WARM_UP, LAST, FEWEST = 2, 8, 4  # steps left out, compared, and needed


def limit_of(error: float) -> float:
    """Return the smallest ratio of measured to expected time that is not chance, from its spread as a share."""
    return 1 + max(MARGIN, SPREADS * error)


def slow_layers(snapshot: Snapshot) -> list[Verdict]:
    """Return verdicts on ranks with slow layers that ``stragglers`` does not judge, the slowest first."""
    samples = {
        rank: one.layers
        for rank, one in snapshot.ranks.items()
        if one.layers is not None and one.layers.steps >= SAMPLES and one.layers.expected_s > 0
    }
    ratios = {rank: each.took_s / each.expected_s for rank, each in samples.items()}
    slow = {rank for rank, ratio in ratios.items() if ratio > limit_of(samples[rank].error)}
    if not slow:
        return []
    judged = peers_known(snapshot.steps)
    suspects = {rank for rank in slow if not judged.get(rank, False)}
    if not suspects:
        return []
    early = {verdict.ranks[0]: verdict for verdict in stragglers(snapshot.steps, last=LAST, fewest=FEWEST, warm_up=WARM_UP)}
    with_peers = peers_known(snapshot.steps, last=LAST, fewest=FEWEST, warm_up=WARM_UP)
    found = []
    for rank in sorted(suspects, key=lambda each: -ratios[each]):
        others = [ratio for other, ratio in ratios.items() if other != rank]
        usual = float(np.median(others)) if others else 0.0
        evidence = SlowLayers(samples[rank].took_s, samples[rank].expected_s, usual)
        if rank in early and early[rank].cause is Cause.COMPUTE:
            found.append(dataclasses.replace(early[rank], evidence=(*early[rank].evidence, evidence)))
        elif others and rank not in with_peers and ratios[rank] > usual * limit_of(samples[rank].error):
            own = _newest(snapshot.steps, rank)
            if len(own) >= FEWEST and _still_slow(own, samples[rank]):
                found.append(_alone(rank, own, evidence, len(snapshot.ranks) - 1))
    return found


def _alone(rank: int, own: StepRows, evidence: SlowLayers, others: int) -> Verdict:
    return Verdict(
        Syndrome.NON_COMMUNICATION_SLOW, (rank,), int(own["begin_ns"].min()), victims=others, cause=Cause.COMPUTE,
        evidence=(evidence,),
    )  # fmt: skip


def _newest(steps: StepRows, rank: int) -> StepRows:
    own = steps[(steps["rank"] == rank) & (steps["number"] > WARM_UP)]
    newest: StepRows = own[np.argsort(own["number"], kind="stable")][-LAST:]
    return newest


def _still_slow(own: StepRows, sample: LayerSample) -> bool:
    """Return whether the steps since then are long enough for layers that are still slow."""
    return float(np.median(own["own_ns"])) * 1e-9 > (sample.took_s + sample.expected_s) / 2
