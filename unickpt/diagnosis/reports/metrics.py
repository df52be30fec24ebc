"""Metrics of a job for Prometheus and TensorBoard.

``measurements`` uses the rings, ``live_measurements`` the snapshot of a running job. Both client packages are optional
and imported on use.

Names follow Prometheus' rules (base units, unit at the end, ``_total`` for counters). Counts of records in the rings are
gauges, because a ring drops its oldest records. Only the number of calls of a group is a counter.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from unickpt.base.errors import ConfigError, StorageError
from unickpt.base.installation import extra_command
from unickpt.base.memory_status import MemoryStatus
from unickpt.base.witness_notes import WitnessNote
from unickpt.diagnosis.detectors.tcp_links import links_of
from unickpt.diagnosis.detectors.verdicts import Verdict
from unickpt.diagnosis.host.process_state import State
from unickpt.diagnosis.recording.records import Op, bytes_in
from unickpt.diagnosis.recording.ring_folder import HostRings
from unickpt.diagnosis.reports.arrivals import by_step
from unickpt.diagnosis.reports.hardware_text import short_text
from unickpt.diagnosis.reports.job_records import OP_NAMES, JobRecords, gather_records
from unickpt.diagnosis.snapshot.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class MetricValue:
    """One value.

    Attributes:
        name: name of the metric.
        labels: label values by name.
        value: value; the unit is at the end of the name.
        step: training step; None for current values.
    """

    name: str
    labels: Mapping[str, str]
    value: float
    step: int | None = None


HELP = {
    "unickpt_rank_step": "Step that a rank is in.",
    "unickpt_rank_own_seconds": "Time of its newest complete step that a rank did not spend waiting in calls.",
    "unickpt_rank_waiting_seconds": "Time of its newest complete step that a rank spent waiting in calls.",
    "unickpt_rank_data_seconds": "Waits for data in a rank's newest complete step.",
    "unickpt_rank_garbage_seconds": "Garbage collections in a rank's newest complete step.",
    "unickpt_rank_lateness_seconds": "Latest arrival at a collective in a rank's newest step, after the first member.",
    "unickpt_rank_lateness_behind_median_seconds": "Latest arrival at a collective in a rank's newest step, after the median.",
    "unickpt_rank_state": "1 for the state that a rank's process is in, 0 for the others.",
    "unickpt_collectives_total": "Collectives that groups have begun, each counted once, by the framework's name of the group.",
    "unickpt_recorded_calls": "Calls in the rings, counted for each rank, by operation and group.",
    "unickpt_recorded_bytes": "Bytes that ranks gave to the calls in the rings, by operation and group.",
    "unickpt_link_seconds_per_byte": "Time that something was under way from a rank to another, for each byte of it.",
    "unickpt_verdicts": "Verdicts by syndrome, rank at fault, its host and place, cause, kind of what to look at next, and "
    "what has happened to the hardware of its host. "
    "A non-communication hang is a rank that the others wait for; a communication hang is a call that does not end.",
    "unickpt_host_events": "What the hardware of a host has told in the last 15 minutes, by kind (such as Xid), device, and "
    "what it bears on: broken hardware, a limit of the host, or the program.",
    "unickpt_verdict_since_timestamp_seconds": "First sign of a verdict, in seconds since the epoch, by the same labels.",
    "unickpt_memory_held_bytes": "Bytes of checkpoints and copies in the memory of a host, at the end of the last save.",
    "unickpt_memory_refused_connections": "Connections that the keeper of a host has refused since its start.",
    "unickpt_memory_generation": "Number of the newest checkpoint in memory whose copies are complete.",
    "unickpt_memory_step": "Step of the newest checkpoint in memory whose copies are complete.",
    "unickpt_memory_age_seconds": "Age of the newest checkpoint in memory whose copies are complete.",
    "unickpt_memory_confirm_seconds": "Time from the call of a save until its copies were complete, of that checkpoint.",
    "unickpt_memory_confirm_longest_seconds": "The longest such time.",
    "unickpt_witness_verdicts": "What the witness has found in this round, by kind, and by the rank and host that it names. Of "
    "the newest 64.",
    "unickpt_memory_saves_total": "Saves into memory, by outcome. Skipped ones went to disk after a failure.",
}
_OUTCOMES = ("confirmed", "uncopied", "failed", "skipped", "left_out")  # of saves into memory
_OF_STEPS = {
    "own": "unickpt_rank_own_seconds",
    "waiting": "unickpt_rank_waiting_seconds",
    "data": "unickpt_rank_data_seconds",
    "garbage": "unickpt_rank_garbage_seconds",
    "behind_first": "unickpt_rank_lateness_seconds",
    "behind_median": "unickpt_rank_lateness_behind_median_seconds",
}


def measurements(
    jobs: Sequence[HostRings], verdicts: Sequence[Verdict], clock_offsets_ns: Mapping[str, int] | None = None
) -> list[MetricValue]:
    """Return all values from rings, by ascending step."""
    job = gather_records(jobs, clock_offsets_ns)
    return [*_of_ranks(job), *_of_steps(job), *_of_groups(job), *of_verdicts(verdicts, _hosts(job))]


def _hosts(job: JobRecords) -> dict[int, str]:
    return {number: rank.ring.identity.host for number, rank in job.ranks.items()}


def _of_ranks(job: JobRecords) -> Iterator[MetricValue]:
    for number, rank in job.ranks.items():
        yield from _of_rank(number, rank.ring.step, rank.ring.identity.host, rank.state)


def _of_rank(rank: int, step: int, host: str, now: State) -> Iterator[MetricValue]:
    yield MetricValue("unickpt_rank_step", {"rank": str(rank)}, float(step))
    for state in State:
        labels = {"rank": str(rank), "host": host, "state": state.value}
        yield MetricValue("unickpt_rank_state", labels, float(state is now))


def _of_steps(job: JobRecords) -> Iterator[MetricValue]:
    table = by_step(job)
    for measure, name in _OF_STEPS.items():
        for number, values in zip(table.ranks.tolist(), table.values[measure], strict=True):
            labels = {"rank": str(number)}
            for step, value in zip(table.steps.tolist(), values.tolist(), strict=True):
                if value == value:  # not NaN: known
                    yield MetricValue(name, labels, value / 1e9, step)


def _of_groups(job: JobRecords) -> Iterator[MetricValue]:
    begun: dict[int, int] = {}
    calls: dict[tuple[str, str], int] = defaultdict(int)
    given: dict[tuple[str, str], int] = defaultdict(int)
    for rank in job.ranks.values():
        called = np.flatnonzero(rank.group >= 0)
        sizes = bytes_in(rank.records)[called]
        keys = rank.group[called] * (max(Op) + 1) + rank.records["op"][called]
        for key in np.unique(keys).tolist():
            number, op = divmod(key, max(Op) + 1)
            here = called[keys == key]
            at = (OP_NAMES[op], job.groups[number].label)
            calls[at] += len(here)
            given[at] += int(sizes[keys == key].sum())
            if op <= Op.NEW_GROUP:
                begun[number] = max(begun.get(number, 0), int(rank.records["seq"][here].max()))
    yield from _collectives((job.groups[number].label, count) for number, count in begun.items())
    for name, counts in (("unickpt_recorded_calls", calls), ("unickpt_recorded_bytes", given)):
        for (op_label, label), count in sorted(counts.items()):
            yield MetricValue(name, {"op": op_label, "group": label}, float(count))


def _collectives(begun: Iterable[tuple[str, int]]) -> Iterator[MetricValue]:
    """Yield the number of collectives that the groups with one label have begun, from those of each group."""
    totals: dict[str, int] = defaultdict(int)
    for label, count in begun:
        totals[label] += count
    for label, count in sorted(totals.items()):
        yield MetricValue("unickpt_collectives_total", {"group": label}, float(count))


def of_verdicts(verdicts: Sequence[Verdict], hosts: Mapping[int, str] = MappingProxyType({})) -> Iterator[MetricValue]:
    """Return the number of verdicts by syndrome, rank, host, place, cause, what to look at and hardware; and since when.

    Args:
        verdicts: the verdicts.
        hosts: host of every known rank.
    """
    counts: dict[tuple[str, ...], int] = defaultdict(int)
    since: dict[tuple[str, ...], float] = {}
    for verdict in verdicts:
        cause = verdict.cause.value if verdict.cause else ""
        following = type(verdict.next).__name__ if verdict.next is not None else ""
        hardware = short_text(verdict.hardware[0]) if verdict.hardware else ""
        for rank in verdict.ranks:
            place = next((each.at for each in verdict.places if rank in each.ranks), None)
            at = f"{place.file}:{place.line}" if place is not None else ""
            key = verdict.syndrome.value, str(rank), hosts.get(rank, ""), at, cause, following, hardware
            counts[key] += 1
            since[key] = min(since.get(key, math.inf), verdict.since_ns / 1e9)
    for name, values in (("unickpt_verdicts", counts), ("unickpt_verdict_since_timestamp_seconds", since)):
        for labelled_by, value in values.items():
            labels = dict(zip(("syndrome", "rank", "host", "at", "cause", "next", "hardware"), labelled_by, strict=True))
            yield MetricValue(name, labels, float(value))


def of_memory(status: MemoryStatus | None) -> list[MetricValue]:
    """Return the values of the memory tier; none without one."""
    if status is None:
        return []
    found: list[tuple[str, dict[str, str], float]] = []
    for each in status.hosts:
        labels = {"host": each.host, "rank": str(each.rank)}
        found += [("held_bytes", labels, each.held_bytes), ("refused_connections", labels, each.refused)]
    if status.generation:
        found += [
            ("generation", {}, status.generation), ("step", {}, status.step),
            ("age_seconds", {}, max(time.time() - status.begun_s, 0.0)), ("confirm_seconds", {}, status.confirm_s),
            ("confirm_longest_seconds", {}, status.longest_s),
        ]  # fmt: skip
    found += [("saves_total", {"outcome": each}, getattr(status, each)) for each in _OUTCOMES]
    return [MetricValue(f"unickpt_memory_{name}", labels, float(value)) for name, labels, value in found]


def of_witness(notes: Sequence[WitnessNote]) -> list[MetricValue]:
    """Return how often the witness has named each rank, by kind."""
    counts = Counter((each.kind, rank, host) for each in notes for rank, host in zip(each.ranks, each.hosts, strict=False))
    return [
        MetricValue("unickpt_witness_verdicts", {"kind": kind, "rank": str(rank), "host": host}, float(count))
        for (kind, rank, host), count in counts.items()
    ]


def labelled(measured: Iterable[MetricValue], labels: Mapping[str, str]) -> list[MetricValue]:
    """Return the values with further labels, such as the name of the job."""
    return [replace(each, labels={**labels, **each.labels}) for each in measured]


# ---------------------------------------------------------------- a running job


def live_measurements(
    snapshot: Snapshot, verdicts: Sequence[Verdict], memory: MemoryStatus | None = None, notes: Sequence[WitnessNote] = ()
) -> list[MetricValue]:
    """All values that a snapshot has, of its newest steps."""
    return [
        *_live_ranks(snapshot),
        *_live_steps(snapshot),
        *_live_groups(snapshot),
        *_live_links(snapshot),
        *of_verdicts(verdicts, {rank: one.host for rank, one in snapshot.ranks.items()}),
        *of_memory(memory),
        *of_witness(notes),
        *_live_events(snapshot),
    ]


def _live_ranks(snapshot: Snapshot) -> Iterator[MetricValue]:
    for number, rank in sorted(snapshot.ranks.items()):
        yield from _of_rank(number, rank.step, rank.host, rank.state)


def _live_steps(snapshot: Snapshot) -> Iterator[MetricValue]:
    steps = snapshot.steps[np.lexsort((snapshot.steps["number"], snapshot.steps["rank"]))]
    newest = steps[np.append(steps["rank"][1:] != steps["rank"][:-1], True)] if len(steps) else steps
    columns = ["rank", "number", "begin_ns", "end_ns", "own_ns", "data_ns", "garbage_ns"]
    for rank, number, begin, end, own, data, garbage in newest[columns].tolist():
        values = {"own": own, "waiting": end - begin - own, "data": data, "garbage": garbage}
        for name, value in values.items():
            yield MetricValue(f"unickpt_rank_{name}_seconds", {"rank": str(rank)}, value / 1e9, number)


def _live_groups(snapshot: Snapshot) -> Iterator[MetricValue]:
    rows = snapshot.rows[snapshot.rows["source"] < 0]
    entered = (rows["entered"][rows["comm"] == number] for number in range(len(snapshot.groups)))
    labels = (group.label or group.name for group in snapshot.groups)
    yield from _collectives((label, int(here.max(initial=0))) for label, here in zip(labels, entered, strict=True))


def _live_links(snapshot: Snapshot) -> Iterator[MetricValue]:
    for source, destination, ns_per_byte in links_of(snapshot.windows)[["source", "destination", "ns_per_byte"]].tolist():
        if ns_per_byte == ns_per_byte:  # something was sent
            labels = {"source": str(source), "destination": str(destination)}
            yield MetricValue("unickpt_link_seconds_per_byte", labels, ns_per_byte / 1e9)


def _live_events(snapshot: Snapshot) -> Iterator[MetricValue]:
    for host, hardware in sorted(snapshot.hardware.items()):
        counts = Counter((event.kind.value, event.device, event.bearing.value) for event in hardware.events)
        for (kind, device, bearing), count in sorted(counts.items()):
            labels = {"host": host, "kind": kind, "device": device, "bearing": bearing}
            yield MetricValue("unickpt_host_events", labels, float(count))


# ---------------------------------------------------------------- exporters


def exposition(measured: Sequence[MetricValue], about: Mapping[str, str] = HELP) -> str:
    """Return Prometheus' text format of values by ascending step. Of a value for several steps, the newest counts.

    Raises:
        ConfigError: ``prometheus_client`` is not installed.
    """
    prometheus: Any = _imported("prometheus_client")
    families: Any = import_module("prometheus_client.core")
    newest: dict[str, dict[tuple[tuple[str, str], ...], float]] = {name: {} for name in about}
    for measurement in measured:  # ascending steps
        newest[measurement.name][tuple(measurement.labels.items())] = measurement.value

    class Collected:
        def collect(self) -> Iterator[Any]:
            for name, series in newest.items():
                if not series:
                    continue
                kind = families.CounterMetricFamily if name.endswith("_total") else families.GaugeMetricFamily
                family = kind(name, about[name], labels=[label for label, _ in next(iter(series))])
                for labels, value in series.items():
                    family.add_metric([text for _, text in labels], value)
                yield family

    registry = prometheus.CollectorRegistry(auto_describe=False)
    registry.register(Collected())
    text: str = prometheus.generate_latest(registry).decode()
    return text


def write_scalars(measured: Sequence[MetricValue], folder: Path) -> int:
    """Write values by step as TensorBoard scalars, ``own_seconds/rank 3``; return their number.

    Raises:
        ConfigError: ``tensorboard`` is not installed.
        StorageError: the folder cannot be written to.
    """
    _imported("tensorboard")
    summary: Any = import_module("tensorboard.summary")
    found = [measurement for measurement in measured if measurement.step is not None]
    try:
        writer = summary.Writer(str(folder))
        for measurement in found:
            name = measurement.name.removeprefix("unickpt_rank_")
            writer.add_scalar(f"{name}/rank {measurement.labels['rank']}", measurement.value, measurement.step)
        writer.close()
    except OSError as err:
        raise StorageError(f"{folder}: TensorBoard's scalars cannot be written ({err})") from err
    return len(found)


def _imported(package: str) -> Any:
    try:
        return import_module(package)
    except ModuleNotFoundError as err:
        raise ConfigError(
            f"{package.replace('_', '-')} is not installed (no module {err.name}): {extra_command('metrics')}"
        ) from err
