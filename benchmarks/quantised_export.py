"""Perplexity of quantised exports on held-out text, for one scheme for all weights and for plans of the same size.

    python -m benchmarks.quantised_training MODEL
    python -m benchmarks.quantised_export MODEL [--keep results/quantised.jsonl] [--page docs/evidence/quantised.md]

Each row is an export of the trained checkpoint that transformers loads with compressed-tensors and computes in float32, so
rows differ in the rounded weights only. Statistics of inputs and measured errors are those of text of the training.
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

WINDOWS, BATCH, SAMPLE = 180, 16, 16
CHOICES = ("4", "8", "16")
ALL_CHOICES = ("4/channel", "4/128", "4/64", "4/32", "8/channel", "8/128", "16")
INDICATORS = ("second-moment", "weight-error", "variance")
RANDOM_PLANS = 3
HALF = "half of the windows, "
HALF_CHOICES, HALF_BATCH = ("4/channel", "4", "4/64", "4/32", "8"), 15
TABLES = re.compile(r"(<!-- figures[^>]*-->\n\n).*?(\n<!-- end of figures -->)", re.S)


def windows(text: torch.Tensor, count: int) -> torch.Tensor:
    """Return ``count`` windows that do not overlap, evenly spread, int64 ``[count, CONTEXT + 1]``."""
    step = (len(text) - CONTEXT - 1) // count
    return torch.stack([text[at * step : at * step + CONTEXT + 1] for at in range(count)]).long()


@torch.no_grad()
def log_probabilities(folder: Path, held_out: torch.Tensor) -> torch.Tensor:
    """Load a folder in transformers, and return float32 ``[windows, CONTEXT, 256]``: log-probabilities of the next byte."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    return torch.cat([model(block[:, :-1]).logits.log_softmax(2) for block in held_out.split(BATCH)])


class Exports:
    """Exports of one checkpoint, and their perplexities.

    Attributes:
        rows: one entry for each export: name, bytes and predicted error; nats per byte; their growth over 16 bits and its
            standard error; Kullback-Leibler divergence of 16 bits from it, in nats per byte.
    """

    def __init__(self, source: Path, folder: Path, held_out: torch.Tensor) -> None:
        self._checkpoint, self._config, self._folder = source / "trained", source, folder
        self._held_out = held_out
        self._base: torch.Tensor | None = None  # log-probabilities in 16 bits
        self.rows: list[dict[str, Any]] = []

    def measured(self, kind: str, name: str, bits: str | Path, size: int | None = None, error: float | None = None) -> None:
        """Export, load, measure and keep a row. ``size`` is that of the plan."""
        out = self._folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        made = unickpt.export_checkpoint(self._checkpoint, out, to="vllm", bits=bits, config=self._config, verify=False)
        assert not made.notes, made.notes
        found = log_probabilities(out, self._held_out)
        base = self._base = found if self._base is None else self._base
        targets = self._held_out[:, 1:, None]
        nats, before = (-each.gather(2, targets).flatten().double() for each in (found, base))
        apart = nats - before
        self.rows.append({
            "kind": kind, "name": name, "bytes": size or made.size_bytes, "error": error, "nats": float(nats.mean()),
            "growth": float(apart.mean()), "deviation": float(apart.std() / math.sqrt(len(apart))),
            "divergence": float((base.exp() * (base - found)).sum(2).double().mean()),
        })  # fmt: skip
        print(json.dumps(self.rows[-1]), flush=True)

    def plan(self, memory_bytes: int, **more: Any) -> dict[str, Any]:
        """Return a plan, also written to the file ``plan.json``."""
        return unickpt.plan_bits(self._checkpoint, memory_bytes, config=self._config, output=self._folder / "plan.json", **more)

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


