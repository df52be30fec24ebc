"""The tracker file and the checkpoints that go: it names a complete one, and the newest stays, in any order of commits."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

pytest.importorskip("megatron.core")

from megatron_unickpt.framework import marks
from megatron_unickpt.pretraining import tracker_hooks
from megatron_unickpt.runtime import Purpose, Runtime, ScriptCall
from megatron_unickpt.tracker import Diverted, Trackers, is_complete, iteration_of, remove_old_non_persistent
from tests.support.rank_threads import alone
from tests.support.saves import large, request
from unickpt.checkpoint.checkpoint_folder import TRACKER, iteration_name
from unickpt.checkpoint.save.requests import SaveOptions
from unickpt.checkpoint.save.retention import Retention
from unickpt.checkpoint.save.saver import Saver

SAVES = (1, 2, 3, 4, 5)
RULES = {
    "interval": (Retention(also_every=4), {4, 5}),
    "keep_last": (Retention(keep_last=2), {4, 5}),
    "both": (Retention(keep_last=2, also_every=3), {3, 4, 5}),
    "neither": (Retention(), set(SAVES)),
}


def commit(folder: Path, trackers: Trackers, order: int, iteration: int, policy: Retention) -> None:
    """Save with unickpt, as the scripts do."""
    wanted = request(folder, iteration_name(iteration), large(1))
    part = wanted.contribute({})
    part.step = iteration
    wanted.contribute, wanted.save_latest = (lambda _: part), False
    wanted.on_commit = lambda directory: trackers.name(directory, order)
    wanted.on_end = lambda _: trackers.remove_replaced(str(folder), policy)
    assert Saver(SaveOptions(retention=policy)).save(wanted, alone()).committed


def natively(folder: Path, iteration: int) -> None:
    """Make a folder of Megatron's own format."""
    place = folder / iteration_name(iteration)
    place.mkdir()
    for name in (".metadata", "metadata.json", "__0_0.distcp"):
        (place / name).write_text("{}")


def stays(folder: Path) -> set[int]:
    return {int(path.name[5:]) for path in folder.glob("iter_*")}


def assert_sound(folder: Path, newest: int) -> None:
    tracked = int((folder / TRACKER).read_text())
    assert is_complete(str(folder / iteration_name(tracked)))
    assert is_complete(str(folder / iteration_name(newest)))


@pytest.mark.parametrize("native", [None, 2, 5])
@pytest.mark.parametrize("rule", RULES)
def test_commits_in_the_order_of_the_saves(tmp_path: Path, rule: str, native: int | None) -> None:
    policy, expected = RULES[rule]
    trackers = Trackers()
    for iteration in SAVES:
        order = trackers.begin()
        if iteration == native:
            natively(tmp_path, iteration)
            trackers.name(str(tmp_path / iteration_name(iteration)), order, native=True)
            trackers.remove_replaced(str(tmp_path), policy)
        else:
            commit(tmp_path, trackers, order, iteration, policy)
        assert_sound(tmp_path, iteration)
        assert (tmp_path / TRACKER).read_text() == str(iteration)
    if native == 5 and policy.keep_last:
        expected = expected | {3}  # ``keep_last`` counts those of unickpt's format when the next one of them is there
    assert stays(tmp_path) == expected


@pytest.mark.parametrize("rule", RULES)
def test_commits_in_any_order(tmp_path: Path, rule: str) -> None:
    """As with a queue of asynchronous saves, and a save of Megatron among them."""
    policy, _ = RULES[rule]
    for number, ending in enumerate(permutations((1, 2, 3, 4))):
        folder, trackers = tmp_path / str(number), Trackers()
        folder.mkdir()
        orders = {iteration: trackers.begin() for iteration in (1, 2, 3, 4)}
        for at, iteration in enumerate(ending):
            if iteration == 3:
                natively(folder, 3)
                trackers.name(str(folder / iteration_name(3)), orders[3], native=True)
                trackers.remove_replaced(str(folder), policy)
            else:
                commit(folder, trackers, orders[iteration], iteration, policy)
            newest = max(ending[: at + 1])
            assert_sound(folder, newest)
            assert (folder / TRACKER).read_text() == str(newest), ending
        assert stays(folder) >= {4}
        if rule == "interval":
            assert stays(folder) == {4}, ending


def test_what_an_earlier_job_has_saved_stays_but_the_last(tmp_path: Path) -> None:
    """As in Megatron, whose next save removes only the checkpoint that the tracker file named before."""
    policy, first = Retention(), Trackers()
    for iteration in (1, 2, 3):
        commit(tmp_path, first, first.begin(), iteration, policy)
    second = Trackers()
    commit(tmp_path, second, second.begin(), 5, Retention(also_every=4))
    assert stays(tmp_path) == {1, 2, 5}


