"""Errors that one rank alone meets during a load: all ranks act alike."""

from __future__ import annotations

import os
import resource
import shutil
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deepspeed import comm as dist

from tests.jobs.deepspeed.damaged_checkpoints import TAG, damaged, data, rewrite, untouched
from tests.jobs.deepspeed.jobs import build, train
from tests.jobs.deepspeed.logs import Log
from tests.jobs.deepspeed.resumes import here
from tests.jobs.deepspeed.scenario_worker import scenario
from unickpt.base.errors import UnickptError


@scenario(2)
def a_failure_on_one_rank_after_the_reads_fails_all_ranks(folder: Path) -> None:
    place = damaged(folder, untouched)
    engine = build(here(1), seed=2)

    def load(src: Any, dst: Any) -> None:
        if dist.get_rank() == 1:
            raise RuntimeError("no memory left")

    own = dist.get_rank() == 1
    pattern = "^no memory left$" if own else "rank 1 could not load it: RuntimeError: no memory left"
    with pytest.raises(RuntimeError if own else UnickptError, match=pattern):
        engine.load_checkpoint(str(place), tag=TAG, custom_load_fn=load)


def two_views(folder: Path, change: Callable[[Path], None]) -> Path:
    """Save two checkpoints and return this rank's view of the folder. The last rank sees the newest one changed."""
    rank, world = dist.get_rank(), dist.get_world_size()
    engine = build(here(1), seed=1)
    for _ in range(2):
        train(engine, 1)
        engine.save_checkpoint(str(folder / "seen"))
    dist.barrier()
    if rank == world - 1:
        shutil.copytree(folder / "seen", folder / "otherwise")
        change(folder / "otherwise" / "global_step2")
    dist.barrier()
    return folder / ("otherwise" if rank == world - 1 else "seen")


def engine_with_timeout(**options: Any) -> Any:
    return build(here(2), seed=2, unickpt={"enabled": True, "timeout_seconds": 20, **options})


def outcome_of(engine: Any, view: Path) -> tuple[str, str]:
    """Load, and return the name of the directory with the log, or the class of the error with its message."""
    with Log() as log:
        try:
            path, _ = engine.load_checkpoint(str(view))
        except Exception as err:
            return type(err).__name__, str(err)
    return Path(path).parent.name, "\n".join(log.lines)


def same_on_all_ranks(value: Any) -> Any:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    assert len(set(found)) == 1, found
    return value


DAMAGES: dict[str, Callable[[Path], None]] = {
    "no manifest": lambda d: (d / "manifest.json").unlink(),
    "damaged manifest": lambda d: (d / "manifest.json").write_text("{"),
    "damaged index": lambda d: (d / "index.safetensors").write_bytes(b"\0" * (d / "index.safetensors").stat().st_size),
    "missing file": lambda d: data(d).unlink(),
    "damaged data": lambda d: data(d).write_bytes(data(d).read_bytes()[:-64] + b"\xaa" * 64),
}


@scenario(2)
def damage_seen_by_one_rank_makes_all_ranks_load_the_same_older_checkpoint(folder: Path) -> None:
    for name, damage in DAMAGES.items():
        view = two_views(folder / name, damage)
        tag, text = outcome_of(engine_with_timeout(read_once_per_host=False), view)
        assert same_on_all_ranks(tag) == TAG, (name, text)
        assert dist.get_rank() or "cannot be used" in text, (name, text)


@scenario(2)
def a_newer_format_seen_by_one_rank_fails_the_load_on_all_ranks(folder: Path) -> None:
    view = two_views(folder, lambda d: rewrite(d, lambda m: m.update(version=99)))
    kind, text = outcome_of(engine_with_timeout(), view)
    assert same_on_all_ranks(kind) == "NewerFormatError", text
    assert "upgrade unickpt" in text
    assert dist.get_rank() or "rank 1 could not load it" in text


@scenario(2)
def a_load_does_not_skip_a_newer_format_if_the_latest_is_damaged(folder: Path) -> None:
    engine = build(here(1), seed=1)
    for _ in range(3):
        train(engine, 1)
        engine.save_checkpoint(str(folder / "seen"))
    dist.barrier()
    if dist.get_rank() == 0:
        rewrite(folder / "seen/global_step2", lambda m: m.update(version=99))
        data(folder / "seen/global_step3").unlink()
    dist.barrier()
    assert same_on_all_ranks(outcome_of(engine_with_timeout(), folder / "seen")[0]) == "NewerFormatError"


@scenario(2)
def a_denied_permission_on_one_rank_does_not_select_an_older_checkpoint(folder: Path) -> None:
    if os.geteuid():
        raise unittest.SkipTest("only root can become another user")
    view = two_views(folder, untouched)
    if dist.get_rank() == 1:
        os.chmod(view / "global_step2" / "data", 0o700)
        os.seteuid(65534)
    try:
        kind, text = outcome_of(engine_with_timeout(), view)
    finally:
        os.seteuid(0)
    assert same_on_all_ranks(kind) == "StorageError", text
    assert "ermission denied" in text


@scenario(2)
def a_lack_of_file_descriptors_on_one_rank_does_not_select_an_older_checkpoint(folder: Path) -> None:
    """It is a temporary condition of the machine, not damage."""
    view = two_views(folder, untouched)
    engine, limits = engine_with_timeout(), resource.getrlimit(resource.RLIMIT_NOFILE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, limits[1]))
    try:
        kind, text = outcome_of(engine, view)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert same_on_all_ranks(kind) == "StorageError", text
    assert "Too many open files" in text


@scenario(2)
def an_unexpected_exception_on_one_rank_fails_the_load_on_all_ranks(folder: Path) -> None:
    """The code of the model raises when unickpt reads its parameters."""
    view = two_views(folder, untouched)
    engine = engine_with_timeout()
    if dist.get_rank() == 1:
        engine.module.named_parameters = None
    found: list[Any] = [None, None]
    dist.all_gather_object(found, outcome_of(engine, view))
    assert found[0][0] == "CoordinationError", found
    assert "rank 1 could not load it: TypeError" in found[0][1], found
    assert found[1][0] == "TypeError", found


@scenario(2)
def the_error_for_a_damaged_tag_names_the_complete_checkpoints(folder: Path) -> None:
    two_views(folder, untouched)
    if dist.get_rank() == 0:
        data(folder / "seen/global_step2").unlink()
    dist.barrier()
    with pytest.raises(UnickptError, match=r"is missing.*Complete checkpoints in .*seen, newest first: global_step1"):
        build(here(2), seed=2).load_checkpoint(str(folder / "seen"), tag="global_step2")
