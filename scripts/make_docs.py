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
    return min(stale, 1) if "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
