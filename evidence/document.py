"""Generated sections of a Markdown document, each replaced as a whole by the command that makes it."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.measure import machine


def section(name: str, command: str, body: str) -> str:
    """Return a section: the command that makes it, the machine, and the body, between two marks."""
    return f"<!-- {name} -->\n\n`{command}`\n\n{machine()}\n\n{body}\n<!-- end of {name} -->\n"


def put(out: Path, name: str, text: str, head: str = "") -> None:
    """Replace a section of the document, or append it.

    Args:
        out: the document. Missing: the document is created, beginning with ``head``.
        name: name of the section.
        text: the section as ``section`` returns it.
        head: beginning of a new document.
    """
    document = out.read_text() if out.exists() else head
    pattern = re.compile(rf"<!-- {re.escape(name)} -->\n.*?<!-- end of {re.escape(name)} -->\n", re.S)
    document = pattern.sub(lambda _: text, document) if pattern.search(document) else f"{document}\n{text}"
    out.write_text(document)
