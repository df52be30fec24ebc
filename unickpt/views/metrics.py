"""Measurements of a job for Prometheus and TensorBoard.

``measurements`` is a function of what was read; the two exporters only hand its result on. Both packages are optional
(``pip install "unickpt[metrics]"``) and imported when they are used.

Names follow Prometheus' rules (base units, the unit at the end, ``_total`` for what only grows). Counts of what is in the rings
are gauges: a ring forgets its oldest records. What only grows is the number of a group's calls, which its members count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from unickpt.diagnosis.verdicts import Verdict
from unickpt.errors import ConfigError, StorageError
from unickpt.timing.folder import Job
from unickpt.timing.processes import State
from unickpt.timing.records import Op, bytes_in
from unickpt.views.gathering import OP_NAMES, View, gathered
from unickpt.views.lateness import by_step


@dataclass(frozen=True, slots=True)
class Measurement:
    """One value.

    Attributes:
        name: as Prometheus has it.
        labels: their values by name.
        value: in seconds or bytes where the name ends so.
        step: that it is of; None for what is so now.
    """

    name: str
    labels: Mapping[str, str]
    value: float
    step: int | None = None


HELP = {
    "unickpt_rank_step": "Step that a rank is in.",
    "unickpt_rank_own_seconds": "Time of its newest whole step that a rank did not spend waiting in calls.",
    "unickpt_rank_waiting_seconds": "Time of its newest whole step that a rank spent waiting in calls.",
    "unickpt_rank_data_seconds": "Waits for data in a rank's newest whole step.",
    "unickpt_rank_garbage_seconds": "Garbage collections in a rank's newest whole step.",
    "unickpt_rank_lateness_seconds": "Latest arrival at a collective in a rank's newest step, after the first member.",
    "unickpt_rank_lateness_behind_median_seconds": "Latest arrival at a collective in a rank's newest step, after the median.",
    "unickpt_rank_state": "1 for the state that a rank's process is in, 0 for the others.",
    "unickpt_collectives_total": "Collectives that groups have begun, each counted once, by the framework's name of the group.",
    "unickpt_recorded_calls": "Calls in the rings, counted for each rank, by operation and group.",
    "unickpt_recorded_bytes": "Bytes that ranks gave to the calls in the rings, by operation and group.",
    "unickpt_link_seconds_per_byte": "Time that something was under way from a rank to another, for each byte of it.",
    "unickpt_verdicts": "Verdicts by syndrome and rank at fault.",
}
_OF_STEPS = {
    "own": "unickpt_rank_own_seconds",
    "waiting": "unickpt_rank_waiting_seconds",
    "data": "unickpt_rank_data_seconds",
    "garbage": "unickpt_rank_garbage_seconds",
    "behind_first": "unickpt_rank_lateness_seconds",
    "behind_median": "unickpt_rank_lateness_behind_median_seconds",
}


def measurements(
    jobs: Sequence[Job], verdicts: Sequence[Verdict], clock_offsets_ns: Mapping[str, int] | None = None
) -> list[Measurement]:
    """All values, those of steps in ascending order of these.

    Args:
        jobs: one for each host.
        verdicts: on them.
        clock_offsets_ns: as in ``gathered``.
    """
    view = gathered(jobs, clock_offsets_ns)
    return [*_of_ranks(view), *_of_steps(view), *_of_groups(view), *of_verdicts(verdicts)]


def _of_ranks(view: View) -> Iterator[Measurement]:
    for number, rank in view.ranks.items():
        yield Measurement("unickpt_rank_step", {"rank": str(number)}, float(rank.ring.step))
        for state in State:
            labels = {"rank": str(number), "host": rank.ring.identity.host, "state": state.value}
            yield Measurement("unickpt_rank_state", labels, float(rank.state is state))


def _of_steps(view: View) -> Iterator[Measurement]:
    table = by_step(view)
    for measure, name in _OF_STEPS.items():
        for number, values in zip(table.ranks.tolist(), table.values[measure], strict=True):
            labels = {"rank": str(number)}
            for step, value in zip(table.steps.tolist(), values.tolist(), strict=True):
                if value == value:  # not NaN: known
                    yield Measurement(name, labels, value / 1e9, step)


def _of_groups(view: View) -> Iterator[Measurement]:
    begun: dict[int, int] = {}
    calls: dict[tuple[str, str], int] = defaultdict(int)
    given: dict[tuple[str, str], int] = defaultdict(int)
    for rank in view.ranks.values():
        called = np.flatnonzero(rank.group >= 0)
        sizes = bytes_in(rank.records)[called]
        keys = rank.group[called] * (max(Op) + 1) + rank.records["op"][called]
        for key in np.unique(keys).tolist():
            number, op = divmod(key, max(Op) + 1)
            here = called[keys == key]
            at = (OP_NAMES[op], view.groups[number].label)
            calls[at] += len(here)
            given[at] += int(sizes[keys == key].sum())
            if op <= Op.BARRIER:
                begun[number] = max(begun.get(number, 0), int(rank.records["seq"][here].max()))
    totals: dict[str, int] = defaultdict(int)
    for number, count in begun.items():
        totals[view.groups[number].label] += count
    for label, count in sorted(totals.items()):
        yield Measurement("unickpt_collectives_total", {"group": label}, float(count))
    for name, counts in (("unickpt_recorded_calls", calls), ("unickpt_recorded_bytes", given)):
        for (op_label, label), count in sorted(counts.items()):
            yield Measurement(name, {"op": op_label, "group": label}, float(count))


def of_verdicts(verdicts: Sequence[Verdict]) -> Iterator[Measurement]:
    """How many there are of each syndrome and rank."""
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for verdict in verdicts:
        for rank in verdict.ranks:
            counts[verdict.syndrome.value, str(rank)] += 1
    for (syndrome, rank_label), count in counts.items():
        yield Measurement("unickpt_verdicts", {"syndrome": syndrome, "rank": rank_label}, float(count))


# ---------------------------------------------------------------- exporters


def exposition(measured: Sequence[Measurement]) -> str:
    """Prometheus' text format; of a value that is there for several steps, the newest.

    Raises:
        ConfigError: ``prometheus_client`` is not installed.
    """
    prometheus: Any = _imported("prometheus_client")
    families: Any = import_module("prometheus_client.core")
    newest: dict[str, dict[tuple[tuple[str, str], ...], float]] = {name: {} for name in HELP}
    for measurement in measured:  # ascending steps
        newest[measurement.name][tuple(measurement.labels.items())] = measurement.value

    class Collected:
        def collect(self) -> Iterator[Any]:
            for name, series in newest.items():
                if not series:
                    continue
                kind = families.CounterMetricFamily if name.endswith("_total") else families.GaugeMetricFamily
                family = kind(name, HELP[name], labels=[label for label, _ in next(iter(series))])
                for labels, value in series.items():
                    family.add_metric([text for _, text in labels], value)
                yield family

    registry = prometheus.CollectorRegistry(auto_describe=False)
    registry.register(Collected())
    text: str = prometheus.generate_latest(registry).decode()
    return text


def write_scalars(measured: Sequence[Measurement], folder: Path) -> int:
    """Write what is there by step as TensorBoard's scalars, ``own_seconds/rank 3``; how many.

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
            f'{package.replace("_", "-")} is not installed (no module {err.name}): pip install "unickpt[metrics]"'
        ) from err
