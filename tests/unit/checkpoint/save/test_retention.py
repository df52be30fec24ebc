"""Retention removes old checkpoints, never the newest complete one, and nothing that others wrote."""

from __future__ import annotations

import os
import time
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.support.rank_threads import alone
from tests.support.saves import assert_counts, large, request
from unickpt.checkpoint.format.witnessed import Passed
from unickpt.checkpoint.save import retention
from unickpt.checkpoint.save.requests import SaveOptions
from unickpt.checkpoint.save.retention import Retention, superseded
from unickpt.checkpoint.save.saver import Saver


@given(st.lists(st.integers(0, 50), unique=True, max_size=12), st.integers(0, 5), st.integers(0, 7), st.integers(0, 50))
def test_new_and_protected_checkpoints_and_multiples_are_kept(steps: list[int], last: int, every: int, kept: int) -> None:
    found = [(step, f"s{step}") for step in steps]
    gone = superseded(found, Retention(last, every), protected=[f"s{kept}"])
    newest = sorted(steps, reverse=True)
    if last == 0:
        assert gone == []
        return
    for at, step in enumerate(newest):
        stays = at < last or step == kept or (every > 0 and step % every == 0)
        assert (f"s{step}" in gone) == (not stays)
    assert not newest or f"s{newest[0]}" not in gone


def saved(folder: Path, tag: str, step: int, policy: Retention, passed: int | None = None) -> None:
    wanted = request(folder, tag, large(2))
    first = wanted.contribute

    def contribute(announced: dict[str, object]):  # type: ignore[no-untyped-def]
        part = first(announced)
        part.step = step
        part.witness = None if passed is None else Passed(passed, ("rest",))
        return part

    wanted.contribute = contribute
    save = Saver(SaveOptions(retention=policy)).save(wanted, alone())
    assert save.wait(30)
    assert save.committed


def test_a_folder_keeps_the_checkpoints_of_the_policy(tmp_path: Path) -> None:
    for step in range(1, 8):
        saved(tmp_path, f"s{step}", step, Retention(keep_last=2, keep_every=3))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "s3", "s6", "s7"]
    for name in ("s3", "s6", "s7"):
        assert_counts(tmp_path / name, 2)


def test_the_checkpoint_of_a_roll_back_stays_until_the_witness_has_passed_a_newer_one(tmp_path: Path) -> None:
    for step, passed, stay in ((1, 0, {1}), (2, 1, {1, 2}), (3, 1, {1, 3}), (4, 1, {1, 4}), (5, 4, {4, 5}), (6, None, {4, 6})):
        saved(tmp_path, f"s{step}", step, Retention(keep_last=1), passed)
        assert {path.name for path in tmp_path.glob("s*")} == {f"s{each}" for each in stay}, step


def test_foreign_files_stay_and_dead_saves_are_removed(tmp_path: Path) -> None:
    saved(tmp_path, "s1", 1, Retention())
    (tmp_path / "s1" / "mp_rank_00_model_states.pt").write_text("DeepSpeed's")
    for name, age in (("dead", 2 * retention.ABANDONED_S), ("alive", 0.0)):
        (tmp_path / name / "data").mkdir(parents=True)
        part = tmp_path / name / "data" / "rank00000.safetensors"
        part.write_text("half")
        os.utime(part, (time.time() - age,) * 2)
    (tmp_path / "notes").mkdir()
    saved(tmp_path, "s2", 2, Retention(keep_last=1))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["alive", "latest", "notes", "s1", "s2"]
    assert [p.name for p in (tmp_path / "s1").iterdir()] == ["mp_rank_00_model_states.pt"]


def test_a_resumed_job_keeps_its_new_save_of_an_earlier_step(tmp_path: Path) -> None:
    saved(tmp_path, "s9", 9, Retention(keep_last=1))
    saved(tmp_path, "s4", 4, Retention(keep_last=1))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "s4", "s9"]
