"""Under torchrun: run every scenario of ``tests.megatron.scenarios`` on this world size.

scenario_worker DIR [NAME ...] [--worlds 1,2]    writes DIR/w<world>.json: {scenario: {rank: failure}}, without those that
skip: they are about something that this version of Megatron does not have. Worlds smaller than this one can be asked for.
"""

from __future__ import annotations

import ast
import datetime
from collections.abc import Callable
from functools import partial
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
    from tests.megatron import scenarios  # before anything of megatron, and before ranks fork

    from tests.launch import leave
    from tests.megatron.truth import in_a_group
    from tests.scenarios import asked, run
    from tests.turns import in_turn

    told = asked()
    work = partial(run, scenarios.REGISTRY, told.folder, set(told.names))
    in_turn((world, partial(in_a_group, work, timeout=datetime.timedelta(seconds=60))) for world in told.worlds)
    leave()


if __name__ == "__main__":
    main()
