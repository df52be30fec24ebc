"""ByteDance's published straggler analysis against ours, from their traces.

git clone https://github.com/ByteDance-Seed/StragglerAnalysis
python -m evidence.replay.published StragglerAnalysis/data --keep results/replay-published.jsonl

``evidence.replay`` makes the table of ``docs/evidence/replay.md`` from the result. It holds figures only.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unickpt.planning.replay.parquet_traces import read_operations
from unickpt.planning.replay.stragglers import find_stragglers

TRACES = {"SE": "sequence lengths", "ST": "long last stage", "AR": "one slowed worker"}
_KINDS = {"forward messages": "forward-pp-comm", "backward messages": "backward-pp-comm"}
_DIGITS = 9


def compared(folder: Path, name: str) -> dict[str, Any]:
    """Return their figures and ours of one trace. Tables of one kind are pairs, by name."""
    result, worst, last = (json.loads((folder / f"{kind}-{name}.json").read_text()) for kind in ("result", "mw", "ms"))
    found = find_stragglers(read_operations(folder / f"trace-{name}.parquet", folder / f"meta-{name}.yaml"))
    by_kind = {_KINDS.get(kind, kind): slowdown for kind, slowdown in found.by_kind.items()}
    single = {
        "step, s": (statistics.mean(result["step_t_base"].values()), found.step_s),
        "T, replayed step, s": (worst["tori"], found.replayed_s),
        "T_ideal, s": (worst["tideal"], found.ideal_s),
        "S = T / T_ideal": (result["blocking_slowdown"], found.slowdown),
        "M_W, removed": (worst["rem"], found.worst.removed),
        "M_W, added": (worst["add"], found.worst.added),
        "M_S, removed": (last["rem"], found.last_stage.removed),
        "M_S, added": (last["add"], found.last_stage.added),
    }
    tables = {
        "S of each step": _pairs(result["blocking_step_slowdown"], found.by_step),
        "S by data-parallel place": _pairs(result["blocking_decompose_by_dp_rank"], found.by_replica),
        "S by stage": _pairs(result["blocking_decompose_by_stage"], found.by_stage),
        "S by kind of operation": _pairs(result["blocking_decompose_by_optype"], by_kind),
    }
    return {"name": name, "single": _rounded(single), "tables": {title: _rounded(table) for title, table in tables.items()}}


def _pairs(theirs: Mapping[str, float], ours: Mapping[Any, float]) -> dict[str, tuple[float, float]]:
    named = {str(key): value for key, value in ours.items()}
    assert named.keys() == theirs.keys(), sorted(named.keys() ^ theirs.keys())
    return {key: (theirs[key], named[key]) for key in theirs}


def _rounded(pairs: Mapping[str, tuple[float, float]]) -> dict[str, list[float]]:
    return {key: [round(value, _DIGITS) for value in pair] for key, pair in pairs.items()}


def section(kept: list[dict[str, Any]]) -> list[str]:
    """Return the section of the page."""
    names = [each["name"] for each in kept]
    lines = [
        "## ByteDance's published analysis",
        "",
        "[StragglerAnalysis](https://github.com/ByteDance-Seed/StragglerAnalysis) (arXiv 2505.05713) has three traces and what "
        "its authors computed. `unickpt whatif TRACE.parquet --meta META.yaml` replays them by the same definitions: "
        + ", ".join(f"{name} ({TRACES[name]})" for name in names)
        + ". M_W: part of the slowdown that the worst 3% of the workers explain; M_S: that of the last stage. *Removed*: if "
        "they are ideal; *added*: if only they are as measured. Their columns are float32, ours float64.",
        "",
        "`python -m evidence.replay.published StragglerAnalysis/data --keep results/replay-published.jsonl`",
        "",
        "| figure |" + "".join(f" {name}, theirs | ours | difference |" for name in names),
        "|---|" + "---|" * (3 * len(names)),
    ]
    for row in kept[0]["single"]:
        cells = [f"{theirs:.6f} | {ours:.6f} | {ours - theirs:+.0e}" for theirs, ours in (each["single"][row] for each in kept)]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    lines += ["", "Tables of one figure for each name: the number of names, and the largest difference.", ""]
    lines += ["| figure |" + "".join(f" {name}, names | theirs, least to most | largest difference |" for name in names)]
    lines += ["|---|" + "---|" * (3 * len(names))]
    for row in kept[0]["tables"]:
        cells = []
        for each in kept:
            pairs = list(each["tables"][row].values())
            theirs = [pair[0] for pair in pairs]
            cells.append(f"{len(pairs)} | {min(theirs):.4f} to {max(theirs):.4f} | {max(abs(a - b) for a, b in pairs):.0e}")
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return [
        *lines,
        "",
        "No trace has an interleaved schedule, or reduces gradients beside the backward pass.",
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder with trace-*.parquet, meta-*.yaml, result-*, mw-* and ms-*.json")
    parser.add_argument("--keep", type=Path, required=True, help="file of results")
    args = parser.parse_args()
    args.keep.write_text("".join(json.dumps(compared(args.folder, name)) + "\n" for name in TRACES))


if __name__ == "__main__":
    main()
