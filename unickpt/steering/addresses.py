"""Addresses of this machine, as other hosts of the job see it."""

from __future__ import annotations

import contextlib
import socket
from typing import Any


def is_loopback(host: str) -> bool:
    """Return whether a name is one of this machine for itself alone."""
    return host in ("localhost", "::1") or host.startswith("127.")


def is_local(host: str) -> bool:
    """Return whether a name is one of this machine: only then can a socket be bound to it."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in found)


def _can_bind(family: int, address: Any) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def way_to(host: str, port: int) -> str:
    """Return the address of this machine that leads to a host. Of the host itself, its name."""
    if is_loopback(host):
        return "127.0.0.1"
    with contextlib.suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                found = str(probe.getsockname()[0])
                return host if is_loopback(found) else found
    return socket.gethostname()
