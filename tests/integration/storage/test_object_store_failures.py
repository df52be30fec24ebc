"""Failures of an object store during saves and loads: earlier checkpoints stay intact."""

from __future__ import annotations

import pytest

from tests.support.rank_threads import WORLD, alone
from tests.support.s3 import CREDENTIALS, Bucket, Relay
from tests.support.saves import assert_counts, large, request
from tests.support.stored_steps import assert_holds, needs_store, save_step
from unickpt.base.errors import CorruptCheckpointError, NotACheckpointError, StorageError
from unickpt.checkpoint.checkpoint_folder import complete_checkpoints
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.validation import is_checkpoint
from unickpt.checkpoint.load.verify import verify_checkpoint
from unickpt.checkpoint.save.requests import SaveOptions
from unickpt.checkpoint.save.saver import Saver
from unickpt.checkpoint.storage import fsspec
from unickpt.cli.main import main

pytestmark = needs_store


def test_a_refused_part_leaves_no_object_and_the_error_has_the_reason_of_the_store(
    relayed: Bucket, relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsspec, "PART_BYTES", 5 << 20)
    assert Saver(SaveOptions(asynchronous=True)).save(request(relayed.url, "a", large(12)), alone()).wait(60)
    before = relayed.keys()
    relay.rule = lambda method, path: "refuse" if method == "PUT" and "partNumber=2" in path else ""
    save = Saver(SaveOptions(asynchronous=True)).save(request(relayed.url, "b", large(12)), alone())
    assert save.wait(60)
    assert not save.committed
    assert f"{relayed.url}/b/data/rank00000.safetensors: cannot be written (PermissionError" in save.cause()
    assert any("partNumber=1" in path for _, path in relay.requests)
    assert relayed.keys() == before
    assert relayed.uploads() == []
    assert relayed.get("latest") == b"a"
    assert_counts(f"{relayed.url}/a", 12)


def test_a_store_that_fails_during_a_save_keeps_the_last_checkpoint(
    relayed: Bucket, relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The upload cannot be aborted while the store is unreachable. It is aborted later."""
    monkeypatch.setattr(fsspec, "PART_BYTES", 5 << 20)
    assert Saver(SaveOptions(asynchronous=True)).save(request(relayed.url, "a", large(12)), alone()).wait(60)
    relay.rule = lambda _, path: "end" if "partNumber=2" in path else ""
    save = Saver(SaveOptions(asynchronous=True)).save(request(relayed.url, "b", large(12)), alone())
    assert save.wait(240)
    assert not save.committed
    assert "cannot be written" in save.cause()
    with pytest.raises(StorageError, match=r"s3://.*manifest.json: cannot be examined"):
        is_checkpoint(f"{relayed.url}/a")
    assert relayed.uploads() == ["b/data/rank00000.safetensors"]
    relay.rule = lambda _method, _path: ""
    relay.start()
    with pytest.raises(NotACheckpointError):
        Checkpoint.open(f"{relayed.url}/b")
    assert_counts(f"{relayed.url}/a", 12)
    assert Saver(SaveOptions(asynchronous=True)).save(request(relayed.url, "c", large(1)), alone()).wait(60)
    assert relayed.uploads() == []
    assert complete_checkpoints(relayed.url)[0][1] in ("a", "c")


def test_a_lost_response_to_the_manifest_is_not_a_failure(relayed: Bucket, relay: Relay) -> None:
    relay.rule = lambda method, path: "lose" if method == "PUT" and path.endswith("manifest.json") else ""
    assert all(result.committed for result in save_step(relayed.url, 1, "a"))
    assert_holds(f"{relayed.url}/a", 1)


def test_files_stay_if_it_is_unknown_whether_the_manifest_was_written(relayed: Bucket, relay: Relay) -> None:
    written: list[str] = []

    def rule(method: str, path: str) -> str:
        if method == "PUT" and path.endswith("manifest.json"):
            written.append(path)
            return "lose"
        return "refuse" if written and not written[0].endswith("latest") and method in ("HEAD", "GET") else ""

    relay.rule = rule
    results = save_step(relayed.url, 1, "a")
    assert not any(result.committed for result in results)
    assert "it is unknown whether the manifest was written" in results[1].failures[0].text
    relay.rule = lambda _method, _path: ""
    assert_holds(f"{relayed.url}/a", 1)  # it was


def test_an_unreachable_store_does_not_end_training(monkeypatch: pytest.MonkeyPatch, relay: Relay) -> None:
    relay.stop()
    for key, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{relay.port}"}.items():
        monkeypatch.setenv(key, value)
    for result in save_step("s3://unreachable/run", 1, "a"):
        assert not result.committed
        assert [failure.rank for failure in result.failures] == list(range(WORLD))
        assert "Could not connect" in result.failures[0].text


def test_missing_truncated_and_damaged_objects_are_refused(bucket: Bucket, capsys: pytest.CaptureFixture[str]) -> None:
    assert save_step(bucket.url, 1, "a")[0].committed
    where, key = f"{bucket.url}/a", "a/data/rank00001.safetensors"
    good = bucket.get(key)
    bucket.put(key, good[:-4])
    with pytest.raises(CorruptCheckpointError, match=rf"s3://.*rank00001.safetensors has {len(good) - 4:,} bytes, expected"):
        Checkpoint.open(where)
    bucket.delete(key)
    with pytest.raises(CorruptCheckpointError, match=r"rank00001.safetensors is missing"):
        Checkpoint.open(where)
    for at, what in ((-3, "differs from the index"), (20, "header differs")):
        flipped = bytearray(good)
        flipped[at] ^= 0x10
        bucket.put(key, bytes(flipped))
        checkpoint = Checkpoint.open(where)
        with pytest.raises(CorruptCheckpointError, match=what):
            [checkpoint.read_tensor(name, state) for name, state in checkpoint.ids]
        assert len(verify_checkpoint(where).problems) >= 1
        assert main(["verify", where]) == 1
        assert f"{where}/data/rank00001.safetensors" in capsys.readouterr().out
    bucket.put(key, good)
    assert_holds(where, 1)
