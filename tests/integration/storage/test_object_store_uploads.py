"""Uploads of local checkpoints to an object store in the background."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.jobs.deepspeed.logs import Log
from tests.support.rank_threads import WORLD, alone, on_all_ranks
from tests.support.s3 import CREDENTIALS, Bucket, Relay
from tests.support.saves import assert_counts, part
from tests.support.stored_steps import assert_holds, needs_store
from unickpt.checkpoint.checkpoint_folder import complete_checkpoints
from unickpt.checkpoint.coordination.message_exchange import MessageExchange
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.validation import is_checkpoint
from unickpt.checkpoint.load.verify import verify_checkpoint
from unickpt.checkpoint.save.requests import PendingSave, SaveOptions, SaveRequest
from unickpt.checkpoint.save.retention import Retention
from unickpt.checkpoint.save.saver import Saver
from unickpt.testing.launch import environment

pytestmark = needs_store


def test_local_checkpoints_are_uploaded_in_the_background(
    tmp_path: Path, bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "unickpt")
    committed: list[str] = []
    target = f"{bucket.url}/run"

    def run(exchange: MessageExchange) -> list[PendingSave]:
        saver = Saver(SaveOptions(asynchronous=True, upload_to=target))
        saves = []
        for step in (1, 2):
            wanted = SaveRequest(
                lambda _, s=step: part(s, exchange.rank), str(tmp_path), f"s{step}", True, on_commit=committed.append
            )
            saves.append(saver.save(wanted, exchange.separate("save")))
            assert saver.finish(60)
        return saves

    with Log() as log:
        for saves in on_all_ranks(run):
            assert [save.committed for save in saves] == [True, True]
            assert [save.upload.committed for save in saves] == [True, True]
    for step in (1, 2):
        assert_holds(f"{target}/s{step}", step)
        for path in (p for p in (tmp_path / f"s{step}").rglob("*") if p.is_file()):
            assert bucket.get(f"run/{path.relative_to(tmp_path)}") == path.read_bytes()
    assert bucket.get("run/latest") == b"s2"
    assert committed == [str(tmp_path / "s1"), f"{target}/s1", str(tmp_path / "s2"), f"{target}/s2"]
    assert sum("uploaded" in line for line in log.lines) == 2, log.lines


def test_a_failed_upload_logs_one_warning_and_leaves_no_object(tmp_path: Path, relayed: Bucket, relay: Relay) -> None:
    relay.rule = lambda method, path: "refuse" if method == "PUT" and "rank00001" in path else ""

    def run(exchange: MessageExchange) -> PendingSave:
        saver = Saver(SaveOptions(asynchronous=True, upload_to=relayed.url))
        save = saver.save(SaveRequest(lambda _: part(1, exchange.rank), str(tmp_path), "a", True), exchange.separate("save"))
        assert saver.finish(60)
        return save

    with Log() as log:
        for save in on_all_ranks(run):
            assert save.committed
            assert [failure.rank for failure in save.upload.result.failures] == [1]
    warnings = [line for line in log.lines if "NOT uploaded" in line]
    assert len(warnings) == 1
    assert "rank 1: StorageError" in warnings[0]
    assert "The local checkpoint is complete" in warnings[0]
    assert relayed.keys() == []
    assert_holds(str(tmp_path / "a"), 1)


def test_an_upload_does_not_write_into_an_existing_checkpoint(tmp_path: Path, relayed: Bucket, relay: Relay) -> None:
    """A resumed job saves the same tag again into a new local directory, with the same file names."""

    def upload(folder: str, step: int) -> list[PendingSave]:
        def run(exchange: MessageExchange) -> PendingSave:
            saver = Saver(SaveOptions(asynchronous=True, upload_to=relayed.url))
            wanted = SaveRequest(lambda _: part(step, exchange.rank), str(tmp_path / folder), "a", True)
            save = saver.save(wanted, exchange.separate("save"))
            assert saver.finish(60)
            return save

        return on_all_ranks(run)

    assert upload("first", 1)[0].upload.committed
    relay.rule = lambda method, path: "refuse" if method == "PUT" and "index" in path else ""
    assert not upload("second", 2)[0].upload.committed
    assert_holds(f"{relayed.url}/a", 1)
    relay.rule = lambda _method, _path: ""
    assert upload("third", 3)[0].upload.committed
    assert_holds(f"{relayed.url}/a", 3)
    assert sorted(relayed.keys()) == sorted(
        ["a/index.1.safetensors", "a/manifest.json", "latest", *(f"a/data/rank0000{r}.1.safetensors" for r in range(WORLD))]
    )


class Gate:
    """Delays requests for some keys until it is opened."""

    def __init__(self, *parts: str) -> None:
        self.parts, self.open, self.reached = parts, threading.Event(), threading.Event()

    def __call__(self, method: str, path: str) -> str:
        if method == "PUT" and any(part in path for part in self.parts):
            self.reached.set()
            self.open.wait(60)
        return ""


def test_retention_keeps_checkpoints_in_upload_and_newer_ones_replace_waiting_ones(
    tmp_path: Path, relayed: Bucket, relay: Relay
) -> None:
    gate = relay.rule = Gate("s1/data")
    saver = Saver(SaveOptions(asynchronous=True, upload_to=relayed.url, retention=Retention(keep_last=1)))
    saves = []
    with Log() as log:
        for step in (1, 2, 3):
            wanted = SaveRequest(lambda _, s=step: part(s, 0, 1), str(tmp_path), f"s{step}", True)
            saves.append(saver.save(wanted, alone()))
            assert saves[-1].wait(30)
            assert gate.reached.wait(30)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "s1", "s2", "s3"]
        gate.open.set()
        assert saver.finish(60)
    results = [save.upload.result for save in saves if save.upload is not None]
    assert [result.committed for result in results if result] == [True, False, True]
    assert [result.superseded for result in results if result] == [False, True, False]
    assert any("s2 is not uploaded: a newer checkpoint waits" in line for line in log.lines)
    assert [name for _, name in complete_checkpoints(relayed.url)] == ["s3", "s1"]
    wanted = SaveRequest(lambda _: part(4, 0, 1), str(tmp_path), "s4", True)
    assert saver.save(wanted, alone(), asynchronous=False).committed
    assert saver.finish(60)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "s4"]


def test_an_upload_has_the_committed_data_although_the_name_is_saved_again(
    tmp_path: Path, relayed: Bucket, relay: Relay
) -> None:
    gate = relay.rule = Gate("same/data/rank00000.safetensors")
    saver = Saver(SaveOptions(asynchronous=True, upload_to=relayed.url))
    saves = []
    for step in (1, 2):
        saves.append(saver.save(SaveRequest(lambda _, s=step: part(s, 0, 1), str(tmp_path), "same", True), alone()))
        assert saves[-1].wait(30)
        assert gate.reached.wait(30)
    assert not (tmp_path / "same/data/rank00000.safetensors").exists()  # replaced
    gate.open.set()
    assert saver.finish(60)
    assert all(save.upload is not None and save.upload.committed for save in saves)
    assert verify_checkpoint(f"{relayed.url}/same").problems == ()
    assert Checkpoint.open(f"{relayed.url}/same").manifest.step == 2


def test_a_damaged_local_file_is_not_uploaded(tmp_path: Path, relayed: Bucket, relay: Relay) -> None:
    def damage(directory: str) -> None:
        path = Path(directory) / "data/rank00000.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)

    saver = Saver(SaveOptions(asynchronous=True, upload_to=relayed.url))
    save = saver.save(SaveRequest(lambda _: part(1, 0, 1), str(tmp_path), "a", True, on_commit=damage), alone())
    assert saver.finish(60)
    assert save.upload is not None
    assert save.upload.result is not None
    assert "the checksum differs from the one of the save" in save.upload.result.failures[0].text
    assert relayed.keys() == []


JOB = """
import sys, time, logging
from pathlib import Path
from tests.support.rank_threads import alone
from tests.support.saves import large, request
from unickpt.checkpoint.save.requests import SaveOptions
from unickpt.checkpoint.save.saver import Saver
logging.basicConfig()
saver = Saver(SaveOptions(asynchronous=True, upload_to=sys.argv[2], grace_s=float(sys.argv[4])))
save = saver.save(request(Path(sys.argv[1]), "a", large()), alone())
assert save.wait(60) and save.committed
print("saved", flush=True)
if sys.argv[3] == "wait":
    time.sleep(60)
