"""From the findings of a look to the report for the leader."""

from __future__ import annotations

import dataclasses
import json
import socket
from pathlib import Path

import pytest

from tests.unit.diagnosis.agent.made import hung
from unickpt.base import round_folder
from unickpt.base.round_folder import Accused, note_accused, read_accused, remove_note
from unickpt.diagnosis.agent.loop import Look
from unickpt.diagnosis.detectors.examine import examine
from unickpt.diagnosis.detectors.hardware import Weight
from unickpt.diagnosis.detectors.observations import Baseline, Direction, LongSteps, SlowTransfers
from unickpt.diagnosis.detectors.verdicts import Syndrome, Verdict
from unickpt.diagnosis.hardware.events import EventKind, HostEvent, HostHardware
from unickpt.diagnosis.hardware.sources import KERNEL_LOG
from unickpt.diagnosis.recording.ring_folder import read_folder
from unickpt.diagnosis.snapshot.snapshot import Snapshot, take_snapshot
from unickpt.steering.host.watcher import SlowTimes, report_of, wrong
from unickpt.steering.policy.policy import Fault
from unickpt.steering.policy.reports import HubReport, report_as_json, report_from_json

HOSTS = {0: "a", 1: "a", 2: "b", 3: "b"}
STEPS = Verdict(Syndrome.NON_COMMUNICATION_SLOW, (2,), 5, evidence=(LongSteps(25e6, 100e6, 7, 20, 1.0),))
TRANSFERS = Verdict(Syndrome.COMMUNICATION_SLOW, (1,), 0, evidence=(SlowTransfers(Direction.SENDS, 3.0, Baseline.OTHER_LINKS),))


def snapshot(folder: Path) -> Snapshot:
    hung(folder, since_s=130)
    return take_snapshot(read_folder(folder))


def test_a_hang_is_reported_with_its_host_and_the_least_movement(tmp_path: Path) -> None:
    seen = snapshot(tmp_path)
    ranks = {rank: dataclasses.replace(one, still_s=7.0, same_place_s=9.0) for rank, one in seen.ranks.items()}
    seen = dataclasses.replace(seen, ranks=ranks)
    report = report_of((1, 2), Look(seen, examine(seen).verdicts, 0), HOSTS, 3 * 10**9, {})
    assert (report.epoch, report.step, report.pause_s) == ((1, 2), 20, 3.0)
    (finding,) = report.findings
    assert (finding.fault, finding.hosts, finding.ranks, finding.still_s, finding.same_place_s) == (
        Fault.HUNG, ("b",), (2,), 7.0, 9.0,
    )  # fmt: skip
    assert 129 < finding.age_s < 190
    assert finding.text.startswith(f"unickpt HANG rank=2 host={socket.gethostname()} op=all_reduce seq=3 ")
    assert finding.text.endswith(", without movement for 7 s, in one place for 9 s")


def test_what_the_hardware_says_is_in_the_report_and_on_the_wire(tmp_path: Path) -> None:
    seen = snapshot(tmp_path)
    ranks = {rank: dataclasses.replace(one, host=HOSTS[rank]) for rank, one in seen.ranks.items()}
    fell = HostEvent(EventKind.XID, "0000:3b:00", seen.now_ns - 129 * 10**9, seen.now_ns - 129 * 10**9, code=79)
    sound, broken = HostHardware((KERNEL_LOG,)), HostHardware((KERNEL_LOG,), (fell,))
    cases = (({}, Weight.UNKNOWN), ({"a": sound, "b": sound}, Weight.ABSENT), ({"a": sound, "b": broken}, Weight.PRESENT))
    for hardware, weight in cases:
        told = dataclasses.replace(seen, ranks=ranks, hardware=hardware)
        report = report_of((1, 2), Look(told, examine(told).verdicts, 0), HOSTS, 0, {})
        assert [finding.hardware for finding in report.findings] == [weight]
        assert ('evidence="Xid 79 0000:3b:00"' in report.findings[0].text) is (weight is Weight.PRESENT)
        assert report_from_json(json.loads(json.dumps(report_as_json(report)))) == report
    link = Verdict(
        Syndrome.COMMUNICATION_HANG, (1, 2), seen.now_ns - 129 * 10**9, link=(1, 2), hosts=("a", "b"), hardware=(fell,)
    )
    (finding,) = report_of((1, 2), Look(told, [link], 0), HOSTS, 0, {}).findings
    assert (finding.fault, finding.hosts, finding.blamed, finding.hardware) == (
        Fault.DEAD_LINK, ("a", "b"), "b", Weight.PRESENT,
    )  # fmt: skip


def test_what_the_witness_accuses_is_a_finding_about_the_hosts_of_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_accused(Accused((1,), "without an agent", 5))
    monkeypatch.setenv(round_folder.RINGS, str(tmp_path))
    monkeypatch.setenv(round_folder.RUN_ID, "j")
    monkeypatch.setenv(round_folder.RINGS_JOB, "j")
    assert read_accused(tmp_path) is None
    note_accused(Accused((2, 3), "SDC_COMPUTE", 10**9))
    found = read_accused(tmp_path)
    assert found == Accused((2, 3), "SDC_COMPUTE", 10**9)
    finding = wrong(found, HOSTS, 3 * 10**9)
    assert (finding.fault, finding.hosts, finding.ranks, finding.age_s) == (Fault.WRONG, ("b",), (2, 3), 2.0)
    report = HubReport((1, 2), 5, 0.0, (finding,))
    assert report_from_json(json.loads(json.dumps(report_as_json(report)))) == report
    remove_note(tmp_path)
    assert read_accused(tmp_path) is None
    (tmp_path / round_folder.ACCUSED).write_text('{"ranks": 1}')
    assert read_accused(tmp_path) is None


def test_slowness_is_as_old_as_its_first_look_and_not_as_its_newest_steps(tmp_path: Path) -> None:
    """The verdict on transfers has no time of its own: without one it would be out at once."""
    times, seen = SlowTimes(), snapshot(tmp_path)
    ages = []
    for second in (0, 1, 20, 45, 90, 91):
        verdicts = [STEPS, TRANSFERS]
        report = report_of((1, 1), Look(seen, verdicts, 0), HOSTS, 0, times.seconds(verdicts, float(second)))
        ages.append([finding.age_s for finding in report.findings])
        assert [(finding.fault, finding.hosts) for finding in report.findings] == [(Fault.SLOW, ("b",)), (Fault.SLOW, ("a",))]
    assert ages == [[age, age] for age in (0, 1, 20, 45, 0, 1)]  # it was gone for 45 s
    hang = examine(seen).verdicts
    assert times.seconds(hang, 100.0) == {}
