"""Faults before the first collective: what the log says, and how soon. ``docs/evidence/start.md``.

    python -m evidence.diagnosis.start_faults --keep results/start.jsonl [--only NAME ...] [--page docs/evidence/start.md]

Each job is two unmodified torchrun agents on one machine, most with two ranks each. One rank, or one agent, does not come: it
hangs in a way of its own (``start_worker.py``). Nothing else is done to the job. The time counts from the moment at which the
first of the others waits; for agents, from the first line of one of them.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import re
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from evidence.document import put, section
from tests.jobs.steering.agents import Agents

WORKER = str(Path(__file__).with_name("start_worker.py"))
LIMIT_S, GOAL_S = 180.0, 15.0
COLUMNS = ("rank", "host", "place", "next")


@dataclass(frozen=True)
class Case:
    """A fault of one rank.

    Attributes:
        name: for the page.
        fault: what ``start_worker.py`` does.
        place: function that is named; '' if the process cannot say where it is.
        backend: of torchrun.
        rank: that hangs.
        workers: ranks of each of the two hosts.
        said: state of the process, as a pattern.
        timing: whether the job asks for timing. The agents of ``unickpt`` ask for the rest by themselves.
    """

    name: str
    fault: str
    place: str = ""
    backend: str = "unickpt"
    rank: int = 3
    workers: int = 2
    said: str = "sleeping"
    timing: bool = False


CASES = (
    Case("a rank loads its data without end", "data", "load_data"),
    Case("a rank waits for a lock of a file (`flock`)", "lock", "take_lock", "c10d"),
    Case("rank 0 waits for a download that does not go on", "download", "download", rank=0),
    Case("a rank waits for the `lock` that a killed build of an extension has left", "compile", "compile_extension"),
    Case("a rank reads from a mount that does not answer (a pipe)", "mount", "read_mount", "c10d"),
    Case("a rank is stopped (SIGSTOP)", "stopped", said="stopped"),
    Case("a rank is in native code that keeps the interpreter's lock", "native", "call_native_code", said="(running|sleeping)"),
    Case("a rank computes and never calls `init_process_group`", "never", "forget_to_join", "c10d", said="running"),
    Case("the only rank of a host loads its data", "data", "load_data", rank=1, workers=1),
    Case("the only rank of a host is stopped", "stopped", rank=1, workers=1, said="stopped"),
    Case("a rank hangs before it imports torch", "early"),
    Case("the only rank of a host hangs before it imports torch", "early", rank=1, workers=1),
    Case("DeepSpeed: a rank hangs after `init_distributed`, timed", "deepspeed", "load_data", timing=True),
    Case("DeepSpeed: the same, not timed", "deepspeed", "load_data"),
    Case("Megatron: a rank hangs before `initialize_model_parallel`", "megatron", "load_data"),
)


@dataclass(frozen=True)
class Row:
    """What was said in one job."""

    case: str
    rank: bool
    host: bool
    place: bool
    next: bool
    seconds: float
    line: str
    following: str


class Hosts(Agents):
    """Agents of a job whose start fails."""

    timing = False

    def variables(self, name: str) -> dict[str, str]:  # noqa: ARG002
        """Return the environment of an agent."""
        found = {"GLOO_SOCKET_IFNAME": "lo", "UNICKPT_AUTOLOAD": "1"}
        return {**found, "UNICKPT_TIMING": "1"} if self.timing or self.backend != "unickpt" else found

    def said(self, pattern: str, limit_s: float = LIMIT_S) -> tuple[str, str, float]:
        """Wait for a line. Return it, the one that says what to do next, and the time on the wall clock."""
        end_s = time.monotonic() + limit_s
        while time.monotonic() < end_s:
            for path in self.outputs:
                lines = path.read_text(errors="replace").splitlines()
                for number, line in enumerate(lines):
                    if re.search(pattern, line):
                        now_s = time.time()
                        time.sleep(0.3)
                        following = path.read_text(errors="replace").splitlines()[number : number + 2]
                        return line, next((each for each in following if "next: " in each), "").partition("next: ")[2], now_s
            time.sleep(0.1)
        return "", "", time.time()


@contextlib.contextmanager
def _world(folder: Path) -> Iterator[None]:
    """What the ranks hang in: a server that never answers, a lock, a pipe, a build that was killed."""
    with socket.create_server(("127.0.0.1", 0)) as server, (folder / "data.lock").open("w") as lock:
        (folder / "port").write_text(str(server.getsockname()[1]))
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.mkfifo(folder / "pipe")
        (folder / "slow_kernel.cpp").write_text("int main() { return 0; }\n")
        (folder / "build").mkdir()
        (folder / "build" / "lock").touch()
        yield


def ran(case: Case) -> Row:
    """Run one job with a rank that does not come."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, _world(Path(name)):
        folder = Path(name)
        job = Hosts(folder, "2", worker=WORKER)
        job.program += [case.fault, str(case.rank)]
        job.backend, job.timing = case.backend, case.timing
        try:
            for host in ("n0", "n1"):
                job.start(host, workers=case.workers)
            line, following, at_s = job.said(r"unickpt: ranks? [\d, ]+ waits? since .*has not (come there|begun to record)")
            noted = [each.split() for each in (folder / "waits").read_text().splitlines()]
            pid = next(int(words[2]) for words in noted if words[3] == "hangs")
            began_s = min(float(words[0]) for words in noted if words[3] == "waits")
            agent = psutil.Process(pid).ppid()
            host = next(each for each, process in job.running.items() if process.pid == agent)
        finally:
            job.close()
    known = host if case.backend == "unickpt" else socket.gethostname()
    return Row(
        case.name,
        f"rank {case.rank} has not " in line and f"process {pid} on" in line,
        f" on {known} " in line,
        (f"({case.place})" in line if case.place else True) and re.search(f" is {case.said}", line) is not None,
        bool(following),
        at_s - began_s, _plain(line, folder), following,
    )  # fmt: skip


