"""The registry of scenarios. Imports nothing of megatron.

A scenario is a function ``name(folder)`` with assertions, marked with ``@scenario(worlds)``. ``scenario_worker`` runs it under
torchrun.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

Scenario = Callable[[Path], None]
REGISTRY: dict[str, tuple[tuple[int, ...], Scenario]] = {}
MODULES = (
    "scenarios_library", "scenarios_asynchronous", "scenarios_late_copies", "scenarios_jobs", "scenarios_errors",
    "scenarios_memory", "scenarios_optimizers", "scenarios_own_loops", "scenarios_partial", "scenarios_precision",
    "scenarios_switch", "scenarios_witness",
)  # fmt: skip


def scenario(*worlds: int) -> Callable[[Scenario], Scenario]:
    """Mark a function as a scenario for these world sizes."""

    def mark(function: Scenario) -> Scenario:
        REGISTRY[function.__name__] = (worlds, function)
        return function

    return mark


def declared() -> dict[str, tuple[int, ...]]:
    """Return the scenarios and their world sizes. Does not import the modules, because the CPU harness patches torch."""
    found = {}
    for module in MODULES:
        for node in ast.parse((Path(__file__).parent / f"{module}.py").read_text()).body:
            if isinstance(node, ast.FunctionDef):
                for decorator in node.decorator_list:
                    if isinstance(decorator, ast.Call) and getattr(decorator.func, "id", "") == "scenario":
                        found[node.name] = tuple(ast.literal_eval(argument) for argument in decorator.args)
    return found
