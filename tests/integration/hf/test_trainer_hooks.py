"""``get_last_checkpoint`` in a separate process: hooked in a script that imported it early, unchanged without the key."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.repository import REPO
from tests.support.trainer_folders import made
from unickpt.testing.launch import environment

pytestmark = [pytest.mark.hf, pytest.mark.timeout(300)]

PROGRAM = """
import json, sys
from transformers.trainer_utils import get_last_checkpoint  # before DeepSpeed, as scripts do
from transformers import trainer, trainer_utils
from transformers.integrations.deepspeed import HfDeepSpeedConfig
folder, found = sys.argv[1], {}

def ask(name):
    functions = get_last_checkpoint, trainer_utils.get_last_checkpoint, trainer.get_last_checkpoint
    found[name] = [function(folder) for function in functions]

ask("before DeepSpeed")
import deepspeed
ask("without a config")
config = HfDeepSpeedConfig({"train_batch_size": 1})
ask("without the key")
config = HfDeepSpeedConfig({"train_batch_size": 1, "unickpt": {"enabled": False}})
ask("switched off")
config = HfDeepSpeedConfig({"train_batch_size": 1, "unickpt": {"enabled": True, "fall_back": False}})
ask("without falling back")
config = HfDeepSpeedConfig({"train_batch_size": 1, "unickpt": {"enabled": True}})
ask("with the key")
try:
    trainer.TrainerState.load_from_json(folder + "/checkpoint-10/trainer_state.json")
except Exception as err:
    found["error"] = f"{type(err).__name__}: {err}"
config = HfDeepSpeedConfig({"train_batch_size": 1})
try:
    trainer.TrainerState.load_from_json(folder + "/checkpoint-10/trainer_state.json")
except Exception as err:
    found["stock error"] = type(err).__name__
import ds_unickpt
config = HfDeepSpeedConfig({"train_batch_size": 1, "unickpt": {"enabled": True}})
ds_unickpt.uninstall()
ask("uninstalled")
print("FOUND" + json.dumps(found))
"""


def test_get_last_checkpoint_is_hooked_where_it_was_imported_and_inert_without_the_key(tmp_path: Path) -> None:
    made(tmp_path, 9, 10)
    (tmp_path / "checkpoint-10/trainer_state.json").unlink()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, env=environment(), cwd=REPO, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.split("FOUND")[1])
    error, stock = found.pop("error"), found.pop("stock error")
    for name, folders in found.items():
        expected = tmp_path / ("checkpoint-9" if name == "with the key" else "checkpoint-10")
        assert folders == [str(expected)] * 3, (name, folders)
    assert f"checkpoint-10 cannot be resumed: it has no trainer_state.json, so its save did not finish. {tmp_path}" in error
    assert "checkpoint-9 can be resumed" in error
    assert stock == "FileNotFoundError"
    assert done.stderr.count("Resuming from") == 3
