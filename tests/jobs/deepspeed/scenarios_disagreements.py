"""Pipelines with tensor parallelism whose ranks disagree: all ranks end within seconds, and the last checkpoint is intact."""

from __future__ import annotations

import resource
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.pipe import LayerSpec

from tests.jobs.deepspeed import pipeline_jobs
from tests.jobs.deepspeed.damaged_checkpoints import data
from tests.jobs.deepspeed.logs import Log
from tests.jobs.deepspeed.megatron_jobs import build, common, train, truth_of
from tests.jobs.deepspeed.megatron_model import INFO, Gated
from tests.jobs.deepspeed.megatron_names import MegatronLayout
from tests.jobs.deepspeed.pipeline_names import PipelineLayout
from tests.jobs.deepspeed.scenario_worker import scenario
from tests.jobs.deepspeed.truth import Truth, differences
from unickpt.base.errors import CorruptCheckpointError, MismatchError, UnsupportedLayoutError
from unickpt.checkpoint.coordination.failure import FailureKind
from unickpt.checkpoint.save import shutdown
from unickpt.cli.main import main

SOON_S = 30.0  # a job that hangs would wait for the timeout of 20 minutes
THREE_D, PLAIN = MegatronLayout(2, 2, 1, 1), MegatronLayout(2, 0, 2, 1)
ROWS, LAST = "4.down.weight", 3  # a parameter of the second stage, and the rank that fails
TOO_MUCH = 1 << 50  # bytes; more than an address space has


class Hungry(Gated):
    """A user's layer whose state needs more memory than there is."""

    def get_extra_state(self) -> Any:
        return torch.empty(TOO_MUCH, dtype=torch.uint8)


class HungryList(Gated):
    """The same, without torch."""

    def get_extra_state(self) -> Any:
        return bytearray(TOO_MUCH)


def _saved(folder: Path, layout: MegatronLayout, steps: int = 1) -> tuple[Any, Truth]:
    """Train and save after each step. Returns the engine and its state."""
    engine = build(layout, seed=1)
    for _ in range(steps):
        train(engine, 1)
        assert engine.save_checkpoint(str(folder)) is True
        assert engine.checkpoint_engine.last_save is not None, "DeepSpeed has saved by itself"
    return engine, truth_of(engine)


def _assert_intact(folder: Path, layout: MegatronLayout, truth: Truth, tag: str | None = None) -> None:
    """Assert that a checkpoint verifies, and that a job of a layout resumes from it."""
    if dist.get_rank() == 0:
        assert main(["verify", str(folder / (tag or (folder / "latest").read_text()))]) == 0
    engine = build(layout, seed=3)
    engine.load_checkpoint(str(folder), tag=tag)
    assert differences(*common(truth, truth_of(engine))) == []


@contextmanager
def _soon() -> Iterator[None]:
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < SOON_S


def _weights(engine: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in engine.module.parameters()]


def _assert_refused(engine: Any, folder: Path, error: type[Exception], pattern: str, tag: str | None = None) -> None:
    """Assert that every rank raises this error soon, and that no rank loads anything."""
    before = _weights(engine)
    with _soon(), pytest.raises(error, match=pattern):
        engine.load_checkpoint(str(folder), tag=tag)
    assert all(torch.equal(a, b) for a, b in zip(before, _weights(engine), strict=True)), "something was loaded"


def _assert_gives_up(engine: Any, folder: Path, text: str) -> None:
    """Assert that a save for which the last rank has too little memory fails on all ranks, and that rank 0 says so."""
    with _soon(), Log() as log:
        assert engine.save_checkpoint(str(folder)) is False
    (failure,) = engine.checkpoint_engine.last_save.failures
    assert (failure.kind, failure.rank) == (FailureKind.MEMORY, LAST), failure
    assert text in failure.text
    told = [line for line in log.lines if "Gave up saving" in line]
    assert len(told) == (dist.get_rank() == 0), log.lines
    assert all(f"rank {LAST}: " in line and text in line and "without a copy in memory" in line for line in told), told
    dist.barrier()
    assert not (folder / f"global_step{engine.global_steps}").exists(), "DeepSpeed has saved, or files remain"