def test_a_job_that_went_back_keeps_the_later_checkpoints(tmp_path: Path) -> None:
    policy, first, second = Retention(also_every=4), Trackers(), Trackers()
    for iteration in (1, 4, 7):
        commit(tmp_path, first, first.begin(), iteration, policy)
    for iteration in (5, 6):
        commit(tmp_path, second, second.begin(), iteration, policy)
        assert (tmp_path / TRACKER).read_text() == str(iteration)
    assert stays(tmp_path) == {4, 6, 7}


def test_links_and_checkpoints_in_use_stay(tmp_path: Path) -> None:
    policy, trackers = Retention(also_every=100), Trackers()
    outside = tmp_path / "outside"
    natively(tmp_path, 1)
    (tmp_path / iteration_name(1)).rename(outside)
    (tmp_path / iteration_name(1)).symlink_to(outside)
    trackers.name(str(tmp_path / iteration_name(1)), trackers.begin(), native=True)
    for iteration in (2, 3):
        natively(tmp_path, iteration)
        trackers.name(str(tmp_path / iteration_name(iteration)), trackers.begin(), native=True)
        trackers.remove_replaced(str(tmp_path), policy, busy={iteration_name(2)})
    assert stays(tmp_path) == {1, 2, 3}
    assert is_complete(str(outside))
    trackers.remove_replaced(str(tmp_path), policy)
    assert stays(tmp_path) == {1, 3}, "the upload has ended"


def test_no_tracker_file_no_removal(tmp_path: Path) -> None:
    """If the file cannot be written, it names the checkpoint before, which stays."""
    policy, trackers = Retention(keep_last=1, also_every=100), Trackers()
    commit(tmp_path, trackers, trackers.begin(), 1, policy)
    trackers.name = lambda *_, **__: None  # type: ignore[method-assign]
    commit(tmp_path, trackers, 2, 2, policy)
    assert (tmp_path / TRACKER).read_text() == "1"
    assert stays(tmp_path) == {1, 2}


def test_of_non_persistent_checkpoints_the_newest_complete_one_stays(tmp_path: Path) -> None:
    trackers = Trackers()
    for iteration in (1, 2):
        commit(tmp_path, trackers, trackers.begin(), iteration, Retention())
    (tmp_path / iteration_name(3) / "data").mkdir(parents=True)  # is being written
    (tmp_path / iteration_name(4) / "data").mkdir(parents=True)  # left by a save that was killed
    (tmp_path / "other").mkdir()
    remove_old_non_persistent(str(tmp_path), 1, busy={iteration_name(3)})
    assert stays(tmp_path) == {2, 3}
    assert (tmp_path / "other").is_dir()
    remove_old_non_persistent(str(tmp_path / "missing"), 1, busy=())


@pytest.mark.parametrize("call", [{"diverted": Diverted()}, {"memory": object()}], ids=["disk", "memory"])
def test_a_save_into_memory_leaves_the_newest_complete_checkpoint_too(tmp_path: Path, call: dict[str, Any]) -> None:
    """Megatron's function would take the folder of a save that was killed for the newest one."""
    trackers, runtime = Trackers(), Runtime()
    for iteration in (1, 2):
        commit(tmp_path, trackers, trackers.begin(), iteration, Retention())
    (tmp_path / iteration_name(3) / "data").mkdir(parents=True)

    def megatrons(save_dir: str, leave_ckpt_num: int = 1, do_async: bool = False) -> None:
        raise AssertionError

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with runtime.during(ScriptCall(Purpose.SAVE, **call)):
            tracker_hooks.remove_old_non_persistent(runtime, megatrons, str(tmp_path), leave_ckpt_num=1)
    finally:
        dist.destroy_process_group()
    assert stays(tmp_path) == {2}


def test_the_remains_of_a_removed_checkpoint_are_no_checkpoint(tmp_path: Path) -> None:
    place = tmp_path / iteration_name(3)
    place.mkdir()
    marks.mark(str(place))
    assert not is_complete(str(place))
    natively(tmp_path, 4)
    assert is_complete(str(tmp_path / iteration_name(4)))


def test_names() -> None:
    assert [iteration_of(name) for name in ("iter_0000012", "release", "iter_x", "iter_²", "global_step3", "iter_")] == [
        12, None, None, None, None, None,
    ]  # fmt: skip
