"""Slow and dead links between two hosts, counted: what the agents say, and how soon. Needs root (network namespaces).

    python -m evidence.diagnosis.timing_links [--runs 10] [--seed 1] [--keep FILE]

Two network namespaces are the hosts, each with two ranks of a DeepSpeed job and an agent of its own. Gloo goes over one pair
of interfaces, on which bandwidth is taken away (``tbf``) or all packets are (a blackhole route), or, where packets shall come
late, through a relay of our own; the job's store and the agents over another pair, as in a cluster that has a network for its
management.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from evidence.diagnosis.timing_counts import Kept, Run
from evidence.diagnosis.timing_faults import Fault, Job, parser_of, settle, sound_stretch
from tests.support.repository import REPO
from unickpt.testing.launch import free_port

HOSTS = ("ukpt-a", "ukpt-b")
RANKS = ((0, 1), (2, 3))
SLOW, DEAD = "communication slow", "communication hang"
FAULTS = {
    "a to b, 20 Mbit/s": Fault("a to b, 20 Mbit/s", "tbf", SLOW),
    "b to a, 20 Mbit/s": Fault("b to a, 20 Mbit/s", "tbf", SLOW),
    "both directions, 20 Mbit/s": Fault("both directions, 20 Mbit/s", "tbf", SLOW),
    "20 ms late, both directions": Fault("20 ms late, both directions", "late", SLOW),
    "20 ms late, a to b": Fault("20 ms late, a to b", "late", SLOW),
    "dead link": Fault("dead link", "blackhole", DEAD, survived=False),
}
DIRECTIONS = {
    "20 ms late, both directions": (0, 1),
    "20 ms late, a to b": (0,),
    "a to b, 20 Mbit/s": (0,),
    "b to a, 20 Mbit/s": (1,),
    "both directions, 20 Mbit/s": (0, 1),
    "dead link": (0,),
}
LIMIT_S = 60.0
NAME = "deepspeed zero1, 2 hosts of 2 ranks"


def ip(*arguments: str, host: int | None = None, check: bool = True) -> None:
    inside = ["ip", "netns", "exec", HOSTS[host]] if host is not None else []
    subprocess.run([*inside, *arguments], check=check, capture_output=not check)


@contextlib.contextmanager
def network() -> Iterator[None]:
    """Two hosts, with two networks: 10.77.1.x for data, 10.77.2.x for all else."""
    for host in HOSTS:
        ip("ip", "netns", "del", host, check=False)
        ip("ip", "netns", "add", host)
    try:
        for net in (1, 2):
            ip("ip", "link", "add", f"ukpta{net}", "type", "veth", "peer", "name", f"ukptb{net}")
            for at, host in enumerate(HOSTS):
                name = f"ukpt{'ab'[at]}{net}"
                ip("ip", "link", "set", name, "netns", host)
                ip("ip", "addr", "add", f"10.77.{net}.{at + 1}/24", "dev", name, host=at)
                ip("ip", "link", "set", name, "up", host=at)
        for at in range(2):
            ip("ip", "link", "set", "lo", "up", host=at)
        yield
    finally:
        for host in HOSTS:
            ip("ip", "netns", "del", host, check=False)


class Relay:
    """What the data goes through where packets can come late; ``tell(a_to_b_ms, b_to_a_ms)``."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "evidence.diagnosis.relay", HOSTS[0], "10.77.3.1", HOSTS[1], "10.77.3.2"]
        self.process = subprocess.Popen(command, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def tell(self, to_b_ms: float, to_a_ms: float) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"delay {to_b_ms} {to_a_ms}\n")
        self.process.stdin.flush()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class TwoHosts(Job):
    """A job on both."""

    relay: Relay | None = None

    def _start(self, kind: str, layout: str) -> list[subprocess.Popen[str]]:
        port = free_port()
        started = []
        for at, host in enumerate(HOSTS):
            rings = self.folder / ("rings" if at == 0 else f"rings-{at}")
            rings.mkdir(parents=True)
            command = [
                "ip", "netns", "exec", host, "unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', f"host-{'ab'[at]}",
                sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(at), "--nproc-per-node", "2",
                "--master-addr", "10.77.2.1", "--master-port", str(port), *self._worker(kind, layout, rings),
            ]  # fmt: skip
            started.append(self._process(command, GLOO_SOCKET_IFNAME="late0" if self.relay else f"ukpt{'ab'[at]}1"))
        return started


