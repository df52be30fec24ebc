"""Write the parts of the docs that come from code: ``python scripts/make_docs.py``; ``--check`` only compares."""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import fields
from pathlib import Path

from ds_unickpt.config import Options

DOCS = Path(__file__).resolve().parent.parent / "docs"


def options_table() -> str:
    """The options of the ``unickpt`` key, as rows of a table."""
    rows = []
    for option in fields(Options):
        choices = f" ({', '.join(json.dumps(c) for c in option.metadata['choices'])})" if option.metadata["choices"] else ""
        default = "no limit" if option.default == math.inf else f"`{json.dumps(option.default)}`"
        rows.append(f"| `{option.name}` | {default} | {option.metadata['doc']}{choices} |")
    return "\n".join(rows)


def main() -> int:
    path = DOCS / "deepspeed.md"
    text = path.read_text()
    # a comment inside a Markdown table would end it, so the rows stand above the opening marker
    pattern = r"(\| option \| default \| meaning \|\n\|---\|---\|---\|\n).*?(\n<!-- options)"
    new = re.sub(pattern, lambda m: m.group(1) + options_table() + "\n" + m.group(2), text, flags=re.S)
    if "--check" in sys.argv:
        return int(new != text)
    path.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
