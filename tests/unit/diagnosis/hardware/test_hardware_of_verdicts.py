"""What a host tells, in the verdict on its rank: ten and more faults, and what only looks like one."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import pytest

from tests.support.hardware_trees import FAULTS, GPUS, LOOK_ALIKES, Case, HardwareTree
from tests.unit.diagnosis.agent.made import S, hung
from unickpt.base.failure_kinds import FailureKind, Remedy
from unickpt.diagnosis.agent.loop import Agent
from unickpt.diagnosis.agent.server import Collector
from unickpt.diagnosis.detectors.examine import examine
from unickpt.diagnosis.detectors.hardware import Weight, broken_hosts, hardware_hint, narrowed, weight_of, with_hardware
from unickpt.diagnosis.detectors.hints import Helps, LooksAtHardware
from unickpt.diagnosis.detectors.verdicts import Cause, Syndrome, Verdict
from unickpt.diagnosis.hardware.events import EventKind, HostEvent, HostHardware
from unickpt.diagnosis.hardware.kept import keep, kept
from unickpt.diagnosis.hardware.sampler import HardwareSampler
from unickpt.diagnosis.hardware.sources import KERNEL_LOG, NETWORK, VARIABLE, Roots, readable_sources
from unickpt.diagnosis.host.process_exits import ExitStatus
from unickpt.diagnosis.host.process_state import State
from unickpt.diagnosis.recording.records import Phase
from unickpt.diagnosis.recording.ring_folder import read_folder
from unickpt.diagnosis.reports.verdict_line import parse_line
from unickpt.diagnosis.reports.verdict_text import one_as_json, render
from unickpt.diagnosis.snapshot.codec import decode_snapshot, encode_snapshot
from unickpt.diagnosis.snapshot.snapshot import Snapshot, merge_snapshots, take_snapshot

PID = os.getpid()


def told_by(tree: HardwareTree, case: Case) -> HostHardware:
    """Return what a host tells after a change, or after some time if it tells nothing."""
    sampler, ends_s = HardwareSampler(tree.roots, every_s=0.0), time.monotonic() + (3.0 if case.quoted else 0.0)
    try:
        if case.before:
            case.change(tree, PID)
        sampler.look(time.time_ns(), [PID])
        before = (tree.folder / "nvml.json").read_text()
        if before:
            time.sleep(0.15)
        sampler.look(time.time_ns(), [PID])
        (tree.folder / "proc" / str(PID)).mkdir(parents=True, exist_ok=True)
        if not case.before:
            case.change(tree, PID)
        found = sampler.look(time.time_ns(), [PID])
        if (tree.folder / "nvml.json").read_text() != before:
            time.sleep(0.35)
            found = sampler.look(time.time_ns(), [PID])
        while not found.events and time.monotonic() < ends_s:
            time.sleep(0.02)
            found = sampler.look(time.time_ns(), [PID])
        return found
    finally:
        sampler.close()


@pytest.fixture(scope="module")
def hanging(tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    """A job whose ranks wait for rank 2 since some seconds."""
    folder = tmp_path_factory.mktemp("rings")
    hung(folder, since_s=6)
    return take_snapshot(read_folder(folder))


def with_told(snapshot: Snapshot, told: HostHardware) -> Snapshot:
    hosts = {one.host for one in snapshot.ranks.values()}
    return dataclasses.replace(snapshot, now_ns=time.time_ns(), hardware=dict.fromkeys(hosts, told))


def judged(case: Case, snapshot: Snapshot) -> Verdict:
    """Return the verdict on rank 2."""
    if case.slow:
        bare = Verdict(Syndrome.NON_COMMUNICATION_SLOW, (2,), snapshot.now_ns - 6 * S, cause=Cause.COMPUTE,
                       hosts=(snapshot.ranks[2].host,))  # fmt: skip
        verdict = with_hardware(bare, snapshot)
        return dataclasses.replace(verdict, next=hardware_hint(verdict, snapshot))
    if case.dead:
        dead = dataclasses.replace(snapshot.ranks[2], state=State.DEAD, exit=ExitStatus(9), heard_ns=snapshot.now_ns)
        snapshot = dataclasses.replace(snapshot, ranks={**snapshot.ranks, 2: dead})
    if case.data:
        waits = dataclasses.replace(snapshot.ranks[2], phase=int(Phase.DATA))
        snapshot = dataclasses.replace(snapshot, ranks={**snapshot.ranks, 2: waits})
    (verdict,) = examine(snapshot, after_s=5).verdicts
    return verdict


@pytest.mark.parametrize("case", [*FAULTS, *LOOK_ALIKES], ids=lambda case: case.name)
def test_a_verdict_quotes_what_has_happened_and_nothing_else(case: Case, hanging: Snapshot, tmp_path: Path) -> None:
    snapshot = with_told(hanging, told_by(HardwareTree(tmp_path), case))
    verdict = judged(case, snapshot)
    text = render(verdict, snapshot)
    assert parse_line(text.line).evidence == case.quoted
    assert (weight_of(verdict, snapshot) is Weight.PRESENT) is case.broken
    assert isinstance(verdict.next, LooksAtHardware) is bool(case.hint)
    assert case.hint in text.next
    assert decode_snapshot(encode_snapshot(snapshot)).hardware == snapshot.hardware


FELL = HostEvent(EventKind.XID, GPUS[0], 0, 0, 1.0, 79)


def at(event: HostEvent, ns: int) -> HostEvent:
    return event.moved(ns)


def test_only_the_window_counts(hanging: Snapshot) -> None:
    now = time.time_ns()
    for ago_s, quoted in ((4, True), (14, True), (60, False)):  # rank 2 is waited for since some seconds
        told = HostHardware((KERNEL_LOG,), (at(FELL, now - ago_s * S),))
        (verdict,) = examine(with_told(hanging, told), after_s=5).verdicts
        assert bool(verdict.hardware) is quoted
        assert weight_of(verdict, with_told(hanging, told)) is (Weight.PRESENT if quoted else Weight.ABSENT)


def test_absence_counts_only_where_something_can_be_read(hanging: Snapshot) -> None:
    for sources, weight in (((KERNEL_LOG, NETWORK), Weight.ABSENT), ((NETWORK,), Weight.UNKNOWN), ((), Weight.UNKNOWN)):
        snapshot = with_told(hanging, HostHardware(sources))
        (verdict,) = examine(snapshot, after_s=5).verdicts
        assert weight_of(verdict, snapshot) is weight
    (verdict,) = examine(hanging, after_s=5).verdicts
    assert weight_of(verdict, hanging) is Weight.UNKNOWN


def test_the_next_sentence_and_json_have_the_event(hanging: Snapshot) -> None:
    now = time.time_ns()
    snapshot = with_told(hanging, HostHardware((KERNEL_LOG,), (at(FELL, now - S),)))
    (verdict,) = examine(snapshot, after_s=5).verdicts
    text = render(verdict, snapshot)
    assert "Xid 79 (fallen off the bus) of GPU 0000:3b:00 at " in text.sentence
    assert "start the job again without this host, and restart the machine" in text.next
    assert text.next.endswith("nvidia-smi -q -d ECC,PERFORMANCE,TEMPERATURE,ROW_REMAPPER")
    assert parse_line(text.line).evidence == "Xid 79 0000:3b:00"
    (event,) = one_as_json(verdict, text)["hardware"]
    assert (event["kind"], event["code"], event["bearing"]) == ("Xid", 79, "broken")
    assert event["text"] == "Xid 79 (fallen off the bus) of GPU 0000:3b:00"


def test_a_program_gets_no_evidence_for_its_mismatch(hanging: Snapshot) -> None:
    snapshot = with_told(hanging, HostHardware((KERNEL_LOG,), (at(FELL, time.time_ns()),)))
    verdict = Verdict(Syndrome.MISMATCH, (2,), snapshot.now_ns, hosts=(snapshot.ranks[2].host,))
    assert with_hardware(verdict, snapshot) == verdict


def two_hosts(hanging: Snapshot, told: HostHardware) -> Snapshot:
    ranks = {rank: dataclasses.replace(one, host=f"n{rank // 2}", pid=100 + rank) for rank, one in hanging.ranks.items()}
    hardware = {"n0": HostHardware((KERNEL_LOG,)), "n1": told}
    return dataclasses.replace(hanging, now_ns=time.time_ns(), ranks=ranks, hardware=hardware)


def test_a_call_that_does_not_end_is_blamed_on_the_one_broken_host(hanging: Snapshot) -> None:
    now = time.time_ns()
    verdict = Verdict(Syndrome.COMMUNICATION_HANG, (0, 1, 2, 3), now - 6 * S, hosts=("n0", "n1"))
    link = HostEvent(EventKind.LINK_DOWN, "mlx5_0/1", now - 7 * S, now)
    whole = narrowed(verdict, two_hosts(hanging, HostHardware((KERNEL_LOG,), (link,))))
    assert (whole.ranks, whole.hosts) == ((2, 3), ("n1",))
    of_rank = dataclasses.replace(at(FELL, now - 7 * S), pid=103)
    assert narrowed(verdict, two_hosts(hanging, HostHardware((KERNEL_LOG,), (of_rank,)))).ranks == (3,)
    assert narrowed(verdict, two_hosts(hanging, HostHardware((KERNEL_LOG,)))) == verdict
    both = two_hosts(hanging, HostHardware((KERNEL_LOG,), (link,)))
    both = dataclasses.replace(both, hardware=dict.fromkeys(("n0", "n1"), both.hardware["n1"]))
    assert narrowed(verdict, both) == verdict
    assert broken_hosts(verdict, both) == ("n0", "n1")


def test_a_link_and_a_disk_weigh_only_where_they_can_be_the_cause(hanging: Snapshot) -> None:
    now = time.time_ns()
    kinds = (EventKind.LINK_DOWN, EventKind.DISK, EventKind.GPU_HOT)
    snapshot = with_told(hanging, HostHardware((KERNEL_LOG,), tuple(HostEvent(kind, "x", now, now) for kind in kinds)))
    (verdict,) = examine(snapshot, after_s=5).verdicts  # a rank that computes
    assert {event.kind for event in verdict.hardware} == set(kinds)
    assert weight_of(verdict, snapshot) is Weight.ABSENT
    assert not isinstance(verdict.next, LooksAtHardware)
    waits = dataclasses.replace(verdict, cause=Cause.DATA)
    assert weight_of(waits, snapshot) is Weight.PRESENT


def test_the_end_of_a_job_by_the_oom_killer_says_what_helps(hanging: Snapshot) -> None:
    now = time.time_ns()
    for code, remedy in ((1, Remedy.STOP), (0, Remedy.RESTART)):
        killed = HostEvent(EventKind.OUT_OF_MEMORY, "/a", now, now, 64 << 30, code, PID, "python")
        ranks = {
            rank: dataclasses.replace(one, state=State.DEAD, exit=ExitStatus(15), heard_ns=now + S)
            for rank, one in hanging.ranks.items()
        }
        ranks[2] = dataclasses.replace(ranks[2], exit=ExitStatus(9), heard_ns=now)
        snapshot = dataclasses.replace(with_told(hanging, HostHardware((KERNEL_LOG,), (killed,))), ranks=ranks)
        (verdict,) = examine(snapshot, after_s=5).end
        assert verdict.next == Helps(2, snapshot.ranks[2].host, FailureKind.MEMORY, remedy)
        text = render(verdict, snapshot)
        assert f"process {PID} (python) was killed with 64.0 GiB because " in text.sentence
        assert f"helps={remedy.value}" in text.line


def test_what_was_told_is_kept_beside_the_rings_and_moves_with_the_clock(hanging: Snapshot, tmp_path: Path) -> None:
    told = HostHardware((KERNEL_LOG,), (at(FELL, 5 * S),))
    keep(tmp_path, "n/0", told)
    (tmp_path / "hardware-broken.json").write_text('{"host": "x", "hardware": [[], [["Xid", 1]]]}')
    assert kept(tmp_path) == {"n/0": told}
    snapshot = dataclasses.replace(hanging, hardware={"a": told})
    (event,) = merge_snapshots([snapshot], [3 * S], 0).hardware["a"].events
    assert (event.begin_ns, event.end_ns) == (8 * S, 8 * S)


@pytest.mark.skipif(time.monotonic() < 200, reason="the host has just started")
def test_records_from_before_the_job_are_not_its_own(tmp_path: Path) -> None:
    tree = HardwareTree(tmp_path)
    tree.log("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", ago_s=190)
    tree.log("NVRM: Xid (PCI:0000:3b:00): 48, DBE", ago_s=60)
    sampler = HardwareSampler(tree.roots)
    (event,) = sampler.look(time.time_ns(), []).events
    assert event.code == 48
    assert abs(time.time_ns() - 60 * S - event.begin_ns) < 5 * S
    sampler.close()


def test_a_worker_of_the_data_loader_is_a_victim_of_its_rank_and_is_named_once(hanging: Snapshot) -> None:
    now = time.time_ns()
    worker = HostEvent(EventKind.OUT_OF_MEMORY, "/a", now, now, 8 << 30, 1, 990, "pt_data_worker")
    counted = HostEvent(EventKind.OUT_OF_MEMORY, "/a", now, now)
    ranks = {rank: dataclasses.replace(one, pid=100 + rank) for rank, one in hanging.ranks.items()}
    told = HostHardware((KERNEL_LOG,), (worker, counted, dataclasses.replace(worker, pid=101)))
    snapshot = dataclasses.replace(with_told(hanging, told), ranks=ranks)
    alive = Verdict(Syndrome.NON_COMMUNICATION_HANG, (2,), now, hosts=(ranks[2].host,), state=State.SLEEPING)
    assert with_hardware(alive, snapshot).hardware == ()
    dead = with_hardware(dataclasses.replace(alive, state=State.DEAD), snapshot)
    assert dead.hardware == (worker,)


def test_the_end_of_a_rank_is_a_reason_to_look_at_once(tmp_path: Path) -> None:
    tree = HardwareTree(tmp_path / "hardware")
    sampler = HardwareSampler(tree.roots, every_s=1000.0)
    hung(tmp_path, since_s=130)
    job = read_folder(tmp_path)
    agent = Agent(tmp_path, lambda _: None, Collector(), hardware=sampler)
    agent.look(job)
    tree.write("sys/fs/cgroup/memory.events", "oom_kill 1\n")
    assert agent.look(job) is not None
    assert kept(tmp_path) == {}
    found = agent.look(dataclasses.replace(job, states={**job.states, 2: State.DEAD}))
    assert found is not None
    assert [event.kind for event in found.verdicts[0].hardware] == [EventKind.OUT_OF_MEMORY]
    (told,) = kept(tmp_path).values()
    assert told.events == found.verdicts[0].hardware
    sampler.close()


def test_a_port_that_cannot_be_read_is_not_tried_again(tmp_path: Path) -> None:
    tree = HardwareTree(tmp_path)
    sampler = HardwareSampler(tree.roots, every_s=0.0)
    counter = tmp_path / "sys/class/infiniband/mlx5_0/ports/1/counters/link_downed"
    counter.unlink()
    sampler.look(time.time_ns(), [])
    counter.write_text("0")
    sampler.look(time.time_ns(), [])
    counter.write_text("9")
    assert sampler.look(time.time_ns(), []).events == ()
    sampler.close()


def test_without_any_source_nothing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    sampler = HardwareSampler()
    assert sampler.look(time.time_ns(), [PID]) == HostHardware()
    assert not any(readable_sources(Roots.of_environment()).values())
    sampler.close()
