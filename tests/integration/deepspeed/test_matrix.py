"""Every source layout resumes under every target layout, bit for bit, and the loss continues.

Layouts: {ZeRO 0, 1, 2, 3} x {fp32, bf16} and BF16_Optimizer, on 1 to 4 ranks: 36 sources, 36
targets. CI loads 108 of the 1,296 pairs: each layout into itself, each of the nine kinds of
optimizer (stage and precision) into each other, each number of ranks into each other, and each
kind from and into each number of ranks. ``UNICKPT_FULL_MATRIX=1`` loads all pairs
(``docs/guides/deepspeed-coverage.md`` has the result).
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.deepspeed.jobs import STEPS_BEFORE, Layout, layouts
from tests.support.rounding import limit_of
from unickpt.testing.launch import fork_ranks

FULL = os.environ.get("UNICKPT_FULL_MATRIX") == "1"
pytestmark = [pytest.mark.timeout(3 * 3600)] if FULL else []
WORLDS = (1, 2, 3, 4)
# Rounding differs from layout to layout. Two uninterrupted runs show by how much; a resumed run
# follows the one and then the other, so it may stray a little further than they are apart.


def pairs() -> list[tuple[Layout, Layout]]:
    """Return the (source, target) pairs to load: all, or one for every two kinds, on alternating world sizes."""
    every = [list(enumerate(layouts(world))) for world in WORLDS]
    return [
        (source, target)
        for (w, sources), (v, targets) in itertools.product(enumerate(every), enumerate(every))
        for (i, source), (j, target) in itertools.product(sources, targets)
        if FULL or source == target or (i != j and w == j % 4 and v == (i + j) % 4)
    ]


def test_the_chosen_pairs_cover_every_pair_of_values() -> None:
    def values(layout: Layout) -> list[object]:
        return [("world", layout.world), ("kind", layout.stage, layout.precision)]

    every = [layout for world in WORLDS for layout in layouts(world)]
    met = {pair for a, b in pairs() for pair in itertools.product(values(a), values(b))}
    assert met == {pair for a in every for b in every for pair in itertools.product(values(a), values(b))}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save all sources, then load them."""
    folder = tmp_path_factory.mktemp("matrix")
    chosen: dict[str, list[str]] = {}
    for source, target in pairs():
        chosen.setdefault(target.name, []).append(source.name)
    (folder / "pairs.json").write_text(json.dumps(chosen))
    fork_ranks(WORLDS[-1], "tests.jobs.deepspeed.matrix_worker", "both", str(folder), timeout_s=3600 if FULL else 900)
    return folder


def results(folder: Path, world: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / f"results-w{world}.json").read_text())
    return found


def losses(folder: Path, name: str) -> list[float]:
    found: list[float] = json.loads((folder / f"{name}.json").read_text())["losses"]
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_every_state_is_bit_equal_after_load(folder: Path, world: int) -> None:
    found = results(folder, world)
    assert len(found) == sum(target.world == world for _, target in pairs())
    assert {f"{r['source']} -> {r['target']}": r["problems"] for r in found if r["problems"]} == {}


def trajectory(layout: Layout) -> str:
    """Return a name that is equal for layouts whose uninterrupted runs differ by rounding alone.

    In bf16, stage 0 counts one optimizer step more from the start (``FP16_UnfusedOptimizer.initialize_optimizer_states``), and
    stage 3 draws its first weights in bf16 (``zero.Init``).
    """
    own = layout.precision == "bf16" and layout.stage in (0, 3)
    return f"bf16 stage {layout.stage}" if own else "all others"


def noise(folder: Path, a: str, b: str, steps: slice) -> float:
    """Return the largest difference of a loss between two uninterrupted runs in these dtypes that differ by rounding alone.

    BF16_Optimizer rounds as ZeRO-1 does. One pair of runs is too small a sample: a resumed bf16 run was seen 4.3 times as far
    away as its two layouts' own runs.
    """
    runs: dict[str, dict[str, list[list[float]]]] = {}
    for layout in itertools.chain.from_iterable(layouts(world) for world in WORLDS):
        runs.setdefault(layout.dtype, {}).setdefault(trajectory(layout), []).append(losses(folder, layout.name)[steps])
    same = runs[a].keys() & runs[b].keys()
    return max(
        abs(x - y) for each in same for one in runs[a][each] for other in runs[b][each] for x, y in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("world", WORLDS)
def test_losses_continue_as_in_an_uninterrupted_run(folder: Path, world: int) -> None:
    dtypes = {layout.name: layout.dtype for each in WORLDS for layout in layouts(each)}
    pairs_of_dtypes = list(itertools.product(sorted(set(dtypes.values())), repeat=2))
    anywhere = {pair: noise(folder, *pair, slice(None)) for pair in pairs_of_dtypes}
    equal_weights = {pair: noise(folder, *pair, slice(1)) for pair in pairs_of_dtypes}
    strayed = {}
    for r in results(folder, world):
        source, target = r["source"], r["target"]
        differences = [abs(a - b) for a, b in zip(r["losses"], losses(folder, source)[STEPS_BEFORE:], strict=True)]
        pair = (dtypes[source], dtypes[target])
        # The first loss depends on the loaded weights alone. Weights are rounded if the dtype changes, and only then.
        first = equal_weights[pair] if pair[0] == pair[1] else anywhere[pair]
        limits = [
            0.0 if source == target else limit_of(each, max(losses(folder, source)))
            for each in (first, anywhere[pair], anywhere[pair])
        ]
        if any(difference > limit for difference, limit in zip(differences, limits, strict=True)):
            strayed[f"{source} -> {target}"] = (differences, limits)
    assert strayed == {}
