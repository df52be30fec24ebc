"""Checkpoints in an object store: the same promises as on disk, against a real S3 server and a bad way to it."""

from __future__ import annotations

import importlib.util
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.deepspeed.logs import Log
from tests.launch import environment, torchrun
from tests.s3 import CREDENTIALS, Bucket, Relay, server
from tests.test_saver import alone, assert_counts, large, request
from tests.test_saving import INFO, WORLD, on_all_ranks, part, values
from unickpt import object_store, retention
from unickpt.cli.main import main
from unickpt.contribution import Contribution
from unickpt.coordination import Rendezvous
from unickpt.errors import CorruptCheckpointError, NotACheckpointError, StorageError
from unickpt.fragments import Box
from unickpt.loading import Checkpoint, is_checkpoint
from unickpt.reading import Request as Read
from unickpt.retention import Retention, whole
from unickpt.saves import PendingSave, Request, SaveOptions, SaveResult
from unickpt.saving import Saver, save
from unickpt.storage import absolute, join, open_storage, split
from unickpt.verification import verify

_MISSING = [name for name in ("fsspec", "s3fs", "moto", "flask") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(_MISSING), reason=f"not installed: {', '.join(_MISSING)} (the 'dev' extra has them)")

_numbers = itertools.count()


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with server(tmp_path_factory.mktemp("s3") / "server.log") as found:
        yield found


def _bucket(port: int, endpoint: int, patch: pytest.MonkeyPatch) -> Bucket:
    """A new one: this process keeps its connections by bucket, so that each test has its own."""
    for key, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{endpoint}"}.items():
        patch.setenv(key, value)
    return Bucket(port, f"bucket-{next(_numbers)}")


