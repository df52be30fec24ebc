"""Write the parts of the docs that come from code: ``python scripts/make_docs.py``; ``--check`` only compares."""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from ds_unickpt.config import Options
from unickpt.timing.options import TimingOptions

DOCS = Path(__file__).resolve().parent.parent / "docs"
SCHEMA = DOCS.parent / "configs" / "unickpt.schema.json"


def options_table(kind: type[Any] = Options) -> str:
    """The options of the ``unickpt`` key, or of an object in it, as rows of a table."""
    rows = []
    for option in fields(kind):
        if is_dataclass(option.default):
            continue
        choices = f" ({', '.join(json.dumps(c) for c in option.metadata['choices'])})" if option.metadata["choices"] else ""
        default = "no limit" if option.default == math.inf else f"`{json.dumps(option.default)}`"
        rows.append(f"| `{option.name}` | {default} | {option.metadata['doc']}{choices} |")
    return "\n".join(rows)


def schema(kind: type[Any] = Options) -> dict[str, Any]:
    """JSON Schema of the ``unickpt`` key, or of an object in it."""
    types = {bool: "boolean", int: "integer", float: "number", str: "string"}
    properties: dict[str, Any] = {}
    for option in fields(kind):
        if is_dataclass(option.default):
            properties[option.name] = schema(type(option.default))
            continue
        about = {"type": types[type(option.default)], "description": option.metadata["doc"]}
        about |= {} if option.default == math.inf else {"default": option.default}
        about |= {"enum": list(option.metadata["choices"])} if option.metadata["choices"] else {}
        properties[option.name] = about
    return {"type": "object", "additionalProperties": False, "properties": properties}


def schema_text() -> str:
    """The file: of a whole DeepSpeed configuration, of which it knows one key."""
    title = "The unickpt key of a DeepSpeed configuration"
    about = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title, "type": "object"}
    return json.dumps({**about, "properties": {"unickpt": schema()}}, indent=2) + "\n"


def main() -> int:
    # a comment inside a Markdown table would end it, so the rows stand above the opening marker
    pattern = r"(\| option \| default \| meaning \|\n\|---\|---\|---\|\n).*?(\n<!-- options)"
    stale = 0
    for name, kind in (("deepspeed.md", Options), ("timing.md", TimingOptions)):
        path = DOCS / name
        text = path.read_text()
        table = options_table(kind)
        new = re.sub(pattern, lambda m, table=table: f"{m.group(1)}{table}\n{m.group(2)}", text, flags=re.S)
        stale += new != text
        if "--check" not in sys.argv:
            path.write_text(new)
    stale += not SCHEMA.is_file() or SCHEMA.read_text() != schema_text()
    if "--check" not in sys.argv:
        SCHEMA.write_text(schema_text())
    return min(stale, 1) if "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
