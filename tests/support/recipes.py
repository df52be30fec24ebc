"""Runs a page of ``docs/recipes`` as a reader does: it saves the files, types the commands, and compares what is printed.

- A fenced block with ``title="NAME"`` is a file.
- A ``bash`` block is typed. After ``<!-- not run: REASON -->`` it is not.
- A ``text`` block after it is part of the output: its lines come in this order, and ``...`` stands for any text.
"""

from __future__ import annotations

import re
import subprocess
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(
    r"(?P<not_run><!-- not run: [^>]+ -->\s*)?^(?P<indent> *)```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n"
    r"(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """Attributes: language of the block, name of the file that it is, text, whether it is typed."""

    language: str
    title: str
    text: str
    run: bool


def blocks(page: str) -> Iterator[Block]:
    """Yield the blocks of a page."""
    for found in _BLOCK.finditer(page):
        yield Block(found["language"], found["title"] or "", textwrap.dedent(found["text"]), found["not_run"] is None)


def follow(page: Path, folder: Path, env: dict[str, str], *, timeout_s: float = 600) -> None:
    """Do what a page says, in a folder.

    Raises:
        AssertionError: a command failed, or printed something else.
    """
    output = ""
    for block in blocks(page.read_text()):
        if block.title:
            (folder / block.title).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.title).write_text(block.text)
        elif block.language == "bash" and block.run:
            done = subprocess.run(
                ["bash", "-e", "-o", "pipefail", "-c", block.text], cwd=folder, env=env, timeout=timeout_s, text=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace",
            )  # fmt: skip
            output = done.stdout
            assert done.returncode == 0, f"{page.name}: this failed:\n{block.text}\n{output[-6000:]}"
        elif block.language == "text":
            at = 0
            for line in block.text.splitlines():
                found = re.compile(".*?".join(re.escape(part.strip()) for part in line.split("..."))).search(output, at)
                assert found, f"{page.name}: expected the line\n{line}\nand found\n{output[-6000:]}"
                at = found.end()
