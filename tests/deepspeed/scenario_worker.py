"""Under torchrun: run every scenario of a module on this world size, one after the other.

    scenario_worker MODULE DIR [NAME ...] [--worlds 1,2]    writes DIR/w<world>.json: {scenario: {rank: failure}}

Worlds smaller than this one can be asked for. A scenario is a function ``name(folder)`` marked with
``@scenario(worlds)``; it asserts.
"""

from __future__ import annotations

import datetime
import importlib
import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import deepspeed

from tests.launch import leave
from tests.scenarios import Scenario, asked, run
from tests.turns import in_turn

REGISTRY: dict[str, dict[str, tuple[tuple[int, ...], Scenario]]] = {}


def scenario(*worlds: int, long: bool = False) -> Callable[[Scenario], Scenario]:
    """Mark a function as a scenario for these world sizes; a ``long`` one for ``UNICKPT_FULL_MATRIX=1`` alone."""

    def mark(function: Scenario) -> Scenario:
        if long and os.environ.get("UNICKPT_FULL_MATRIX") != "1":
            return function
        REGISTRY.setdefault(function.__module__, {})[function.__name__] = (worlds, function)
        return function

    return mark


def scenarios(module: str) -> dict[str, tuple[tuple[int, ...], Scenario]]:
    """Scenarios of a module by name."""
    importlib.import_module(module)
    # this file runs as __main__ under torchrun; scenario modules import it by its own name
    return importlib.import_module("tests.deepspeed.scenario_worker").REGISTRY[module]


def run_all(module: str, folder: Path, only: set[str]) -> None:
    warnings.filterwarnings("ignore")
    deepspeed.init_distributed("gloo", timeout=datetime.timedelta(seconds=60), verbose=False)
    run(scenarios(module), folder, only)


def main() -> None:
    told = asked("module")
    in_turn((world, partial(run_all, told.module, told.folder, set(told.names))) for world in told.worlds)
    leave()


if __name__ == "__main__":
    main()
