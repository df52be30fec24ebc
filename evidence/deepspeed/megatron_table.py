"""The table of the Universal Checkpointing paper with DeepSpeed's 3D parallelism: one source to many targets, and the reverse.

    python -m evidence.deepspeed.megatron_table from|to|page [--steps 20]

The source of the first table has tensor, pipeline and data parallelism of 2 each and ZeRO-1. Each target starts from another
seed, loads the checkpoint, is compared bit for bit (weights, masters, moments, steps, settings) and trains on. ``from`` and
``to`` write results/deepspeed-3d.json, and ``page`` makes docs/evidence/deepspeed-3d.md with a picture from it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.measure import machine
from tests.jobs import pairs
from tests.jobs.deepspeed.megatron_names import MegatronLayout
from tests.support.repository import REPO

BEFORE = 10
MARK = "<!-- made by evidence/deepspeed/megatron_table.py -->"
OTHERS = "<!-- made by evidence/journeys/pipeline_table.py -->"  # follows on the same page
RESULTS, PAGE, IMAGE = REPO / "results/deepspeed-3d.json", REPO / "docs/evidence/deepspeed-3d.md", "../images/deepspeed-3d.png"


def _bf16(tensor: int, stages: int, data: int, stage: int = 1, precision: str = "bf16") -> MegatronLayout:
    return MegatronLayout(tensor, stages, data, stage, precision)


SOURCE = _bf16(2, 2, 2)
TARGETS = (
    _bf16(2, 2, 2), _bf16(1, 1, 1), _bf16(2, 1, 1), _bf16(1, 2, 1), _bf16(1, 1, 2), _bf16(2, 2, 1), _bf16(2, 1, 2),
    _bf16(1, 2, 2), _bf16(4, 1, 1), _bf16(1, 4, 1), _bf16(1, 1, 6), _bf16(4, 2, 1), _bf16(2, 4, 1), _bf16(4, 1, 2),
    _bf16(1, 4, 2), _bf16(2, 1, 3), _bf16(2, 2, 2, 0), _bf16(2, 2, 2, 1, "bf16o"), _bf16(2, 0, 2, 2), _bf16(1, 0, 2, 3),
    _bf16(2, 2, 1, 1, "fp32"),
)  # fmt: skip
SOURCES = (
    _bf16(1, 1, 1), _bf16(4, 1, 2), _bf16(1, 4, 2), _bf16(1, 1, 6), _bf16(2, 4, 1), _bf16(4, 2, 1), _bf16(1, 2, 3),
    _bf16(2, 2, 2, 1, "bf16o"), _bf16(2, 0, 2, 2), _bf16(1, 0, 3, 3), _bf16(2, 2, 2, 0),
)  # fmt: skip
PAIRS = {"from": [(SOURCE, target) for target in TARGETS], "to": [(source, SOURCE) for source in SOURCES]}


def label(layout: MegatronLayout) -> str:
    kinds = {"bf16": "bf16", "bf16o": "BF16_Optimizer", "fp32": "fp32"}
    stages = f"/PP{layout.stages}" if layout.stages else ""
    plain = "" if layout.stages else ", no pipeline"
    return f"TP{layout.tensor}{stages}/DP{layout.data}, ZeRO-{layout.stage}, {kinds[layout.precision]}{plain}"


def measured(direction: str, steps: int) -> dict[str, Any]:
    """Run all pairs of one direction."""
    wanted, begin = PAIRS[direction], time.monotonic()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        folder = Path(place)
        more = ("mpu", "--steps", str(BEFORE), str(steps))
        pairs.run(pairs.DEEPSPEED, *more, pairs=wanted, folder=folder, timeout_s=3600, ranks=8)
        found = pairs.results(wanted, folder)
        alone = {source.name: json.loads((folder / f"{source.name}.json").read_text())["losses"] for source, _ in wanted}
    rows = [
        {
            "source": label(source),
            "target": label(target),
            "alone": alone[source.name],
            **{key: found[source.name, target.name][key] for key in ("tensors", "problems", "losses")},
        }
        for source, target in wanted
    ]
    return {
        "rows": rows,
        "steps": steps,
        "seconds": round(time.monotonic() - begin),
        "made": f"{machine()}, deepspeed {version('deepspeed')}",
    }


def row(found: dict[str, Any]) -> str:
    """Return the row of a table from a result: ``source``, ``target``, ``tensors``, ``problems``, ``losses`` and ``alone``."""
    after, alone = found["losses"], found["alone"][-len(found["losses"]) :]
    off = max(abs(a - b) / b for a, b in zip(after, alone, strict=True))
    same = "all equal" if not found["problems"] else f"{len(found['problems'])} differ"
    losses = [f"{after[at]:.4f} ({alone[at]:.4f})" for at in (0, -1)]
    return f"| {' | '.join([found['source'], found['target'], str(found['tensors']), same, *losses])} | {off:.1e} |"


def section(title: str, command: str, found: dict[str, Any]) -> str:
    """Return the section of a page with a table. ``found``: ``rows``, ``steps``, ``seconds`` and ``made``."""
    columns = ("source", "target", "tensors compared", "result", "first loss (uninterrupted)", "last loss (uninterrupted)")
    head = f"| {' | '.join(columns)} | largest difference of losses |\n{'|---' * 7}|\n"
    text = f"\n## {title}\n\n`{command} --steps {found['steps']}`: {found['made']}; {found['seconds']} s.\n\n{head}"
    return text + "\n".join(map(row, found["rows"])) + "\n"


def page() -> None:
    """Write the page and the picture from the results. Sections of other commands stay."""
    results = json.loads(RESULTS.read_text())
    text = f"{MARK}\n\n![Losses across the switch]({IMAGE})\n"
    titles = (("from", "One source, many targets"), ("to", "Many sources, one target"))
    for direction, title in titles:
        if direction in results:
            text += section(title, f"python -m evidence.deepspeed.megatron_table {direction}", results[direction])
    before, _, made = PAGE.read_text().partition(MARK)
    _, mark, others = made.partition(OTHERS)
    PAGE.write_text(f"{before.rstrip()}\n\n{text}" + (f"\n{mark}{others}" if mark else ""))
    shown = {"from": f"{label(SOURCE)} resumed as ...", "to": f"... resumed as {label(SOURCE)}"}
    panels = [
        Panel(title, results[direction]["rows"], direction == "to")
        for direction, title in shown.items()
        if direction in results
    ]
    draw(panels, PAGE.parent / IMAGE)


@dataclass(frozen=True)
class Panel:
    """One part of the picture. Attributes: title; rows of results; whether they have many sources, and not many targets."""

    title: str
    rows: list[dict[str, Any]]
    sources: bool


def draw(panels: list[Panel], path: Path) -> None:
    """Draw the losses of every row, and of the sources without interruption."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(panels), figsize=(7 * len(panels), 5), sharey=True, squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        for number, found in enumerate(panel.rows):
            alone, after = found["alone"], found["losses"]
            before = len(alone) - len(after)
            if number == 0 or panel.sources:
                again = {"label": "uninterrupted"} if number == 0 else {}
                axis.plot(range(1, len(alone) + 1), alone, color="black", linewidth=3, alpha=0.3, **again)
            shown = found["source" if panel.sources else "target"]
            axis.plot(range(before + 1, len(alone) + 1), after, linewidth=1, label=shown)
            axis.axvline(before + 0.5, color="grey", linestyle=":")
        axis.set(title=panel.title, xlabel="step")
        axis.legend(fontsize=6, ncols=2)
    axes[0][0].set_ylabel("loss")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("from", "to", "page"))
    parser.add_argument("--steps", type=int, default=20, help="after the switch")
    args = parser.parse_args()
    if args.what == "page":
        page()
        return
    found = measured(args.what, args.steps)
    before = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    RESULTS.write_text(json.dumps({**before, args.what: found}, indent=1) + "\n")
    for each in found["rows"]:
        print(row(each))


if __name__ == "__main__":
    main()
