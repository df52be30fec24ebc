"""Metrics of the steering for Prometheus: from an agent's copy of the state and from its history."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from unickpt.diagnosis.reports.metrics import MetricValue
from unickpt.steering.state.history import HistoryEntry, Kind
from unickpt.steering.state.hosts import host_rows
from unickpt.steering.state.membership import Membership, Standing
from unickpt.steering.state.orders import Action
from unickpt.steering.state.timeline import START, job_times

HELP = {
    "unickpt_steering_rounds_total": "Rounds that have begun.",
    "unickpt_steering_restarts_total": "Rounds that have begun after the first.",
    "unickpt_steering_orders_total": "Orders that this agent has seen executed, by kind.",
    "unickpt_steering_hosts": "Hosts by state.",
    "unickpt_steering_ranks": "Ranks of the round.",
    "unickpt_steering_downtimes_total": "Times without training since this agent began, by cause.",
    "unickpt_steering_downtime_seconds_total": "Time without training since this agent began, by cause.",
    "unickpt_steering_last_repair_seconds": "Time without training that the last repair took, from the last step before it.",
    "unickpt_steering_effective_training_ratio": "Training seconds divided by wall seconds since this agent began.",
}


def steering_measurements(
    state: Membership | None, entries: Sequence[HistoryEntry], now_s: float, wall_s: float
) -> list[MetricValue]:
    """Return the metrics.

    Args:
        state: this agent's copy of the state; None before the first contact.
        entries: its history.
        now_s: time on the clock of the state.
        wall_s: the same time in seconds since the epoch.
    """
    rounds = state.round.epoch[1] if state is not None and state.round is not None else 0
    found = [
        MetricValue("unickpt_steering_rounds_total", {}, float(rounds)),
        MetricValue("unickpt_steering_restarts_total", {}, float(max(rounds - 1, 0))),
    ]
    orders = Counter(entry.action for entry in entries if entry.kind is Kind.ORDER)
    found += [MetricValue("unickpt_steering_orders_total", {"kind": kind.value}, float(orders[kind.value])) for kind in Action]
    if state is not None:
        hosts = Counter(row.state for row in host_rows(state, now_s))
        found += [MetricValue("unickpt_steering_hosts", {"state": each.value}, float(hosts[each])) for each in Standing]
    closed = state is not None and bool(state.closed)
    times = job_times([*entries, *([] if closed else [HistoryEntry(Kind.ALIVE, wall_s)])])
    found.append(MetricValue("unickpt_steering_ranks", {}, float(times.rounds[-1].world if times.rounds else 0)))
    for cause, (count, seconds) in times.by_cause().items():
        found.append(MetricValue("unickpt_steering_downtimes_total", {"cause": cause}, float(count)))
        found.append(MetricValue("unickpt_steering_downtime_seconds_total", {"cause": cause}, seconds))
    repaired = [each for each in times.downtimes if each.repaired and each.cause != START]
    if repaired:
        found.append(MetricValue("unickpt_steering_last_repair_seconds", {}, repaired[-1].seconds))
    found.append(MetricValue("unickpt_steering_effective_training_ratio", {}, times.effective))
    return found
