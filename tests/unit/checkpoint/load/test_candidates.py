"""Which checkpoint a job resumes from, whatever has become of ``latest`` and of what it names."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.support.rank_threads import alone
from tests.support.saves import large, request, saved
from unickpt.base.errors import FormatError, StorageError, UnickptError
from unickpt.checkpoint.checkpoint_folder import TRACKER, complete_checkpoints, latest_tag, tracked_iteration
from unickpt.checkpoint.format.layout import LOCK_FILE
from unickpt.checkpoint.format.witnessed import Passed, WitnessFault
from unickpt.checkpoint.load.candidates import Candidates, CandidateTag
from unickpt.checkpoint.load.folders import newest
from unickpt.checkpoint.save import retention
from unickpt.checkpoint.save.requests import SaveOptions
from unickpt.checkpoint.save.retention import Retention
from unickpt.checkpoint.save.saver import Saver
from unickpt.checkpoint.storage.posix import PosixStorage
from unickpt.checkpoint.witness_faults import add_fault, note_gone_back, read_faults


def order(candidates: Candidates) -> list[str | None]:
    """Everything that is tried if all of it is damaged."""
    found: list[str | None] = []
    while not found or found[-1] is not None:
        found.append(candidates.next().tag)
    return found


def test_the_latest_comes_first_and_then_the_newest(tmp_path: Path) -> None:
    saved(tmp_path, "a", "b", "c")
    (tmp_path / "latest").write_text("b\n")
    assert order(Candidates(tmp_path)) == ["b", "c", "a", None]


def test_without_latest_a_job_is_new(tmp_path: Path) -> None:
    assert order(Candidates(tmp_path / "nowhere")) == [None]
    saved(tmp_path, "a")
    (tmp_path / "latest").unlink()
    assert Candidates(tmp_path).next().tag is None


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xfe", b"a\0b", b"../b", b"/etc", b"x" * 5000, b"b/../.."])
def test_a_latest_file_without_checkpoint_selects_the_newest(tmp_path: Path, content: bytes) -> None:
    saved(tmp_path, "a", "b")
    (tmp_path / "latest").write_bytes(content)
    with pytest.raises(FormatError, match="latest"):
        latest_tag(tmp_path)
    candidates = Candidates(tmp_path)
    choice = candidates.next()
    assert choice.tag == "b"
    assert "latest" in choice.notes[0]
    assert order(candidates) == ["a", None]


@pytest.mark.parametrize("target", ["a", "{}/a", "missing", ".."])
def test_latest_may_be_a_link_to_a_checkpoint_beside_it(tmp_path: Path, target: str) -> None:
    folder = tmp_path / "run"
    saved(folder, "a", "b")
    (folder / "latest").unlink()
    (folder / "latest").symlink_to(target.format(folder))
    choice = Candidates(folder).next()
    if target.endswith("a"):
        assert choice == CandidateTag("a")
    else:
        assert choice.tag == "b"
        assert "latest: is a symbolic link to missing" in choice.notes[0] or "latest leads outside" in choice.notes[0]
    if target != "..":
        saved(folder, "c")
        assert (folder / "latest").read_text() == "c"


def test_without_latest_megatrons_tracker_file_counts(tmp_path: Path) -> None:
    saved(tmp_path, "iter_0000001", "iter_0000002", "iter_0000003")
    (tmp_path / "latest").unlink()
    (tmp_path / TRACKER).write_text("2\n")
    assert tracked_iteration(tmp_path) == 2
    assert order(Candidates(tmp_path)) == ["iter_0000002", "iter_0000003", "iter_0000001", None]
    (tmp_path / "latest").write_text("iter_0000001")  # DeepSpeed's own comes first
    assert Candidates(tmp_path).next().tag == "iter_0000001"
    (tmp_path / "latest").unlink()
    (tmp_path / TRACKER).write_text("7")  # which Megatron has saved in a format of its own: not ours to load
    assert Candidates(tmp_path).next().tag is None
    (tmp_path / TRACKER).write_text("release")
    assert Candidates(tmp_path).next().tag is None
    (tmp_path / TRACKER).write_text("")
    choice = Candidates(tmp_path).next()
    assert choice.tag == "iter_0000003"
    assert "instead of an iteration" in choice.notes[0]


def test_a_folder_named_latest_selects_the_newest(tmp_path: Path) -> None:
    saved(tmp_path, "a")
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    assert Candidates(tmp_path).next().tag is None  # as without one: it is no file


def test_a_checkpoint_that_was_saved_again_while_it_was_read_is_tried_again(tmp_path: Path) -> None:
    saved(tmp_path, "old", "best")
    candidates = Candidates(tmp_path)
    assert candidates.next().tag == "best"
    saved(tmp_path, "best")
    choice = candidates.next()
    assert choice.tag == "best"
    assert "saved again" in choice.notes[0]
    assert candidates.next().tag == "old"


def test_a_damaged_latest_does_not_stop_a_save_that_keeps_few(tmp_path: Path) -> None:
    saved(tmp_path, "a", "b", "c")
    (tmp_path / "latest").write_bytes(b"\xff\xff")
    assert retention.apply(str(tmp_path), Retention(keep_last=1), just_saved="c") == ["b", "a"]


def test_checkpoints_that_another_job_saves_or_has_named_are_not_removed(tmp_path: Path) -> None:
    saved(tmp_path, "a", "b", "c")
    release = PosixStorage(tmp_path / "a").try_lock(LOCK_FILE)
    assert release is not None
    assert retention.apply(str(tmp_path), Retention(keep_last=1), just_saved="c") == ["b"]
    release()
    (tmp_path / "latest").write_text("a")
    assert retention.apply(str(tmp_path), Retention(keep_last=1), just_saved="c") == []
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["data", "index.safetensors", "manifest.json"]


def test_a_save_into_a_directory_of_another_running_save_is_an_error(tmp_path: Path) -> None:
    release = PosixStorage(tmp_path / "a").try_lock(LOCK_FILE)
    assert release is not None
    ended = []
    save = Saver(SaveOptions(asynchronous=True)).save(request(tmp_path, "a", large(1), on_end=ended.append), alone())
    assert save.done
    assert not save.committed
    assert "is saving into this directory" in save.cause()
    assert ended == [save]
    release()
    assert Saver(SaveOptions(asynchronous=False)).save(request(tmp_path, "a", large(1)), alone()).committed
    assert not (tmp_path / "a" / LOCK_FILE).exists()


def test_a_lock_goes_with_its_process(tmp_path: Path) -> None:
    storage = PosixStorage(tmp_path)
    child = multiprocessing.get_context("fork").Process(
        target=lambda: (storage.try_lock("l"), os.kill(os.getpid(), signal.SIGKILL))
    )
    child.start()
    child.join()
    assert (tmp_path / "l").exists()
    release = storage.try_lock("l")
    assert release is not None
    assert storage.try_lock("l") is None
    release()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_linked_from_elsewhere_is_not_written_through(tmp_path: Path) -> None:
    """A backup by hard links, or a rank of a dead job that still has the file open."""
    saved(tmp_path, "a")
    data = tmp_path / "a" / "data" / "rank00000.safetensors"
    os.link(data, tmp_path / "backup")
    before = data.read_bytes()
    (tmp_path / "a" / "manifest.json").unlink()  # so that the same names are used again
    assert Saver(SaveOptions(asynchronous=False)).save(request(tmp_path, "a", large(3)), alone()).committed
    assert (tmp_path / "backup").read_bytes() == before
    shutil.rmtree(tmp_path / "a")


def test_no_candidate_raises_for_a_folder_that_cannot_be_listed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    try:
        assert Candidates(tmp_path / "file").next().tag is None
    except UnickptError:
        pytest.fail("raised")


def test_an_unreadable_manifest_is_reported_and_nothing_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, "a", "b")
    read = PosixStorage.read

    def refuse(self: PosixStorage, name: str, *rest: int) -> bytes:
        if name == "manifest.json" and self.where().endswith("/b"):
            raise StorageError(f"{self.where(name)}: permission denied")
        return read(self, name, *rest)

    monkeypatch.setattr(PosixStorage, "read", refuse)
    with pytest.raises(StorageError, match=r"b/manifest\.json"):
        complete_checkpoints(tmp_path)
    options = SaveOptions(retention=Retention(keep_last=1))
    assert Saver(options).save(request(tmp_path, "c", large(1)), alone()).committed
    assert "were not removed: " in caplog.text
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"a", "b", "c"}


def witnessed(folder: Path, step: int, record: Passed | None) -> None:
    wanted = request(folder, f"s{step}", large(1))
    part = wanted.contribute({})
    part.step, part.witness = step, record
    wanted.contribute = lambda _: part
    assert Saver(SaveOptions()).save(wanted, alone()).committed


def test_a_job_goes_back_behind_a_fault_that_the_witness_has_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (2, 4, 6):
        witnessed(tmp_path, step, Passed(4, ("rest",)))
    add_fault(tmp_path, WitnessFault(4, 7, "SDC_AT_REST"))
    candidates = Candidates(tmp_path)
    choice = candidates.next()
    assert choice.tag == "s4"
    assert choice.notes == (f"{tmp_path}/s6 is of step 6, and may have traces of a fault after step 4: SDC_AT_REST",)
    assert order(candidates) == ["s2", None]
    for name, warned in (("s4", False), ("s6", True)):  # named by the user
        caplog.clear()
        assert Candidates(tmp_path / name).offer().explicit
        assert (
            "may have traces of a fault after step 4: SDC_AT_REST. It is loaded, because it was named" in caplog.text
        ) is warned
    assert newest(str(tmp_path)).checkpoint == f"{tmp_path}/s4"  # type: ignore[union-attr]
    note_gone_back(tmp_path)
    witnessed(tmp_path, 5, Passed(4, ("rest",), faults=1))  # of the job that has gone back
    assert order(Candidates(tmp_path)) == ["s5", "s4", "s2", None]
    add_fault(tmp_path, WitnessFault(4, 9, "SDC_REPLICA"))
    assert order(Candidates(tmp_path)) == ["s4", "s2", None]
    assert [(fault.found, fault.gone_back) for fault in read_faults(tmp_path)] == [(7, True), (9, False)]


def test_a_damaged_file_of_faults_ends_a_start_with_advice(tmp_path: Path) -> None:
    saved(tmp_path, "a")
    for content in (
        "{",
        "[]",
        '{"faults": [{"after": -1}]}',
        '{"faults": [{"after": 1, "found": 2, "text": "", "gone_back": 1}]}',
    ):
        (tmp_path / "witness.json").write_text(content)
        with pytest.raises(FormatError, match=r"witness.json.*remove the file"):
            Candidates(tmp_path).next()
