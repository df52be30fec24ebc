"""The page Compatibility: one table of every version that counts. ``scripts/make_docs.py`` writes it.

What was tested is in ``docs/compatibility.toml``. The ranges are where the code and ``pyproject.toml`` declare them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomllib
from packaging.requirements import Requirement

from unickpt.cli.doctor import declared

REPO = Path(__file__).resolve().parent.parent
FACTS = REPO / "docs" / "compatibility.toml"
PAGE = REPO / "docs" / "start" / "compatibility.md"
# Of each framework, without an import of it: ``scripts/test.sh --unit`` has none.
_ADAPTERS = {each.hook.name.partition(".")[0]: each.hook.versions for each in declared.read()}
_BEGINNING = """\
<!-- Generated, do not edit: docs/compatibility.toml, then python scripts/make_docs.py -->
# Compatibility

Which versions work together?

| | supported | tested | expected to work | refused |
|---|---|---|---|---|
"""
_END = """
- **tested**: what ran with this version, on a CPU with gloo. A page is linked where it was more than the test suite.
- **expected to work**: the functions that unickpt wraps are known, or pip accepts the version. Nothing ran.
- **Another version** of DeepSpeed, Megatron or transformers is used if the wrapped functions are the same, or if a self-test
  passes on your machine ([Install](install.md#how-it-gets-into-the-framework)). `unickpt hooks status` says what holds there.

GPUs: [what ran on one](../evidence/gpu.md).
"""


def _range(kind: str, name: str, project: dict[str, Any]) -> str:
    """Return the supported versions of a component."""
    if kind == "project":
        return str(project["requires-python"])
    if kind in _ADAPTERS:
        return ", ".join(sorted(str(_ADAPTERS[kind]).split(","), reverse=True))
    among = project["dependencies"] if kind == "torch" else project["optional-dependencies"][kind]
    wanted = {"pytorch": "torch"}.get(name.lower(), name.lower())
    found = next(requirement for text in among if (requirement := Requirement(text)).name == wanted)
    return str(found.specifier) or "any"


def page() -> str:
    """Return the page."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    rows = []
    for name, facts in tomllib.loads(FACTS.read_text()).items():
        cells = [
            name,
            f"`{_range(facts['range'], name, project)}`",
            "<br>".join(f"{version}: {what}" for version, what in facts["tested"]),
            facts.get("expected", "-"),
            "<br>".join(f"{version}: {why}" for version, why in facts.get("refused", [])) or "-",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return _BEGINNING + "\n".join(rows) + "\n" + _END
