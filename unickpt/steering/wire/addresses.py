"""Addresses of this machine, as other hosts of the job see it."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from unickpt.base.logs import logger, printable

LOOPBACKS = ("127.0.0.1", "::1")
SAY_S, AGAIN_S, LOOK_S = 5.0, 60.0, 1.0  # after which a slow name server is named, a warning is repeated, and a name is tried
_ELSEWHERE = (("192.0.2.1", socket.AF_INET), ("2001:db8::1", socket.AF_INET6))  # reserved for documentation: nothing is sent


def is_loopback(host: str) -> bool:
    """Return whether a name is one of this machine for itself alone."""
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    return False


def loopback_of(host: str) -> str:
    """Return the address to which a loop-back name is bound: the address itself, or of ``localhost`` the one that it has."""
    if host != "localhost":
        return host
    found = [str(each[4][0]) for each in _found(host, 0, socket.SOCK_STREAM)]
    return found[0] if found and LOOPBACKS[0] not in found else LOOPBACKS[0]


def is_local(host: str) -> bool:
    """Return whether a name is one of this machine: only then can a socket be bound to it."""
    return any(_can_bind(family, address) for family, _, _, _, address in _found(host, 0, socket.SOCK_STREAM))


def _found(host: str, port: int, kind: int) -> list[Any]:
    """Return the addresses of a name; none if it does not resolve."""
    try:
        return socket.getaddrinfo(host, port, type=kind)
    except (OSError, UnicodeError):
        return []


def _can_bind(family: int, address: Any) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def listening_socket(host: str, port: int, backlog: int = 128) -> socket.socket:
    """Return a listening socket. Without a host it takes IPv4 and IPv6, as far as the machine has them.

    Raises:
        OSError: nothing can listen there.
    """
    if host:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2] if family == socket.AF_INET else address, family=family, backlog=backlog)
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
        except OSError as err:
            failure = err
        if port and _is_taken(port):
            raise failure
    return socket.create_server(("", port), backlog=backlog)


def _is_taken(port: int) -> bool:
    return not _can_bind(socket.AF_INET, ("", port))


def way_to(host: str, port: int) -> str:
    """Return the address of this machine that leads to a host: of the host itself, its name; '' if there is no way.

    It is a number, because the names of hosts need not resolve.
    """
    if is_loopback(host):
        return loopback_of(host)
    for family, _, _, _, address in _found(host, port or 1, socket.SOCK_DGRAM):
        found = _source(family, address)
        if found:
            return host if is_loopback(found) else found
    return ""


def any_address() -> str:
    """Return an address of this machine for others, when it is not known where they are; its name if it has no network."""
    for elsewhere, family in _ELSEWHERE:
        found = _source(family, (elsewhere, 1))
        if found:
            return found
    return socket.gethostname()


def _source(family: int, address: Any) -> str:
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
    return ""


def await_name(host: str, give_up: Callable[[], bool], limit_s: float) -> None:
    """Wait until the name of the endpoint resolves, and say for what.

    In Kubernetes, the name of a pod may resolve only seconds after other pods have started.

    Args:
        host: name or address.
        give_up: returns whether the job can be found without the endpoint.
        limit_s: longest time.

    Raises:
        OSError: it does not resolve in time.
    """
    began_s, said_s = time.monotonic(), -AGAIN_S
    while True:
        try:
            with _said_if_slow(host):
                socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
            if said_s >= 0:
                logger.info("unickpt: steering: %s resolves now", printable(host))
            return
        except (OSError, UnicodeError) as err:
            text = unresolved(host, err)
        if give_up():
            return
        now_s = time.monotonic()
        if now_s - began_s > limit_s:
            raise OSError(text)
        if now_s - said_s > AGAIN_S:
            said_s = now_s
            logger.warning("unickpt: steering: %s. It is tried again for %.0f s", text, limit_s - (now_s - began_s))
        time.sleep(LOOK_S)


def unresolved(host: str, err: Exception) -> str:
    """Return what to say about a name of the endpoint that does not resolve."""
    return (
        f"the name {printable(host)!r} in --rdzv-endpoint does not resolve on {socket.gethostname()} ({err}). "
        f"Compare it with `getent hosts {printable(host)}` on this host: a wrong name, or no name server. In Kubernetes, a "
        "headless service with publishNotReadyAddresses gives pods names. An address instead of the name needs no name server"
    )


def no_contact(endpoint: str, err: Exception) -> tuple[str, str]:
    """Return why an agent finds no other one at the endpoint, and what to do about it."""
    host, _, port = endpoint.rpartition(":")
    plain = host.strip("[]")
    if isinstance(err, socket.gaierror):
        return unresolved(plain, err), f"type on this host: getent hosts {plain}"
    addresses = sorted({str(each[4][0]) for each in _found(plain, 0, socket.SOCK_STREAM)} - {plain})
    at = f"{endpoint} ({', '.join(addresses[:2])})" if addresses else endpoint
    if isinstance(err, ConnectionRefusedError):
        return (
            f"the endpoint {at} refuses connections, so no agent listens there",
            f"look whether torchrun runs on {plain} with this --rdzv-endpoint, and at its log",
        )
    if isinstance(err, OSError):
        return (
            f"the endpoint {at} does not answer ({err})",
            f"type on this host: nc -vz {plain} {port}; its machine is down, or a firewall or a route is in between",
        )
    return (
        f"who listens at the endpoint {at} does not accept this agent ({err})",
        "compare --rdzv-id and secret_file with those of the other hosts; another program may listen at this port",
    )


@contextlib.contextmanager
def _said_if_slow(host: str) -> Iterator[None]:
    timer = threading.Timer(
        SAY_S,
        lambda: logger.warning(
            "unickpt: steering: the name server has not answered for %.0f s to the name %s in --rdzv-endpoint, on %s. See "
            "/etc/resolv.conf of this host. An address instead of the name needs no name server",
            SAY_S,
            printable(host),
            socket.gethostname(),
        ),
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