@pytest.fixture
def bucket(port: int, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    return _bucket(port, port, monkeypatch)


@pytest.fixture
def relay(port: int) -> Iterator[Relay]:
    found = Relay(port)
    found.start()
    yield found
    found.stop()


@pytest.fixture
def relayed(port: int, relay: Relay, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A bucket to which unickpt goes through the relay; the test looks into it directly."""
    return _bucket(port, relay.port, monkeypatch)


def save_step(where: str, step: int, tag: str, **more: Any) -> list[SaveResult]:
    """A save of three ranks."""

    def run(meet: Rendezvous) -> SaveResult:
        return save(lambda _: part(step, meet.rank), save_dir=where, tag=tag, save_latest=True, meet=meet, **more)

    return on_all_ranks(run)


def assert_holds(where: str, step: int) -> None:
    """The checkpoint is sound, and is that step's and no other's."""
    assert verify(where).problems == ()
    checkpoint = Checkpoint.open(where)
    assert checkpoint.manifest.step == step
    assert torch.equal(checkpoint.read_tensor(*INFO.key).reshape(-1), values(step))
    assert checkpoint.objects().value == {"step": step}
    assert [checkpoint.rank_objects(rank).value for rank in range(WORLD)] == [{"rank": rank} for rank in range(WORLD)]


# ---------------------------------------------------------------- places


def test_a_url_is_a_place_and_a_path_stays_a_path(tmp_path: Path) -> None:
    assert absolute("s3://bucket/run/") == "s3://bucket/run"
    assert absolute("run") == os.path.abspath("run")
    assert join("s3://bucket/run/", "a") == "s3://bucket/run/a"
    assert split("s3://bucket/run/a/") == ("s3://bucket/run", "a")
    assert type(open_storage("gs://b/x")) is type(open_storage("s3://b/x")) is object_store.FsspecStorage
    assert open_storage(f"file://{tmp_path}").where("a") == str(tmp_path / "a") == open_storage(tmp_path).where("a")
    with pytest.raises(StorageError, match=r"a pathlib.Path cannot hold a URL.*as a string"):
        open_storage(Path("s3://bucket/run"))


def test_a_store_whose_package_is_missing_is_told_by_its_name() -> None:
    code = """
import sys
sys.modules["s3fs"] = None
from unickpt.storage import open_storage, usable
print(usable("s3://bucket/run"))
sys.modules["fsspec"] = None
print(usable("gs://bucket/run"))
print("fsspec" in usable("s3://bucket/run"), usable("/a/path") == "")
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    assert "pip install 's3fs'" in lines[0], (lines, done.stderr)
    assert "pip install 'unickpt[object-store]'" in lines[1], lines
    assert lines[2].split()[1] == "True"


def test_nothing_of_it_is_imported_for_a_path(tmp_path: Path) -> None:
    code = f"""
import sys, unickpt.saving, unickpt.cli.main
from unickpt.loading import is_checkpoint
print(is_checkpoint({str(tmp_path)!r}), "s3fs" in sys.modules, "unickpt.object_store" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["False", "False", "False"], done.stderr


# ---------------------------------------------------------------- saving and loading


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


def test_a_second_save_under_one_tag_replaces_the_first_whole(bucket: Bucket) -> None:
    for step in (1, 2, 3):
        assert save_step(bucket.url, step, "same")[0].committed
        assert_holds(f"{bucket.url}/same", step)
    assert len(bucket.keys()) == WORLD + 3
    assert bucket.get("latest") == b"same"


def test_a_file_larger_than_a_part_goes_up_in_parts_and_comes_back(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "PART_BYTES", 8 << 20)
    save = Saver(SaveOptions(asynchronous=True)).save(request(bucket.url, "a", large(21)), alone())
    assert save.wait(120)
    assert save.committed, save.cause()
    assert bucket.etag("a/data/rank00000.safetensors").endswith("-3")
    assert "-" not in bucket.etag("a/manifest.json")
    assert_counts(f"{bucket.url}/a", 21)


def test_parts_grow_so_that_there_are_never_too_many(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "PART_BYTES", 5 << 20)
    monkeypatch.setattr(object_store, "MAX_PARTS", 2)
    save = Saver(SaveOptions(asynchronous=True)).save(request(bucket.url, "a", large(21)), alone())
    assert save.wait(120)
    assert bucket.etag("a/data/rank00000.safetensors")[-2:] in ("-2", "-3")  # the header is not in what was said


def test_range_reads_are_under_way_together(relayed: Bucket, relay: Relay) -> None:
    assert Saver(SaveOptions(asynchronous=True)).save(request(relayed.url, "a", large(8, 6)), alone()).wait(120)
    checkpoint = Checkpoint.open(f"{relayed.url}/a")
    relay.hold_reads = True
    outs = [torch.empty(6 << 18) for _ in range(8)]
    checkpoint.read([Read(checkpoint.ids[f"t{at}", "master"], Box((0,), (6 << 18,)), out) for at, out in enumerate(outs)])
    assert relay.most >= 2
    assert all(torch.equal(out, torch.full_like(out, float(at))) for at, out in enumerate(outs))


def test_old_checkpoints_go_and_the_rest_stays(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "ABANDONED_S", 0.0)
    bucket.put("run/dead/data/rank00000.safetensors", b"half")
    bucket.put("run/notes/mine.txt", b"note")
    bucket.put("run/s1/mine.txt", b"note")
    time.sleep(1.1)  # the store's times are in seconds
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
    assert whole(f"{bucket.url}/run") == [(3, "s3"), (2, "s2")]
    assert [key for key in sorted(bucket.keys()) if "s1" in key or "dead" in key or "notes" in key] == [
        "run/notes/mine.txt", "run/s1/mine.txt",
    ]  # fmt: skip


# ---------------------------------------------------------------- what goes wrong


def test_a_refused_part_leaves_nothing_and_says_what_the_store_said(
    relayed: Bucket, relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "PART_BYTES", 5 << 20)
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


def test_a_store_that_goes_away_in_the_middle_keeps_the_last_good_checkpoint(
    relayed: Bucket, relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot even be told to forget the upload; that is made up for when it is back."""
    monkeypatch.setattr(object_store, "PART_BYTES", 5 << 20)
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
    assert whole(relayed.url)[0][1] in ("a", "c")


def test_a_lost_answer_to_the_manifest_is_not_taken_for_a_failure(relayed: Bucket, relay: Relay) -> None:
    relay.rule = lambda method, path: "lose" if method == "PUT" and path.endswith("manifest.json") else ""
    assert all(result.committed for result in save_step(relayed.url, 1, "a"))
    assert_holds(f"{relayed.url}/a", 1)


def test_files_stay_where_nobody_knows_whether_the_manifest_was_written(relayed: Bucket, relay: Relay) -> None:
    written: list[str] = []

    def rule(method: str, path: str) -> str:
        if method == "PUT" and path.endswith("manifest.json"):
            written.append(path)
            return "lose"
        return "refuse" if written and not written[0].endswith("latest") and method in ("HEAD", "GET") else ""

    relay.rule = rule
    results = save_step(relayed.url, 1, "a")
    assert not any(result.committed for result in results)
    assert "whether it was written all the same cannot be seen" in results[1].failures[0].text
    relay.rule = lambda _method, _path: ""
    assert_holds(f"{relayed.url}/a", 1)  # it was


def test_a_store_that_is_not_there_never_ends_training(monkeypatch: pytest.MonkeyPatch, relay: Relay) -> None:
    relay.stop()
    for key, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{relay.port}"}.items():
        monkeypatch.setenv(key, value)
    for result in save_step(f"s3://nowhere-{next(_numbers)}/run", 1, "a"):
        assert not result.committed
        assert [failure.rank for failure in result.failures] == list(range(WORLD))
        assert "Could not connect" in result.failures[0].text


def test_objects_that_are_missing_cut_or_damaged_are_refused(bucket: Bucket, capsys: pytest.CaptureFixture[str]) -> None:
    assert save_step(bucket.url, 1, "a")[0].committed
    where, key = f"{bucket.url}/a", "a/data/rank00001.safetensors"
    good = bucket.get(key)
    bucket.put(key, good[:-4])
    with pytest.raises(CorruptCheckpointError, match=rf"s3://.*rank00001.safetensors has {len(good) - 4:,} bytes, expected"):
        Checkpoint.open(where)
    bucket.delete(key)
    with pytest.raises(CorruptCheckpointError, match=r"rank00001.safetensors is missing"):
        Checkpoint.open(where)
    for at, what in ((-3, "differs from the one written"), (20, "header differs")):
        flipped = bytearray(good)
        flipped[at] ^= 0x10
        bucket.put(key, bytes(flipped))
        checkpoint = Checkpoint.open(where)
        with pytest.raises(CorruptCheckpointError, match=what):
            [checkpoint.read_tensor(name, state) for name, state in checkpoint.ids]
        assert len(verify(where).problems) >= 1
        assert main(["verify", where]) == 1
        assert f"{where}/data/rank00001.safetensors" in capsys.readouterr().out
    bucket.put(key, good)
    assert_holds(where, 1)


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


# ---------------------------------------------------------------- uploads behind training


def test_what_is_saved_here_is_uploaded_behind_training(
    tmp_path: Path, bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "unickpt")
    told: list[str] = []
    target = f"{bucket.url}/run"

    def run(meet: Rendezvous) -> list[PendingSave]:
        saver = Saver(SaveOptions(asynchronous=True, upload_to=target))
        saves = []
        for step in (1, 2):
            wanted = Request(lambda _, s=step: part(s, meet.rank), str(tmp_path), f"s{step}", True, on_commit=told.append)
            saves.append(saver.save(wanted, meet.apart("save")))
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
    assert told == [str(tmp_path / "s1"), f"{target}/s1", str(tmp_path / "s2"), f"{target}/s2"]
    assert sum("uploaded" in line for line in log.lines) == 2, log.lines


def test_an_upload_that_fails_is_one_warning_and_leaves_nothing_there(tmp_path: Path, relayed: Bucket, relay: Relay) -> None:
    relay.rule = lambda method, path: "refuse" if method == "PUT" and "rank00001" in path else ""

    def run(meet: Rendezvous) -> PendingSave:
        saver = Saver(SaveOptions(asynchronous=True, upload_to=relayed.url))
        save = saver.save(Request(lambda _: part(1, meet.rank), str(tmp_path), "a", True), meet.apart("save"))
        assert saver.finish(60)
        return save

    with Log() as log:
        for save in on_all_ranks(run):
            assert save.committed
            assert save.upload.result.failures.keys() == {1}
    warnings = [line for line in log.lines if "NOT uploaded" in line]
    assert len(warnings) == 1
    assert "rank 1: StorageError" in warnings[0]
    assert "The local checkpoint is whole" in warnings[0]
    assert relayed.keys() == []
    assert_holds(str(tmp_path / "a"), 1)


def test_an_upload_never_writes_into_a_checkpoint_that_is_there(tmp_path: Path, relayed: Bucket, relay: Relay) -> None:
    """A resumed job saves the same tag again into a new directory; its first generation has the same file names."""

    def upload(folder: str, step: int) -> list[PendingSave]:
        def run(meet: Rendezvous) -> PendingSave:
            saver = Saver(SaveOptions(asynchronous=True, upload_to=relayed.url))
            wanted = Request(lambda _: part(step, meet.rank), str(tmp_path / folder), "a", True)
            save = saver.save(wanted, meet.apart("save"))
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
    """Holds requests for some keys back until it is opened."""

    def __init__(self, *parts: str) -> None:
        self.parts, self.open, self.reached = parts, threading.Event(), threading.Event()

    def __call__(self, method: str, path: str) -> str:
        if method == "PUT" and any(part in path for part in self.parts):
            self.reached.set()
            self.open.wait(60)
        return ""


def test_retention_spares_what_is_being_uploaded_and_older_waiting_ones_give_way(
    tmp_path: Path, relayed: Bucket, relay: Relay
) -> None:
    gate = relay.rule = Gate("s1/data")
    saver = Saver(SaveOptions(asynchronous=True, upload_to=relayed.url, retention=Retention(keep_last=1)))
    saves = []
    with Log() as log:
        for step in (1, 2, 3):
            wanted = Request(lambda _, s=step: part(s, 0, 1), str(tmp_path), f"s{step}", True)
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
    assert [name for _, name in whole(relayed.url)] == ["s3", "s1"]
    wanted = Request(lambda _: part(4, 0, 1), str(tmp_path), "s4", True)
    assert saver.save(wanted, alone(), asynchronous=False).committed
    assert saver.finish(60)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "s4"]


def test_what_is_uploaded_is_what_was_committed_though_its_name_is_saved_again(
    tmp_path: Path, relayed: Bucket, relay: Relay
) -> None:
    gate = relay.rule = Gate("same/data/rank00000.safetensors")
    saver = Saver(SaveOptions(asynchronous=True, upload_to=relayed.url))
    saves = []
    for step in (1, 2):
        saves.append(saver.save(Request(lambda _, s=step: part(s, 0, 1), str(tmp_path), "same", True), alone()))
        assert saves[-1].wait(30)
        assert gate.reached.wait(30)
    assert not (tmp_path / "same/data/rank00000.safetensors").exists()  # replaced
    gate.open.set()
    assert saver.finish(60)
    assert all(save.upload is not None and save.upload.committed for save in saves)
    assert verify(f"{relayed.url}/same").problems == ()
    assert Checkpoint.open(f"{relayed.url}/same").manifest.step == 2


def test_a_file_that_is_damaged_here_is_not_uploaded(tmp_path: Path, relayed: Bucket, relay: Relay) -> None:
    def damage(directory: str) -> None:
        path = Path(directory) / "data/rank00000.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)

    saver = Saver(SaveOptions(asynchronous=True, upload_to=relayed.url))
    save = saver.save(Request(lambda _: part(1, 0, 1), str(tmp_path), "a", True, on_commit=damage), alone())
    assert saver.finish(60)
    assert save.upload is not None
    assert save.upload.result is not None
    assert "no longer what was written" in save.upload.result.failures[0]
    assert relayed.keys() == []


JOB = """
import sys, time, logging
from pathlib import Path
from tests.test_saver import *
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
    """``localhost`` has to be looked up, which Python's own end would not allow any more."""
    gate = relay.rule = Gate("a/data")
    process = job(tmp_path, relayed.url, what, port=relay.port)
    assert gate.reached.wait(30)
    if what == "wait":
        process.send_signal(signal.SIGTERM)
    else:
        time.sleep(12)  # connections and looked-up names are kept for ten seconds
    gate.open.set()
    _, errors = process.communicate(timeout=120)
    assert process.returncode == (-signal.SIGTERM if what == "wait" else 0), errors
    assert ("SIGTERM; finishing the upload of" in errors) == (what == "wait")
    assert_counts(f"{relayed.url}/a")
    assert relayed.get("latest") == b"a"


def test_an_upload_that_outlasts_the_grace_is_abandoned_and_the_local_checkpoint_is_whole(
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


# ---------------------------------------------------------------- DeepSpeed


def test_deepspeed_saves_to_a_url_and_resumes_from_it(tmp_path: Path, bucket: Bucket) -> None:
    pytest.importorskip("deepspeed")
    env = {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{bucket.port}", "UNICKPT_TEST_URL": bucket.url}
    torchrun(
        2, "tests.deepspeed.scenario_worker", "tests.deepspeed.scenarios_object_store", str(tmp_path), timeout_s=600, env=env
    )
    failures = json.loads((tmp_path / "w2.json").read_text())
    assert failures
    assert not any(failures.values()), failures


# ---------------------------------------------------------------- Megatron


def test_megatron_saves_to_a_url_uploads_and_resumes(tmp_path: Path, bucket: Bucket) -> None:
    pytest.importorskip("megatron.core")
    env = {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{bucket.port}", "UNICKPT_TEST_URL": bucket.url}
    name = "a_url_is_a_directory_for_the_library_and_what_the_scripts_cannot_use_is_refused"
    torchrun(2, "tests.megatron.scenario_worker", str(tmp_path), name, timeout_s=300, env=env)
    assert json.loads((tmp_path / "w2.json").read_text()) == {name: {}}
    assert bucket.get("megatron/library/metadata.json")
