"""Checkpoints in an object store, on a real S3 server: saves, loads, retention and the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.rank_threads import WORLD, alone
from tests.support.s3 import Bucket, Relay
from tests.support.saves import INFO, assert_counts, large, request, values
from tests.support.stored_steps import assert_holds, needs_store, save_step
from unickpt.base.errors import StorageError
from unickpt.base.installation import extra_command
from unickpt.checkpoint.checkpoint_folder import complete_checkpoints
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.fragments import Request as Read
from unickpt.checkpoint.load.validation import is_checkpoint
from unickpt.checkpoint.save import retention
from unickpt.checkpoint.save.requests import SaveOptions
from unickpt.checkpoint.save.retention import Retention
from unickpt.checkpoint.save.saver import Saver
from unickpt.checkpoint.save.shards import Contribution
from unickpt.checkpoint.storage import fsspec
from unickpt.checkpoint.storage.base import absolute, join, split
from unickpt.checkpoint.storage.open import open_storage
from unickpt.cli.main import main
from unickpt.testing.launch import environment

pytestmark = needs_store


def test_urls_and_paths_are_recognised(tmp_path: Path) -> None:
    assert absolute("s3://bucket/run/") == "s3://bucket/run"
    assert absolute("run") == os.path.abspath("run")
    assert join("s3://bucket/run/", "a") == "s3://bucket/run/a"
    assert split("s3://bucket/run/a/") == ("s3://bucket/run", "a")
    assert type(open_storage("gs://b/x")) is type(open_storage("s3://b/x")) is fsspec.FsspecStorage
    assert open_storage(f"file://{tmp_path}").where("a") == str(tmp_path / "a") == open_storage(tmp_path).where("a")
    with pytest.raises(StorageError, match=r"pathlib.Path merges the slashes of a URL.*as a string"):
        open_storage(Path("s3://bucket/run"))


def test_the_error_names_the_missing_package_of_a_store() -> None:
    code = """
import sys
sys.modules["s3fs"] = None
from unickpt.checkpoint.storage.open import open_storage, unusable_reason
print(unusable_reason("s3://bucket/run"))
sys.modules["fsspec"] = None
print(unusable_reason("gs://bucket/run"))
print("fsspec" in unusable_reason("s3://bucket/run"), unusable_reason("/a/path") == "")
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    assert "pip install 's3fs'" in lines[0], (lines, done.stderr)
    assert extra_command("object-store") in lines[1], lines
    assert lines[2].split()[1] == "True"


