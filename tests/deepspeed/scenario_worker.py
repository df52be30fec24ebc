"""Under torchrun: run every scenario of a module on this world size, one after the other.

    scenario_worker MODULE DIR      writes DIR/w<world>.json: {scenario: {rank: failure}}

One process group serves them all (starting one costs seconds, a scenario a fraction of one). A
scenario is a function ``name(folder)`` marked with ``@scenario(worlds)``; it asserts.
"""

from __future__ import annotations

import datetime
import importlib
import json
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import deepspeed
import torch.distributed as dist

from tests.launch import leave

Scenario = Callable[[Path], None]
REGISTRY: dict[str, dict[str, tuple[tuple[int, ...], Scenario]]] = {}


def scenario(*worlds: int) -> Callable[[Scenario], Scenario]:
    """Mark a function as a scenario for these world sizes."""

    def mark(function: Scenario) -> Scenario:
        REGISTRY.setdefault(function.__module__, {})[function.__name__] = (worlds, function)
        return function

    return mark


def scenarios(module: str) -> dict[str, tuple[tuple[int, ...], Scenario]]:
    """Scenarios of a module by name."""
    importlib.import_module(module)
    # this file runs as __main__ under torchrun; scenario modules import it by its own name
    return importlib.import_module("tests.deepspeed.scenario_worker").REGISTRY[module]


def main() -> None:
    module, folder = sys.argv[1], Path(sys.argv[2])
    only = set(sys.argv[3:])
    warnings.filterwarnings("ignore")
    deepspeed.init_distributed("gloo", timeout=datetime.timedelta(seconds=60), verbose=False)
    rank, world = dist.get_rank(), dist.get_world_size()
    outcome: dict[str, dict[int, str]] = {}
    for name, (worlds, function) in scenarios(module).items():
        if world not in worlds or (only and name not in only):
            continue
        place = folder / f"{name}-w{world}"
        place.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        failure = None
        try:
            function(place)
        except Exception:
            failure = traceback.format_exc()
            print(f"rank {rank}: {name}\n{failure}", flush=True)
        found: list[str | None] = [None] * world
        dist.all_gather_object(found, failure)
        outcome[name] = {r: text for r, text in enumerate(found) if text is not None}
    if rank == 0:
        (folder / f"w{world}.json").write_text(json.dumps(outcome))
    dist.barrier()
    leave()


if __name__ == "__main__":
    main()
