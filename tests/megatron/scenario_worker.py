"""Under torchrun: run every scenario of ``tests.megatron.scenarios`` on this world size.

scenario_worker DIR [NAME ...]      writes DIR/w<world>.json: {scenario: {rank: failure}}, without those that skip:
they are about something that this version of Megatron does not have.
"""

from __future__ import annotations

import ast
import datetime
import json
import sys
import traceback
import unittest
import warnings
from collections.abc import Callable
from pathlib import Path

Scenario = Callable[[Path], None]
REGISTRY: dict[str, tuple[tuple[int, ...], Scenario]] = {}


def scenario(*worlds: int) -> Callable[[Scenario], Scenario]:
    """Mark a function as a scenario for these world sizes."""

    def mark(function: Scenario) -> Scenario:
        REGISTRY[function.__name__] = (worlds, function)
        return function

    return mark


def declared() -> dict[str, tuple[int, ...]]:
    """Scenarios and their world sizes, without importing them: they import the CPU harness, which changes torch."""
    source = (Path(__file__).parent / "scenarios.py").read_text()
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call) and getattr(decorator.func, "id", "") == "scenario":
                    found[node.name] = tuple(ast.literal_eval(argument) for argument in decorator.args)
    return found


def main() -> None:
    from tests.megatron import scenarios  # before anything of megatron

    import torch.distributed as dist

    from tests.launch import leave
    from tests.megatron.truth import close

    warnings.filterwarnings("ignore")
    folder, only = Path(sys.argv[1]), set(sys.argv[2:])
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    outcome: dict[str, dict[int, str]] = {}
    for name, (worlds, function) in scenarios.REGISTRY.items():
        if world not in worlds or (only and name not in only):
            continue
        place = folder / f"{name}-w{world}"
        place.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        failure = None
        try:
            function(place)
        except unittest.SkipTest:  # on every rank
            continue
        except BaseException:  # torch's CheckpointException is no Exception
            failure = traceback.format_exc()
            print(f"rank {rank}: {name}\n{failure}", flush=True)
        found: list[str | None] = [None] * world
        dist.all_gather_object(found, failure)
        outcome[name] = {r: text for r, text in enumerate(found) if text is not None}
    if rank == 0:
        (folder / f"w{world}.json").write_text(json.dumps(outcome))
    dist.barrier()
    close()
    leave()


if __name__ == "__main__":
    main()