def test_a_local_path_does_not_import_fsspec(tmp_path: Path) -> None:
    code = f"""
import sys, unickpt.checkpoint.save.saver, unickpt.cli.main
from unickpt.checkpoint.load.validation import is_checkpoint
print(is_checkpoint({str(tmp_path)!r}), "s3fs" in sys.modules, "unickpt.checkpoint.storage.fsspec" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["False", "False", "False"], done.stderr


def test_three_ranks_save_and_other_boxes_are_read_back(bucket: Bucket) -> None:
    run = f"{bucket.url}/a/run"
    assert all(result.committed for result in save_step(run, 1, "step1"))
    assert_holds(f"{run}/step1", 1)
    assert sorted(bucket.keys()) == [
        "a/run/latest", *(f"a/run/step1/data/rank0000{rank}.safetensors" for rank in range(WORLD)),
        "a/run/step1/index.safetensors", "a/run/step1/manifest.json",
    ]  # fmt: skip
    assert bucket.get("a/run/latest") == b"step1"
    assert bucket.uploads() == []
    assert is_checkpoint(f"{run}/step1")
    assert not is_checkpoint(run)
    assert not Path("s3:").exists()
    checkpoint = Checkpoint.open(f"{run}/step1")
    whole_tensor = values(1).reshape(INFO.shape)
    for box in (Box((0, 0), (7, 2)), Box((1, 1), (5, 3)), Box((6, 0), (1, 5)), Box((2, 4), (3, 1))):
        out = torch.full((box.numel,), -1.0)
        checkpoint.read([Read(checkpoint.ids[INFO.key], box, out)])
        assert torch.equal(out.view(box.shape), whole_tensor[box.slices()])


def test_a_second_save_under_one_tag_replaces_the_first_completely(bucket: Bucket) -> None:
    for step in (1, 2, 3):
        assert save_step(bucket.url, step, "same")[0].committed
        assert_holds(f"{bucket.url}/same", step)
    assert len(bucket.keys()) == WORLD + 3
    assert bucket.get("latest") == b"same"


def test_a_file_larger_than_a_part_is_written_in_parts(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsspec, "PART_BYTES", 8 << 20)
    save = Saver(SaveOptions(asynchronous=True)).save(request(bucket.url, "a", large(21)), alone())
    assert save.wait(120)
    assert save.committed, save.cause()
    assert bucket.etag("a/data/rank00000.safetensors").endswith("-3")
    assert "-" not in bucket.etag("a/manifest.json")
    assert_counts(f"{bucket.url}/a", 21)


def test_the_part_size_grows_to_respect_the_maximum_number_of_parts(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsspec, "PART_BYTES", 5 << 20)
    monkeypatch.setattr(fsspec, "MAX_PARTS", 2)
    save = Saver(SaveOptions(asynchronous=True)).save(request(bucket.url, "a", large(21)), alone())
    assert save.wait(120)
    assert bucket.etag("a/data/rank00000.safetensors")[-2:] in ("-2", "-3")  # the announced size does not include the header


def test_range_reads_run_concurrently(relayed: Bucket, relay: Relay) -> None:
    assert Saver(SaveOptions(asynchronous=True)).save(request(relayed.url, "a", large(8, 6)), alone()).wait(120)
    checkpoint = Checkpoint.open(f"{relayed.url}/a")
    relay.hold_reads = True
    outs = [torch.empty(6 << 18) for _ in range(8)]
    checkpoint.read([Read(checkpoint.ids[f"t{at}", "master"], Box((0,), (6 << 18,)), out) for at, out in enumerate(outs)])
    assert relay.most >= 2
    assert all(torch.equal(out, torch.full_like(out, float(at))) for at, out in enumerate(outs))


def test_retention_deletes_old_checkpoints_and_nothing_else(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "ABANDONED_S", 0.0)
    bucket.put("run/dead/data/rank00000.safetensors", b"half")
    bucket.put("run/notes/mine.txt", b"note")
    bucket.put("run/s1/mine.txt", b"note")
    time.sleep(1.1)  # the store's timestamps have a resolution of one second
    for step in (1, 2, 3):
        wanted = request(f"{bucket.url}/run", f"s{step}", large(2))
        contribute = wanted.contribute

        def with_step(announced: Any, step: int = step, contribute: Any = contribute) -> Contribution:
            found: Contribution = contribute(announced)
            found.step = step
            return found

        wanted.contribute = with_step
        saved = Saver(SaveOptions(asynchronous=True, retention=Retention(keep_last=2))).save(wanted, alone())
        assert saved.wait(60)
        assert saved.committed
    assert complete_checkpoints(f"{bucket.url}/run") == [(3, "s3"), (2, "s2")]
    assert [key for key in sorted(bucket.keys()) if "s1" in key or "dead" in key or "notes" in key] == [
        "run/notes/mine.txt", "run/s1/mine.txt",
    ]  # fmt: skip


def test_the_command_line_takes_urls(bucket: Bucket, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        assert save_step(f"{bucket.url}/run", step, f"s{step}")[0].committed
    bucket.put("run/s3/data/rank00000.safetensors", b"half")
    assert main(["inspect", f"{bucket.url}/run/"]) == 0
    text = capsys.readouterr().out
    assert f"save directory {bucket.url}/run\nlatest: s2" in text
    assert "no: the save did not finish" in text
    assert f"checkpoint {bucket.url}/run/s2" in text
    assert main(["inspect", f"{bucket.url}/run/s1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["directory"] == f"{bucket.url}/run/s1"
    assert document["checkpoint"]["step"] == 1
    assert main(["verify", f"{bucket.url}/run"]) == 0
    assert "sound: s3://" in capsys.readouterr().out
    assert main(["verify", f"{bucket.url}/nowhere"]) == 2
    assert f"{bucket.url}/nowhere: there is no such directory" in capsys.readouterr().err
