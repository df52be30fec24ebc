"""Pairs of a source and a target layout: each source is saved, loaded into its targets, and trained further."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.jobs.deepspeed.auto_expert_names import AutoExpertLayout
from tests.jobs.deepspeed.expert_names import ExpertLayout, PipedExpertLayout
from tests.jobs.deepspeed.megatron_names import MegatronLayout
from tests.jobs.deepspeed.pipeline_names import PipelineLayout
from tests.jobs.deepspeed.tensor_expert_names import TensorExpertLayout
from tests.jobs.deepspeed.tensor_names import TensorLayout
from tests.support.rounding import limit_of
from unickpt.testing.launch import fork_ranks

AnyLayout = (
    PipelineLayout | ExpertLayout | PipedExpertLayout | AutoExpertLayout | TensorLayout | MegatronLayout | TensorExpertLayout
)
Pairs = Sequence[tuple[AnyLayout, AnyLayout]]
STEPS_BEFORE = 3


def run(
    jobs: str, pairs: Pairs, folder: Path, *, timeout_s: float, ranks: int = 4, steps: tuple[int, int] = (STEPS_BEFORE, 2)
) -> None:
    """Save all sources, then load them. ``jobs`` is the first argument of ``pairs_worker.py``.

    ``ranks`` is the number of processes. ``steps`` are those of a source before its save, and those after the save and a load.
    """
    chosen: dict[AnyLayout, list[AnyLayout]] = {}
    for source, target in pairs:
        chosen.setdefault(target, []).append(source)
    wanted = [(target.to_json(), [source.to_json() for source in sources]) for target, sources in chosen.items()]
    (folder / "pairs.json").write_text(json.dumps(wanted))
    numbers = map(str, steps)
    fork_ranks(ranks, "tests.jobs.deepspeed.pairs_worker", jobs, str(folder), *numbers, timeout_s=timeout_s)


def part(pairs: Pairs) -> Pairs:
    """Return the pairs of a part of the targets: ``UNICKPT_MATRIX_PART=2/4`` is the second quarter. Without it, all."""
    number, _, count = os.environ.get("UNICKPT_MATRIX_PART", "1/1").partition("/")
    targets = list(dict.fromkeys(target for _, target in pairs))[int(number) - 1 :: int(count)]
    return [pair for pair in pairs if pair[1] in targets]


def results(pairs: Pairs, folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the result of each pair, by the names of source and target."""
    targets = dict.fromkeys(target.name for _, target in pairs)
    read = {target: json.loads((folder / f"results-{target}.json").read_text()) for target in targets}
    return {(found["source"], target): found for target, each in read.items() for found in each}


def problems(pairs: Pairs, folder: Path) -> dict[tuple[str, str], list[str]]:
    """Return the differences after the loads, of pairs that have some."""
    found = results(pairs, folder)
    assert found.keys() == {(source.name, target.name) for source, target in pairs}
    return {pair: each["problems"] for pair, each in found.items() if each["problems"]}


def strayed(pairs: Pairs, folder: Path) -> dict[tuple[str, str], tuple[float, float]]:
    """Return the pairs whose losses differ by more than rounding from an uninterrupted run, with difference and limit."""
    sources = list(dict.fromkeys(source for source, _ in pairs))
    runs = {
        precision: [_losses(folder, source.name) for source in sources if source.precision == precision]
        for precision in {layout.precision for pair in pairs for layout in pair}
    }
    noise = {
        (a, b): max(abs(x - y) for one in runs[a] for other in runs[b] for x, y in zip(one, other, strict=True))
        for a, b in itertools.product(runs, runs)
    }
    found, out = results(pairs, folder), {}
    for source, target in pairs:
        after = found[source.name, target.name]["losses"]
        difference = max(abs(x - y) for x, y in zip(after, _losses(folder, source.name)[STEPS_BEFORE:], strict=True))
        exact = source == target and source.precision == "fp32"  # in bf16, engines that a process had before have an effect
        limit = 0.0 if exact else limit_of(noise[source.precision, target.precision], max(after))
        if difference > limit:
            out[source.name, target.name] = (difference, limit)
    return out


def _losses(folder: Path, name: str) -> list[float]:
    found: list[float] = json.loads((folder / f"{name}.json").read_text())
    return found
