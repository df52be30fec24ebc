"""Ctrl-C ends every command with one line that says how to continue."""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import handmade
from tests.support.cli import python
from unickpt.cli import main as main_module
from unickpt.transform.convert import pipeline, read_ahead


@pytest.mark.usefixtures("hears_ctrl_c")
def test_ctrl_c_prints_how_to_continue_an_export(tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = handmade.save_ranks(tmp_path / "source", world=3)
    monkeypatch.setattr(pipeline, "FRAGMENT_BYTES", 8)
    monkeypatch.setattr(read_ahead, "BATCH_BYTES", 8)
    batches, slow = read_ahead._batches, threading.Event()

    def interrupted(shards: Any) -> Any:
        for at, batch in enumerate(batches(shards)):
            if at == 1 and not slow.is_set():
                slow.set()
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.5)  # meanwhile the main thread stops the others
            yield batch

    monkeypatch.setattr(read_ahead, "_batches", interrupted)
    command = ["edit", source, tmp_path / "new", "--cast", "*:exp_avg=bfloat16"]
    code, _, err = run(*command)
    assert (code, err) == (
        130, "unickpt: interrupted: the files written so far are kept; run the same command again to continue. DST is not a "
        "checkpoint yet\n",
    )  # fmt: skip
    assert not (tmp_path / "new" / "manifest.json").exists()
    assert run(*command)[0] == 0
    assert run("verify", tmp_path / "new")[0] == 0


@pytest.mark.parametrize("command", [command.name for command in main_module.COMMANDS])
def test_ctrl_c_in_every_command_is_one_line(command: str, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(next(each.module for each in main_module.COMMANDS if each.name == command))

    def interrupt(*_: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "run", interrupt)
    given: dict[str, list[str]] = {
        "hooks": ["status"], "hosts": [], "completion": ["bash"], "trace": ["x", "-o", "y"], "plan": ["pipeline", "x"],
        "grow": ["x", "y", "--set", "hidden_size=8"], "upcycle": ["x", "y", "--experts", "2", "--top-k", "1"],
    }  # fmt: skip
    pairs = ("diff", "convert", "export", "edit", "average")
    code, out, err = run(command, *given.get(command, ["x", "y"] if command in pairs else ["x"]))
    assert (code, out) == (130, "")
    assert err.startswith("unickpt: interrupted: ")
    assert err.count("\n") == 1


@pytest.mark.usefixtures("hears_ctrl_c")
def test_ctrl_c_during_the_imports_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "rich.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nfrom unickpt.cli.main import main\nmain(['inspect', '.'])"
    found = python("-c", program, code=130)
    assert found.stdout == ""
    assert found.stderr == "unickpt: interrupted: nothing was changed; run the same command again\n"