@contextlib.contextmanager
def doing(fault: Fault, relay: Relay | None) -> Iterator[None]:
    """The fault goes on inside."""
    ends = DIRECTIONS[fault.title]
    if fault.name == "late" and relay is not None:
        relay.tell(*(20.0 if at in ends else 0.0 for at in range(2)))
        try:
            yield
        finally:
            relay.tell(0, 0)
        return
    for at in ends:
        if fault.name == "tbf":
            ip("tc", "qdisc", "add", "dev", f"ukpt{'ab'[at]}1", "root", "tbf", "rate", "20mbit", "burst", "64kb", "latency",
               "400ms", host=at)  # fmt: skip
        else:
            ip("ip", "route", "add", "blackhole", f"10.77.1.{2 - at}/32", host=at)
    try:
        yield
    finally:
        for at in ends:
            if fault.name == "tbf":
                ip("tc", "qdisc", "del", "dev", f"ukpt{'ab'[at]}1", "root", host=at, check=False)
            else:
                ip("ip", "route", "del", "blackhole", f"10.77.1.{2 - at}/32", host=at, check=False)


def make(job: TwoHosts, fault: Fault) -> Run:
    """One fault, until something is said of it."""
    run = Run(NAME, fault.title, -1)
    before = len(job.said())
    with doing(fault, job.relay):
        begun, step = time.time_ns(), max(job.steps())
        while time.time_ns() - begun < LIMIT_S * 1e9 and len(job.said()) == before:
            time.sleep(0.1)
        new = job.said()[before:]
        if new:
            first = new[0]
            run.detected, run.said, run.syndrome = True, first["sentence"], first["syndrome"] == fault.syndrome
            run.named = all(crosses(verdict, fault) for verdict in new)
            run.seconds = (first["at_ns"] - begun) / 1e9
            run.beyond, run.steps = run.seconds - first["deadline_s"], max(job.steps()) - step
    return run


def crosses(verdict: dict[str, object], fault: Fault) -> bool:
    """It names a link from one host to the other, in the right direction; of a dead one either."""
    link = verdict["link"]
    if not isinstance(link, list):
        ranks = verdict["ranks"]
        return fault.name == "blackhole" and isinstance(ranks, list) and {rank // 2 for rank in ranks} == {0, 1}
    ways = (0, 1) if fault.name in ("blackhole", "late") else DIRECTIONS[fault.title]
    return any(link[0] in RANKS[at] and link[1] in RANKS[1 - at] for at in ways)


def measure(faults: list[Fault], kept: Kept, *, relayed: bool) -> None:
    """Faults in one job, and the sound stretches between them."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place, network():
        TwoHosts.relay = Relay() if relayed else None
        job = TwoHosts("deepspeed", "zero1", 4, Path(place))
        try:
            job.until_step(60)
            for fault in faults:
                kept.add(sound_stretch(job, NAME))
                kept.add(make(job, fault))
                if fault.survived:
                    settle(job)
        except RuntimeError as err:
            print(err, flush=True)
        finally:
            job.close()
            if TwoHosts.relay is not None:
                TwoHosts.relay.close()


def main() -> None:
    args = parser_of(__doc__ or "", FAULTS).parse_args()
    chance = random.Random(args.seed)
    kept = Kept(args.keep, f"python -m evidence.diagnosis.timing_links {' '.join(sys.argv[1:])}")
    late = [title for title in args.faults if FAULTS[title].name == "late"]
    for titles, relayed in ((late, True), ([title for title in args.faults if title not in late], False)):
        gentle = [FAULTS[title] for title in titles if FAULTS[title].survived for _ in range(args.runs)]
        hard = [FAULTS[title] for title in titles if not FAULTS[title].survived for _ in range(args.runs)]
        chance.shuffle(gentle)
        share = -(-len(gentle) // max(len(hard), 1))
        for at in range(max(len(hard), 1) if titles else 0):
            measure([*gentle[at * share : (at + 1) * share], *hard[at : at + 1]], kept, relayed=relayed)


if __name__ == "__main__":
    main()
