"""Saves to and loads from a URL with an unchanged script.

``tests/integration/storage/test_object_store_frameworks.py`` runs it with a server.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from deepspeed import comm as dist

from tests.jobs.deepspeed.jobs import Layout, build, scramble, train
from tests.jobs.deepspeed.logs import Log
from tests.jobs.deepspeed.resumes import unsupported_engine
from tests.jobs.deepspeed.scenario_worker import scenario
from tests.jobs.deepspeed.truth import consolidated, differences
from unickpt.base.errors import StorageError

ADAM = ("exp_avg", "exp_avg_sq")


def url(name: str) -> str:
    return f"{os.environ['UNICKPT_TEST_URL']}/{name}"


def here(stage: int) -> Layout:
    return Layout(stage, dist.get_world_size())


@scenario(2)
def a_url_works_as_a_save_directory(folder: Path) -> None:
    os.chdir(folder)
    for stage, behind in ((1, False), (3, True)):
        run = url(f"run{stage}")
        source = build(here(stage), seed=1, unickpt={"enabled": True, "async_save": behind, "keep_last": 2})
        for _ in range(3):
            train(source, 1)
            assert source.save_checkpoint(run, client_state={"at": source.global_steps}) is True
        truth = consolidated(source, ADAM)
        for other in (stage, (stage + 1) % 4):
            target = build(here(other), seed=2)
            scramble(target)
            path, client_state = target.load_checkpoint(run)
            assert path == f"{run}/global_step3/manifest.json"
            assert client_state["at"] == 3
            assert not differences(truth, consolidated(target, ADAM))
        target = build(here(2), seed=3)
        assert target.load_checkpoint(run, tag="global_step2")[1]["at"] == 2
        with pytest.raises(Exception, match=r"no manifest\.json"):
            target.load_checkpoint(run, tag="global_step1")  # removed by keep_last
    assert list(folder.iterdir()) == []  # no local directory named s3:


@scenario(2)
def a_damaged_latest_file_selects_the_newest_complete_checkpoint(folder: Path) -> None:
    run = url("damaged")
    engine = build(here(1), seed=1)
    for _ in range(2):
        train(engine, 1)
        engine.save_checkpoint(run)
    if dist.get_rank() == 0:
        from tests.support.s3 import Bucket

        bucket = Bucket(int(os.environ["AWS_ENDPOINT_URL"].rpartition(":")[2]), os.environ["UNICKPT_TEST_URL"][5:])
        key = "damaged/global_step2/data/rank00001.safetensors"
        data = bytearray(bucket.get(key))
        data[-100] ^= 1
        bucket.put(key, bytes(data))
    dist.barrier()
    target = build(here(2), seed=2)
    with Log() as log:
        path, _ = target.load_checkpoint(run)
    assert path.endswith("global_step1/manifest.json"), path
    if dist.get_rank() == 0:
        assert any("global_step2 cannot be used" in line for line in log.lines), log.lines


@scenario(2)
def an_empty_url_loads_nothing_and_an_unreachable_store_is_an_error_on_all_ranks(folder: Path) -> None:
    os.chdir(folder)
    engine = build(here(1), seed=1)
    assert engine.load_checkpoint(url("empty")) == (None, None)
    with pytest.raises(StorageError, match=r"rank 0 cannot see what is there.*pip install"):
        engine.load_checkpoint("gs://nobody/has/gcsfs")
    assert engine.save_checkpoint("gs://nobody/has/gcsfs") is False
    assert list(folder.iterdir()) == []


@scenario(2)
def a_local_save_is_uploaded_and_resumed_from_the_url(folder: Path) -> None:
    run = url("uploaded")
    engine = build(here(2), seed=1, unickpt={"enabled": True, "upload_to": run})
    train(engine, 2)
    assert engine.save_checkpoint(str(folder / "here")) is True
    truth = consolidated(engine, ADAM)
    for where in (str(folder / "here"), run):
        target = build(here(3), seed=2)
        path, _ = target.load_checkpoint(where)  # waits for a running save
        assert path == f"{where}/global_step2/manifest.json"
        assert not differences(truth, consolidated(target, ADAM))


@scenario(2)
def an_unsupported_job_is_not_saved_into_a_local_directory_with_the_name_of_the_url(folder: Path) -> None:
    os.chdir(folder)

    engine = unsupported_engine()
    with Log() as log:
        assert engine.save_checkpoint(url("unsupported")) is False
    assert list(folder.iterdir()) == []
    if dist.get_rank() == 0:
        assert any("NOT saved" in line and "optimizer wrapper NewZeroOptimizer" in line for line in log.lines), log.lines
