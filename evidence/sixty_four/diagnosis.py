"""Faults in timed jobs of 64 real ranks under TP 4, PP 4, DP 4: which rank is named, how soon, and what the agent costs.

    python -m evidence.sixty_four.diagnosis [--ranks 64] [--seed 1] [--only hang ...] [--out docs/evidence/sixty-four.md]

One agent watches all ranks, which are processes of this machine and run with its two cores. A fault is at a random rank, after
sound steps. For a slow link there are two hosts, with an agent each: network namespaces, which need root, ``ip`` and ``tc``.
``results/sixty-four-diagnosis.jsonl`` keeps each fault.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from evidence.document import put, section
from tests.jobs.steering.namespaces import LINK as NIC
from tests.jobs.steering.namespaces import Network
from tests.support.forked_jobs import fork_ranks

HEAD, SECTION = "# Sixty-four ranks\n", "diagnosis"
KEPT = Path("results/sixty-four-diagnosis.jsonl")
WORKER = "evidence.sixty_four.diagnosis_worker"
LIMIT_S, START_S, SOUND_S = 120.0, 400.0, 40.0
LINK, LINK_MBIT, HOSTS = "link", 40, ("a", "b")
FAULTS = {  # and the syndrome of its verdict
    "sound": ("none, for 40 s", ""),
    "hang": ("a rank sleeps for ever", "non-communication hang"),
    "kill": ("SIGKILL of a rank", "non-communication hang"),
    "mismatch": ("a rank makes a call too many", "mismatched collectives"),
    LINK: (f"the link from one host to the other has {LINK_MBIT} Mbit/s", "communication slow"),
    "slow": ("a rank takes 0.4 s longer in each step", "non-communication slow"),
}


@dataclass(frozen=True)
class Result:
    """A fault.

    Attributes:
        fault: its name.
        ranks: of the job.
        rank: at fault. Of a link: the first one of those that send over it.
        named: whether the first verdict names this rank alone, or a link from this host to the other, and is of the right kind.
            Of a sound job: nothing was said.
        seconds: until then.
        step_s: length of a sound step.
        agent: share of one core that the agent takes while the job is sound: of ``sound`` in 40 s, otherwise in the seconds
            before the fault, which are those after its start.
        agent_mb: its memory of its own.
        report_mb, report_s: size of the report, and the time to write it.
        top_lines: lines that ``unickpt top --once`` shows.
        predicted: by ``whatif``: length of a step without the slow rank, relative to a sound step; None of other faults.
        said: the first verdict.
    """

    fault: str
    ranks: int
    rank: int
    named: bool
    seconds: float | None
    step_s: float
    agent: float
    agent_mb: float
    report_mb: float
    report_s: float
    top_lines: int
    predicted: float | None
    said: str


def unickpt(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of unickpt."""
    return subprocess.run([sys.executable, "-m", "unickpt.cli.main", *arguments], capture_output=True, text=True, check=False)


def _agent_of(folder: Path) -> psutil.Process:
    """Return the agent that watches a folder."""
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "agent" in " ".join(each.cmdline()) and str(folder) in " ".join(each.cmdline()):
                return each
    raise RuntimeError(f"no agent watches {folder}")


def _said(folder: Path) -> list[dict[str, Any]]:
    lines = [line for file in folder.glob("rings*/verdicts.jsonl") for line in file.read_text().splitlines()]
    return sorted(map(json.loads, lines), key=lambda each: each["at_ns"])


def _names(verdict: dict[str, Any], fault: str, rank: int, ranks: int) -> bool:
    """Return whether a verdict is right."""
    if verdict["syndrome"] != FAULTS[fault][1]:
        return False
    if fault != LINK:
        return bool(verdict["ranks"] == [rank])
    link = re.search(r" link=(\d+)->(\d+) ", verdict["line"])
    return link is not None and int(link[1]) < ranks // 2 <= int(link[2])


@contextlib.contextmanager
def _limited(network: Network, host: str) -> Iterator[None]:
    """What a host sends is slow meanwhile."""
    inside = [*network.command(host), "tc", "qdisc"]
    limit = ["tbf", "rate", f"{LINK_MBIT}mbit", "burst", "64kb", "latency", "400ms"]
    subprocess.run([*inside, "add", "dev", NIC, "root", *limit], check=True)
    try:
        yield
    finally:
        subprocess.run([*inside, "del", "dev", NIC, "root"], check=False)


