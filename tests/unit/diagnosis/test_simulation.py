"""Simulated jobs with one fault each: one verdict, with the right rank or link. Healthy jobs have no verdict."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest

from unickpt.diagnosis.detectors.verdicts import Cause, Syndrome, Verdict
from unickpt.diagnosis.snapshot.progress import rank_progress
from unickpt.testing.simulation.calls import Disturbance, job_progress, play, program
from unickpt.testing.simulation.faults import Expected, JobFault, diagnosed, right_place, right_syndrome, simulate
from unickpt.testing.simulation.layout import WORLD, ParallelLayout
from unickpt.testing.simulation.steps import Slowness, timed

SMALL, LARGER = ParallelLayout(2, 4, 8), ParallelLayout(4, 4, 16)
HANGS = [
    JobFault.STOPPED, JobFault.LOOP, JobFault.DEAD, JobFault.DEAD_WITHIN, JobFault.SKIPPED, JobFault.MISMATCHED,
    JobFault.DEADLOCK, JobFault.DEAD_LINK, JobFault.DEAD_GROUP,
]  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("fault", [fault for fault in JobFault if fault is not JobFault.SOUND])
def test_only_the_rank_or_link_of_a_fault_is_reported(fault: JobFault, seed: int) -> None:
    scene = simulate(LARGER if seed % 2 else SMALL, fault, seed)
    verdicts = diagnosed(scene)
    assert right_syndrome(verdicts, scene.expected), verdicts
    assert right_place(verdicts, scene.expected), verdicts


@pytest.mark.parametrize("layout", [SMALL, LARGER, ParallelLayout(1, 4, 8), ParallelLayout(4, 1, 8), ParallelLayout(2, 8, 1)])
def test_a_job_without_faults_has_no_verdict(layout: ParallelLayout) -> None:
    scenes = [simulate(layout, JobFault.SOUND, seed) for seed in range(10)]
    assert any((scene.rows["blocked"] > 0).any() for scene in scenes)  # in the middle of a step, ranks wait for others
    assert [diagnosed(scene) for scene in scenes] == [[]] * 10


@pytest.mark.parametrize("fault", [JobFault.SOUND, JobFault.SKIPPED, JobFault.STARVED])
def test_the_same_seed_is_the_same_job(fault: JobFault) -> None:
    one, again, other = (simulate(SMALL, fault, seed) for seed in (3, 3, 4))
    for name in ("rows", "steps", "transfers", "waits_ns"):
        np.testing.assert_array_equal(getattr(one, name), getattr(again, name))
    assert (one.now_ns, one.expected, one.gone) == (again.now_ns, again.expected, again.gone)
    assert not np.array_equal(one.steps, other.steps)


@pytest.mark.parametrize("fault", HANGS)
@pytest.mark.parametrize("layout", [SMALL, LARGER])
def test_in_the_end_everybody_waits(fault: JobFault, layout: ParallelLayout) -> None:
    """All ranks come to stand: but for one that is stuck, each waits in a call, and some of every stage."""
    scene = simulate(layout, fault, 1)
    waiting = set(scene.rows["rank"][scene.rows["blocked"] > 0].tolist())
    stuck = scene.expected.ranks if fault in (JobFault.STOPPED, JobFault.LOOP, JobFault.DEAD) else set()
    assert waiting == set(range(layout.world)) - set(stuck)
    (verdict,) = diagnosed(scene)
    if fault in (JobFault.STOPPED, JobFault.LOOP, JobFault.DEAD, JobFault.DEAD_WITHIN):
        assert verdict.victims == layout.world - 1


def test_a_simulated_rank_waits_in_one_call_and_counts_its_calls() -> None:
    for fault in (JobFault.SOUND, JobFault.STOPPED, JobFault.DEAD_LINK):
        rows = simulate(SMALL, fault, 2).rows
        keys = rows[["rank", "comm", "source", "destination"]].tolist()
        assert len(set(keys)) == len(keys)
        assert max(Counter(rows["rank"][rows["blocked"] > 0].tolist()).values()) == 1
        assert (rows["ended"] <= rows["entered"]).all()
        blocked = rows[rows["blocked"] > 0]
        assert (blocked["blocked"] > blocked["ended"]).all()


def test_one_replica_represents_the_others() -> None:
    """What is made from two replicas is what comes of playing all four."""
    layout = ParallelLayout(2, 2, 4)
    programs = {rank: program(layout, rank, 2) for rank in range(layout.world)}
    stuck = Disturbance(stops={layout.rank(1, 2, 1): 5})
    none: dict[int, Counter[tuple[int, int, int]]] = {rank: Counter() for rank in programs}
    every = play(programs, none, stuck, lambda: 1.0)
    two = {rank: items for rank, items in programs.items() if layout.place(rank)[1] in (2, 3)}
    made = job_progress(layout, play(two, none, stuck, lambda: 1.0), 2, 3)
    numbers = np.arange(len(layout.members()), dtype=np.int32)
    all_played = np.concatenate([rank_progress(rank, records, numbers) for rank, records in every.items()])
    order = ["rank", "comm", "source", "destination"]
    np.testing.assert_array_equal(np.sort(made, order=order), np.sort(all_played, order=order))


def test_a_slow_rank_lengthens_all_steps_but_only_its_own_time() -> None:
    skew = np.zeros(SMALL.world // SMALL.tp)
    sound, slow = (
        timed(SMALL, 4, 12, Slowness(rank, sleep_ns=50e6), skew, np.random.default_rng(1), transfer_steps=1).steps.reshape(
            12, -1
        )
        for rank in (-1, 13)
    )
    longer = (slow["end_ns"] - slow["begin_ns"]) - (sound["end_ns"] - sound["begin_ns"])
    assert longer.min() > 5e6
    assert longer.mean() > 20e6
    own = slow["own_ns"] - sound["own_ns"]
    np.testing.assert_allclose(own[:, 13], 50e6)
    assert (np.delete(own, 13, axis=1) == 0).all()


def test_a_slow_link_is_slow_in_its_direction() -> None:
    link = (SMALL.rank(1, 3, 0), SMALL.rank(0, 3, 0))
    skew = np.zeros(SMALL.world // SMALL.tp)
    found = timed(SMALL, 4, 6, Slowness(links={link: 10.0}), skew, np.random.default_rng(1), transfer_steps=3).transfers
    here = (found["source"] == link[0]) & (found["destination"] == link[1])
    assert here.sum() == 4 * 3
    assert found["ns"][here].min() > 5 * np.median(found["ns"])
    assert found["ns"][~here].max() < 2 * np.median(found["ns"])


def test_ranks_and_groups_are_megatrons() -> None:
    layout = ParallelLayout(2, 4, 8)
    members, groups = layout.members(), layout.groups()
    assert members.keys() == groups.keys() == set(range(1 + 32 + 8 + 16))
    assert [layout.rank(*layout.place(rank)) for rank in range(layout.world)] == list(range(layout.world))
    assert members[WORLD].tolist() == list(range(64))
    assert members[layout.tensor_group(2, 3)].tolist() == [38, 39]
    assert members[layout.data_group(2, 1)].tolist() == list(range(33, 48, 2))
    assert members[layout.pipeline_group(3, 1)].tolist() == [7, 23, 39, 55]
    group = groups[layout.pipeline_group(3, 1)]
    assert (group.label, group.members().tolist()) == ("pipeline parallel", [7, 23, 39, 55])
    assert layout.hosts().tolist() == [rank // 2 for rank in range(64)]


def test_right_and_wrong_verdicts_are_distinguished() -> None:
    def verdict(*ranks: int, link: tuple[int, int] | None = None, cause: Cause | None = None) -> Verdict:
        return Verdict(Syndrome.DEADLOCK, ranks, 0, link=link, cause=cause)

    wanted = Expected(frozenset({Syndrome.DEADLOCK}), frozenset({3}))
    assert right_syndrome([verdict(3)], wanted)
    assert not right_syndrome([], wanted)
    assert not right_syndrome([verdict(3), Verdict(Syndrome.MISMATCH, (3,), 0)], wanted)
    assert right_place([verdict(3)], wanted)
    assert not right_place([verdict(3, 4)], wanted)
    assert right_place([verdict(3), verdict(4)], dataclasses.replace(wanted, allowed=frozenset({3, 4})))
    assert not right_place([verdict(4)], dataclasses.replace(wanted, allowed=frozenset({3, 4})))
    assert right_place([verdict(3, cause=Cause.DATA)], dataclasses.replace(wanted, cause=Cause.DATA))
    assert not right_place([verdict(3, cause=Cause.COMPUTE)], dataclasses.replace(wanted, cause=Cause.DATA))
    linked = Expected(frozenset({Syndrome.DEADLOCK}), links=frozenset({(1, 2)}))
    assert right_place([verdict(1, 2, link=(1, 2))], linked)
    assert not right_place([verdict(1, 2, link=(2, 1))], linked)
    assert not right_syndrome([verdict(3)], Expected())
    assert right_syndrome([], Expected())


def test_ranks_of_a_dead_host_are_all_named() -> None:
    """A host with four ranks: verdicts on several ranks are right, too."""
    scene = simulate(LARGER, JobFault.DEAD, 5)
    (rank,) = scene.expected.ranks
    host = frozenset(np.flatnonzero(scene.hosts == scene.hosts[rank]).tolist())
    verdicts = diagnosed(dataclasses.replace(scene, gone=host))
    assert {each for verdict in verdicts for each in verdict.ranks} == host
