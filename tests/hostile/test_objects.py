"""Malformed objects, and pickles, which are not loaded. See attacks.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.attacks import cases, refused
from tests.support.handmade import edit_manifest
from tests.support.repository import REPO
from unickpt.base.errors import FormatError
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.testing.launch import environment

HOSTILE_OBJECTS: list[Any] = [
    {"$unknown": 1}, {"$tuple": 1, "x": 2}, {"$tuple": None}, {"$tuple": 5}, {"$set": [[1]]}, {"$frozenset": [{}]},
    {"$dict": 5}, {"$dict": [1]}, {"$dict": [[[1], 2]]}, {"$dict": [[1, 2, 3]]}, {"$ordered": [[{}, 1]]},
    {"$int": "x"}, {"$int": 5}, {"$int": "9" * 5000}, {"$float": "1"}, {"$float": []}, {"$complex": [1, 2, 3]},
    {"$bytes": "é"}, {"$bytes": "====="}, {"$bytes": 5}, {"$size": [2**70]}, {"$size": ["a"]}, {"$dtype": 5},
    {"$dtype": "save"}, {"$dtype": "torch.nn"}, {"$device": "frob"}, {"$device": 5}, {"$device": "cuda:99999999999999999"},
    {"$namespace": [1]}, {"$path": [1]}, {"$datetime": "yesterday"}, {"$datetime": 5},
    {"$numpy": ["<i8", 2**70]}, {"$numpy": ["i8,,", "1"]}, {"$numpy": ["<i1", 300]}, {"$numpy": ["O", 1]}, {"$numpy": []},
    {"$numpy": ["<U999999999", "x"]}, {"$numpy": ["(1000000000,)<f8", 1]}, {"$numpy": [{"names": ["a"], "formats": ["O"]}, 1]},
    {"$ndarray": 5}, {"$ndarray": ["<f4", 1]}, {"$ndarray": ["O", {"$tensor": "objects/job/0"}]},
    {"$tensor": "nowhere"}, {"$tensor": [1]}, {"$tensor": "objects/rank00000"},
    {"$opaque": {}}, {"$opaque": {"type": 1, "pickle": "x"}}, {"$opaque": "gASVAAAA"},
]  # fmt: skip


OBJECT_REASONS = {
    '{"$unknown": 1}': "unknown tag",
    '{"$tuple": 1, "x": 2}': "is not one tag",
    '{"$dict": 5}': "are not pairs",
    '{"$dict": [1]}': "are not pairs",
    '{"$dict": [[1, 2, 3]]}': "are not pairs",
    '{"$tensor": "nowhere"}': "is not stored",
    '{"$tensor": [1]}': "is not stored",
    '{"$tensor": "objects/rank00000"}': "is not stored",
    '{"$opaque": {}}': "malformed opaque value",
    '{"$opaque": {"type": 1, "pickle": "x"}}': "malformed opaque value",
    '{"$opaque": "gASVAAAA"}': "malformed opaque value",
}


@pytest.mark.parametrize("text", cases(map(json.dumps, HOSTILE_OBJECTS)))
def test_a_malformed_object_is_refused(victim: Path, text: str) -> None:
    value = json.loads(text)
    edit_manifest(victim, lambda body: body["objects"].update(evil={"list": [value]}))
    with pytest.raises(FormatError) as caught:
        Checkpoint.open(victim).objects()
    assert "evil.list[0]" in str(caught.value)
    assert OBJECT_REASONS.get(text, "cannot hold") in str(caught.value)
    refused(victim)


def test_no_pickle_of_a_checkpoint_is_ever_loaded(victim: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*arguments: Any) -> None:
        raise AssertionError("unpickled")

    monkeypatch.setattr("pickle.loads", forbidden)
    monkeypatch.setattr("pickle.Unpickler", forbidden)
    bomb = {"$opaque": {"type": "os.system", "pickle": "Y29zCnN5c3RlbQooUyd0cnVlJwp0Ui4="}}
    edit_manifest(victim, lambda body: body["objects"].update(bomb=bomb))
    assert refused(victim) == []
    decoded = Checkpoint.open(victim).objects()
    assert any(str(each).startswith("bomb: os.system") for each in decoded.left_out)


def test_no_name_of_a_dtype_makes_torch_import_its_parts() -> None:
    code = """
import sys, torch
from unickpt.checkpoint.format.objects import decode
for name in ("torch._dynamo", "torch.onnx", "torch._inductor"):
    sys.modules.pop(name, None)
    try:
        decode({"$dtype": name}, tensors={}, where="t")
    except Exception as err:
        assert "is not a dtype" in str(err), err
    else:
        raise AssertionError(name)
    assert name not in sys.modules, name
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), cwd=REPO, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
