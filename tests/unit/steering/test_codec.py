"""Messages between agents: what is sent arrives, and what was not made with the job's secret is refused."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from unickpt.steering.state.limits import Limits
from unickpt.steering.state.membership import (
    NEVER_S,
    Admit,
    Arrived,
    Close,
    Committed,
    Event,
    Heard,
    Joined,
    Left,
    Measured,
    Membership,
    Opened,
    Ordered,
    Park,
    Reached,
    Ready,
    Restart,
    WorkersEnded,
)
from unickpt.steering.state.scores import Score
from unickpt.steering.state.transitions import transition
from unickpt.steering.wire.codec import (
    Frames,
    SteeringError,
    event_as_json,
    event_from_json,
    join_address,
    key_of,
    split_address,
    state_as_json,
    state_from_json,
)

EVENTS: list[Event] = [
    Joined("a", "1", "a:1"), Heard("a", "1"), Arrived("a", "1", (3, 4)), Opened("a", "1", (1, 1), "s:1", "m:1"),
    Ready("a", "1", (1, 1)), Left("a", "1", True, ""), Park("a", "slow"), Park("a", "slow", 5.0), Admit("a"),
    Restart((1, 1), "why"), Close("why"),
    Opened("a", "1", (1, 1), "s:1", "m:1", "http://a:1/secret"),
    Joined("a", "1", "a:1", 8), Committed("a", "1", (1, 1), 3), WorkersEnded("a", "1", (1, 1), (0, 7)),
    Measured("a", "1", 4, Score(1.5, 0.0, 2.0, 3.0, 0.25, "wrong")),
]  # fmt: skip


def some_state() -> Membership:
    state = Membership(Limits(1, 2, frozenset({1, 2}), order=("a", "z")), "a (1)", gathering_s=-9.0)
    arrivals = [Arrived("a", "1"), Joined("b", "7", "[::1]:5"), Arrived("b", "7")]
    for event in [*EVENTS[:2], *arrivals, Park("c", "hung", 8.0), Park("d", "asked")]:
        state = transition(state, event, 100.0)
    late: list[Event] = [Ordered("x", "park c", (1, 2)), Reached((1, 1), 12, 2.5), Committed("a", "1", (1, 1), 3)]
    late.append(WorkersEnded("a", "1", (1, 1), (5, 2)))
    opened = [Opened("a", "1", (1, 1), "s:1", "m:1", "http://a:1/secret"), Ready("b", "7", (1, 1))]
    late.append(Measured("a", "1", 0, Score(1.5, 0.0, 2.0, 3.0, 0.25)))
    state = replace(state, suspects={"c": 3}, checks=3)
    for event in [*opened, *late, Joined("e", "2", "e:5"), Arrived("e", "2")]:
        state = transition(state, event, 101.0)
    return state


def test_fields_that_an_earlier_build_does_not_send_have_defaults_and_others_say_why() -> None:
    sent = json.loads(json.dumps(state_as_json(some_state(), 103.0)))
    for name in ("stillborn", "scores", "ended"):
        del sent[name]
    del sent["limits"]["order"], sent["round"]["hub"]
    sent["hosts"] = [host[:4] for host in sent["hosts"]]
    found = state_from_json(sent, 103.0)
    assert found.round is not None
    assert (found.stillborn, found.limits.order, found.round.hub, found.ended) == ({}, (), "", frozenset())
    del sent["electorate"]
    with pytest.raises(SteeringError, match=r"'electorate'.*same version"):
        state_from_json(sent, 103.0)
    assert event_from_json({"event": "Joined", "name": "a", "incarnation": "1", "address": "a:1"}) == Joined("a", "1", "a:1")


@pytest.mark.parametrize("event", EVENTS, ids=str)
def test_events_arrive_as_they_were_sent(event: Event) -> None:
    assert event_from_json(json.loads(json.dumps(event_as_json(event)))) == event


def test_a_state_arrives_with_times_on_the_clock_of_the_receiver() -> None:
    state = some_state()
    copy = state_from_json(json.loads(json.dumps(state_as_json(state, 103.0))), 1003.0)
    later = replace(state, heard=dict.fromkeys(state.hosts, 1003.0))
    assert copy.parked["c"].until_s == pytest.approx(1008.0)
    assert copy.parked["d"].until_s == NEVER_S
    assert copy.hosts["e"].arrived_s == copy.committed_s == pytest.approx(1001.0)
    assert copy.round is not None
    assert state.round is not None
    assert (copy.round.members, copy.round.epoch, copy.round.ready) == (state.round.members, (1, 1), frozenset("ab"))
    assert copy.round.hub == "http://a:1/secret"
    assert (copy.reached, copy.evictions, copy.orders[0].ranks) == (12, {"c": 1}, (1, 2))
    names = (
        "limits",
        "leader",
        "term",
        "version",
        "phase",
        "heard",
        "seats",
        "electorate",
        "reason",
        "closed",
        "finished",
        "losses",
        "evictions",
        "orders",
        "furthest",
        "reached",
        "fruitless",
        "pause_s",
        "commits",
        "suspects",
        "checks",
        "scores",
    )
    assert {name: getattr(copy, name) for name in names} == {name: getattr(later, name) for name in names}


@pytest.mark.parametrize(
    "value",
    [
        None, [], {}, {"event": "Lost", "name": "a", "incarnation": "1"}, {"event": "TookOver", "leader": "a", "term": 9},
        {"event": "Joined", "name": "a", "incarnation": "1"}, {"event": "Joined", "name": 1, "incarnation": "1", "address": ""},
        {"event": "Arrived", "name": "a", "incarnation": "1", "after": [1]},
        {"event": "Arrived", "name": "a", "incarnation": "1", "after": ["1", True]},
        *(
            {"event": "Measured", "name": "a", "incarnation": "1", "check": 1, "score": score}
            for score in (None, [], [1, 2, 3, 4, 5], [1, 2, 3, 4, -5, ""], [1, 2, 3, 4, float("nan"), ""],
                          [True, 2, 3, 4, 5, ""], [1, 2, 3, 4, 10**400, ""], [1, 2, 3, 4, 5, "x" * 5000],
                          [1, 2, 3, 4, 5, 6], "123456")
        ),
        {"event": "Park", "name": "a", "reason": "r", "for_s": -1}, {"event": "Admit", "name": "a" * 9999},
    ],
)  # fmt: skip
def test_what_is_no_event_of_an_agent_is_refused(value: Any) -> None:
    """No agent can send the event that another host is lost, or that there is a new leader."""
    with pytest.raises(SteeringError):
        event_from_json(value)


def test_a_damaged_state_is_refused_or_read() -> None:
    """Random changes of the JSON of a state raise ``SteeringError`` and nothing else."""
    text = json.dumps(state_as_json(some_state(), 103.0))
    source, refused = random.Random(1), 0
    for _ in range(2000):
        value = json.loads(text)
        place: Any = value
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = source.choice(keys)
            if isinstance(place[key], (dict, list)) and source.random() < 0.6:
                place = place[key]
                continue
            place[key] = source.choice([None, -1, "x", [], {}, [1, 2], 1e9, True])
            break
        try:
            state_from_json(value, 0.0)
        except SteeringError:
            refused += 1
    assert refused > 500


def test_addresses() -> None:
    assert split_address("host:80") == ("host", 80)
    assert split_address(join_address("::1", 5)) == ("::1", 5)
    for wrong in ("host", "host:", ":5", "host:x", "host:99999"):
        with pytest.raises(SteeringError):
            split_address(wrong)


# ---------------------------------------------------------------- frames


def pair(key: bytes = b"k", other: bytes = b"k", challenge: str = "c") -> tuple[Frames, Frames, socket.socket]:
    one, two = socket.socketpair()
    one.settimeout(5)
    two.settimeout(5)
    return Frames(one, key, "c", listens=False), Frames(two, other, challenge, listens=True), one


def test_frames_in_both_directions() -> None:
    asks, answers, _ = pair()
    for number in range(3):
        asks.send({"number": number})
        assert answers.receive() == {"number": number}
        answers.send({"got": number})
        assert asks.receive() == {"got": number}
    asks.close()
    with pytest.raises(EOFError):
        answers.receive()


@pytest.mark.parametrize(("key", "challenge"), [(key_of("other"), "c"), (key_of("job"), "d")], ids=["secret", "challenge"])
def test_another_secret_or_challenge_is_refused(key: bytes, challenge: str) -> None:
    asks, answers, _ = pair(key, key_of("job"), challenge)
    asks.send({"kind": "hello"})
    with pytest.raises(SteeringError, match="not authentic"):
        answers.receive()


def _recorded(send: Callable[[Frames], None]) -> bytes:
    asks, answers, _ = pair()
    send(asks)
    return answers._file.readline()


@pytest.mark.parametrize(
    "change",
    [
        lambda line: line + line,  # the same again
        lambda line: line.replace(b"hello", b"claim"),
        lambda line: line[:-1],
        lambda _: b"x" * 100 + b"\n",
        lambda _: b"\n",
        lambda _: b"",
        lambda line: bytes(reversed(line)) + b"\n",
        lambda _: b"\xff" * 1000 + b"\n",
    ],
)
def test_recorded_changed_and_foreign_bytes_are_refused(change: Callable[[bytes], bytes]) -> None:
    line = change(_recorded(lambda frames: frames.send({"kind": "hello"})))
    _, answers, raw = pair()
    raw.sendall(line)
    raw.shutdown(socket.SHUT_WR)
    with pytest.raises((SteeringError, EOFError)):
        print([answers.receive() for _ in range(3)])