@scenario(4)
def a_stage_without_memory_fails_the_save_on_every_rank(folder: Path) -> None:
    engine, truth = _saved(folder, THREE_D)
    layer = engine.module.get_submodule("4") if engine.grid.stage_id else None
    train(engine, 1)
    for kind, text in ((Hungry, "RuntimeError: [enforce fail at alloc_cpu.cpp"), (HungryList, "MemoryError")):
        if dist.get_rank() == LAST:
            layer.__class__ = kind
        _assert_gives_up(engine, folder, text)
        if dist.get_rank() == LAST:
            layer.__class__ = Gated
    _assert_intact(folder, THREE_D, truth)
    assert engine.save_checkpoint(str(folder)) is True
    assert (folder / "global_step2" / "manifest.json").is_file()


@contextmanager
def _memory_for(size_bytes: int) -> Iterator[None]:
    """Limit the address space of this process to what it has and a number of bytes."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + size_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@scenario(4)
def a_stage_without_memory_for_its_copy_fails_the_save_and_the_next_one_makes_no_copy(folder: Path) -> None:
    layers = [LayerSpec(torch.nn.Linear, 1024, 1024) for _ in range(8)]
    engine = pipeline_jobs.build(PipelineLayout(2, 2, 1), seed=1, layers=layers, unickpt={"enabled": True, "async_save": True})
    copied_bytes = 4 * 4 * 1024 * 1024 // 2  # masters of the four layers of a stage, on two data-parallel ranks
    with _memory_for(copied_bytes // 2 if dist.get_rank() == LAST else 1 << 40):
        _assert_gives_up(engine, folder, "Cannot allocate memory")
    assert engine.save_checkpoint(str(folder)) is True
    save = engine.checkpoint_engine.last_save
    assert save.committed, "the save has ended when the call returns"
    assert dist.get_rank() or main(["verify", str(folder / "global_step0")]) == 0
    threading.stack_size(1 << 46 if dist.get_rank() == LAST else 0)  # bytes; no thread starts
    try:
        with Log() as log:
            assert engine.save_checkpoint(str(folder), tag="again") is True
    finally:
        threading.stack_size(0)
    assert any("can't start new thread" in line for line in log.lines) == (dist.get_rank() == LAST), log.lines
    shutdown.finish_all()
    assert engine.checkpoint_engine.last_save.committed


@scenario(4)
def a_file_of_one_stage_that_is_missing_is_named_on_every_rank(folder: Path) -> None:
    _saved(folder / "run", THREE_D, steps=2)
    older = _older(folder / "run")
    if dist.get_rank() == 0:
        data(folder / "run/global_step2", LAST).unlink()
    dist.barrier()
    for layout in (THREE_D, MegatronLayout(1, 2, 2, 1)):
        engine = build(layout, seed=3)
        named = rf"global_step2.*rank{LAST:05d}.safetensors is missing.*Complete checkpoints in .*: global_step1"
        _assert_refused(engine, folder / "run", CorruptCheckpointError, named, tag="global_step2")
        with _soon(), Log() as log:
            path, _ = engine.load_checkpoint(str(folder / "run"))
        assert Path(path).parent.name == "global_step1"
        assert any(f"rank{LAST:05d}.safetensors is missing" in line for line in log.lines) == (dist.get_rank() == 0), log.lines
        assert differences(*common(older, truth_of(engine))) == []


def _older(folder: Path) -> Truth:
    engine = build(THREE_D, seed=5)
    engine.load_checkpoint(str(folder), tag="global_step1")
    return truth_of(engine)


@scenario(4)
def a_file_that_only_a_rank_of_the_last_stage_misses_makes_all_ranks_load_the_older_checkpoint(folder: Path) -> None:
    _saved(folder / "run", THREE_D, steps=2)
    own = folder / "run"
    if dist.get_rank() == LAST:
        own = shutil.copytree(own, folder / "elsewhere")
        data(own / "global_step2", LAST).unlink()
    dist.barrier()
    engine = build(THREE_D, seed=3)
    named = rf"rank{LAST:05d}.safetensors is missing"
    _assert_refused(engine, own, CorruptCheckpointError, named, tag="global_step2")
    with _soon(), Log() as log:
        path, _ = engine.load_checkpoint(str(own))
    assert Path(path).parent.name == "global_step1"
    assert any(f"rank {LAST} " in line and named in line for line in log.lines) == (dist.get_rank() == 0), log.lines


@scenario(4)
def a_rank_of_a_pipeline_that_describes_a_parameter_otherwise_is_an_error_on_every_rank(folder: Path) -> None:
    engine, truth = _saved(folder, THREE_D)
    parameter = engine.module.get_parameter(ROWS) if engine.grid.stage_id else torch.nn.Parameter(torch.ones(1))
    if dist.get_rank() == LAST:
        parameter.partition_dim = 0
    named = rf"of another shape \(1\): {ROWS}: \(24, 12\) in the checkpoint, \(48, 6\) in this job"
    _assert_refused(engine, folder, MismatchError, named)
    train(engine, 1)
    engine.module.universal_checkpoint_info = INFO  # DeepSpeed 0.19.8 stores it in its own files, and cannot store a method
    with _soon(), Log() as log:
        engine.save_checkpoint(str(folder))
    assert any(ROWS in line for line in log.lines) == (dist.get_rank() == 0), log.lines
    dist.barrier()
    assert not (folder / "global_step2/manifest.json").exists(), "DeepSpeed saves by itself"
    _assert_intact(folder, THREE_D, truth, tag="global_step1")


@scenario(4)
def layers_that_are_cut_for_another_degree_than_the_topology_are_an_error_on_every_rank(folder: Path) -> None:
    _, truth = _saved(folder, THREE_D)
    engine = build(MegatronLayout(1, 2, 2, 1), seed=3, cut=2)
    named = r"of another shape .*1.down.weight: \(24, 12\) in the checkpoint, \(24, 6\) in this job"
    _assert_refused(engine, folder, MismatchError, named)
    _assert_intact(folder, THREE_D, truth)


@scenario(4)
def an_mpu_that_contradicts_its_groups_is_named_on_every_rank(folder: Path) -> None:
    _, truth = _saved(folder, PLAIN)
    for method, value, named in (
        (
            "rank",
            0,
            r"on rank 3 it is tensor-parallel rank 0 of 2, but its group has 2 ranks \(2, 3\), of which rank 3 is number 1",
        ),
        ("world_size", 4, r"on rank 3 it is tensor-parallel rank 1 of 4, but its group has 2 ranks \(2, 3\)"),
        ("world_size", 1, r"on rank 3 it is tensor-parallel rank 1 of 1, but its group has 2 ranks \(2, 3\)"),
    ):
        target = build(PLAIN, seed=3)
        if dist.get_rank() == LAST:
            setattr(target.mpu, f"get_tensor_model_parallel_{method}", lambda value=value: value)
        try:
            _assert_refused(target, folder, UnsupportedLayoutError, named)
            with _soon(), Log() as log:
                assert target.save_checkpoint(str(folder / "broken")) is False, "DeepSpeed would mix up the ranks' files"
        finally:
            if dist.get_rank() == LAST:
                delattr(target.mpu, f"get_tensor_model_parallel_{method}")
        assert any("an mpu that contradicts itself: on rank 3" in line for line in log.lines) == (dist.get_rank() == 0), (
            log.lines
        )
        assert not list(folder.glob("broken/*/*"))
    _assert_intact(folder, THREE_D, truth)
