"""The table of the Universal Checkpointing paper: one source under many targets, many sources under one target. With a picture.

    python -m evidence.journeys.universal_table [--steps 20] [--out docs/evidence/universal.md]

A small GPT. The source of the first table is Megatron's with tensor, pipeline and data parallelism of 2 each and its
distributed optimizer (ZeRO-1), the paper's own; it trains some steps, and every target, Megatron's or DeepSpeed's, goes on from
its checkpoint with random weights of another seed before. Compared are all masters and moments after the load, bit for bit,
and the losses with those of the source that went on without a break.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path


from benchmarks.measure import machine
from tests.jobs.journeys.journeys import Station, differences
from unickpt.testing.launch import torchrun

FAMILY = "gpt2"
MARK = "<!-- made by evidence/journeys/universal_table.py -->"
IMAGE = "../images/universal.png"  # from the page


def megatron(shape: str, ranks: int) -> Station:
    return Station("megatron", f"gpt-{shape}-dist", ranks)


def deepspeed(stage: int, ranks: int) -> Station:
    return Station("deepspeed", f"zero{stage}", ranks)


SOURCE, SINGLE = megatron("tp2pp2dp2", 8), megatron("one", 1)
TARGETS = (
    SINGLE, megatron("dp2", 2), megatron("dp4", 4), megatron("tp2", 2), megatron("tp4", 4), megatron("pp2", 2),
    megatron("pp4", 4), megatron("tp2pp2", 4), megatron("tp2dp2", 4), megatron("pp2dp2", 4), megatron("tp4pp2", 8),
    megatron("tp2pp4", 8), deepspeed(1, 1), deepspeed(1, 4), deepspeed(2, 2), deepspeed(3, 2), deepspeed(3, 4),
)  # fmt: skip
SOURCES = (
    SOURCE, megatron("tp4", 4), megatron("pp4", 4), megatron("dp4", 4), megatron("tp2pp2", 4), deepspeed(1, 2), deepspeed(2, 4),
    deepspeed(3, 2),
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """Of one table. Attributes: rows of it; curves of losses by name, each with its first step."""

    rows: list[str]
    curves: list[tuple[str, int, list[float]]]


def trained(station: Station, source: Path | None, out: Path, steps: int, first: int) -> list[float]:
    """The losses of a job; it leaves ``out/loaded`` and ``out/trained``."""
    out.mkdir(parents=True)
    arguments = (station.kind, station.layout, FAMILY, "bf16", str(source or "-"), str(out), str(steps), str(first))
    torchrun(station.ranks, "tests.jobs.journeys.station", *arguments, timeout_s=600)
    losses: list[float] = json.loads((out / "station.json").read_text())["losses"]
    return losses


def name(station: Station) -> str:
    if station.kind == "deepspeed":
        return f"DeepSpeed ZeRO-{station.layout[-1]}, {station.ranks} rank{'s' * (station.ranks > 1)}"
    if station.kind == "pipeline":
        return f"DeepSpeed {_degrees(station.layout)}, ZeRO-1"
    shape = station.layout.split("-")[1]
    sizes = "tp1pp1dp1" if shape == "one" else shape
    return f"Megatron {_degrees(sizes)}"


def _degrees(sizes: str) -> str:
    return "/".join(sizes[at : at + 3].upper() for at in range(0, len(sizes), 3))


def one_to_many(folder: Path, steps: int) -> Part:
    alone = trained(SOURCE, None, folder / "alone", 2 * steps, 0)
    before = trained(SOURCE, None, folder / "0", steps, 0)
    rows, curves = [], [("uninterrupted", 0, alone)]
    for at, target in enumerate(TARGETS, start=1):
        after = trained(target, folder / "0" / "trained", folder / str(at), steps, steps)
        rows.append(row(name(SOURCE), name(target), folder / "0", folder / str(at), after, alone[steps:]))
        curves.append((name(target), steps, [before[-1], *after]))
        print(rows[-1], flush=True)
    return Part(rows, curves)


def many_to_one(folder: Path, steps: int) -> Part:
    rows, curves = [], []
    for at, source in enumerate(SOURCES):
        home = folder / str(at)
        alone = trained(source, None, home / "alone", 2 * steps, 0)
        trained(source, None, home / "0", steps, 0)
        after = trained(SINGLE, home / "0" / "trained", home / "1", steps, steps)
        rows.append(row(name(source), name(SINGLE), home / "0", home / "1", after, alone[steps:]))
        curves.append((name(source), 0, [*alone[:steps], *after]))
        print(rows[-1], flush=True)
    return Part(rows, curves)


def row(source: str, target: str, saved: Path, loaded: Path, after: list[float], alone: list[float]) -> str:
    compared, wrong = differences(saved / "trained", loaded / "loaded", FAMILY)
    off = max(abs(a - b) / b for a, b in zip(after, alone, strict=True))
    cells = [source, target, f"{compared - len(wrong)} of {compared}"]
    cells += [f"{after[at]:.4f} ({alone[at]:.4f})" for at in (0, -1)]
    return f"| {' | '.join(cells)} | {off:.1e} |"


def draw(first: Part, second: Part, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(13, 5), sharey=True)
    for axis, part, title in (
        (axes[0], first, f"{name(SOURCE)} (ZeRO-1) resumed as ..."),
        (axes[1], second, f"... resumed as {name(SINGLE)}"),
    ):
        for label, begin, losses in part.curves:
            alone = label == "uninterrupted"
            steps = range(begin - (begin > 0) + 1, begin - (begin > 0) + 1 + len(losses))
            axis.plot(
                steps,
                losses,
                label=label,
                color="black" if alone else None,
                linewidth=3 if alone else 1,
                alpha=0.35 if alone else 1,
            )
        axis.axvline(len(first.curves[0][2]) // 2, color="grey", linestyle=":")
        axis.set(title=title, xlabel="step")
        axis.legend(fontsize=7)
    axes[0].set_ylabel("loss")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="before and after the switch")
    parser.add_argument("--out", type=Path, help="Markdown file whose part below the mark is replaced, with its picture")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        first = one_to_many(Path(place) / "one", args.steps)
        second = many_to_one(Path(place) / "many", args.steps)
    packages = ", ".join(f"{each} {version(each)}" for each in ("deepspeed", "megatron-core", "transformers"))
    columns = ("source", "target", "equal tensors", "first loss (uninterrupted)", "last loss (uninterrupted)")
    head = f"| {' | '.join(columns)} | largest difference of losses |\n"
    head += "|---" * 6 + "|\n"
    text = f"`python -m evidence.journeys.universal_table --steps {args.steps}`: {machine()}, {packages}; "
    text += "bf16 with fp32 masters.\n"
    text += f"\n## One source, many targets\n\n{head}" + "\n".join(first.rows)
    text += f"\n\n## Many sources, one target\n\n{head}" + "\n".join(second.rows) + "\n"
    if args.out:
        draw(first, second, args.out.parent / IMAGE)
        before = args.out.read_text().partition(MARK)[0] if args.out.is_file() else ""
        args.out.write_text(f"{before.rstrip()}\n\n{MARK}\n\n![Losses across the switch]({IMAGE})\n\n{text}")


if __name__ == "__main__":
    main()
