"""The command line in a separate process."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.support import handmade
from tests.support.cli import python
from unickpt.cli.main import main


def test_as_a_process(ranks: Path) -> None:
    handmade.flip_bit(ranks / "data/rank00002.safetensors", -1)
    found = python("-m", "unickpt.cli.main", "verify", ranks, "--json", code=1)
    assert json.loads(found.stdout)["sound"] is False
    assert found.stderr == ""


@pytest.mark.parametrize("command", ["inspect", "verify", "latest"])
def test_looking_at_a_checkpoint_imports_neither_torch_nor_a_framework(checkpoint: Path, command: str) -> None:
    program = (
        "import sys\n"
        "from unickpt.cli.main import main\n"
        f"assert main([{command!r}, {str(checkpoint)!r}]) == 0 == main([{command!r}, {str(checkpoint.parent)!r}])\n"
        "heavy = ('torch', 'deepspeed', 'megatron', 'ds_unickpt', 'megatron_unickpt', 'torch_unickpt')\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    assert python("-c", program).stdout.splitlines()[-1] == "[]"


def test_a_reader_that_stops_early_is_no_error(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(["inspect", str(checkpoint)]) == 0
