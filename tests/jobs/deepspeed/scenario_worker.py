"""Under torchrun: run every scenario of a group of modules on this world size, one after the other.

    scenario_worker GROUP DIR [NAME ...] [--worlds 1,2]    writes DIR/w<world>.json: {scenario: {rank: failure}}

``--worlds`` may name smaller world sizes. A scenario is a function ``name(folder)`` with assertions, marked with
``@scenario(worlds)``.
"""

from __future__ import annotations

import datetime
import importlib
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import deepspeed

from tests.support import deepspeed_imports  # noqa: F401
from tests.support.extent import FULL
from tests.support.scenarios import Scenario, arguments, run
from tests.support.turns import in_turn
from unickpt.testing.launch import leave

REGISTRY: dict[str, dict[str, tuple[tuple[int, ...], Scenario]]] = {}
PACKAGE = "tests.jobs.deepspeed"
GROUPS = {  # each runs in one torchrun
    "state": (
        "scenarios_optimizers",
        "scenarios_offload",
        "scenarios_owned_states",
        "scenarios_parameters",
        "scenarios_calls",
        "scenarios_curriculum",
        "scenarios_partial_loads",
    ),
    "promises": (
        "scenarios_promises",
        "scenarios_starting",
        "scenarios_batch",
        "scenarios_precision",
        "scenarios_late_copies",
        "scenarios_witness",
    ),
    "errors": ("scenarios_damage", "scenarios_one_rank", "scenarios_mismatches", "scenarios_failed_saves"),
    "unsupported": ("scenarios_unsupported",),
    "pipeline": ("scenarios_pipeline", "scenarios_megatron", "scenarios_disagreements"),
    "experts": ("scenarios_experts", "scenarios_auto_experts", "scenarios_tensor_experts"),
    "tensors": ("scenarios_tensor",),
    "surgery": ("scenarios_surgery",),
    "placement": ("scenarios_placement",),
    "fidelity": ("scenarios_fidelity",),
    "memory": ("scenarios_memory",),
    "nvme": ("scenarios_nvme",),
    "object_store": ("scenarios_object_store",),
}


def scenario(*worlds: int, long: bool = False) -> Callable[[Scenario], Scenario]:
    """Mark a function as a scenario for these world sizes. A ``long`` one runs only with ``UNICKPT_FULL_MATRIX=1``."""

    def mark(function: Scenario) -> Scenario:
        if long and not FULL:
            return function
        REGISTRY.setdefault(function.__module__, {})[function.__name__] = (worlds, function)
        return function

    return mark


def scenarios(group: str) -> dict[str, tuple[tuple[int, ...], Scenario]]:
    """Return the scenarios of a group by name."""
    modules = [f"{PACKAGE}.{module}" for module in GROUPS[group]]
    for module in modules:
        importlib.import_module(module)
    # this file runs as __main__ under torchrun; scenario modules import it by its own name
    registry = importlib.import_module(f"{PACKAGE}.scenario_worker").REGISTRY
    return {name: found for module in modules for name, found in registry.get(module, {}).items()}


def run_all(group: str, folder: Path, only: set[str]) -> None:
    warnings.filterwarnings("ignore")
    deepspeed.init_distributed("gloo", timeout=datetime.timedelta(seconds=60), verbose=False)
    run(scenarios(group), folder, only)


def main() -> None:
    given = arguments("group")
    scenarios(given.group)  # imports them, before ranks fork
    in_turn((world, partial(run_all, given.group, given.folder, set(given.names))) for world in given.worlds)
    leave()


if __name__ == "__main__":
    main()
