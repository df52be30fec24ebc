"""A round that does not form: the hosts that have come, those that are missing by name, and what to look at."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from tests.unit.steering.made import running
from unickpt.steering.state.forming import Expected, absent, expected_hosts, gathering, nodes_of, other_nodes
from unickpt.steering.state.limits import Limits
from unickpt.steering.state.membership import Arrived, JobPhase, Joined, Membership, Opened, Park
from unickpt.steering.state.transitions import transition
from unickpt.steering.wire.addresses import no_contact
from unickpt.steering.wire.codec import SteeringError


def job(*names: str, low: int = 3, high: int = 3, slow: str = "") -> Membership:
    """A job whose first round has not begun."""
    state = Membership(Limits(low, high), "n0", gathering_s=0.0)
    for name in names:
        state = transition(state, Joined(name, "1", f"{name}:1"), 0.0)
        if name != slow:
            state = transition(state, Arrived(name, "1"), 0.0)
    return state


LISTED = Expected(("n0", "n1", "n2"), "--rdzv-conf hosts=")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ["node1"]),
        ("node[1-3,7],gpu01", ["node1", "node2", "node3", "node7", "gpu01"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("rack[1-2]n[1-2].example", ["rack1n1.example", "rack1n2.example", "rack2n1.example", "rack2n2.example"]),
        ("a,b", ["a", "b"]),
        ("", []),
        ("n[1-999999]", []),
    ],
)
def test_a_list_of_slurm_is_read(text: str, names: list[str]) -> None:
    assert list(nodes_of(text)) == names


def test_where_the_names_come_from() -> None:
    slurm = {"SLURM_JOB_NODELIST": "n[0-3]", "SLURM_STEP_NODELIST": "n[0-1]"}
    options = {"hosts": (), "order": ("b", "a")}
    assert expected_hosts({**options, "hosts": ("x", "y")}, slurm, ["z"]) == Expected(("x", "y"), "--rdzv-conf hosts=")
    assert expected_hosts(options, slurm, ["z"]).source == "--rdzv-conf order="
    assert expected_hosts({}, slurm, ["z"]) == Expected(("n0", "n1"), "SLURM_STEP_NODELIST")
    assert expected_hosts({}, {}, ["z"]) == Expected(("z",), "the last round")
    assert expected_hosts({}, {}, []) == Expected()


def test_names_with_and_without_a_domain_are_the_same() -> None:
    assert absent(LISTED, ["n0.cluster.example", "n2#2"]) == ["n1"]
    assert absent(Expected(("10.0.0.1", "10.0.0.2"), ""), ["10.0.0.2"]) == ["10.0.0.1"]
    assert absent(LISTED, ["pod-a", "pod-b"]) == []  # the list has other names: nothing is known


def test_hosts_that_have_not_come_are_named() -> None:
    text, then = gathering(job("n0", "n1"), LISTED, 9.0)
    assert text == "2 of 3 hosts have come: n0, n1; not come, of --rdzv-conf hosts=: n2"
    assert then.startswith("look whether torchrun runs on n2, at its log")
    text, then = gathering(job("n0"), Expected(), 9.0)
    assert text == "1 of 3 hosts have come: n0; 2 more must come"
    assert "hosts=NAME+NAME" in then
    assert "localhost is each machine itself" in gathering(job("n0"), Expected(), 9.0, "localhost")[1]


def test_a_round_that_may_form_needs_no_warning() -> None:
    text, then = gathering(job("n0", "n1", low=2), LISTED, 9.0)
    assert (text, then) == ("2 of 2 to 3 hosts have come: n0, n1; not come, of --rdzv-conf hosts=: n2", "")
    assert gathering(running(), LISTED, 9.0) == ("", "")
    assert gathering(replace(job("n0"), closed="asked"), LISTED, 9.0) == ("", "")


def test_hosts_that_are_there_and_cannot_take_part_are_named() -> None:
    state = transition(job("n0", "n1", "n2", slow="n1"), Park("n2", "asked"), 1.0)
    text, _ = gathering(state, LISTED, 9.0)
    assert "not ready, because their workers still end: n1" in text
    assert "parked, or not checked yet: n2" in text


def test_a_host_that_cannot_connect_to_the_store_is_named() -> None:
    state = transition(job("n0", "n1", "n2"), Arrived("n0", "1"), 2.0)
    assert state.phase is JobPhase.OPENING
    assert gathering(state, LISTED, 12.0)[0] == "n0 has not opened the store of the round yet"
    assert state.round is not None
    state = transition(state, Opened("n0", "1", state.round.epoch, "10.0.0.1:4711", "m:1"), 3.0)
    text, then = gathering(state, LISTED, 12.0)
    assert text == "n1, n2 cannot connect to the store of the round at 10.0.0.1:4711 (n0). The round waits 50 s more"
    assert then.startswith("type on n1: nc -vz 10.0.0.1 4711.")


def test_another_number_of_nodes_is_told() -> None:
    assert other_nodes(job("n0"), Limits(3, 3)) == ""
    assert "--nnodes 2:4, and the job with --nnodes 3, which" in other_nodes(job("n0"), Limits(2, 4))


@pytest.mark.parametrize(
    ("err", "text", "then"),
    [
        (ConnectionRefusedError("refused"), "refuses connections, so no agent listens there", "look whether torchrun runs on"),
        (TimeoutError("timed out"), "does not answer (timed out)", "nc -vz 127.0.0.1 29400"),
        (EOFError("closed"), "does not accept this agent (closed)", "compare --rdzv-id and secret_file"),
        (SteeringError("not authentic"), "does not accept this agent", "another program may listen at this port"),
        (socket.gaierror(-2, "unknown"), "'127.0.0.1' in --rdzv-endpoint does not resolve", "getent hosts 127.0.0.1"),
    ],
)
def test_why_there_is_no_contact(err: Exception, text: str, then: str) -> None:
    said, following = no_contact("127.0.0.1:29400", err)
    assert text in said
    assert then in following
