"""Of several copies of a job, the one that was started last writes into a checkpoint folder."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest

from tests.jobs.faults import ranks
from unickpt.base.errors import StorageError
from unickpt.base.process_identity import ProcessIdentity
from unickpt.checkpoint.coordination.failure import FailureKind
from unickpt.checkpoint.fence import (
    FENCE,
    FENCE_FILE,
    ROUND,
    FencedError,
    FenceVerdict,
    JobCopy,
    copy_of_this,
    guarded,
    line_folder,
    read_fence,
    take_on_resume,
    verdict_on,
)
from unickpt.checkpoint.save.commit import next_generation
from unickpt.checkpoint.save.requests import SaveOptions
from unickpt.checkpoint.save.saver import Saver
from unickpt.checkpoint.storage.open import open_storage

OLD = JobCopy("", "", (0, 0), "1.1.boot.ns", 100.0, "host process 1")
NEW = replace(OLD, process="2.2.boot.ns", began_s=200.0)
FIRST = JobCopy("job", "instance", (1, 1), "1.1.boot.ns", 100.0, "host process 1")


@pytest.fixture
def steered(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """This process is a worker of a round."""
    for name, value in (("TORCHELASTIC_RUN_ID", "id"), (FENCE, "job/instance"), (ROUND, "1.2"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("unickpt.base.launcher_watch._watching", -1)
    return monkeypatch


def test_the_copy_that_was_started_last_writes() -> None:
    for owned, lives in itertools.product((True, False), (True, None, False)):
        assert verdict_on(None, OLD, owned=owned, lives=lives) is FenceVerdict.TAKE
        assert verdict_on(OLD, OLD, owned=owned, lives=lives) is FenceVerdict.OWN
        assert verdict_on(OLD, NEW, owned=owned, lives=lives) is FenceVerdict.TAKE
        refused = lives or (owned and lives is None)  # one that has ended holds nothing
        assert verdict_on(NEW, OLD, owned=owned, lives=lives) is (FenceVerdict.REFUSED if refused else FenceVerdict.TAKE)


def test_copies_on_one_machine_are_compared_without_a_clock() -> None:
    behind = replace(NEW, began_s=OLD.began_s - 3600.0)  # the clock was set back between the two starts
    assert verdict_on(OLD, behind, owned=False, lives=True) is FenceVerdict.TAKE, "the old copy hangs"
    assert verdict_on(behind, OLD, owned=True, lives=True) is FenceVerdict.REFUSED
    elsewhere = replace(behind, process="2.2.other.ns")
    assert verdict_on(elsewhere, OLD, owned=True, lives=None) is FenceVerdict.TAKE, "of two machines only the clocks tell"


def test_rounds_of_a_job_are_ordered_without_a_clock() -> None:
    later = replace(FIRST, round=(2, 2), process="2.2.boot.ns", began_s=1.0)  # on a host whose clock is wrong
    other_host = replace(FIRST, process="9.9.other.ns", began_s=500.0)
    for owned, lives in itertools.product((True, False), (True, None, False)):
        assert verdict_on(FIRST, later, owned=owned, lives=lives) is FenceVerdict.TAKE
        assert verdict_on(later, FIRST, owned=owned, lives=lives) is FenceVerdict.REFUSED
        assert verdict_on(other_host, FIRST, owned=owned, lives=lives) is FenceVerdict.OWN
    again = replace(FIRST, instance="another", process="3.3.boot.ns", began_s=300.0)  # all agents were started again
    assert verdict_on(FIRST, again, owned=False, lives=False) is FenceVerdict.TAKE
    assert verdict_on(again, FIRST, owned=True, lives=False) is FenceVerdict.REFUSED, "it may be between two rounds"


@pytest.mark.parametrize("place", ["folder", "memory"])
def test_an_older_copy_is_refused_in_a_folder_and_in_an_object_store(tmp_path: Path, place: str) -> None:
    where = str(tmp_path) if place == "folder" else f"memory://{tmp_path.name}"
    old, new = set[str](), set[str]()
    with guarded(where, OLD, old):
        pass
    with guarded(f"{where}/checkpoint-30", NEW, new):  # Trainer: the folder above has the line of checkpoints
        pass
    assert read_fence(open_storage(where)) == NEW
    with pytest.raises(FencedError, match=r"host process 1, started at .* This one"), guarded(where, OLD, old):
        raise AssertionError("the block must not run")
    with guarded(where, NEW, new):
        assert read_fence(open_storage(where)) == NEW
    if place == "memory":
        fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)


def test_a_later_copy_that_has_ended_leaves_the_folder_to_the_one_that_trains(tmp_path: Path) -> None:
    """A short job, such as an evaluation with a save, was started in the folder of a training."""
    found, owned = ProcessIdentity.of(os.getpid()), set[str]()
    assert found is not None
    training = replace(OLD, process=f"{found.pid}.{found.start}.{found.boot}.other")
    with guarded(str(tmp_path), training, owned):
        pass
    with subprocess.Popen(["sleep", "60"]) as process:
        other = ProcessIdentity.of(process.pid)
        with guarded(str(tmp_path), replace(NEW, process=str(other)), set()):
            pass
        with pytest.raises(FencedError), guarded(str(tmp_path), training, owned):
            pass
        process.kill()
        process.wait()
    with guarded(str(tmp_path), training, owned):
        assert read_fence(open_storage(str(tmp_path))) == training


def test_a_checkpoint_folder_in_a_folder_that_cannot_be_written_has_the_fence_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FENCE_FILE).mkdir()  # no file can take its place, not even of root
    owned = set[str]()
    for step in (1, 2):
        with guarded(str(tmp_path / f"checkpoint-{step}"), OLD, owned):
            assert read_fence(open_storage(str(tmp_path / f"checkpoint-{step}"))) == OLD
    assert len([line for line in caplog.messages if f"Make {tmp_path} writable" in line]) == 1
    with pytest.raises(StorageError), guarded(str(tmp_path), OLD, owned):
        raise AssertionError("the block must not run")


def test_a_damaged_fence_stops_nobody(tmp_path: Path) -> None:
    for text in ("", "{", "[]", '{"schema": 2}', json.dumps({"schema": 1, "round": "x"})):
        (tmp_path / FENCE_FILE).write_text(text)
        with guarded(str(tmp_path), OLD, set()):
            assert read_fence(open_storage(str(tmp_path))) == OLD


def test_the_folder_of_one_checkpoint_belongs_to_the_line_above_it() -> None:
    assert line_folder("/out/checkpoint-30") == line_folder("/out") == "/out"
    assert line_folder("s3://bucket/out/checkpoint_3") == "s3://bucket/out"
    assert line_folder("/out/checkpoints") == "/out/checkpoints"


def test_no_copy_without_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "CROSS_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert copy_of_this() is None
    save(tmp_path, 1)
    assert not (tmp_path / FENCE_FILE).exists()


def save(folder: Path, step: int) -> list[FailureKind]:
    """Save a checkpoint of one rank, and return why it failed."""
    exchange = ranks.alone()
    request = ranks.request(folder, f"step{step}", step, exchange)
    request.one_writer = True
    saved = Saver(SaveOptions()).save(request, exchange)
    assert saved.result is not None
    return [failure.kind for failure in saved.result.failures]


def test_a_save_of_an_older_round_is_refused_at_the_commit(tmp_path: Path, steered: pytest.MonkeyPatch) -> None:
    assert save(tmp_path, 1) == []
    of_round = read_fence(open_storage(str(tmp_path)))
    assert of_round is not None
    assert (of_round.job, of_round.instance, of_round.round) == ("job", "instance", (1, 2))
    later = replace(of_round, round=(1, 3), process="7.7.boot.ns")

    def written(*_: object, **__: object) -> None:
        """The next round resumes while the files of this save are written."""
        with guarded(str(tmp_path), later, set()):
            pass

    steered.setattr("unickpt.checkpoint.save.task.agreement.notes_of", lambda _: written() or ())
    assert save(tmp_path, 2) == [FailureKind.STORAGE]
    assert not (tmp_path / "step2").exists()
    assert (tmp_path / "latest").read_text() == "step1"
    steered.undo()
    steered.setenv("TORCHELASTIC_RUN_ID", "id")
    steered.setenv(FENCE, "job/instance")
    steered.setenv(ROUND, "1.2")
    assert save(tmp_path, 3) == [FailureKind.STORAGE], "refused before anything is written"
    assert read_fence(open_storage(str(tmp_path))) == later


def test_a_round_takes_over_when_it_resumes_and_other_jobs_take_nothing(tmp_path: Path, steered: pytest.MonkeyPatch) -> None:
    place = open_storage(str(tmp_path))
    take_on_resume(str(tmp_path))
    assert read_fence(place) is None
    with guarded(str(tmp_path), FIRST, set()):
        pass
    steered.setenv(FENCE, "evaluation/other")
    take_on_resume(str(tmp_path))
    assert read_fence(place) == FIRST
    steered.setenv(FENCE, "job/instance")
    take_on_resume(str(tmp_path / "checkpoint-1"))
    taken = read_fence(place)
    assert taken is not None
    assert taken.round == (1, 2)


def test_an_object_store_keeps_files_of_two_copies_apart() -> None:
    storage = open_storage("memory://fence/step1")
    assert next_generation(storage) == 0
    storage.write_atomic("data/rank00000.safetensors", b"of a copy that still writes")
    assert next_generation(storage) > 1
    fsspec.filesystem("memory").rm("/fence", recursive=True)