# ---------------------------------------------------------------- hosts that do not come


def host_missing(job: Hosts) -> str:
    """Two of three hosts start their agents."""
    job.nodes, job.conf = "3", "hosts=n0+n1+n2"
    job.start("n0")
    job.start("n1")
    return r"no round has begun .*2 of 3 hosts have come: n0, n1; not come, of --rdzv-conf hosts=: n2"


def slurm_host_missing(job: Hosts) -> str:
    """Slurm knows the name of the third one."""
    job.nodes = "3"
    os.environ["SLURM_JOB_NODELIST"] = "n[0-2]"
    try:
        job.start("n0")
        job.start("n1")
    finally:
        del os.environ["SLURM_JOB_NODELIST"]
    return r"no round has begun .*not come, of SLURM_JOB_NODELIST: n2"


def no_such_name(job: Hosts) -> str:
    """The endpoint is a name that nobody knows."""
    job.endpoint = f"no-such-host.invalid:{job.port}"
    job.start("n0")
    return r"the name 'no-such-host\.invalid' in --rdzv-endpoint does not resolve on "


def endpoint_away(job: Hosts) -> str:
    """No torchrun runs at the endpoint, an address that this machine cannot reach."""
    job.endpoint = f"192.0.2.7:{job.port}"
    job.start("n1")
    return r"no round has begun .*n1 has no contact with the other hosts: the endpoint 192\.0\.2\.7:\d+ does not answer"


def other_secret(job: Hosts) -> str:
    """A host has another ``--rdzv-id``."""
    job.start("n0")
    time.sleep(3.0)  # it has the endpoint
    job.identifier += "-other"
    job.start("n1")
    return r"no round has begun .*n1 has no contact .*does not accept this agent"


def other_nodes(job: Hosts) -> str:
    """A host has another ``--nnodes``."""
    job.nodes = "3"
    job.start("n0")
    time.sleep(3.0)
    job.nodes = "2"
    job.start("n1")
    return r"this host was started with --nnodes (2, and the job with --nnodes 3|3, and the job with --nnodes 2), which counts"


