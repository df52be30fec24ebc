"""What a save has returned from is durable; a save that fails says so, on every rank, and leaves nothing behind."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.faults.calls import Call, watched
from tests.support.rank_threads import WORLD, alone, on_all_ranks
from tests.support.saves import Broken, assert_counts, assert_holds, files, large, part, request, run_alone
from unickpt.checkpoint.coordination.failure import FailureKind
from unickpt.checkpoint.coordination.message_exchange import MessageExchange
from unickpt.checkpoint.load.validation import is_checkpoint
from unickpt.checkpoint.save.requests import PendingSave, SaveOptions, SaveRequest
from unickpt.checkpoint.save.retention import Retention
from unickpt.checkpoint.save.saver import Saver
from unickpt.checkpoint.save.shards import Contribution

BEHIND = SaveOptions(asynchronous=True)


# ---------------------------------------------------------------- durable when the call returns


def test_a_process_that_ends_right_after_a_save_has_a_complete_checkpoint(tmp_path: Path) -> None:
    code = """
import os, shutil, sys
from pathlib import Path
from tests.support.rank_threads import alone
from tests.support.saves import files, run_alone, large, request
from unickpt.checkpoint.save.saver import Saver
folder = Path(sys.argv[1])
save = Saver().save(request(folder, "a", large()), alone())
assert save.committed
shutil.copytree(folder, str(folder) + "-copy")
os._exit(0)
"""
    done = run_alone(code, str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr[-2000:]
    for folder in (tmp_path / "run", tmp_path / "run-copy"):
        assert_counts(folder / "a")
        assert (folder / "latest").read_text() == "a"


def test_a_synchronous_save_takes_no_staging_memory(tmp_path: Path) -> None:
    saver = Saver()
    assert saver.save(request(tmp_path, "a", large()), alone()).committed
    assert saver._pool.capacity_bytes == 0


@pytest.mark.parametrize("asynchronous", [False, True])
def test_everything_is_synced_before_a_save_is_committed(asynchronous: bool, tmp_path: Path) -> None:
    """Every new file, and every folder that got a new entry after that entry was made. Training waits for no sync."""
    calls: list[Call] = []
    in_training: list[Call] = []
    folder = tmp_path / "new" / "run"

    def note(call: Call) -> None:
        calls.append(call)
        if threading.current_thread() is threading.main_thread():
            in_training.append(call)

    with watched(tmp_path, note, ("open", "mkdir", "fsync", "replace")):
        saver = Saver(SaveOptions(asynchronous=asynchronous))
        save = saver.save(request(folder, "a", large(1)), alone())
        assert saver.finish(30)
    assert save.committed
    assert asynchronous is not any(call.name == "fsync" for call in in_training)
    synced = {call.path: call.number for call in calls if call.name == "fsync" and call.after}
    for made in ("new", "new/run", "new/run/a", "new/run/a/data"):
        entry = next(call.number for call in calls if call.path.startswith(made))
        above = str(Path(made).parent) if "/" in made else ""
        assert synced.get(above, -1) > entry, f"the entry of {made} is not synced: {synced}"
    assert {"new/run/a/manifest.json.tmp", "new/run/latest.tmp", "new/run/a/data/rank00000.safetensors"} <= set(synced)


def test_a_latest_that_cannot_be_written_is_no_success(tmp_path: Path) -> None:
    saver = Saver()
    assert saver.save(request(tmp_path, "a", large(1)), alone()).committed
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()  # a folder cannot be replaced by a file
    save = saver.save(request(tmp_path, "b", large(1)), alone())
    assert is_checkpoint(tmp_path / "b")
    assert save.result is not None
    assert not save.result.complete
    assert "latest" in save.cause()


# ---------------------------------------------------------------- paths


def test_paths_are_those_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``os.chdir`` while a save goes on, with retention on: another folder with the same name is not touched."""
    first, second = tmp_path / "first", tmp_path / "second"
    for place in (first, second):
        place.mkdir()
        monkeypatch.chdir(place)
        for tag in ("s1", "s2"):
            assert Saver(SaveOptions(asynchronous=False)).save(request("run", tag, large(1)), alone()).committed
    untouched = files(second)
    monkeypatch.chdir(first)
    saver = Saver(SaveOptions(asynchronous=True, retention=Retention(keep_last=1), upload_to="copies"))
    gate = threading.Event()

    def hold(call: Call) -> None:
        if call.name == "pwrite" and threading.current_thread() is not threading.main_thread():
            gate.wait(30)

    with watched(first, hold, ("pwrite",)):
        save = saver.save(request("run", "s3", large(1)), alone())
        monkeypatch.chdir(second)
        gate.set()
        assert saver.finish(30)
    assert save.committed
    assert files(second) == untouched
    assert (first / "run" / "latest").read_text() == "s3"
    assert sorted(p.name for p in (first / "run").iterdir()) == ["latest", "s3"]
    assert_counts(first / "copies" / "s3", 1)


# ---------------------------------------------------------------- failures, agreed on


def test_ranks_that_name_different_checkpoints_learn_it_at_once(tmp_path: Path) -> None:
    def run(exchange: MessageExchange) -> PendingSave:
        wanted = SaveRequest(lambda _: part(1, exchange.rank), str(tmp_path), f"tag{exchange.rank % 2}", True)
        return Saver().save(wanted, exchange)

    begin = time.monotonic()
    for save in on_all_ranks(run, timeout_s=60):
        assert isinstance(save, PendingSave), save
        assert not save.committed
        assert save.result is not None
        assert not save.result.framework_saves, "its files would lie in two places"
        assert "tag0" in save.cause()
        assert "tag1" in save.cause()
    assert time.monotonic() - begin < 20
    assert files(tmp_path) == []


