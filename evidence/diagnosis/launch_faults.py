"""Faults of starts, restarts and ends, of public reports, under torchrun agents: what is said, and what happens."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from evidence.diagnosis.fault_rows import Row
from evidence.diagnosis.hardware_faults import RecordedHosts, text_of
from evidence.diagnosis.reported_faults import HOSTS, WORKER, place_of
from tests.jobs.steering import agents
from tests.jobs.steering.agents import Agents, Start

LIMIT_S = 60.0
STOPPING = "stopping_worker.py"


@contextlib.contextmanager
def job_of(nodes: str, worker: str = "worker.py", *program: str, conf: str = "") -> Iterator[RecordedHosts]:
    """Yield a job whose agents are not started, and end it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        path = str(Path(agents.__file__).with_name(worker)) if os.sep not in worker else worker
        job = RecordedHosts(Path(place), nodes, worker=path, conf=conf)
        job.program.extend(program)
        try:
            yield job
        finally:
            job.close()


def until(holds: Callable[[], object], limit_s: float = LIMIT_S) -> bool:
    """Return whether something holds within a time."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if holds():
            return True
        time.sleep(0.2)
    return False


def lines(job: Agents, pattern: str) -> list[str]:
    """Return lines of unickpt in the logs that match."""
    text = "\n".join(path.read_text(errors="replace") for path in job.outputs)
    return [line for line in text.splitlines() if "unickpt" in line and re.search(pattern, line)]


def first(found: list[str]) -> str:
    return found[0].partition("unickpt: ")[2] if found else ""


def alive(starts: list[Start]) -> list[int]:
    return [each.pid for each in starts if psutil.pid_exists(each.pid)]


def orphaned() -> Row:
    """The agent of a host is killed alone, as by the OOM killer: its worker must not live on."""
    with job_of("1:2") as job:
        for name in HOSTS:
            job.start(name)
        before = job.round("", 2)
        left = next(each for each in before if each.rank == 1)
        began = time.monotonic()
        job.running.pop("n1").kill()
        goes_on = until(lambda: [each for each in job.starts() if each.round > before[0].round and each.world == 1])
        ended, seconds = until(lambda: not alive([left])), time.monotonic() - began
        what = lines(job, rf"process {left.pid}\b|Process {left.pid}\b")
        said, gone = first(what), lines(job, "n1 is gone")
        cause = bool(re.search("has left on this host at its end|has ended without ending its workers", said))
        return Row("orphaned workers", bool(what), cause, bool(gone), None, ended and goes_on, said, first(gone), "", seconds)


def two_copies() -> Row:
    """The launcher of a host is killed alone, and a supervisor starts it again: two copies would write one folder."""
    with job_of("1:1") as job:
        job.start("n0", workers=2)
        before = job.round("", 2)
        began = time.monotonic()
        job.running.pop("n0").kill()
        job.start("n0", workers=2)
        again = until(lambda: len([each for each in job.starts() if each.pid not in {one.pid for one in before}]) == 2)
        both, seconds = alive(before), time.monotonic() - began
        what = lines(job, rf"[pP]rocess ({before[0].pid}|{before[1].pid})\b")
        said = first(what)
        cause = bool(re.search("has ended without ending its workers|has left on this host at its end", said))
        return Row("two copies of a job", bool(what), cause, "n0" in text_of(job), None, again and not both, said,
                   "the old workers have ended before the new ones begin", "", seconds)  # fmt: skip


def name_server() -> Row:
    """The name of the endpoint does not resolve."""
    with job_of("2") as job:
        name = "unickpt-head.example.invalid"
        job.endpoint = f"{name}:{job.port}"
        began = time.monotonic()
        job.start("n0")
        until(lambda: lines(job, "does not resolve"), 30.0)
        said, seconds = first(lines(job, "does not resolve")), time.monotonic() - began
        waits = job.running["n0"].poll() is None
        acted = waits and f"getent hosts {name}" in said and "It is tried again" in said
        return Row("a name does not resolve", name in said, "does not resolve" in said, socket.gethostname() in said, None,
                   acted, said, said.partition("). ")[2], "", seconds)  # fmt: skip


def ipv6() -> Row:
    """The endpoint is an address of IPv6: no fault for us, so nothing may be said of one."""
    with job_of("2") as job:
        job.endpoint = f"[::1]:{job.port}"
        for name in HOSTS:
            job.start(name)
        began = time.monotonic()
        found = job.round("", 2)
        bad = lines(job, "HANG|FAILED|MISMATCH|does not resolve|order: ")
        leads = first(lines(job, "this agent leads, at"))
        members = lines(job, r"round \S+: rank \d of 2 \(0 n0, 1 n1\)")
        return Row("IPv6 alone", "::1" in leads, not bad, bool(members), None, len(found) == 2, leads, "the job trains", "",
                   time.monotonic() - began)  # fmt: skip


def never_works() -> Row:
    """A program that cannot start has 20 restarts."""
    with job_of("2", str(WORKER), "cannot_start") as job:
        for name in HOSTS:
            job.start(name)
        began = time.monotonic()
        ended = until(lambda: all(agent.poll() is not None for agent in job.running.values()), 120.0)
        what = lines(job, "a restart meets the same error: on n")
        said, text = first(what), text_of(job)
        codes = [agent.poll() for agent in job.running.values()]
        once = not lines(job, r"round \S+\.2\b")
        place = place_of("cannot_start")
        return Row("never works after a restart", bool(re.search(r"rank \d", said)), "ModuleNotFoundError" in said,
                   bool(re.search(r"\bon n[01]\b", said)), place in text or Path(place).name in said,
                   ended and once and codes == [1, 1], said, said, "", time.monotonic() - began)  # fmt: skip


def slurm_term() -> Row:
    """Slurm sends SIGTERM to every process of the step at once: agents and workers."""
    with job_of("1:2", STOPPING) as job:
        for name in HOSTS:
            job.start(name)
        before = job.round("", 2)
        told = time.monotonic()
        for pid in (*(agent.pid for agent in job.running.values()), *(each.pid for each in before)):
            os.kill(pid, signal.SIGTERM)
        ended = until(lambda: all(agent.poll() is not None for agent in job.running.values()))
        seconds = time.monotonic() - told
        said, ends = first(lines(job, "has received SIGTERM")), job.folder / "ends"
        saved = {line.split()[3] for line in ends.read_text().splitlines()} if ends.exists() else set()
        count = len(ends.read_text().splitlines()) if ends.exists() else 0
        codes = {agent.poll() for agent in job.running.values()}
        hosts = [name for name in HOSTS if lines(job, rf"{name} is told to end|this agent is told to end")]
        acted = ended and len(saved) == 1 and count == 2 and codes <= {-signal.SIGTERM, 143} and len(job.starts()) == 2
        return Row("SIGTERM of Slurm to all", bool(said), "SIGTERM" in said, len(hosts) == 2, None, acted, said,
                   f"one common step saved: {saved}; exit codes {codes}", "", seconds)  # fmt: skip


LAUNCHES = {
    "orphaned workers": orphaned,
    "two copies of a job": two_copies,
    "a name does not resolve": name_server,
    "IPv6 alone": ipv6,
    "never works after a restart": never_works,
    "SIGTERM of Slurm to all": slurm_term,
}
