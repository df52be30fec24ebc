"""The hooks that the adapters declare, without an import of the adapters: they import the frameworks.

``hooks.json`` has them; ``unickpt hooks status --declared`` prints it from the declarations.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from unickpt.base.hooks import Hook

FILE = Path(__file__).with_name("hooks.json")


class Role(str, Enum):
    """What a job loses without a hook."""

    NEEDED = "needed"  # unickpt itself
    BESIDE = "beside"  # one function of it
    OPTION = "option"  # a function that an option asks for


@dataclass(frozen=True, slots=True)
class DeclaredHook:
    """A hook and its role. The hook has no wrapper: it is for looking at, not for installing."""

    hook: Hook
    role: Role


def read() -> list[DeclaredHook]:
    """Return the declared hooks of all adapters."""
    return [_hook(record) for record in json.loads(FILE.read_text(encoding="utf-8"))]


def as_json(hook: Hook, role: Role) -> dict[str, Any]:
    """Return the record of a hook in the file."""
    return {
        "name": hook.name,
        "module": hook.module,
        "attribute": hook.attribute,
        "parameters": list(hook.parameters),
        "versions": str(hook.versions),
        "strict": hook.strict,
        "role": role.value,
        "fingerprints": sorted(hook.fingerprints),
    }


def _hook(record: dict[str, Any]) -> DeclaredHook:
    hook = Hook(
        name=record["name"],
        module=record["module"],
        attribute=record["attribute"],
        wrapper=_no_wrapper,
        versions=SpecifierSet(record["versions"]),
        fingerprints=frozenset(record["fingerprints"]),
        why="",
        upstream="",
        until="",
        parameters=tuple(record["parameters"]),
        strict=record["strict"],
    )
    return DeclaredHook(hook, Role(record["role"]))


def _no_wrapper(_wrapped: Callable[..., Any], _instance: Any, _args: Any, _kwargs: Any) -> Any:
    raise NotImplementedError
