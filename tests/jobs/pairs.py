"""Pairs of a source and a target layout: each source is saved, loaded into its targets, and trained further.

A worker does that in a folder: ``pairs_worker.py`` of ``tests/jobs/deepspeed``, ``megatron`` or ``torch``. It reads
``pairs.json``. Of each source it writes ``SOURCE.json``, an object with ``losses``. In the files ``results-*.json`` it writes
lists of objects, of each pair one: ``source``, ``target``, ``problems`` (differences after the load) and ``losses`` (after it).
With ``--memory`` the sources are saved in the memory of ``HOSTS`` hosts, whose folders are ``SOURCE.hosts/host*``.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.support.forked_jobs import fork_ranks
from tests.support.rounding import limit_of

DEEPSPEED, MEGATRON = "tests.jobs.deepspeed.pairs_worker", "tests.jobs.megatron.pairs_worker"
TORCH = "tests.jobs.torch.pairs_worker"
HOSTS = 8
STEPS = (3, 2)  # of a source before its save, and of sources and targets after the save and the load
Layout = Any  # a frozen dataclass with ``name``, ``world``, and what the measure of its rounding reads
Pairs = Sequence[tuple[Layout, Layout]]
Runs = Mapping[Layout, Mapping[str, Any]]  # what the worker has written of each source
# From the runs to: of a source and a target, what rounding alone does to the first loss and to later ones. None: nothing.
Rounding = Callable[[Runs], Callable[[Layout, Layout], tuple[float, float] | None]]


def write(pairs: Pairs, folder: Path) -> None:
    """Write what a worker reads."""
    (folder / "pairs.json").write_text(json.dumps([(asdict(source), asdict(target)) for source, target in pairs]))


def run(
    worker: str, *arguments: str, pairs: Pairs, folder: Path, ranks: int = 4, timeout_s: float = 600,
    env: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """Save all sources, then load them. ``arguments`` follow the folder. ``env``: such as sizes (``tests.jobs.sizes``)."""
    write(pairs, folder)
    fork_ranks(ranks, worker, str(folder), *arguments, timeout_s=timeout_s, env=env)


def host_of(folder: Path, source: Layout, rank: int, world: int) -> Path:
    """Create and return the folder of the host of a rank, in whose memory a source is saved."""
    place = folder / f"{source.name}.hosts" / f"host{rank * HOSTS // world}"
    place.mkdir(parents=True, exist_ok=True)
    return place


def part(pairs: Pairs) -> Pairs:
    """Return the pairs of a part of the targets: ``UNICKPT_MATRIX_PART=2/4`` is the second quarter. Without it, all."""
    number, _, count = os.environ.get("UNICKPT_MATRIX_PART", "1/1").partition("/")
    targets = list(dict.fromkeys(target for _, target in pairs))[int(number) - 1 :: int(count)]
    return [pair for pair in pairs if pair[1] in targets]


def results(pairs: Pairs, folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the result of each pair, by the names of source and target."""
    every = [each for file in folder.glob("results-*.json") for each in json.loads(file.read_text())]
    found = {(each["source"], each["target"]): each for each in every}
    assert found.keys() == {(source.name, target.name) for source, target in pairs}
    return found


def problems(pairs: Pairs, folder: Path) -> dict[tuple[str, str], list[str]]:
    """Return the differences after the loads, of pairs that have some."""
    return {pair: each["problems"] for pair, each in results(pairs, folder).items() if each["problems"]}


def strayed(pairs: Pairs, folder: Path, rounding: Rounding, every: Pairs | None = None) -> dict[tuple[str, str], Any]:
    """Return the pairs whose losses differ by more than rounding from an uninterrupted run, with differences and limits.

    ``every``: all pairs that were loaded, if these are not all.
    """
    found = results(every or pairs, folder)
    runs = {source: json.loads((folder / f"{source.name}.json").read_text()) for source, _ in pairs}
    noise, out = rounding(runs), {}
    for source, target in pairs:
        after = found[source.name, target.name]["losses"]
        expected = runs[source]["losses"][-len(after) :]
        far = [abs(a - b) for a, b in zip(after, expected, strict=True)]
        measured = noise(source, target)
        limits = [0.0, 0.0] if measured is None else [limit_of(each, max(expected)) for each in measured]
        if far[0] > limits[0] or max(far[1:]) > limits[1]:
            out[source.name, target.name] = (far, limits)
    return out


# ------------------------------------------------------- what rounding does, measured between uninterrupted runs


def _apart(one: Sequence[float], other: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def between_precisions(runs: Runs) -> Callable[[Layout, Layout], tuple[float, float] | None]:
    """Measure between all layouts of two precisions. In bf16, engines that a process had before have an effect."""
    noise: dict[tuple[str, str], float] = {}
    for a, b in itertools.product(runs, repeat=2):
        key = (a.precision, b.precision)
        noise[key] = max(noise.get(key, 0.0), _apart(runs[a]["losses"], runs[b]["losses"]))

    def of(source: Layout, target: Layout) -> tuple[float, float] | None:
        if source == target and source.precision == "fp32":
            return None
        return (noise.get((source.precision, target.precision), 0.0),) * 2

    return of


def between_dtypes(runs: Runs) -> Callable[[Layout, Layout], tuple[float, float] | None]:
    """Measure between all layouts of two dtypes that differ by rounding alone.

    One pair of runs is too small a sample: a resumed bf16 run was seen 4.3 times as far away as its two layouts' own runs. The
    first loss depends on the loaded weights alone. Weights are rounded if the dtype changes, and only then.
    """

    def noise(dtypes: tuple[str, str], steps: slice) -> float:
        return max(
            _apart(runs[a]["losses"][steps], runs[b]["losses"][steps])
            for a, b in itertools.product(runs, repeat=2)
            if (a.dtype, b.dtype) == dtypes and a.trajectory == b.trajectory
        )

    def of(source: Layout, target: Layout) -> tuple[float, float] | None:
        dtypes = (source.dtype, target.dtype)
        if source == target:
            return None
        return noise(dtypes, slice(1) if source.dtype == target.dtype else slice(None)), noise(dtypes, slice(None))

    return of


def by_moved_weights(runs: Runs) -> Callable[[Layout, Layout], tuple[float, float] | None]:
    """Measure between each run and the same with weights that move in the last place (``moved``), over all of a precision."""
    noise = {True: 0.0, False: 0.0}
    for layout, run in runs.items():
        noise[layout.low] = max(noise[layout.low], _apart(run["losses"][-len(run["moved"]) :], run["moved"]))

    def of(source: Layout, target: Layout) -> tuple[float, float] | None:
        return None if source == target else (noise[source.low or target.low],) * 2

    return of
