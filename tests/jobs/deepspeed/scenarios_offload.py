"""Variants of offload and of partitions: partial offload, ZeRO++'s secondary partitions, node-local storage, ZeRO's options."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepspeed import comm as dist
from deepspeed.utils import groups

from tests.jobs.deepspeed.jobs import build, scramble, train
from tests.jobs.deepspeed.logs import Log
from tests.jobs.deepspeed.resumes import ADAM, assert_resumes, assert_trains_on, assert_weights_equal, here
from tests.jobs.deepspeed.scenario_worker import scenario
from tests.jobs.deepspeed.truth import Truth, consolidated, differences

CPU_ADAM = {"type": "AdamW", "params": {"lr": 1e-2}}


def _zero(stage: int, seed: int, precision: str = "fp32", *, optimizer: Any = None, **zero: Any) -> Any:
    settings = {"stage": stage, "sub_group_size": 1500, "stage3_param_persistence_threshold": 40, **zero}
    more = {} if optimizer is None else {"optimizer": optimizer}
    return build(here(stage, precision), seed=seed, zero_optimization=settings, **more)


def _in_part(seed: int, precision: str = "fp32") -> Any:
    """Build an engine that offloads half of its sub-groups.

    On a CPU the device has the name of the offload device, so DeepSpeed takes all sub-groups for offloaded ones. ``cpu:0``
    is the same device with another name: DeepSpeed steps on these sub-groups with its second optimizer, as on a GPU.
    """
    engine = _zero(3, seed, precision, optimizer=CPU_ADAM, offload_optimizer={"device": "cpu", "ratio": 0.5})
    places = engine.optimizer.subgroup_to_device
    for number in range(len(places) // 2):
        places[number] = "cpu:0"
    assert set(places.values()) == {"cpu", "cpu:0"}
    return engine


def _with_both_optimizers(engine: Any) -> Truth:
    """``consolidated``: DeepSpeed's accessors look into the first optimizer only."""
    second = engine.optimizer.backup_optimizer.state
    assert second
    engine.optimizer.optimizer.state.update(second)
    try:
        return consolidated(engine, ADAM)
    finally:
        for master in second:
            del engine.optimizer.optimizer.state[master]


@scenario(2)
def partial_offload_has_two_optimizers(folder: Path) -> None:
    whole = _zero(2, 2, optimizer=CPU_ADAM, offload_optimizer={"device": "cpu"})
    source = _in_part(1)
    train(source, 3)
    assert source.save_checkpoint(str(folder / "a")) is True
    assert source.checkpoint_engine.last_save.committed, source.checkpoint_engine.last_save
    truth = _with_both_optimizers(source)
    for number, target in enumerate((whole, build(here(1), seed=3))):
        scramble(target)
        target.load_checkpoint(str(folder / "a"))
        assert differences(truth, consolidated(target, ADAM), ignore=("groups",)) == []
        target.save_checkpoint(str(folder / f"b{number}"))
    losses = train(source, 2)
    for number, place in enumerate(("a", "b0", "b1")):
        again = _in_part(4 + number)
        scramble(again)
        again.load_checkpoint(str(folder / place))
        assert differences(truth, _with_both_optimizers(again), ignore=("groups",)) == [], place
        assert {type(state["step"]) for state in again.optimizer.optimizer.state.values()} == {int}
        if place == "a":
            assert train(again, 2) == losses
        else:
            assert_trains_on(again, losses, folder / place)


@scenario(2)
def secondary_partitions_are_renewed(folder: Path) -> None:
    """``zero_hpz_partition_size``: the masters are partitioned over all ranks. Copies of the weights follow them."""

    def hpz(seed: int) -> Any:
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None  # DeepSpeed refuses a second engine
        return _zero(3, seed, "bf16", zero_hpz_partition_size=2)

    source, plain = hpz(1), build(here(1, "bf16"), seed=2)
    assert_resumes(folder / "a", source, plain, ignore=("groups",))
    back = hpz(4)
    assert_resumes(folder / "b", plain, back, ignore=("groups",))
    assert_weights_equal(plain, back)
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None


@scenario(2)
def options_that_do_not_change_the_state(folder: Path) -> None:
    """Node-local storage on one host, ``elastic_checkpoint`` and ``round_robin_gradients``."""
    local = {"use_node_local_storage": True}
    elastic = _zero(1, 1, elastic_checkpoint=True)
    robin = _zero(2, 2, round_robin_gradients=True)
    third = build(here(3), seed=3, checkpoint=local)
    train(elastic, 3)
    elastic.save_checkpoint(str(folder / "a"))
    truth = consolidated(elastic, ADAM)
    robin.load_checkpoint(str(folder / "a"))
    assert_weights_equal(elastic, robin)  # DeepSpeed's accessors read other ranges under round_robin_gradients
    robin.save_checkpoint(str(folder / "b"))
    third.load_checkpoint(str(folder / "b"))
    assert differences(truth, consolidated(third, ADAM), ignore=("groups",)) == []
    assert third.save_checkpoint(str(folder / "c")) is True
    assert third.checkpoint_engine.last_save.committed, third.checkpoint_engine.last_save
    again = _zero(1, 4, elastic_checkpoint=True)
    scramble(again)
    again.load_checkpoint(str(folder / "c"))
    assert differences(truth, consolidated(again, ADAM)) == []
    assert train(elastic, 2) == train(again, 2)


@contextmanager
def _ranks_per_host(number: int) -> Iterator[None]:
    before = os.environ["LOCAL_WORLD_SIZE"]
    os.environ["LOCAL_WORLD_SIZE"] = str(number)
    try:
        yield
    finally:
        os.environ["LOCAL_WORLD_SIZE"] = before


@scenario(2)
def node_local_storage_on_several_hosts_is_left_to_deepspeed(folder: Path) -> None:
    engine = build(here(1), seed=1, checkpoint={"use_node_local_storage": True})
    train(engine, 1)
    with Log() as log, _ranks_per_host(1):
        assert engine.save_checkpoint(str(folder)) is True
    warned = [line for line in log.lines if "node-local storage on several hosts" in line]
    assert len(warned) == (1 if dist.get_rank() == 0 else 0), log.lines
    assert not list(folder.rglob("manifest.json"))
