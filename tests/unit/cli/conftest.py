"""Checkpoints and commands for the tests of the command line."""

from __future__ import annotations

import importlib
import importlib.util
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import handmade
from tests.support.cli import python
from unickpt.cli.main import main


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return handmade.save_single(tmp_path / "out")


@pytest.fixture
def ranks(tmp_path: Path) -> Path:
    return handmade.save_ranks(tmp_path / "ranks" / "global_step3", world=3)


Run = tuple[int, str, str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*argv: object) -> Run:
        code = main([str(word) for word in argv])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def run_json(run: Any) -> Any:
    def call(*argv: object) -> tuple[int, Any]:
        code, out, _ = run(*argv, "--json")
        return code, json.loads(out)

    return call


@pytest.fixture(scope="session")
def hooks_in_a_process() -> tuple[str, ...]:
    """Output of ``hooks status`` with ``--json``, ``--markdown``, ``--fallbacks`` and ``--declared``, with DeepSpeed."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs DeepSpeed")
    program = (
        "from unickpt.cli.main import main\n"
        "assert main(['hooks', 'status', '--json']) == 0\n"
        "print('=====')\n"
        "assert main(['hooks', 'status', '--markdown']) == 0\n"
        "print('=====')\n"
        "assert main(['hooks', 'status', '--fallbacks']) == 0\n"
        "print('=====')\n"
        "assert main(['hooks', 'status', '--declared']) == 0\n"
    )
    return tuple(python("-c", program).stdout.split("=====\n"))


@pytest.fixture
def hears_ctrl_c() -> Iterator[None]:
    """Enable Ctrl-C, which programs in the background of a shell and their children ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
