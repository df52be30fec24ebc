"""An extension that was built before its code was changed: one warning with the command, and saves that copy at the call."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from tests.jobs import late_copies
from unickpt.base.extensions import Built, ExtensionModule
from unickpt.checkpoint.coordination.message_exchange import MessageExchange
from unickpt.checkpoint.save import part
from unickpt.checkpoint.save.requests import SaveOptions
from unickpt.checkpoint.save.saver import Saver


def _module(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> ExtensionModule:
    (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    return ExtensionModule("copying", name, ("copies", "samples"), "saves are slow")


def test_the_state_of_an_extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _module(tmp_path, monkeypatch, "casts_of_before", "copies = len").built is Built.OLD
    assert _module(tmp_path, monkeypatch, "casts_of_now", "copies = samples = len").built is Built.READY
    slow = "copies = samples = len\ndef is_fast(): return False"
    assert _module(tmp_path, monkeypatch, "casts_of_another", slow).built is Built.UNSUITED
    assert ExtensionModule("copying", "casts_of_nobody", (), "").built is Built.MISSING


def test_a_function_that_it_has_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = _module(tmp_path, monkeypatch, "casts_of_then", "copies = len")
    assert found.function("copies") is len
    assert found.function("samples") is None


def test_one_warning_has_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(part, "COPYING", _module(tmp_path, monkeypatch, "casts_of_long_ago", "copies = len"))
    torch.manual_seed(1)
    job, saver = late_copies.Job(1), Saver(SaveOptions(asynchronous=True))
    with caplog.at_level(logging.INFO, "unickpt"):
        for tag in ("first", "second"):
            save = saver.save(job.request(tmp_path, tag), MessageExchange(None, rank=0, world=1, prefix=tag))
            assert save.wait(60)
            assert save.committed
    (line,) = [each for each in caplog.messages if "was built before its code was changed" in each]
    assert "casts_of_long_ago" in line
    assert "build_ext --inplace" in line
