"""Scenarios: functions ``name(folder)`` with assertions. All ranks of a process group run them one after the other.

The start of a process group takes seconds, a scenario a fraction of a second.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import traceback
import unittest
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch.distributed as dist

from tests.support.turns import forget_garbage

Scenario = Callable[[Path], None]
Scenarios = Mapping[str, tuple[tuple[int, ...], Scenario]]  # name -> world sizes and function


def run(scenarios: Scenarios, folder: Path, only: set[str]) -> None:
    """Run the scenarios of this world size in the default group, and write FOLDER/w<world>.json: {scenario: {rank: failure}}.

    A scenario that raises SkipTest, on every rank, is not in that file but, with its reason, in FOLDER/w<world>-skipped.json:
    this version of a framework, or this installation, lacks a feature.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    outcome: dict[str, dict[int, str]] = {}
    skipped: dict[str, str] = {}
    for name, (worlds, function) in scenarios.items():
        if world not in worlds or (only and name not in only):
            continue
        place = folder / f"{name}-w{world}"
        place.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        failure, began_s = None, time.monotonic()
        try:
            function(place)
        except unittest.SkipTest as why:
            skipped[name] = str(why)
            continue
        except BaseException:  # torch's CheckpointException does not derive from Exception
            failure = traceback.format_exc()
            print(f"rank {rank}: {name}\n{failure}", flush=True)
        if rank == 0:
            print(f"scenario {name} with {world} ranks: {time.monotonic() - began_s:.1f} s", flush=True)
        found: list[str | None] = [None] * world
        dist.all_gather_object(found, failure)
        outcome[name] = {r: text for r, text in enumerate(found) if text is not None}
        forget_garbage()
    if rank == 0:
        (folder / f"w{world}.json").write_text(json.dumps(outcome))
        (folder / f"w{world}-skipped.json").write_text(json.dumps(skipped))
    dist.barrier()


def outcomes(folder: Path, worlds: Iterable[int]) -> dict[tuple[str, int], dict[str, str] | str]:
    """Return what ``run`` wrote: by scenario and world size, the failures by rank, or the reason why it was skipped."""
    files = [(world, folder / f"w{world}{end}.json") for world in worlds for end in ("", "-skipped")]
    return {(name, world): outcome for world, file in files for name, outcome in json.loads(file.read_text()).items()}


def arguments(*before: str) -> argparse.Namespace:
    """Return the arguments of a worker: ``before``, ``folder``, ``names`` of scenarios (empty: all), and ``worlds``."""
    parser = argparse.ArgumentParser()
    for name in before:
        parser.add_argument(name)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--worlds", type=_numbers, default=os.environ["WORLD_SIZE"], help="separated by commas")
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]
