"""Agents in one process, over real connections: they find each other, one leads, and another one takes over."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters

from tests.unit.steering.peers import KEY, Job, begin_round, hosts, until
from unickpt.base.errors import ConfigError
from unickpt.base.options.steering import SteeringOptions
from unickpt.steering.agent.peer import Peer
from unickpt.steering.handler import _reserve
from unickpt.steering.rendezvous import create, limits_of
from unickpt.steering.state.limits import Limits
from unickpt.steering.state.membership import Arrived, Close, Left, Membership, Park
from unickpt.steering.wire.codec import SteeringError, dial, event_as_json, key_of
from unickpt.steering.wire.last_members import recall

LIMITS = Limits(1, 4, join_s=1.0, expiry_s=60.0, settle_s=0.1)


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job(LIMITS)
    yield made
    for peer in made.peers:
        peer.close()


def test_all_agents_see_all_hosts_and_one_leads(job: Job) -> None:
    peers = [job.start(name) for name in ("a", "b", "c")]
    until(lambda: all(hosts(peer) == {"a", "b", "c"} for peer in peers))
    assert [peer.leads for peer in peers].count(True) == 1


def test_a_second_agent_of_a_host_gets_a_name_of_its_own(job: Job) -> None:
    first = job.start("a")
    until(lambda: first.leads)
    job.start("a")
    job.start("a")
    until(lambda: hosts(first) == {"a", "a#2", "a#3"})


def test_the_next_host_takes_over_and_a_new_process_at_the_endpoint_follows_it(job: Job) -> None:
    a = job.start("a")
    until(lambda: a.leads)
    b, c = job.start("b"), job.start("c")
    until(lambda: hosts(b) == hosts(c) == {"a", "b", "c"})
    a.close()
    until(lambda: b.leads and hosts(c) == {"b", "c"})
    state = c.read()
    assert state is not None
    assert state.term == 2
    again = job.start("a")
    until(lambda: hosts(again) == hosts(b) == {"a", "b", "c"})
    assert [peer.leads for peer in (again, b, c)] == [False, True, False]


def test_an_agent_that_is_started_again_at_once_does_not_begin_another_job(job: Job) -> None:
    a = job.start("a")
    until(lambda: a.leads)
    b, c = job.start("b"), job.start("c")
    until(lambda: hosts(b) == hosts(c) == {"a", "b", "c"})
    a.close()
    again = job.start("a")
    until(lambda: b.leads)
    until(lambda: all(hosts(peer) == {"a", "b", "c"} for peer in (again, b, c)))
    assert [peer.leads for peer in (again, b, c)] == [False, True, False]
    states = [peer.read() for peer in (again, b, c)]
    assert {state.term for state in states if state is not None} == {2}


def test_an_agent_that_is_started_again_finds_the_job_while_the_machine_of_the_endpoint_is_dead(job: Job) -> None:
    a = job.start("a")
    until(lambda: a.leads)
    b = job.start("b")
    begin_round(a, b)
    c = job.start("c")
    until(lambda: hosts(b) == hosts(c) == {"a", "b", "c"})
    a.close()
    until(lambda: b.leads and hosts(c) == {"b", "c"})
    until(lambda: recall(c._members) != [])
    c.close()
    again = Peer("c", job.endpoint, job.limits, job.key)
    greet = again._probe.greet

    def unreachable(address: str, incarnation: str) -> Any:
        """A machine without power does not even refuse a connection."""
        if address == job.endpoint:
            raise TimeoutError
        return greet(address, incarnation)

    again._probe.greet = unreachable  # type: ignore[method-assign]
    again.start()
    job.peers.append(again)
    until(lambda: hosts(again) == hosts(b) == {"b", "c"})
    assert b.leads


def test_a_process_that_ends_is_noticed_at_once_and_one_that_leaves_too(job: Job) -> None:
    a = job.start("a")
    until(lambda: a.leads)
    b, c = job.start("b"), job.start("c")
    until(lambda: hosts(a) == {"a", "b", "c"})
    began_s = time.monotonic()
    b.close()
    c.close(Left("c", c.incarnation))
    until(lambda: hosts(a) == {"a"})
    assert time.monotonic() - began_s < LIMITS.expiry_s


def test_only_the_leader_gives_orders_and_all_hear_them(job: Job) -> None:
    a = job.start("a")
    until(lambda: a.leads)
    b = job.start("b")
    until(lambda: hosts(b) == {"a", "b"})
    a.order([Park("b", "asked"), Close("enough")])
    state: Membership = until(lambda: (now := b.read()) is not None and now.closed and now)
    assert (state.closed, state.parked["b"].reason) == ("enough", "asked")
    with pytest.raises(SteeringError):
        b.order([Close("again")])


def test_a_host_arrives_in_the_state(job: Job) -> None:
    a = job.start("a")
    b = job.start("b")
    until(lambda: hosts(a) == hosts(b) == {"a", "b"})
    b.say(Arrived("b", b.incarnation))
    a.say(Arrived("a", a.incarnation))
    until(lambda: (state := b.read()) is not None and state.round is not None and len(state.round.members) == 2)


def test_a_stranger_changes_nothing_and_is_counted(job: Job) -> None:
    a = job.start("a")
    until(lambda: a.leads)
    stranger = dial(job.endpoint, key_of("guess"), 2.0)
    stranger.send({"kind": "report", "events": [event_as_json(Close("gone"))], "seen": [0, 0]})
    with pytest.raises((EOFError, OSError)):
        stranger.receive()
    for junk in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 5000 + b"\n", b"[" * 100_000 + b"\n"):
        with socket.create_connection(("localhost", int(job.endpoint.split(":")[1])), timeout=5) as connection:
            connection.sendall(junk)
    insider = dial(job.endpoint, KEY, 2.0)
    insider.send({"kind": "report", "events": [{"event": "Lost", "name": "a", "incarnation": a.incarnation}], "seen": [0, 0]})
    with pytest.raises((EOFError, OSError)):
        insider.receive()
    until(lambda: a.refused >= 4)
    state = a.read()
    assert state is not None
    assert (hosts(a), state.closed, a.leads) == ({"a"}, "", True)


# ---------------------------------------------------------------- handler


def parameters(endpoint: str, low: int, high: int, **conf: str) -> RendezvousParameters:
    return RendezvousParameters("unickpt", endpoint, "job", low, high, None, timeout=900, **conf)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ConfigError, match="need a fixed port"):
        create(parameters("localhost:0", 1, 2))
    with pytest.raises(ConfigError, match="did you mean"):
        create(parameters("localhost:0", 1, 1, joinseconds="3"))
    with pytest.raises(ConfigError, match="secret_file"):
        create(parameters("localhost:0", 1, 1, secret_file="/nowhere"))
    assert limits_of(parameters("localhost:1", 2, 8), SteeringOptions(sizes="4+8")).sizes == {4, 8}
    for sizes in ("4+9", "4+x", "1"):
        with pytest.raises(ConfigError, match="numbers from 2 to 8"):
            limits_of(parameters("localhost:1", 2, 8), SteeringOptions(sizes=sizes))
    assert limits_of(parameters("localhost:1", 2, 8), SteeringOptions(order="n2+n0")).order == ("n2", "n0")
    with pytest.raises(ConfigError, match="has n2 more than once"):
        limits_of(parameters("localhost:1", 2, 8), SteeringOptions(order="n2+n0+n2"))


def test_a_reserved_port_is_given_to_the_store_of_the_workers_alone() -> None:
    holder = _reserve()
    port = holder.getsockname()[1]
    with pytest.raises(OSError, match="in use"), socket.socket() as other:
        other.bind(("", port))
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    store.set("key", "value")
    assert store.get("key") == b"value"
    holder.close()