@pytest.mark.parametrize("behind", [False, True])
def test_an_exception_while_one_rank_describes_its_state_is_known_on_all_when_the_call_returns(
    tmp_path: Path, behind: bool
) -> None:
    def run(exchange: MessageExchange) -> PendingSave:
        saver = Saver(SaveOptions(asynchronous=behind))

        def contribute(_: Any) -> Contribution:
            if exchange.rank == 1:
                raise IndexError("list index out of range")
            return part(1, exchange.rank)

        first = saver.save(SaveRequest(lambda _: part(1, exchange.rank), str(tmp_path), "a", True), exchange.separate("save"))
        assert first.wait(30)
        return saver.save(SaveRequest(contribute, str(tmp_path), "b", True), exchange.separate("save"))

    for save in on_all_ranks(run):
        assert isinstance(save, PendingSave), save
        assert save.done
        assert save.result is not None
        assert save.result.framework_saves
        (failure,) = save.result.failures
        assert (failure.kind, failure.rank) == (FailureKind.UNEXPECTED, 1)
        assert failure.text.startswith("IndexError: list index out of range (at test_durable_saves.py:")
    assert not (tmp_path / "b").exists()
    assert_holds(tmp_path, "a", 1)


def test_a_coverage_error_at_the_commit_makes_the_framework_save_from_then_on(tmp_path: Path) -> None:
    """A hole in the coverage is seen by the coordinator alone, and in asynchronous mode after the call."""

    def run(exchange: MessageExchange) -> list[PendingSave]:
        saver = Saver(BEHIND)
        described = []

        def contribute(_: Any) -> Contribution:
            described.append(1)
            found = part(1, exchange.rank)
            if exchange.rank == 1:
                found.shards.pop()
            return found

        saves = []
        for tag in ("a", "b", "c"):
            saves.append(saver.save(SaveRequest(contribute, str(tmp_path), tag, True), exchange.separate("save")))
        saver.finish(30)
        assert len(described) == 1, "a layout that is known to be described wrongly is described again"
        return saves

    for found in on_all_ranks(run):
        assert isinstance(found, list), found
        first, *later = found
        assert first.result.failures[0].kind is FailureKind.UNEXPECTED
        for save in later:
            assert save.result.framework_saves
            assert "CoverageError" in save.cause()
    assert files(tmp_path) == []


def test_a_save_on_some_ranks_does_not_mix_with_the_next(tmp_path: Path) -> None:
    """Whichever rank came alone: the coordinator, or another."""
    gone = threading.Barrier(WORLD)

    def run(exchange: MessageExchange) -> list[Any]:
        saver, found = Saver(), []
        for round_, lonely in enumerate((0, 1)):
            if exchange.rank == lonely:
                exchange.timeout_s = 0.5
                with pytest.raises(Exception, match="no message from rank"):
                    saver.save(SaveRequest(lambda _: part(1, exchange.rank), str(tmp_path), "alone"), exchange.separate("save"))
                exchange.timeout_s = 20.0
            gone.wait(30)
            wanted = SaveRequest(lambda _, r=round_: part(r, exchange.rank), str(tmp_path), f"all{round_}")
            found.append(saver.save(wanted, exchange.separate("save")).committed)
        return found

    assert on_all_ranks(run, timeout_s=20) == [[True, True]] * WORLD
    assert not (tmp_path / "alone").exists()


# ---------------------------------------------------------------- an asynchronous save that failed


def test_a_failure_behind_training_is_an_error_at_the_next_call_which_then_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saver, broken = Saver(BEHIND), Broken()
    with watched(tmp_path, broken, ("pwrite",)):
        assert saver.save(request(tmp_path, "a", large(1)), alone()).wait(30)
        caplog.clear()
        second = saver.save(request(tmp_path, "b", large(1)), alone())
        assert second.done, "after a failure a save does not return before it is known how it ended"
        assert not second.committed
        errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
        assert any("a" in text and "No space left" in text for text in errors), errors
        broken.on = False
        assert saver.save(request(tmp_path, "c", large(1)), alone()).committed
    caplog.clear()
    assert saver.save(request(tmp_path, "d", large(1)), alone()).wait(30)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert files(tmp_path)[:2] == ["c", "c/data"]


@pytest.mark.parametrize("how", ["load", "end"])
def test_a_failure_behind_training_is_an_error_when_the_process_loads_or_ends(tmp_path: Path, how: str) -> None:
    code = """
import logging, sys
from pathlib import Path
from tests.jobs.faults.calls import watched
from tests.support.rank_threads import alone
from tests.support.saves import files, run_alone, Broken, background, large, request
from unickpt.checkpoint.save import shutdown
logging.basicConfig(level=logging.ERROR)
watching = watched(Path(sys.argv[1]), Broken(), ("pwrite",))
watching.__enter__()
save = background().save(request(sys.argv[1], "a", large(1)), alone())
if sys.argv[2] == "load":
    shutdown.finish_all()
    print("loaded", file=sys.stderr)
"""
    done = run_alone(code, str(tmp_path), how)
    assert done.returncode == 0, done.stderr[-2000:]
    before, _, after = done.stderr.partition("loaded")
    assert "ERROR" in before
    assert "No space left" in before
    assert "ERROR" not in after
