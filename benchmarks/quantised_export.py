"""Perplexity of quantised exports on held-out text, for one scheme for all weights and for plans of the same size.

    python -m benchmarks.quantised_training MODEL
    python -m benchmarks.quantised_export MODEL [--keep results/quantised.jsonl] [--page docs/evidence/quantised.md]

Each row is an export of the trained checkpoint that transformers loads with compressed-tensors and computes in float32, so
rows differ in the rounded weights only. Statistics of inputs are those of text of the training.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import unickpt
from benchmarks.measure import machine
from benchmarks.quantised_training import CONTEXT, parts

WINDOWS, BATCH, SAMPLE = 96, 16, 16
CHOICES = ("4", "8", "16")
ALL_CHOICES = ("4/channel", "4/128", "4/64", "4/32", "8/channel", "8/128", "16")
INDICATORS = ("second-moment", "weight-error", "variance")
RANDOM_PLANS = 3
TABLES = re.compile(r"(<!-- figures[^>]*-->\n\n).*?(\n<!-- end of figures -->)", re.S)


def windows(text: torch.Tensor, count: int) -> torch.Tensor:
    """Return ``count`` windows that do not overlap, evenly spread, int64 ``[count, CONTEXT + 1]``."""
    step = (len(text) - CONTEXT - 1) // count
    return torch.stack([text[at * step : at * step + CONTEXT + 1] for at in range(count)]).long()


@torch.no_grad()
def nats_per_byte(folder: Path, held_out: torch.Tensor) -> float:
    """Load a folder in transformers, and return the mean cross-entropy on the windows."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    total = 0.0
    for block in held_out.split(BATCH):
        logits = model(block[:, :-1]).logits.flatten(0, 1)
        total += float(torch.nn.functional.cross_entropy(logits, block[:, 1:].flatten(), reduction="sum"))
    return total / (held_out.shape[0] * CONTEXT)


class Exports:
    """Exports of one checkpoint, and their perplexities.

    Attributes:
        rows: one entry for each export: name, bytes, nats, predicted error.
    """

    def __init__(self, source: Path, folder: Path) -> None:
        self._checkpoint, self._config, self._folder = source / "trained", source, folder
        self._held_out = windows(parts()[1], WINDOWS)
        self.rows: list[dict[str, Any]] = []

    def measured(self, kind: str, name: str, bits: str | Path, size: int | None = None, error: float | None = None) -> None:
        """Export, load, measure and keep a row. ``size`` is that of the plan."""
        out = self._folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        made = unickpt.export_checkpoint(self._checkpoint, out, to="vllm", bits=bits, config=self._config, verify=False)
        assert not made.notes, made.notes
        nats = nats_per_byte(out, self._held_out)
        self.rows.append({"kind": kind, "name": name, "bytes": size or made.size_bytes, "nats": nats, "error": error})
        print(json.dumps(self.rows[-1]), flush=True)

    def plan(self, memory_bytes: int, **more: Any) -> dict[str, Any]:
        """Return a plan, also written to the file ``plan.json``."""
        return unickpt.plan_bits(
            self._checkpoint, memory_bytes, config=self._config, output=self._folder / "plan.json", **more
        )  # fmt: skip

    def size(self, scheme: str) -> int:
        """Return the bytes of one scheme for all weights."""
        found: int = self.plan(1 << 60, schemes=[scheme])["total_bytes"]
        return found

    def planned(self, kind: str, name: str, memory_bytes: int, **more: Any) -> None:
        """Plan, export and measure."""
        found = self.plan(memory_bytes, **more)
        self.measured(kind, name, self._folder / "plan.json", found["total_bytes"], found["error"])

    def filled(self, kind: str, name: str, memory_bytes: int, order: Callable[[list[dict[str, Any]]], None]) -> None:
        """Measure 8 bits for units in an order, as long as they fit, and 4 bits for the others."""
        low, high = (self.plan(1 << 60, schemes=[bits]) for bits in ("4", "8"))
        size = low["total_bytes"]
        pairs = [{"low": a, "high": b} for a, b in zip(low["units"], high["units"], strict=True)]
        order(pairs)
        units = []
        for pair in pairs:
            more = pair["high"]["bytes"] - pair["low"]["bytes"]
            fits = size + more <= memory_bytes
            size += more * fits
            units.append(pair["high" if fits else "low"])
        (self._folder / "plan.json").write_text(json.dumps({"schema": 1, "units": units}))
        self.measured(kind, name, self._folder / "plan.json", size)


