"""Write the generated parts of the docs: ``python scripts/make_docs.py``. With ``--check``, only compare.

The tables of ``docs/reference/options.md`` and ``docs/guides/steering-options.md``, and ``configs/unickpt.schema.json``, come
from the declarations in ``unickpt/base/options`` and ``megatron_unickpt/framework/flags.py``.
``docs/start/compatibility.md`` comes from ``docs/compatibility.toml``.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import compatibility

from megatron_unickpt.framework.flags import FLAG_ONLY, FLAGS, SCRIPT_OPTIONS, reason_without_flag
from unickpt.base.options.declared import UNLIMITED, Option, declarations
from unickpt.base.options.job import declared
from unickpt.base.options.json_section import schema
from unickpt.base.options.steering import SteeringOptions

REPO = Path(__file__).resolve().parent.parent
OPTIONS, SCHEMA = REPO / "docs" / "reference" / "options.md", REPO / "configs" / "unickpt.schema.json"
STEERING = REPO / "docs" / "guides" / "steering-options.md"
# A comment inside a Markdown table ends it, so the opening marker stands above the header.
MARKED = re.compile(r"(<!-- options of (\w+)[^>]*-->\n\n).*?(\n<!-- end of options -->)", re.S)
SECTIONS = {
    "unickpt": "",
    "compression": "compression",
    "memory": "memory",
    "timing": "timing",
    "witness": "witness",
}  # section by the word in the marker
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}


def _type(option: Option) -> str:
    if option.choices:
        return ", ".join(f"`{json.dumps(choice)}`" for choice in option.choices)
    if option.kind is float:
        return "number > 0"
    if option.kind is int:
        return f"integer ≥ {option.least}" if option.most is None else f"integer, {option.least} to {option.most}"
    return "names" if option.several else _TYPES[option.kind]


def _flag(option: Option) -> str:
    """Return the flag with its metavariable. A flag without a value shows the value that it sets."""
    reason = reason_without_flag(option)
    if reason:
        return f"none: {reason}"
    (flag,) = (flag for flag, other in FLAGS.items() if other == option)
    if option.kind is bool:
        return f"`{flag}`" + (" (sets `false`)" if option.default else "")
    return f"`{flag} {'CHOICE' if option.choices else 'NAME...' if option.several else option.kind.__name__.upper()}`"


def options_table(section: str) -> str:
    """Return the table of a section of the options: '' or the name of a section of the JSON."""
    rows = ["| JSON key | Megatron flag | type | default | unit | meaning |", "|---|---|---|---|---|---|"]
    for option in (*declared(section), *(() if section else SCRIPT_OPTIONS)):
        key = f"none: {FLAG_ONLY[option.path]}" if option.path in FLAG_ONLY else f"`{option.key}`"
        rows.append(
            f"| {key} | {_flag(option)} | {_type(option)} | {_default(option)} | {option.unit or '-'} | {option.help} |"
        )
    return "\n".join(rows)


def _default(option: Option) -> str:
    default = option.default.split(",") if option.several and option.default else option.default
    return "no limit" if default == UNLIMITED else f"`{json.dumps(default)}`"


def steering_table() -> str:
    """Return the table of the options of ``torchrun --rdzv-conf``."""
    rows = ["| key | type | default | unit | meaning |", "|---|---|---|---|---|"]
    for option in declarations(SteeringOptions):
        cells = [f"`{option.key}`", _type(option), _default(option), option.unit or "-", option.help]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def with_steering_table(text: str) -> str:
    """Return the page of steering with a new table.

    Raises:
        ValueError: the page lacks the markers of the table.
    """
    made, count = MARKED.subn(lambda found: f"{found[1]}{steering_table()}\n{found[3]}", text)
    if count != 1:
        raise ValueError(f"{STEERING} has {count} marked tables, not 1")
    return made


def with_tables(text: str) -> str:
    """Return the page of options with new tables.

    Raises:
        ValueError: the page lacks the markers of a table.
    """
    if (marked := [found[2] for found in MARKED.finditer(text)]) != list(SECTIONS):
        raise ValueError(f"{OPTIONS} has marked tables of {marked}, not of {list(SECTIONS)}")
    return MARKED.sub(lambda found: f"{found[1]}{options_table(SECTIONS[found[2]])}\n{found[3]}", text)


def schema_text() -> str:
    """Return the JSON Schema of the ``unickpt`` key of a DeepSpeed configuration."""
    title = "The unickpt key of a DeepSpeed configuration"
    about = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title, "type": "object"}
    return json.dumps({**about, "properties": {"unickpt": schema()}}, indent=2) + "\n"


def main() -> int:
    made = {
        OPTIONS: with_tables(OPTIONS.read_text()),
        STEERING: with_steering_table(STEERING.read_text()),
        SCHEMA: schema_text(),
        compatibility.PAGE: compatibility.page(),
    }
    stale = [path for path, text in made.items() if not path.is_file() or path.read_text() != text]
    if "--check" in sys.argv:
        print(*(f"{path} is stale" for path in stale), sep="\n", end="\n" if stale else "")
        return bool(stale)
    for path in stale:
        path.write_text(made[path])
    return 0


if __name__ == "__main__":
    sys.exit(main())