def _until(what: Any, limit_s: float) -> Any:
    deadline = time.monotonic() + limit_s
    while not (value := what()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return value


def _step(folder: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int((folder / "step").read_text())
    return 0


def _whatif(rings: Path, rank: int) -> float | None:
    """Return the seconds of a step without the delays of a rank."""
    done = unickpt("whatif", str(rings), "--without-rank", str(rank), "--json")
    with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
        return float(json.loads(done.stdout)["answers"][0]["step_s"])
    print(done.stdout[-2000:], done.stderr[-2000:], flush=True)
    return None


def measured(fault: str, ranks: int, rank: int, folder: Path, network: Network | None) -> Result:
    """Run a job with a fault. ``network``: of two hosts, for a slow link."""
    rings = folder / "rings"
    variables, hosts = {"GLOO_SOCKET_IFNAME": "lo"}, list[str]()
    if network is not None:
        variables = {"GLOO_SOCKET_IFNAME": NIC}
        hosts = [network.address(HOSTS[0]), *map(network.namespace, HOSTS)]
    job = threading.Thread(
        target=fork_ranks, args=(ranks, WORKER, str(folder), fault, str(rank), *hosts),
        kwargs={"timeout_s": 900, "env": variables, "check": False},
    )  # fmt: skip
    job.start()
    try:
        if not _until(lambda: _step(folder) >= 5, START_S):
            raise RuntimeError("the job has not begun")
        agent = _agent_of(rings)
        before, begin, first = sum(agent.cpu_times()[:2]), time.monotonic(), _step(folder)
        _until(lambda: (folder / "fault").exists() or _step(folder) >= 24, START_S)
        if fault == "sound":  # without what the agent does at its start
            before, begin, first = sum(agent.cpu_times()[:2]), time.monotonic(), _step(folder)
            time.sleep(SOUND_S)
        passed, steps = time.monotonic() - begin, _step(folder) - first
        share, own = (sum(agent.cpu_times()[:2]) - before) / passed, agent.memory_full_info().uss / 1e6
        if fault == "sound":
            said = _said(folder)
        else:
            _until(lambda: (folder / "fault").exists(), START_S)
            if network is None:
                said = _until(lambda: _said(folder), LIMIT_S) or []
            else:
                time.sleep(SOUND_S)  # links are compared with their own past
                (folder / "fault").write_text(str(time.time()))
                with _limited(network, HOSTS[0]):
                    said = _until(lambda: _said(folder), LIMIT_S) or []
        begun = float((folder / "fault").read_text()) if (folder / "fault").exists() else 0.0
        right = [each for each in said[:1] if _names(each, fault, rank, ranks)]
        shown = unickpt("top", str(rings), "--once")
        begin = time.monotonic()
        unickpt("report", str(rings), "-o", str(folder / "report.html"))
        report_s = time.monotonic() - begin
        predicted = None
        if fault == "slow":
            time.sleep(20.0)  # of steps with the fault
            found = _whatif(rings, rank)
            predicted = None if found is None else found / (passed / steps)
        return Result(
            fault, ranks, rank, not said if fault == "sound" else bool(right),
            said[0]["at_ns"] / 1e9 - begun if said and begun else None, passed / max(steps, 1), share, own,
            (folder / "report.html").stat().st_size / 1e6, report_s, len(shown.stdout.splitlines()), predicted,
            said[0]["sentence"] if said else "",
        )  # fmt: skip
    finally:
        (folder / "stop").touch()
        for each in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                each.kill()
        job.join(60)


def table(every: Sequence[Result]) -> str:
    """Return the Markdown table."""
    lines = [
        "| fault | runs | named | seconds | sound step, s | agent, share of a core | agent, MB | report, MB | whatif |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, (title, _) in FAULTS.items():
        found = [each for each in every if each.fault == name]
        if found:
            cells = [
                _spread([each.seconds for each in found]), _spread([each.step_s for each in found], 2),
                _spread([each.agent for each in found], 3), _spread([each.agent_mb for each in found]),
                _spread([each.report_mb for each in found], 2), _spread([each.predicted for each in found], 2),
            ]  # fmt: skip
            lines.append(f"| {title} | {len(found)} | {sum(each.named for each in found)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _spread(values: Sequence[float | None], digits: int = 1) -> str:
    known = sorted(value for value in values if value is not None)
    if not known:
        return "-"
    low, high = f"{known[0]:.{digits}f}", f"{known[-1]:.{digits}f}"
    return low if low == high else f"{low} to {high}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    source = random.Random(args.seed)
    for fault in args.only:
        rank = source.randrange(args.ranks)
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            if fault == LINK:
                with contextlib.closing(Network(HOSTS)) as network:
                    result = measured(fault, args.ranks, 0, Path(folder), network)
            else:
                result = measured(fault, args.ranks, rank, Path(folder), None)
        print(result, flush=True)
        with KEPT.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
    every = [Result(**json.loads(line)) for line in KEPT.read_text().splitlines()]
    body = table([each for each in every if each.ranks == args.ranks])
    print(body)
    if args.out:
        command = f"python -m evidence.sixty_four.diagnosis --ranks {args.ranks}"
        put(args.out, SECTION, section(SECTION, command, body), HEAD)


if __name__ == "__main__":
    main()
