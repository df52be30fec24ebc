"""Hosts as network namespaces of this machine: a link of each host to one switch can fail, or become slow.

Needs root, and ``ip`` and ``tc`` of iproute2. ``missing`` says what is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Sequence

LINK = "eth0"  # name of a host's link inside its namespace
_ATTEMPTS = 20  # a namespace whose last process is just ending cannot be removed


def missing() -> str:
    """Return why namespaces cannot be made here; '' if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    tools = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if tools:
        return f"network namespaces need {' and '.join(tools)} (Debian package iproute2)"
    name = f"ut{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"this kernel or container permits no network namespaces: {made.stderr.strip()}"
    bridge = subprocess.run(["ip", "link", "add", name, "type", "bridge"], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "link", "del", name], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", name], check=False)
    return f"this kernel has no bridges: {bridge.stderr.strip()}" if bridge.returncode else ""


class Network:
    """A switch with one namespace for each host. Names are at most 6 characters long.

    Args:
        names: hosts.

    Raises:
        RuntimeError: namespaces cannot be made. See ``missing``.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._tag = f"{os.getpid() % 100_000}"
        self._net = f"10.{64 + os.getpid() % 128}.{(os.getpid() // 128) % 256}"
        self._switch = f"us{self._tag}"
        self._places = {name: place for place, name in enumerate(names, 1)}
        _run("ip", "link", "add", self._switch, "type", "bridge")
        _run("ip", "address", "add", f"{self._net}.254/24", "dev", self._switch)
        _run("ip", "link", "set", self._switch, "up")
        for name in names:
            self.add(name)

    def namespace(self, name: str) -> str:
        """Return the name of a host's namespace."""
        return f"un{self._tag}{name}"

    def address(self, name: str) -> str:
        """Return the address of a host."""
        return f"{self._net}.{self._places[name]}"

    def command(self, name: str) -> list[str]:
        """Return the beginning of a command that runs on a host. The command keeps its process number."""
        return ["ip", "netns", "exec", self.namespace(name)]

    def add(self, name: str) -> None:
        """Make a host, and connect it."""
        space, outside = self.namespace(name), self._outside(name)
        mac = f"02:75:6e:00:00:{self._places[name]:02x}"  # the same after a restart, as of a machine
        _run("ip", "netns", "add", space)
        _run("ip", "link", "add", outside, "type", "veth", "peer", "name", LINK, "address", mac, "netns", space)
        _run("ip", "link", "set", outside, "master", self._switch, "up")
        _run("ip", "-n", space, "address", "add", f"{self.address(name)}/24", "dev", LINK)
        for link in ("lo", LINK):
            _run("ip", "-n", space, "link", "set", link, "up")

    def remove(self, name: str) -> None:
        """Remove a host whose processes have ended. Its sockets are gone, as after a restart of a machine."""
        subprocess.run(["ip", "link", "del", self._outside(name)], capture_output=True, check=False)
        for _ in range(_ATTEMPTS):
            if subprocess.run(["ip", "netns", "del", self.namespace(name)], capture_output=True, check=False).returncode == 0:
                return
            time.sleep(0.1)

    def down(self, name: str) -> None:
        """Cut the link of a host. Neither side is told."""
        _run("ip", "link", "set", self._outside(name), "down")

    def up(self, name: str) -> None:
        """Mend the link of a host."""
        _run("ip", "link", "set", self._outside(name), "up")

    def divide(self, names: Sequence[str]) -> None:
        """Let these hosts reach each other alone. No side is told."""
        other = f"{self._switch}b"
        _run("ip", "link", "add", other, "type", "bridge")
        _run("ip", "link", "set", other, "up")
        for name in names:
            _run("ip", "link", "set", self._outside(name), "master", other)

    def unite(self, names: Sequence[str]) -> None:
        """Let these hosts reach all others again, after ``divide``."""
        for name in names:
            _run("ip", "link", "set", self._outside(name), "master", self._switch)
        _run("ip", "link", "del", f"{self._switch}b")

    def slow(self, name: str, megabits: float) -> None:
        """Limit the link of a host to a rate in both directions, in megabits per second; 0: no limit."""
        for place, link in (((), self._outside(name)), (("-n", self.namespace(name)), LINK)):
            subprocess.run(["tc", *place, "qdisc", "del", "dev", link, "root"], capture_output=True, check=False)
            if megabits:
                rate = f"{max(1, round(megabits * 1000))}kbit"
                _run("tc", *place, "qdisc", "add", "dev", link, "root", "tbf", "rate", rate, "burst", "16kb", "latency", "2s")

    def close(self) -> None:
        """Remove all hosts and the switch."""
        for name in self._places:
            self.remove(name)
        for switch in (self._switch, f"{self._switch}b"):
            subprocess.run(["ip", "link", "del", switch], capture_output=True, check=False)

    def _outside(self, name: str) -> str:
        return f"uv{self._tag}{name}"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
