"""Addresses of agents: IPv6, loop-back addresses other than 127.0.0.1, names that do not resolve."""

from __future__ import annotations

import itertools
import logging
import socket
from types import SimpleNamespace

import pytest

from tests.unit.steering.peers import KEY, Job, hosts, until
from unickpt.steering.links.link_speed import measure
from unickpt.steering.state.limits import Limits
from unickpt.steering.wire import addresses
from unickpt.steering.wire.addresses import await_name, is_loopback, listening_socket, loopback_of, way_to
from unickpt.steering.wire.codec import split_address, split_endpoint
from unickpt.testing.launch import free_port

UNKNOWN = "unickpt-head.example.invalid"  # RFC 6761: never resolves


def _has(address: str) -> bool:
    try:
        listening_socket(address, 0).close()
    except OSError:
        return False
    return True


IPV6 = pytest.param("[::1]", "", marks=pytest.mark.skipif(not _has("::1"), reason="the machine has no IPv6"))


@pytest.mark.parametrize(("host", "local"), [IPV6, ("127.0.0.2", ""), ("127.0.0.1", "127.0.0.3"), ("localhost", "")])
def test_agents_form_a_job_at_any_loopback_address_and_reach_themselves(host: str, local: str) -> None:
    job = Job(Limits(2, 2))
    job.endpoint = f"{host}:{free_port()}"
    try:
        first, second = job.start("a", local=local), job.start("b")
        until(lambda: hosts(first) == hosts(second) == {"a", "b"})
        for peer in (first, second):
            assert measure(peer.loopbacks[0], KEY, 2.0).slowest > 0
            assert is_loopback(split_address(peer.address)[0])
    finally:
        for peer in job.peers:
            peer.close()


def test_an_agent_of_several_machines_listens_at_ipv4_and_ipv6() -> None:
    with listening_socket("", 0) as listener:
        port = listener.getsockname()[1]
        for address in ("127.0.0.1", "::1") if _has("::1") else ("127.0.0.1",):
            socket.create_connection((address, port), timeout=5).close()
        with pytest.raises(OSError, match="in use"):
            listening_socket("", port)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[::1]:29400", ("::1", 29400)), ("[::1]", ("::1", None)), ("::1", ("::1", None)), ("fe80::1%e", ("fe80::1%e", None)),
        ("host:1", ("host", 1)), ("host", ("host", None)), ("", ("", None)), ("host:", ("host", None)),
    ],
)  # fmt: skip
def test_an_endpoint_has_a_host_and_perhaps_a_port(text: str, found: tuple[str, int | None]) -> None:
    assert split_endpoint(text) == found


def test_loopback_addresses_are_their_own_way() -> None:
    assert way_to("127.0.0.2", 1) == loopback_of("127.0.0.2") == "127.0.0.2"
    assert way_to("::1", 1) == "::1"
    assert way_to(UNKNOWN, 1) == ""
    assert not is_loopback("10.0.0.1")
    assert not is_loopback("localhost.example")


def test_a_name_that_does_not_resolve_is_said_with_what_to_do(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: float(next(ticks)), sleep=lambda _: None)  # a second from look to look
    monkeypatch.setattr(addresses, "time", clock)
    with caplog.at_level(logging.INFO, "unickpt"), pytest.raises(OSError, match="does not resolve"):
        await_name(UNKNOWN, lambda: False, 3.0)
    said = next(text for text in caplog.messages if UNKNOWN in text)  # a name server that is slow is said, too
    for part in (UNKNOWN, socket.gethostname(), "getent hosts", "publishNotReadyAddresses", "tried again"):
        assert part in said
    await_name(UNKNOWN, lambda: True, 60.0)  # the job is known in another way


def test_an_agent_waits_for_a_name_that_resolves_later(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, looks, getaddrinfo = "head-that-starts-later", itertools.count(), socket.getaddrinfo

    def resolve(host: str, *rest: object, **options: object) -> object:
        """Other names are looked up as ever: a thread of another test may do so now."""
        if host != name:
            return getaddrinfo(host, *rest, **options)  # type: ignore[arg-type]
        if next(looks) == 0:
            raise socket.gaierror(-2, "Name or service not known")
        return []

    monkeypatch.setattr(addresses, "LOOK_S", 0.01)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with caplog.at_level(logging.INFO, "unickpt"):
        await_name(name, lambda: False, 60.0)
    said = [record.getMessage() for record in caplog.records if name in record.getMessage()]
    assert said[-1].rpartition(": ")[2] == f"{name} resolves now"