"""


def job(folder: Path, target: str, what: str, *, grace: float = 30.0, port: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", JOB, str(folder), target, what, str(grace)],
        env=environment(**CREDENTIALS, AWS_ENDPOINT_URL=f"http://localhost:{port}"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "saved\n", process.communicate()[1][-3000:]
    return process


@pytest.mark.parametrize("what", ["end", "wait"])
def test_the_end_of_a_process_finishes_the_upload(tmp_path: Path, relayed: Bucket, relay: Relay, what: str) -> None:
    """The upload resolves ``localhost``, which Python does not allow during the shutdown of the interpreter."""
    gate = relay.rule = Gate("a/data")
    process = job(tmp_path, relayed.url, what, port=relay.port)
    assert gate.reached.wait(30)
    if what == "wait":
        process.send_signal(signal.SIGTERM)
    else:
        time.sleep(12)  # connections and resolved names are cached for ten seconds
    gate.open.set()
    _, errors = process.communicate(timeout=120)
    assert process.returncode == (-signal.SIGTERM if what == "wait" else 0), errors
    assert ("SIGTERM; finishing the upload of" in errors) == (what == "wait")
    assert_counts(f"{relayed.url}/a")
    assert relayed.get("latest") == b"a"


def test_an_upload_longer_than_the_grace_period_is_abandoned_and_the_local_checkpoint_stays(
    tmp_path: Path, relayed: Bucket, relay: Relay
) -> None:
    gate = relay.rule = Gate("a/data")
    process = job(tmp_path, relayed.url, "wait", grace=0.3, port=relay.port)
    assert gate.reached.wait(30)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM
    assert "the upload of" in errors
    assert "Gave up" in errors
    gate.open.set()
    assert not is_checkpoint(f"{relayed.url}/a")
    assert_counts(tmp_path / "a")
