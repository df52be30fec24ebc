"""Run all benchmarks, and write ``docs/evidence/benchmarks.md`` and its picture.

It takes an hour on two cores of an otherwise idle machine.

    python -m benchmarks.run [--rounds 5] [--only deepspeed-50M-2 ...] [--list]

The part of the document above the mark is written by hand and by ``benchmarks.metadata_scale``. The part below is replaced.
Benchmarks that do not run keep their earlier results.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
PAGE, PICTURE = REPO / "docs" / "evidence" / "benchmarks.md", REPO / "docs" / "images" / "performance.png"
DATA = REPO / "results" / "performance.json"
MARK = "<!-- made by benchmarks/run.py -->"

PARTS: dict[str, tuple[str, list[str]]] = {
    "direct-io": ("Direct I/O", ["direct_io"]),
    "deepspeed-50M-1": ("DeepSpeed, 50M, 1 rank", ["deepspeed_save_load", "--ranks=1", "--millions=50", "--peers", "dcp"]),
    "deepspeed-50M-2": ("DeepSpeed, 50M, 2 ranks", ["deepspeed_save_load", "--ranks=2", "--millions=50"]),
    "deepspeed-50M-4": ("DeepSpeed, 50M, 4 ranks", ["deepspeed_save_load", "--ranks=4", "--millions=50", "--peers", "dcp"]),
    "deepspeed-50M-2-zero3": (
        "DeepSpeed, 50M, 2 ranks, ZeRO-3",
        ["deepspeed_save_load", "--ranks=2", "--millions=50", "--stage=3", "--peers", "dcp"],
    ),
    "deepspeed-350M-1": ("DeepSpeed, 350M, 1 rank", ["deepspeed_save_load", "--ranks=1", "--millions=350", "--peers"]),
    "deepspeed-350M-2": ("DeepSpeed, 350M, 2 ranks", ["deepspeed_save_load", "--ranks=2", "--millions=350", "--peers"]),
    "deepspeed-350M-4-zero3": (
        "DeepSpeed, 350M, 4 ranks, ZeRO-3",
        ["deepspeed_save_load", "--ranks=4", "--millions=350", "--stage=3", "--no-steps", "--peers"],
    ),
    "deepspeed-3d-50M-4": (
        "DeepSpeed TP2/PP2/DP1, 50M, 4 ranks",
        ["deepspeed_save_load", "--ranks=4", "--millions=50", "--tensor=2", "--pipeline=2", "--peers", "universal"],
    ),
    "deepspeed-3d-50M-8": (
        "DeepSpeed TP2/PP2/DP2, 50M, 8 ranks",
        ["deepspeed_save_load", "--ranks=8", "--millions=50", "--tensor=2", "--pipeline=2", "--peers", "universal"],
    ),
    "deepspeed-3d-350M-4": (
        "DeepSpeed TP2/PP2/DP1, 350M, 4 ranks",
        ["deepspeed_save_load", "--ranks=4", "--millions=350", "--tensor=2", "--pipeline=2", "--no-steps", "--peers"],
    ),
    "megatron-50M": ("Megatron, 50M", ["megatron_save_load", "--millions=50", "--layouts", "tp2", "tp2dp2"]),
}  # fmt: skip
SHOWN = (
    ("training stands still", {
        "memory copy": "one memory copy", "unickpt stall": "unickpt", "unickpt stall, asynchronous": "unickpt",
        "DeepSpeed save": "DeepSpeed", "DCP async_save, stall": "DCP async_save",
        "dp_reshardable stall, asynchronous": "torch_dist async",
    }),
    ("until the checkpoint is safe", {
        "raw write": "raw write and fsync", "unickpt committed": "unickpt", "unickpt written, asynchronous": "unickpt",
        "DeepSpeed save": "DeepSpeed", "DCP async_save, written": "DCP async_save",
        "dp_reshardable written, asynchronous": "torch_dist async",
    }),
    ("load, from the disk", {
        "raw read, uncached": "raw read", "unickpt load, uncached": "unickpt", "DeepSpeed load, uncached": "DeepSpeed",
        "DCP load, uncached": "DCP", "dp_reshardable load, uncached": "torch_dist",
    }),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    if args.list:
        print("\n".join(PARTS))
        return
    written, _, made = PAGE.read_text().partition(MARK)
    parts = sections(made)
    data: dict[str, Any] = json.loads(DATA.read_text()) if DATA.is_file() else {}
    for name in args.only:
        title, command = PARTS[name]
        text, found = measured(command, args.rounds)
        parts[title] = text
        data |= {name: found} if found else {}
        body = "".join(f"\n## {t}\n\n{parts[t].strip()}\n" for t, _ in PARTS.values() if t in parts)
        PAGE.write_text(f"{written}{MARK}\n{body}")
        DATA.write_text(json.dumps(data, indent=1))
        print(f"{name}: done", flush=True)
    results = [each for name in PARTS for each in data.get(name, [])]
    if results:
        draw(results)


def sections(text: str) -> dict[str, str]:
    """Return the sections of an earlier run: title -> body."""
    pieces = re.split(r"^## (.*)$", text, flags=re.MULTILINE)[1:]
    return dict(zip(pieces[::2], pieces[1::2], strict=True))


def measured(command: list[str], rounds: int) -> tuple[str, list[Any]]:
    """Run a benchmark, and return its text and its seconds, if it has any."""
    with tempfile.TemporaryDirectory() as folder:
        out, seconds = Path(folder) / "out.md", Path(folder) / "seconds.json"
        script, *options = command
        options.append(f"--rounds={rounds}")
        options += ["--json", str(seconds)] if script.endswith("save_load") else []
        subprocess.run([sys.executable, "-m", f"benchmarks.{script}", *options, "--out", str(out)], check=True, cwd=REPO)
        return out.read_text(), json.loads(seconds.read_text()) if seconds.is_file() else []


def draw(results: list[Any]) -> None:
    """Draw medians as bars, one panel per question and benchmark, with whiskers from the fastest to the slowest round."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(
        len(results), len(SHOWN), figsize=(13, 1.6 * len(results) + 0.6), squeeze=False, layout="constrained"
    )
    for row, result in zip(panels, results, strict=True):
        for panel, (question, rows) in zip(row, SHOWN, strict=True):
            bars = [(label, result["seconds"][key]) for key, label in rows.items() if key in result["seconds"]]
            for at, (label, values) in enumerate(reversed(bars)):
                middle = statistics.median(values)
                colour = "#1f77b4" if label == "unickpt" else "#2ca02c" if "raw" in label or "copy" in label else "#b0b0b0"
                spread = [[middle - min(values)], [max(values) - middle]]
                panel.barh(at, middle, color=colour, xerr=spread, error_kw={"elinewidth": 1})
                panel.text(max(values), at, f" {middle:.2g} s", va="center", fontsize=7)
            panel.set_yticks(range(len(bars)), [label for label, _ in reversed(bars)], fontsize=7)
            panel.set_xmargin(0.2)
            panel.tick_params(axis="x", labelsize=7)
            panel.set_title(f"{result['title']}: {question}", fontsize=8)
            panel.spines[["top", "right"]].set_visible(False)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main()
