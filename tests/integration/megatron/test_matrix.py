"""Every parallel shape and optimizer wrapper resumes under every other one, bit for bit, and the loss continues.

The truth is Megatron's own: its sharded state dicts, resharded by its ``torch_dist`` format, before
the save and after the load. CI loads 26 pairs that let every value of every dimension meet every other of it,
some layouts into themselves, and those that Megatron's own formats refuse;
``UNICKPT_FULL_MATRIX=1`` loads all pairs (``docs/guides/megatron.md`` has the result).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from unickpt.testing.launch import fork_ranks
from megatron_unickpt.testing.layouts import HARD, Layout, layouts, pairs, worlds
from tests.support.rounding import limit_of
from unickpt.checkpoint.load.checkpoint import Checkpoint

pytest.importorskip("megatron.core")

FULL = os.environ.get("UNICKPT_FULL_MATRIX") == "1"
pytestmark = [pytest.mark.timeout(3 * 3600)] if FULL else []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save all sources, then load them."""
    folder = tmp_path_factory.mktemp("megatron")
    chosen = pairs(full=FULL)
    (folder / "pairs.json").write_text(json.dumps([(a.name, b.name) for a, b in chosen]))
    fork_ranks(
        worlds(layouts())[-1],
        "tests.jobs.megatron.matrix_worker",
        "both",
        str(folder),
        timeout_s=3600 * 2 if FULL else 900,
    )
    return folder


def results(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for world in worlds(layouts()):
        found += json.loads((folder / f"results-w{world}.json").read_text())
    return found


def test_the_chosen_pairs_cover_every_pair_of_values() -> None:
    chosen = pairs()
    assert set(HARD) <= {(a.name, b.name) for a, b in chosen}
    for field in ("tp", "pp", "vpp", "cp", "ep", "dp", "optimizer"):
        values = {getattr(x, field) for x in layouts()}
        assert {(getattr(a, field), getattr(b, field)) for a, b in chosen} == {(a, b) for a in values for b in values}, field


def test_every_state_is_bit_equal_after_load(folder: Path) -> None:
    found = results(folder)
    assert len(found) == len(pairs(full=FULL))
    bad = [f"{r['source']} -> {r['target']}: {r['problems'][:3]}" for r in found if r["problems"]]
    assert not bad, f"{len(bad)} of {len(found)}: {bad[:5]}"


def test_the_loss_continues(folder: Path) -> None:
    """Rounding is measured over all sources of a precision, because two steps of one are a small sample."""
    saved = {source: json.loads((folder / f"{source}.json").read_text()) for source in {r["source"] for r in results(folder)}}
    noise = {True: 0.0, False: 0.0}
    for name, found in saved.items():
        moved = found["moved"]
        apart = max(abs(a - b) for a, b in zip(found["losses"][-len(moved) :], moved, strict=True))
        noise[_is_whole(name)] = max(noise[_is_whole(name)], apart)
    bad = []
    for result in results(folder):
        name, target = result["source"], result["target"]
        expected = saved[name]["losses"][-len(result["losses"]) :]
        apart = max(abs(a - b) for a, b in zip(expected, result["losses"], strict=True))
        allowed = 0.0 if name == target else limit_of(noise[_is_whole(name) and _is_whole(target)], max(expected))
        if apart > allowed:
            bad.append(f"{name} -> {target}: {apart:.3g} > {allowed:.3g}")
    assert not bad, bad


def _is_whole(name: str) -> bool:
    """Return whether a layout computes in float32."""
    return Layout.parse(name).optimizer == "fp32"


def test_every_trained_parameter_has_its_hyperparameters_and_its_step(folder: Path) -> None:
    """Includes parameters whose states are only on later ranks of their data parallel group."""
    bad = []
    for layout in dict.fromkeys(source for source, _ in pairs(full=FULL)):
        checkpoint = Checkpoint.open(folder / layout.name)
        record = checkpoint.manifest.optimizer
        assert record is not None
        trained = {info.name for info in checkpoint.index.tensors if info.state == "exp_avg"}
        grouped = {name for group in record.groups for name in group.parameters}
        stepped = {name for group in record.scalars for name in group.parameters if "step" in group.hyperparameters}
        if not trained or grouped != trained or stepped != trained:
            bad.append(f"{layout.name}: {sorted(trained - grouped)[:3]}, {sorted(trained - stepped)[:3]}")
    assert not bad, bad
