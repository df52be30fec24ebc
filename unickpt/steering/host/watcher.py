"""Diagnosis agent of a host under ``torchrun --rdzv-backend unickpt``: one process for all rounds, without torch.

The handler starts it (``host_agent``) and writes a line for every round to its standard input: an assignment, or the end of the
round. The agent looks at the rings of the round once a second. On rank 0's host it collects the snapshots of all hosts, and
writes a report for the leader to its standard output after every look.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from socket import socket
from typing import Any
from urllib.parse import unquote

from unickpt.base.errors import UnickptError
from unickpt.base.left_workers import end_all, left_in
from unickpt.base.limited_http import RateLimitedLog
from unickpt.base.prometheus import OpenPort, Scrape
from unickpt.base.round_folder import Accused, read_accused
from unickpt.diagnosis.agent.launch import write_address
from unickpt.diagnosis.agent.loop import EVERY_S, Agent, Look
from unickpt.diagnosis.agent.ring_looks import RingLooks, over
from unickpt.diagnosis.agent.server import Collector, answer_prometheus, secret_of, serve
from unickpt.diagnosis.agent.telling import PREFIX, notice, tell
from unickpt.diagnosis.detectors.hardware import broken_hosts, weight_of
from unickpt.diagnosis.detectors.verdicts import Syndrome, Verdict
from unickpt.diagnosis.hardware.sampler import HardwareSampler
from unickpt.diagnosis.recording.ring_folder import SessionNote, read_note
from unickpt.diagnosis.reports.verdict_text import render
from unickpt.diagnosis.snapshot.snapshot import Snapshot
from unickpt.steering.host.gains import Gains, PredictGain
from unickpt.steering.policy.policy import Fault, Finding, finding_of
from unickpt.steering.policy.reports import LONGEST_TEXT, MOST_FINDINGS, HubReport, report_as_json

LONGEST_LINE = 65_536
SLOW, GAP_S = (Syndrome.COMMUNICATION_SLOW, Syndrome.NON_COMMUNICATION_SLOW), 30.0
AWAITS_S = 0.2  # interval of looks for a round's first ring
LAST_S = 0.7  # between the last looks at a round whose workers have failed
AGENT_ENDS_S = 60.0  # that a handler needs to end after it has closed its end
LINGERS_S = 30.0  # that the agent goes on without its handler while ranks live


@dataclass(frozen=True, slots=True)
class Assignment:
    """What the agent does in one round.

    Attributes:
        epoch: the round.
        host: name of this host in the job.
        folder: folder of the round on this host.
        hub: address of the agent on rank 0's host; '' for none.
        is_hub: whether this is that agent.
        key: key that authenticates snapshots, in hexadecimal digits.
        job: name of the job in metrics, if the workers name none.
    """

    epoch: tuple[int, int]
    host: str
    folder: str
    hub: str
    is_hub: bool
    key: str
    job: str = ""

    def line(self) -> bytes:
        """The assignment as a line for the agent."""
        return json.dumps({"assignment": asdict(self)}).encode() + b"\n"


def end_line(last_look: bool) -> bytes:
    """Return the line that ends a round. ``last_look``: whether the agent shall look once more at what has happened."""
    return json.dumps({"end": last_look}).encode() + b"\n"


class SlowTimes:
    """For how long ranks and links have been slow: their verdicts are about the newest steps alone."""

    def __init__(self) -> None:
        self._times: dict[str, tuple[float, float]] = {}  # first and last look with the verdict, by its key

    def seconds(self, verdicts: Sequence[Verdict], now_s: float) -> dict[str, float]:
        """Add a look. Return for each slow verdict the seconds since the first look with it, without longer gaps."""
        for verdict in verdicts:
            if verdict.syndrome in SLOW:
                first_s, last_s = self._times.get(verdict.key, (now_s, now_s))
                self._times[verdict.key] = (first_s if now_s - last_s <= GAP_S else now_s, now_s)
        return {verdict.key: now_s - self._times[verdict.key][0] for verdict in verdicts if verdict.key in self._times}


class RoundWatch:
    """Looks at the rings of one round.

    Args:
        assignment: the round.
        note: what its workers want.
        collector: snapshots of the other hosts, if this agent collects them.
        predict: what the job would gain without slow ranks.
        hardware: reads what the hardware of this host tells.

    Attributes:
        rings: the rings, and the ends of the ranks.
        over: whether all ranks of this host have ended.
    """

    def __init__(
        self,
        assignment: Assignment,
        note: SessionNote,
        collector: Collector | None,
        predict: PredictGain | None = None,
        hardware: HardwareSampler | None = None,
    ) -> None:
        self.assignment, self.folder = assignment, Path(note.folder)
        self._collector, key = collector, bytes.fromhex(assignment.key)
        self._agent = Agent(
            self.folder, tell, collector, lambda: assignment.hub, name=assignment.host, key=key, movement=True,
            host=assignment.host, hardware=hardware,
        )  # fmt: skip
        self.rings = RingLooks(self.folder)
        self._pause_ns = 0
        self._slow = SlowTimes()
        self._gains = Gains(predict)
        self.over = False

    def look(self, *, ends: bool = False) -> HubReport | None:
        """Look once. Return the report for the leader, if this agent makes reports. ``ends``: the workers have failed.

        Raises:
            UnickptError, OSError: there is no readable ring yet.
        """
        job = self.rings.read()
        self.over = over(job)
        found = self._agent.look(job, self.rings.exits.known, ends=ends)
        if found is None or self._collector is None:
            return None
        self._pause_ns = max(self._pause_ns, found.longest_wait_ns)
        hosts = dict.fromkeys(job.ranks, self.assignment.host)
        for name, snapshot, _ in self._collector.named():
            hosts |= dict.fromkeys(snapshot.ranks, unquote(name))
        slow_s = self._slow.seconds(found.verdicts, time.monotonic())
        report = report_of(self.assignment.epoch, found, hosts, self._pause_ns, slow_s, self._gains)
        accused = read_accused(Path(self.assignment.folder))
        if accused is None:
            return report
        return replace(report, findings=(wrong(accused, hosts, time.time_ns()), *report.findings)[:MOST_FINDINGS])


def report_of(
    epoch: tuple[int, int],
    found: Look,
    hosts: Mapping[int, str],
    pause_ns: int,
    slow_s: Mapping[str, float],
    gains: Gains | None = None,
) -> HubReport:
    """Return the report of a look.

    Args:
        epoch: the round.
        found: result of the look.
        hosts: host of every rank.
        pause_ns: longest wait that has ended so far in the round.
        slow_s: seconds for which ranks and links have been slow, by key of the verdict.
        gains: predicted gains of taking out slow ranks.
    """
    step = max((one.step for one in found.snapshot.ranks.values()), default=0)
    predicted = {
        each.key: gains.of(each, found.snapshot)
        for each in found.verdicts[:MOST_FINDINGS]
        if gains is not None and each.syndrome in SLOW
    }
    findings = [
        _finding(verdict, found, hosts, slow_s.get(verdict.key, 0.0), predicted.get(verdict.key))
        for verdict in found.verdicts[:MOST_FINDINGS]
        if verdict.syndrome is not Syndrome.FAILED  # the round ends by itself
    ]
    return HubReport(epoch, max(0, step), max(0, pause_ns) / 1e9, tuple(findings))


def _finding(verdict: Verdict, found: Look, hosts: Mapping[int, str], slow_s: float, predicted: float | None) -> Finding:
    ranks = [found.snapshot.ranks[rank] for rank in verdict.ranks if rank in found.snapshot.ranks]
    still = min((one.still_s for one in ranks), default=0.0)
    place = min((one.same_place_s for one in ranks), default=0.0)
    age_s = slow_s if verdict.syndrome in SLOW else max(0.0, (found.snapshot.now_ns - verdict.since_ns) / 1e9)
    movement = f", without movement for {still:.0f} s, in one place for {place:.0f} s" if still or place else ""
    text = f"{render(verdict, found.snapshot).line}; for {age_s:.0f} s{movement}"[:LONGEST_TEXT]
    finding = finding_of(
        verdict, hosts, found.snapshot.now_ns, still=still, same_place=place, text=text, predicted=predicted,
        hardware=weight_of(verdict, found.snapshot), blamed=_one(broken_hosts(verdict, found.snapshot)),
    )  # fmt: skip
    return replace(finding, age_s=age_s)


def wrong(accused: Accused, hosts: Mapping[int, str], now_ns: int) -> Finding:
    """Return what the policy must know about a verdict of the witness. ``hosts``: host of every rank."""
    blamed = tuple(dict.fromkeys(hosts[rank] for rank in accused.ranks if rank in hosts))
    age_s = max(0.0, (now_ns - accused.at_ns) / 1e9)
    return Finding(Fault.WRONG, blamed, age_s, ranks=accused.ranks, text=accused.text[:LONGEST_TEXT])


def _one(hosts: Sequence[str]) -> str:
    """Return the host, if there is one alone."""
    return hosts[0] if len(hosts) == 1 else ""


class Watcher:
    """The agent.

    Args:
        listener: socket on which it collects snapshots of other hosts.
        predict: what the job would gain without slow ranks.
        record: record of the handler's workers; None for none.
    """

    def __init__(self, listener: socket, predict: PredictGain | None = None, record: Path | None = None) -> None:
        self._predict, self._record, self._hardware = predict, record, HardwareSampler()
        self._lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._hub: tuple[Collector, str] = (Collector(), "")
        self._round: RoundWatch | None = None
        self._assignment: Assignment | None = None
        self._handler_ended_s = 0.0
        self._port: OpenPort | None = None
        self._asked = False  # Prometheus is answered as long as this process runs, or cannot be
        self._ending = threading.Thread(target=self._end_left_workers, daemon=True)
        self._failures = RateLimitedLog(tell, f"{PREFIX}looks at the rings that failed; the agent goes on")
        serve(lambda: self._hub, listener, tell=notice)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while line := sys.stdin.buffer.readline(LONGEST_LINE):
            with contextlib.suppress(ValueError):
                self._lines.put(json.loads(line))
        self._lines.put(None)

    def run(self) -> None:
        """Watch round after round, until the handler and the ranks have ended."""
        while True:
            try:
                self._take_lines(0.0)
                wait_s = self._look()
            except Exception as err:  # the data is untrusted
                self._failures.note(f"{type(err).__name__}: {err}")
                wait_s = EVERY_S
            if self._handler_ended_s:
                late = time.monotonic() - self._handler_ended_s > LINGERS_S
                if late or self._round is None or self._round.over:
                    if self._port is not None:
                        self._port.withdraw()
                    return self._ending.join()
            if self._round is not None and wait_s >= EVERY_S:
                self._round.rings.exits.sleep(wait_s)
            else:
                self._take_lines(wait_s)

    def _end_left_workers(self) -> None:
        """Thread: the handler has closed its end. If it was killed, its workers live on."""
        if self._record is None:
            return
        end_s = time.monotonic() + AGENT_ENDS_S
        while self._record.exists() and time.monotonic() < end_s:
            left = left_in(self._record)
            if left:
                ranks = ", ".join(str(each.rank) for each in left)
                tell(f"{PREFIX}torchrun's agent on this host has ended without its workers; ending ranks {ranks}")
                end_all(left)
                return
            time.sleep(0.1)

    def _take_lines(self, wait_s: float) -> None:
        """Process the lines of the handler. Wait for the first one."""
        with contextlib.suppress(queue.Empty):
            said = self._lines.get(timeout=wait_s) if wait_s else self._lines.get_nowait()
            while True:
                if said is None:
                    self._handler_ended_s = time.monotonic()
                    self._ending.start()
                elif "assignment" in said:
                    self._begin(Assignment(**{**said["assignment"], "epoch": tuple(said["assignment"]["epoch"])}))
                else:
                    self._end(bool(said.get("end")))
                said = self._lines.get_nowait()

    def _begin(self, assignment: Assignment) -> None:
        self._end(last_look=False)
        self._assignment = assignment
        secret = secret_of(assignment.hub) if assignment.is_hub else ""
        self._hub = (Collector(bytes.fromhex(assignment.key)), secret)

    def _end(self, last_look: bool) -> None:
        if self._round is not None:
            if last_look:  # the snapshots of other hosts, and verdicts for this one, come in between
                self._report(self._round, ends=True)
                time.sleep(LAST_S)
                self._report(self._round, ends=True)
            self._round.rings.exits.close()
        self._round = self._assignment = None
        self._hub = (Collector(), "")

    def _look(self) -> float:
        """Look at the round, and return how long to wait."""
        assignment = self._assignment
        if assignment is None:
            return EVERY_S / 2
        if self._round is None:
            note = read_note(Path(assignment.folder))
            if note is None or not note.watch:
                return AWAITS_S
            collector = self._hub[0] if assignment.is_hub else None
            self._round = RoundWatch(assignment, note, collector, self._predict, self._hardware)
            if assignment.hub and assignment.is_hub:
                write_address(self._round.folder, assignment.hub)
                self._answer_prometheus(replace(note.metrics, job=note.metrics.job or assignment.job))
        self._report(self._round)
        return EVERY_S

    def _answer_prometheus(self, scrape: Scrape) -> None:
        self._hub[0].labels = scrape.labels
        if scrape.port and not self._asked:
            self._asked, self._port = True, answer_prometheus(lambda: self._hub, scrape, notice)

    def _report(self, watch: RoundWatch, *, ends: bool = False) -> None:
        with contextlib.suppress(UnickptError, OSError):  # no ring yet
            report = watch.look(ends=ends)
            if report is not None:
                print(json.dumps(report_as_json(report)), flush=True)


def _predicted(snapshot: Snapshot, ranks: Sequence[int], links: Sequence[tuple[int, int]]) -> float:
    """Replay the newest steps. The replay is imported only when a rank is slow."""
    from unickpt.planning.replay.eviction import predicted_gain

    return predicted_gain(snapshot, ranks, links)


def main() -> None:
    """Watch until the handler has ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", type=int, required=True)
    parser.add_argument("--workers", type=Path)
    args = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        Watcher(socket(fileno=args.listen), _predicted, args.workers).run()
    os._exit(0)  # a thread reads standard input


if __name__ == "__main__":
    main()
