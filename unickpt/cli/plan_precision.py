"""``unickpt plan precision``: which layers of slow ranks compute in bf16, so that these ranks do not hold up a step."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from unickpt.base.errors import ConfigError
from unickpt.base.private_files import read_text
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.cli.exit_codes import SOUND
from unickpt.cli.locate import locate_checkpoint
from unickpt.cli.output import Output, human_ms, progress_bar, write_json
from unickpt.planning.plan.layers import RankLayers
from unickpt.planning.plan.precision import PrecisionPlan, SlowRanks, lowerable, plan_precision, slow_ranks
from unickpt.planning.plan.sources import read_layers
from unickpt.planning.replay.savings import SavedTimes
from unickpt.planning.replay.sources import read_trace
from unickpt.training.precision.policy import LOW, Policy
from unickpt.transform.quantise.narrowing import narrowing_errors

PARAMETERS, GIVEN = "parameters", "file"
_MOST_BYTES = 16 << 20


def run(args: argparse.Namespace, out: Output) -> int:
    """Plan, print, and write the plan."""
    measured = _slow(args, read_layers(args.folders).ranks)
    names = list(dict.fromkeys(layer.name for each in measured for _, layer in lowerable(each)))
    indicator, errors = _errors(args, names, measured)
    groups = slow_ranks(measured, _low(args), errors.__getitem__)
    times = SavedTimes(read_trace(list(map(str, args.folders))), args.steps)
    found = plan_precision(groups, times.work_s, times.steps_s, within=args.within / 100)
    low = {name: LOW for group in found.groups for name in group.low}
    ranks = () if args.device else tuple(sorted(rank for group in found.groups if group.low for rank in group.ranks))
    policy = Policy(low, args.device or "", ranks, len(times.work_s) if ranks else 0)
    document = policy.as_json() | _prediction(found, groups, times, indicator)
    if args.out is not None:
        write_json(args.out, document)
    if args.json:
        out.json(document)
    else:
        _tell(document, out)
    return SOUND


def _slow(args: argparse.Namespace, measured: Sequence[RankLayers]) -> list[RankLayers]:
    found = [each for each in measured if (each.device == args.device if args.device else each.rank in args.ranks)]
    if args.device and not found:
        known = sorted({each.device for each in measured})
        raise ConfigError(f"no rank has the device {args.device!r}; there are {', '.join(map(repr, known))}")
    missing = [] if args.device else sorted(set(args.ranks) - {each.rank for each in found})
    if missing:
        has = ", ".join(str(each.rank) for each in measured)
        raise ConfigError(f"ranks {', '.join(map(str, missing))} have no times of layers; there are those of ranks {has}")
    return found


def _low(args: argparse.Namespace) -> Callable[[int, float], float]:
    """Return the function from a layer's number and its seconds to the seconds in bf16."""
    if args.speedup:
        return lambda _number, full_s: full_s / float(args.speedup)
    layers = read_layers(args.low).layers
    took = {number: each.forward_s + each.backward_s for number, each in enumerate(layers)}
    return lambda number, full_s: took.get(number) or full_s


def _errors(args: argparse.Namespace, names: Sequence[str], measured: Sequence[RankLayers]) -> tuple[str, dict[str, float]]:
    """Return the name of the indicator, and the predicted error of each layer."""
    if args.checkpoint:
        checkpoint = Checkpoint.open(locate_checkpoint(args.checkpoint))
        total = sum(info.size_bytes for info in checkpoint.index.tensors if info.state == "weight")
        with progress_bar("measure", total) as advance:
            found = narrowing_errors(checkpoint, names, torch.bfloat16, advance)
        return found.indicator, dict(zip(names, found.errors, strict=True))
    if args.errors:
        return GIVEN, _given(args.errors, names)
    sizes = {layer.name: float(layer.parameters) for each in measured for _, layer in lowerable(each)}
    return PARAMETERS, sizes


def _given(path: Path, names: Sequence[str]) -> dict[str, float]:
    try:
        document = json.loads(read_text(path, _MOST_BYTES))
    except (OSError, ValueError, RecursionError) as err:
        raise ConfigError(f"{path}: cannot be read as JSON ({err})") from err
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: expected a JSON object with an error for each layer")
    for name in names:
        value = document.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not (0 <= value < math.inf):
            raise ConfigError(f'{path}: the error of layer "{name}" must be a number from 0, not {value!r}')
    return {name: float(document[name]) for name in names}


def _prediction(found: PrecisionPlan, groups: Sequence[SlowRanks], times: SavedTimes, indicator: str) -> dict[str, Any]:
    rows = [
        {
            "ranks": list(group.ranks), "needed_s": plan.needed_s, "saved_s": plan.saved_s, "most_s": group.most_s,
            "error": plan.error,
            "layers": [
                {
                    "name": each.name, "full_s": each.full_s, "low_s": each.low_s, "error": each.error,
                    "low": each.name in plan.low,
                }
                for each in group.layers
            ],
        }
        for group, plan in zip(groups, found.groups, strict=True)
    ]  # fmt: skip
    return {
        "indicator": indicator, "measured_s": times.step_s, "step_s": found.step_s, "lowest_s": found.lowest_s,
        "unhindered_s": found.unhindered_s, "error_s": times.error_s, "groups": rows,
    }  # fmt: skip


def _tell(document: dict[str, Any], out: Output) -> None:
    measured, step, lowest = (human_ms(document[name]) for name in ("measured_s", "step_s", "lowest_s"))
    out.line(f"predicted step: {step}; measured: {measured}; with all layers of these ranks in bf16: {lowest}", style="bold")
    if document["lowest_s"] > document["unhindered_s"] * (1 + 1e-3) + document["error_s"]:
        unhindered = human_ms(document["unhindered_s"])
        out.line(f"speed binds: with all layers in bf16 these ranks still hold up the step ({unhindered} without their work)")
    for group in document["groups"]:
        ranks, layers = ",".join(map(str, group["ranks"])), group["layers"]
        low = sum(each["low"] for each in layers)
        out.line()
        out.line(
            f"ranks {ranks}: {low} of {len(layers)} layers in bf16 save {human_ms(group['saved_s'])} of a step; needed: "
            f"{human_ms(group['needed_s'])}"
        )
        rows = [
            (each["name"], LOW if each["low"] else "", human_ms(each["full_s"]), human_ms(each["low_s"]),
             f"{each['error']:.4g}")
            for each in layers
        ]  # fmt: skip
        out.table(f"layers ({document['indicator']})", ("layer", "dtype", "now", "in bf16", "predicted error"), rows)
    out.line()
    out.line('DeepSpeed: "unickpt": {"precision": "PLAN.json"}')
    out.line("Megatron: --unickpt-precision PLAN.json")
