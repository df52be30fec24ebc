"""Printing: styles on a terminal, escapes, encodings, sizes and encoded objects."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import handmade
from tests.support.cli import Terminal, scalar
from unickpt.cli.main import main
from unickpt.cli.output import human_bytes, one_line
from unickpt.cli.rendering import render


def test_on_a_terminal_tables_are_styled_and_lose_nothing(ranks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["inspect", str(ranks)]) == 0
    assert "\x1b[1m" in stream.getvalue()  # titles
    assert "\x1b[2m" in stream.getvalue()  # column heads
    assert "…" not in stream.getvalue()


def test_verify_shows_progress_on_a_terminal(
    ranks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert main(["verify", str(ranks)]) == 0
    assert "━" in stream.getvalue()
    assert "━" not in capsys.readouterr().out


def test_names_in_a_checkpoint_cannot_steer_the_terminal(tmp_path: Path, run: Any) -> None:
    evil = "w\x1b[2J\u202e\n[red]\x07"
    directory = handmade.save_single(tmp_path, extra=[scalar(evil)])
    handmade.edit_manifest(directory, lambda body: body.update(created=evil, aliases={evil: evil}, objects={evil: evil}))
    for arguments in ([], ["--tensor", evil], ["--json"]):
        code, out, _ = run("inspect", directory, *arguments)
        assert code == 0
        assert not set("\x1b\u202e\x07") & set(out)
    assert "w\\x1b[2J\\u202e\\n[red]\\x07" in run("inspect", directory)[1]


def test_a_terminal_without_unicode_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = handmade.save_single(tmp_path, extra=[scalar("überschreiben")])
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["inspect", str(directory)]) == 0
    stream.seek(0)
    assert "\\xfcberschreiben" in stream.read()


def test_one_line_escapes_unprintable_characters() -> None:
    assert one_line("a\tb\ud800é", io.StringIO()) == "a\\tb\\ud800é"


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (1, "1 byte"), (1023, "1,023 b"), (1024, "1.0 KiB"), (1536, "1.5 KiB (1,536 b"), (3 << 60, "3072.0 PiB")],
)
def test_human_bytes(size: int, text: str) -> None:
    assert human_bytes(size).startswith(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"$tuple": [1]}, "(1,)"),
        ({"$set": [1, "a"]}, "{1, 'a'}"),
        ({"$dict": [[{"$tuple": [1, 2]}, None]]}, "{(1, 2): None}"),
        ({"$float": "nan"}, "nan"),
        ({"$tensor": "objects/job/0"}, "<tensor objects/job/0>"),
        ({"$lost": "m.C"}, "<lost m.C: it could not be pickled when it was saved>"),
        ({"$opaque": 3}, "opaque(3)"),
        ({"$tuple": 3, "x": 1}, "{'$tuple': 3, 'x': 1}"),
        ({"$numpy": ["<f4", 1.5]}, "numpy(['<f4', 1.5])"),
    ],
)
def test_rendering_of_encoded_objects(value: Any, text: str) -> None:
    assert render(value, most=None) == text
    assert len(render(value, most=10)) <= 10