def record_inputs(folder: Path, path: Path) -> None:
    """Write the statistics of the inputs on a few windows of the training's text."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    with torch.no_grad(), unickpt.InputStatistics(model) as found:
        model(windows(parts()[0], SAMPLE)[:, :-1])
    found.save(path)


def measure(source: Path, folder: Path) -> list[dict[str, Any]]:
    """Return all rows."""
    exports = Exports(source, folder)
    for scheme in ("16", "8/channel", "8", "4/32", "4", "4/channel"):
        exports.measured("uniform", scheme, scheme, exports.size(scheme))
        if scheme == "16":
            record_inputs(folder / "out", folder / "inputs.safetensors")
    ways: list[dict[str, Any]] = [{"indicator": indicator} for indicator in INDICATORS]
    ways += [{"indicator": indicator, "inputs": folder / "inputs.safetensors"} for indicator in INDICATORS[1:]]
    for scheme in ("4", "8"):
        for way in ways:
            exports.planned(f"size of {scheme}", _name(way), exports.size(scheme), schemes=ALL_CHOICES, **way)
    for share in (0.25, 0.5):
        low, high = exports.size("4"), exports.size("8")
        memory, kind = int(low + share * (high - low)), f"{share:.0%} from 4 to 8"
        for way in ways:
            exports.planned(kind, _name(way), memory, schemes=CHOICES, **way)
        exports.filled(kind, "first layers in 8 bits", memory, lambda _: None)
        exports.filled(kind, "last layers in 8 bits", memory, lambda pairs: pairs.reverse())
        for seed in range(RANDOM_PLANS):
            exports.filled(kind, f"random units in 8 bits, {seed}", memory, random.Random(seed).shuffle)
    return exports.rows


def _name(way: dict[str, Any]) -> str:
    return f"{way['indicator']}{' with inputs' * ('inputs' in way)}"


def tables(rows: list[dict[str, Any]]) -> str:
    """Return the tables of the page."""
    base = next(row["nats"] for row in rows if row["name"] == "16")

    def line(name: str, size: float, nats: float) -> str:
        return f"| {name} | {size:,.0f} | {math.exp(nats):.4f} | {(nats - base) * 1e3:+.2f} |"

    head = "| {} | bytes | perplexity | growth of the loss, 10⁻³ nats per byte |\n|---|---|---|---|\n"
    found = [
        head.format("one scheme") + "\n".join(line(r["name"], r["bytes"], r["nats"]) for r in rows if r["kind"] == "uniform")
    ]
    for kind in dict.fromkeys(row["kind"] for row in rows if row["kind"] != "uniform"):
        own = [row for row in rows if row["kind"] == kind]
        chance = [row["nats"] for row in own if row["name"].startswith("random")]
        scheme = kind.removeprefix("size of ")
        lines = [
            line(f"`{scheme}` for all", r["bytes"], r["nats"]) for r in rows if (r["kind"], r["name"]) == ("uniform", scheme)
        ]
        lines += [line(r["name"], r["bytes"], r["nats"]) for r in own if not r["name"].startswith("random")]
        if chance:
            size = max(row["bytes"] for row in own)
            lines += [
                line(f"random units in 8 bits, mean of {len(chance)}", size, statistics.mean(chance)),
                line("random units in 8 bits, the best", size, min(chance)),
            ]
        found.append(head.format(f"plan, {kind}") + "\n".join(lines))
    return "\n\n".join(found) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--keep", type=Path, help="JSON lines of all rows; an existing file is only rendered")
    parser.add_argument("--page", type=Path, help="page whose marked tables are replaced")
    args = parser.parse_args()
    if args.keep is not None and args.keep.exists():
        rows = [json.loads(line) for line in args.keep.read_text().splitlines()]
    else:
        with tempfile.TemporaryDirectory() as folder:
            rows = measure(args.model, Path(folder))
        if args.keep is not None:
            args.keep.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = tables(rows)
    print(machine(), made, sep="\n")
    if args.page is not None:
        text, count = TABLES.subn(lambda found: f"{found[1]}{made}{found[2]}", args.page.read_text())
        assert count == 1, count
        args.page.write_text(text)


if __name__ == "__main__":
    main()