def measure_errors(folder: Path, path: Path) -> None:
    """Write the errors of all schemes on the same windows."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    batches = [{"input_ids": block} for block in windows(parts()[0], SAMPLE)[:, :-1].split(BATCH)]
    unickpt.measure_rounding(model, batches, path, schemes=ALL_CHOICES)


def measure(source: Path, folder: Path) -> list[dict[str, Any]]:
    """Return all rows."""
    exports = Exports(source, folder, windows(parts()[1], WINDOWS))
    for scheme in ("16", "8/channel", "8", "4/32", "4/64", "4", "4/channel"):
        exports.measured("uniform", scheme, scheme, exports.size(scheme))
        if scheme == "16":
            record_inputs(folder / "out", folder / "inputs.safetensors")
            measure_errors(folder / "out", folder / "errors.json")
    ways: list[dict[str, Any]] = [{"indicator": indicator} for indicator in INDICATORS]
    ways += [{"indicator": indicator, "inputs": folder / "inputs.safetensors"} for indicator in INDICATORS[1:]]
    measured: dict[str, Any] = {"errors": folder / "errors.json"}
    for scheme in ("4", "4/64", "4/32"):
        for way in (*ways[:4], measured):
            exports.planned(f"size of {scheme}", _name(way), exports.size(scheme), schemes=ALL_CHOICES, **way)
    for share in (0.25, 0.5):
        low, high = exports.size("4"), exports.size("8")
        memory, kind = int(low + share * (high - low)), f"{share:.0%} from 4 to 8"
        for way in (*ways, measured):
            exports.planned(kind, _name(way), memory, schemes=CHOICES, **way)
        for way in (ways[0], measured):
            exports.planned(kind, f"{_name(way)}, groups of all sizes", memory, schemes=ALL_CHOICES, **way)
        exports.filled(kind, "first layers in 8 bits", memory, lambda _: None)
        exports.filled(kind, "last layers in 8 bits", memory, lambda pairs: pairs.reverse())
        for seed in range(RANDOM_PLANS):
            exports.filled(kind, f"random units in 8 bits, {seed}", memory, random.Random(seed).shuffle)
    return exports.rows


def measure_labelled(source: Path, folder: Path) -> list[dict[str, Any]]:
    """Return rows of plans by errors that are measured with labels on one half of the held-out windows. They show the other."""
    from transformers import AutoModelForCausalLM

    held_out = windows(parts()[1], WINDOWS)
    exports = Exports(source, folder, held_out[1::2])
    exports.measured(f"{HALF}one scheme", "16", "16", exports.size("16"))
    model = AutoModelForCausalLM.from_pretrained(str(folder / "out"), dtype=torch.float32).eval()
    batches = [{"input_ids": block, "labels": block} for block in held_out[::2].split(HALF_BATCH)]
    unickpt.measure_rounding(model, batches, folder / "labelled.json", schemes=HALF_CHOICES)
    for scheme in ("4", "4/64", "4/32"):
        size, kind = exports.size(scheme), f"{HALF}size of {scheme}"
        exports.measured(kind, f"{scheme} for all", scheme, size)
        exports.planned(kind, "second-moment", size, schemes=HALF_CHOICES, indicator="second-moment")
        exports.planned(kind, "errors with labels", size, schemes=HALF_CHOICES, errors=folder / "labelled.json")
    size, kind = (exports.size("4") + exports.size("8")) // 2, f"{HALF}50% from 4 to 8"
    exports.planned(kind, "second-moment", size, schemes=HALF_CHOICES, indicator="second-moment")
    exports.planned(kind, "errors with labels", size, schemes=HALF_CHOICES, errors=folder / "labelled.json")
    return exports.rows


def _name(way: dict[str, Any]) -> str:
    if "errors" in way:
        return "measured errors"
    return f"{way['indicator']}{' with inputs' * ('inputs' in way)}"


def tables(rows: list[dict[str, Any]]) -> str:
    """Return the tables of the page."""

    def line(row: dict[str, Any]) -> str:
        growth = f"{row['growth'] * 1e3:+.2f} ± {row['deviation'] * 1e3:.2f}"
        return f"| {row['name']} | {row['bytes']:,} | {math.exp(row['nats']):.4f} | {growth} | {row['divergence'] * 1e3:.3f} |"

    head = "| {} | bytes | perplexity | growth of the loss, 10⁻³ | divergence from 16 bits, 10⁻³ |\n|---|---|---|---|---|\n"
    uniform = [row for row in rows if row["kind"] == "uniform"]
    found = [head.format("one scheme") + "\n".join(map(line, uniform))]
    for kind in dict.fromkeys(row["kind"] for row in rows if row["kind"] != "uniform"):
        own = [row for row in rows if row["kind"] == kind]
        chance = [row for row in own if row["name"].startswith("random")]
        same = [{**row, "name": f"{row['name']} for all"} for row in uniform if row["name"] == kind.removeprefix("size of ")]
        lines = [line(row) for row in (*same, *(row for row in own if row not in chance))]
        if chance:
            means = {key: statistics.mean(row[key] for row in chance) for key in ("nats", "growth", "deviation", "divergence")}
            size = max(row["bytes"] for row in chance)
            lines.append(line({"name": f"random units in 8 bits, mean of {len(chance)}", "bytes": size, **means}))
        found.append(head.format(f"plan, {kind}") + "\n".join(lines))
    return "\n\n".join(found) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--keep", type=Path, help="JSON lines of all rows; an existing file is only rendered")
    parser.add_argument("--page", type=Path, help="page whose marked tables are replaced")
    parser.add_argument("--labelled", action="store_true", help="only plans by errors with labels, on half of the windows")
    args = parser.parse_args()
    if args.keep is not None and args.keep.exists():
        rows = [json.loads(line) for line in args.keep.read_text().splitlines()]
    else:
        with tempfile.TemporaryDirectory() as folder:
            rows = [] if args.labelled else measure(args.model, Path(folder))
            rows += measure_labelled(args.model, Path(folder))
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
