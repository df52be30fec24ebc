"""Which end of a bad link is at fault: from measurements, and measured between real agents."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.steering.made import running
from tests.unit.steering.peers import KEY, Job, Slowly, hosts, until
from unickpt.base.options.steering import SteeringOptions
from unickpt.steering.agent.peer import Peer
from unickpt.steering.links.link_check import check
from unickpt.steering.policy.decisions import Decisions
from unickpt.steering.policy.policy import Fault, Finding
from unickpt.steering.policy.reports import HubReport
from unickpt.steering.state.limits import Limits
from unickpt.steering.state.link_verdicts import Blame, LinkSpeed, Pair, judge, pair, pairs_to_measure, thirds
from unickpt.steering.state.membership import Arrived, JobPhase, Lost, Opened, Ready
from unickpt.steering.state.transitions import transition
from unickpt.steering.wire.codec import dial
from unickpt.steering.wire.probing import Probe

GOOD, BAD, LATE = LinkSpeed(1e-3, 900e6, 800e6), LinkSpeed(1e-3, 900e6, 80e6), LinkSpeed(0.2, 900e6, 800e6)


@pytest.mark.parametrize(
    ("bad", "blame", "host"),
    [
        ("ab ac ad", Blame.ONE_END, "a"),
        ("ab bc bd", Blame.ONE_END, "b"),
        ("ab", Blame.LINK, ""),
        ("ab ac", Blame.LINK, ""),  # half of its links only
        ("ab ac bc ad bd", Blame.BOTH_ENDS, ""),
        ("ac ad", Blame.SOUND, ""),
        ("cd", Blame.SOUND, ""),
        ("", Blame.SOUND, ""),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [BAD, LATE, None], ids=["slow", "late", "unusable"])
def test_the_end_with_more_bad_links_is_at_fault(bad: str, blame: Blame, host: str, kind: LinkSpeed | None) -> None:
    ends = pair("b", "a")
    speeds = {each: kind if "".join(each) in bad.split() else GOOD for each in pairs_to_measure(ends, ["c", "d"])}
    finding = judge(ends, speeds)
    assert (finding.blame, finding.host) == (blame, host)
    assert finding.text.startswith(f"{host} is at fault, its links to other hosts are bad as well: " if host else blame.value)
    assert finding.text.count("a-b ") == 1


def test_with_two_hosts_it_cannot_be_told() -> None:
    finding = judge(("a", "b"), {("a", "b"): None})
    assert finding.text == "it cannot be told which end is at fault with two hosts: a-b unusable"
    assert judge(("a", "b"), {("a", "b"): BAD}).blame is Blame.UNKNOWN
    assert judge(("a", "b"), {}).text == "it cannot be told which end is at fault with two hosts: nothing could be measured"


def test_unknown_links_prove_nothing() -> None:
    assert judge(("a", "b"), {("a", "b"): None, ("a", "c"): None}).host == "a"  # b could not be asked, c did not answer a
    assert judge(("a", "b"), {("a", "b"): None, ("a", "c"): GOOD}).blame is Blame.UNKNOWN
    assert judge(("a", "b"), {("a", "c"): GOOD, ("b", "c"): BAD}).blame is Blame.UNKNOWN


def test_random_measurements_blame_an_end_only_if_its_other_links_are_bad() -> None:
    source, blamed = random.Random(1), 0
    for _ in range(5000):
        ends: Pair = ("a", "b")
        speeds: dict[Pair, LinkSpeed | None] = {
            each: source.choice([GOOD, BAD, LATE, None, LinkSpeed(source.uniform(1e-5, 1), 10 ** source.uniform(3, 10), 1e9)])
            for each in pairs_to_measure(ends, ["c", "d"][: source.randint(0, 2)])
            if source.random() < 0.8
        }
        finding = judge(ends, speeds)
        assert (finding.host != "") == (finding.blame is Blame.ONE_END)
        if finding.host:
            blamed += 1
            best = max((speed.slowest for speed in speeds.values() if speed), default=0.0)
            own = [speed for each, speed in speeds.items() if finding.host in each and each != ends]
            assert any(speed is None or speed.slowest < 0.4 * best or speed.latency_s > 0.005 for speed in own)
            assert ends in speeds
    assert blamed > 300


def test_thirds_are_members_that_have_not_left() -> None:
    state = running(5)
    assert thirds(state, ("h0", "h1")) == ["h2", "h3"]
    gone = transition(state, Lost("h2", "1"), 0.0)
    assert thirds(gone, ("h0", "h1")) == ["h3", "h4"]


# ---------------------------------------------------------------- over connections


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job(Limits(1, 4, join_s=1.0, expiry_s=60.0, settle_s=0.1), lambda: Decisions(SteeringOptions(check_seconds=15.0)))
    yield made
    for peer in made.peers:
        peer.close()


def begin(job: Job, names: str) -> list[Peer]:
    """Start a round of hosts."""
    peers = [job.start(names[0])]
    until(lambda: peers[0].leads)
    peers += [job.start(name) for name in names[1:]]
    until(lambda: all(hosts(peer) == set(names) for peer in peers))
    for peer in peers:
        peer.say(Arrived(peer.name, peer.incarnation))
    until(lambda: (state := peers[0].read()) and state.round and len(state.round.members) == len(names))
    peers[0].say(Opened(names[0], peers[0].incarnation, (1, 1), "s:1", "m:1"))
    until(lambda: all((state := peer.read()) and state.round and state.round.store for peer in peers))
    for peer in peers[1:]:
        peer.say(Ready(peer.name, peer.incarnation, (1, 1)))
    until(lambda: all((state := peer.read()) and state.phase is JobPhase.RUNNING for peer in peers))
    for peer in peers:
        peer.say()
    return peers


def test_the_leader_orders_the_measurements_and_the_host_at_fault_is_out(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    """The link of host z is slow in both directions for the others. The verdict is about one of its links."""
    caplog.set_level("INFO", "unickpt")
    peers = begin(job, "acz")
    slow = Slowly(peers[2].address, 3e6)
    try:
        peers[2].address = slow.address
        until(lambda: (state := peers[1].read()) and state.hosts["z"].address == slow.address)
        link = Finding(Fault.DEAD_LINK, ("z", "a"), 9.0, text="rank 0 and 2")
        peers[1].found(HubReport((1, 1), 5, 0.0, (link,)))
        until(lambda: "check of a and z: z is at fault, its links to other hosts are bad as well: a-z " in caplog.text)
        peers[1].found(HubReport((1, 1), 5, 0.0, (link,)))
        state: Any = until(lambda: (now := peers[1].read()) and now.parked and now)
        assert state.parked["z"].reason == "LINK_OUT: rank 0 and 2"
    finally:
        slow.close()


def test_a_host_that_cannot_be_reached_is_at_fault_and_the_check_has_a_deadline(job: Job) -> None:
    peers = begin(job, "acz")
    peers[2]._listener.close()  # it goes on to report, so the others still know it
    state: Any = peers[0].read()
    finding = check(("a", "z"), state, Probe(KEY), 60.0)
    assert finding.host == "z"
    assert "a-c " in finding.text
    late = check(("a", "z"), state, Probe(KEY), 1e-9)
    assert late.text.endswith("nothing could be measured")


@pytest.mark.parametrize(
    "change",
    [{"host": None}, {"host": "x"}, {"host": ["c"]}, {"seconds": None}, {"seconds": -1}, {"seconds": 1e9}, {"seconds": True},
     {"seconds": "1"}, {"seconds": float("nan")}, {"kind": "measured"}],
    ids=str,
)  # fmt: skip
def test_malformed_orders_to_measure_are_refused(job: Job, change: dict[str, Any]) -> None:
    peer = job.start("a")
    until(lambda: peer.leads and hosts(peer))
    frames = dial(peer.address, KEY, 5.0)
    frames.send({"kind": "measure", "host": "a", "seconds": 1.0, **change})
    with pytest.raises((EOFError, OSError)):
        frames.receive()
    assert peer.refused == 1