def dead_rank(job: Hosts) -> str:
    """A rank ends before it joins."""
    job.program += ["dead", "3"]
    for host in ("n0", "n1"):
        job.start(host, workers=2)
    return r"round 1\.1 has ended on this host: rank 3: ended with exit code 3"


AGENTS: Sequence[tuple[str, Callable[[Hosts], str]]] = (
    ("the agent of a host never comes; `hosts=` names all", host_missing),
    ("the same; Slurm names all", slurm_host_missing),
    ("the name of the endpoint does not resolve", no_such_name),
    ("nobody is at the endpoint", endpoint_away),
    ("a host has another `--rdzv-id`", other_secret),
    ("a host has another `--nnodes`", other_nodes),
    ("a rank ends before it joins, with exit code 3", dead_rank),
)


def ran_agents(name: str, fault: Callable[[Hosts], str]) -> Row:
    """Run agents that do not form a round."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        job = Hosts(Path(folder), "2", worker=WORKER)
        try:
            pattern = fault(job)
            *_, began_s = job.said("unickpt: steering: ")
            line, following, at_s = job.said(pattern)
            waits = Path(folder) / "waits"
            began_s = float(waits.read_text().split()[0]) if fault is dead_rank else began_s
        finally:
            job.close()
        text = line.partition("] ")[2] or line
        following = following or text.partition(". ")[2] or "its error is in the lines before"
        return Row(
            name, bool(line), bool(line), bool(line), bool(following), at_s - began_s, _plain(text, Path(folder)), following
        )


def _plain(line: str, folder: Path) -> str:
    return line.replace(f"{folder}/", "")


def _mark(row: dict[str, Any], column: str) -> str:
    """Return a cell: of what a job has not, ``-``."""
    if not row[column]:
        return "**no**"
    stateful = any(case.name == row["case"] and not case.place for case in CASES)
    of_agent = any(name == row["case"] and fault is not dead_rank for name, fault in AGENTS)
    if column == "place" and (stateful or any(name == row["case"] for name, _ in AGENTS)):
        return "state alone" if stateful else "-"
    return "-" if column == "rank" and of_agent else "yes"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the tables of the page."""
    lines = [f"| fault | {' | '.join(COLUMNS)} | s |", f"|---|{'---|' * (len(COLUMNS) + 1)}"]
    for row in rows:
        marks = " | ".join(_mark(row, column) for column in COLUMNS)
        lines.append(f"| {row['case']} | {marks} | {row['seconds']:.1f} |")
    right = sum(all(row[column] for column in COLUMNS) and row["seconds"] <= GOAL_S for row in rows)
    lines += ["", f"All right, and said within {GOAL_S:.0f} s, in {right} of {len(rows)} jobs. What the log says:", ""]
    lines += [f"- {row['case']}: `{row['line'].split('. next: ')[0].replace('`', '')}`" for row in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, required=True, help="file of results; cases that are in it are not repeated")
    parser.add_argument("--only", nargs="*", help="parts of names of cases")
    parser.add_argument("--page", type=Path, help="write the table into this page")
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.keep.read_text().splitlines()] if args.keep.exists() else []
    done = {row["case"] for row in rows}
    jobs: list[tuple[str, Callable[[], Row]]] = [(case.name, lambda case=case: ran(case)) for case in CASES]  # type: ignore[misc]
    jobs += [(name, lambda name=name, fault=fault: ran_agents(name, fault)) for name, fault in AGENTS]  # type: ignore[misc]
    for name, run in jobs:
        if name in done or (args.only and not any(part in name for part in args.only)):
            continue
        row = asdict(run())
        print(json.dumps(row, indent=1), flush=True)
        rows.append(row)
        with args.keep.open("a") as file:
            file.write(json.dumps(row) + "\n")
    if args.page:
        command = f"python -m evidence.diagnosis.start_faults --keep {args.keep}"
        put(args.page, "start faults", section("start faults", command, table(rows)))
    print(table(rows))


if __name__ == "__main__":
    main()
