"""The table of the Universal Checkpointing paper, from DeepSpeed's 3D parallelism into Megatron and out of Megatron.

    python -m evidence.journeys.pipeline_table into|out|page [--steps 20]

The model is a GPT-2 as a user writes it for a ``PipelineModule`` (``pipeline_job.py``), and megatron-core's GPT. Each source
trains some steps and saves. Each target starts from another seed, loads the checkpoint through the dialect ``pipeline.toml``,
saves it again at once, which is compared bit for bit, and trains on. ``into`` and ``out`` write
results/deepspeed-3d-megatron.json, and ``page`` adds to docs/evidence/deepspeed-3d.md from it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.measure import machine
from evidence.deepspeed.megatron_table import OTHERS, PAGE, Panel, draw, row, section
from tests.jobs.journeys.families import family_of
from tests.jobs.journeys.journeys import Station, differences
from evidence.journeys.universal_table import megatron, name
from tests.support.repository import REPO
from tests.support.forked_jobs import fork_ranks

FAMILY = "gpt2-pipeline"
RESULTS, IMAGE = REPO / "results/deepspeed-3d-megatron.json", "../images/deepspeed-3d-megatron.png"
ABOUT = """\
## Between DeepSpeed's 3D parallelism and Megatron

The model is a small GPT-2 with tied embeddings, in bf16: a `PipelineModule` with tensor-parallel layers
(`tests/jobs/journeys/pipeline_job.py`), and megatron-core's GPT with its distributed optimizer. The dialect is
`tests/jobs/journeys/pipeline.toml`. A target loads and saves again at once. *Tensors compared* are the weights, masters and
moments of both checkpoints. Both jobs train 20 steps before and after the switch. The frameworks round at different places,
so their losses part slowly."""
TITLES = {"into": "DeepSpeed into Megatron", "out": "Megatron into DeepSpeed"}


def pipeline(tensor: int, stages: int, data: int) -> Station:
    return Station("pipeline", f"tp{tensor}pp{stages}dp{data}", tensor * stages * data)


SOURCES = {"into": pipeline(2, 2, 2), "out": megatron("tp2pp2dp2", 8)}
TARGETS = {
    "into": (
        megatron("tp2pp2dp2", 8), megatron("one", 1), megatron("tp2", 2), megatron("pp2", 2), megatron("dp2", 2),
        megatron("tp4", 4), megatron("pp4", 4), megatron("dp4", 4), megatron("tp2pp2", 4), megatron("tp2dp2", 4),
        megatron("pp2dp2", 4), megatron("tp4pp2", 8), megatron("tp2pp4", 8),
    ),
    "out": (
        pipeline(2, 2, 2), pipeline(1, 1, 1), pipeline(2, 1, 1), pipeline(1, 2, 1), pipeline(1, 1, 2), pipeline(4, 1, 1),
        pipeline(1, 4, 1), pipeline(2, 2, 1), pipeline(2, 1, 2), pipeline(1, 2, 2), pipeline(4, 2, 1), pipeline(2, 4, 1),
    ),
}  # fmt: skip


def trained(station: Station, source: Path | None, out: Path, steps: int, first: int) -> list[float]:
    """Run a job, and return its losses. It leaves ``out/loaded`` and ``out/trained``."""
    out.mkdir(parents=True)
    arguments = (station.kind, station.layout, FAMILY, "bf16", str(source or "-"), str(out), str(steps), str(first))
    fork_ranks(station.ranks, "tests.jobs.journeys.station", *arguments, timeout_s=600)
    losses: list[float] = json.loads((out / "station.json").read_text())["losses"]
    return losses


def measured(direction: str, steps: int) -> dict[str, Any]:
    """Run the source of one direction, and all of its targets."""
    begin, source, rows = time.monotonic(), SOURCES[direction], []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        folder = Path(place)
        alone = trained(source, None, folder / "alone", 2 * steps, 0)
        trained(source, None, folder / "source", steps, 0)
        for target in TARGETS[direction]:
            home = folder / target.layout
            after = trained(target, folder / "source" / "trained", home, steps, steps)
            compared, wrong = differences(folder / "source" / "trained", home / "loaded", family_of(FAMILY).dialect)
            result = {"tensors": compared, "problems": wrong, "losses": after, "alone": alone}
            rows.append({"source": name(source), "target": name(target), **result})
            print(row(rows[-1]), *wrong[:4], flush=True)
    packages = ", ".join(f"{each} {version(each)}" for each in ("deepspeed", "megatron-core"))
    seconds = round(time.monotonic() - begin)
    return {"rows": rows, "steps": steps, "seconds": seconds, "made": f"{machine()}, {packages}"}


def page() -> None:
    """Write the part of the page below the mark, and its picture, from the results."""
    results = json.loads(RESULTS.read_text())
    found = {direction: title for direction, title in TITLES.items() if direction in results}
    text = f"{OTHERS}\n\n{ABOUT}\n\n![Losses across the switch between the frameworks]({IMAGE})\n"
    for direction, title in found.items():
        text += section(title, f"python -m evidence.journeys.pipeline_table {direction}", results[direction])
    PAGE.write_text(f"{PAGE.read_text().partition(OTHERS)[0].rstrip()}\n\n{text}")
    panels = [Panel(f"{name(SOURCES[each])} resumed as ...", results[each]["rows"], sources=False) for each in found]
    draw(panels, PAGE.parent / IMAGE)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("into", "out", "page"))
    parser.add_argument("--steps", type=int, default=20, help="before and after the switch")
    args = parser.parse_args()
    if args.what == "page":
        page()
        return
    found = measured(args.what, args.steps)
    before = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    RESULTS.write_text(json.dumps({**before, args.what: found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
