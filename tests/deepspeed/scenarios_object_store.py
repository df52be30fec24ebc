"""Saves to and loads from a URL with an unchanged script. Run by ``tests/test_object_store.py``, which has the server."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from deepspeed import comm as dist

from tests.deepspeed.jobs import Layout, build, scramble, train
from tests.deepspeed.logs import Log
from tests.deepspeed.scenario_worker import scenario
from tests.deepspeed.truth import consolidated, differences
from unickpt.errors import StorageError

ADAM = ("exp_avg", "exp_avg_sq")


def url(name: str) -> str:
    return f"{os.environ['UNICKPT_TEST_URL']}/{name}"


def here(stage: int) -> Layout:
    return Layout(stage, dist.get_world_size())


@scenario(2)
def a_url_is_a_save_directory_like_any_other(folder: Path) -> None:
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
        with pytest.raises(Exception, match="no checkpoint here"):
            target.load_checkpoint(run, tag="global_step1")  # removed by keep_last
    assert list(folder.iterdir()) == []  # no local directory named s3:


@scenario(2)
def a_damaged_latest_gives_way_to_the_newest_whole_checkpoint(folder: Path) -> None:
    run = url("damaged")
    engine = build(here(1), seed=1)
    for _ in range(2):
        train(engine, 1)
        engine.save_checkpoint(run)
    if dist.get_rank() == 0:
        from tests.s3 import Bucket

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
def nothing_there_is_nothing_loaded_and_a_store_that_does_not_answer_is_an_error_on_all_ranks(folder: Path) -> None:
    os.chdir(folder)
    engine = build(here(1), seed=1)
    assert engine.load_checkpoint(url("empty")) == (None, None)
    with pytest.raises(StorageError, match=r"rank 0 cannot see what is there.*pip install"):
        engine.load_checkpoint("gs://nobody/has/gcsfs")
    assert engine.save_checkpoint("gs://nobody/has/gcsfs") is False
    assert list(folder.iterdir()) == []


@scenario(2)
def what_is_saved_here_is_uploaded_and_resumed_from_there(folder: Path) -> None:
    run = url("uploaded")
    engine = build(here(2), seed=1, unickpt={"enabled": True, "upload_to": run})
    train(engine, 2)
    assert engine.save_checkpoint(str(folder / "here")) is True
    truth = consolidated(engine, ADAM)
    for where in (str(folder / "here"), run):
        target = build(here(3), seed=2)
        path, _ = target.load_checkpoint(where)  # waits for what was begun
        assert path == f"{where}/global_step2/manifest.json"
        assert not differences(truth, consolidated(target, ADAM))


@scenario(2)
def a_job_that_deepspeed_itself_would_save_is_not_saved_into_a_directory_named_like_the_url(folder: Path) -> None:
    os.chdir(folder)

    class Factored(torch.optim.SGD):
        def step(self, closure: object = None) -> object:  # noqa: ARG002 - torch's signature
            super().step()
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["row"] = torch.zeros(3)
            return None

    from tests.deepspeed.model import Model

    torch.manual_seed(1)
    model = Model()
    optimizer = Factored([p for p in model.parameters() if p.requires_grad], lr=0.1)
    engine = build(here(1), seed=1, model=model, client_optimizer=optimizer, scheduler={})
    train(engine, 1)
    with Log() as log:
        assert engine.save_checkpoint(url("unsupported")) is False
    assert list(folder.iterdir()) == []
    if dist.get_rank() == 0:
        assert any("NOT saved" in line and "'row' has shape (3,)" in line for line in log.lines), log.lines
