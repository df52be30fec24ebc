"""Two hosts as two network namespaces of this machine, with a link between them, and jobs whose ranks are divided among them.

Namespaces need root and ``ip`` (Debian package iproute2). Without them the ranks share the loopback interface.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from unickpt.testing.launch import environment, free_port

LINK = "eth0"
REPO = Path(__file__).resolve().parent.parent


class TwoHosts:
    """Two hosts with a link; a context manager that removes them.

    Attributes:
        names: namespaces; empty if they cannot be made.
        problem: why they cannot be made; ''.
    """

    ADDRESSES = ("10.77.23.1", "10.77.23.2")

    def __init__(self) -> None:
        self.names: list[str] = []
        self.problem = ""

    def __enter__(self) -> TwoHosts:
        names = [f"unickpt{os.getpid() % 100_000}{which}" for which in "ab"]
        try:
            if shutil.which("ip") is None:
                raise RuntimeError("there is no `ip`")
            for name in names:
                _ip("netns", "add", name)
                self.names.append(name)
            _ip("link", "add", "name", LINK, "netns", names[0], "type", "veth", "peer", "name", LINK, "netns", names[1])
            for name, address in zip(names, self.ADDRESSES, strict=True):
                _ip("-n", name, "address", "add", f"{address}/24", "dev", LINK)
                for link in ("lo", LINK):
                    _ip("-n", name, "link", "set", link, "up")
        except RuntimeError as err:
            self.problem = str(err)
            self.close()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the namespaces, and with them the link."""
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        self.names = []

    @property
    def described(self) -> str:
        return "two network namespaces with a virtual Ethernet link" if self.names else "one host, over the loopback interface"

    def run(self, world: int, arguments: Sequence[str], env: Mapping[str, str], timeout_s: float) -> None:
        """Run ``python ARGUMENTS`` on ``world`` ranks to its end, the first half of them on the first host.

        Raises:
            RuntimeError: a rank failed, or the time was over. All are ended.
        """
        here = world // 2 if self.names else world
        common = {
            **environment(REPO, **env),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(here),
            "MASTER_PORT": str(free_port()),
            "MASTER_ADDR": self.ADDRESSES[0] if self.names else "127.0.0.1",
            "GLOO_SOCKET_IFNAME": LINK if self.names else "lo",
        }
        ranks = []
        for rank in range(world):
            prefix = ["ip", "netns", "exec", self.names[rank // here]] if self.names else []
            own = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank % here)}
            command = [*prefix, sys.executable, *arguments]
            ranks.append(subprocess.Popen(command, env=own, cwd=REPO, stdout=subprocess.DEVNULL))
        try:
            codes = [each.wait(timeout_s) for each in ranks]
        except subprocess.TimeoutExpired as late:
            for each in ranks:
                each.send_signal(signal.SIGABRT)  # faulthandler prints all stacks
            time.sleep(5)
            raise RuntimeError(f"the job did not end within {timeout_s:.0f} s") from late
        finally:
            for each in ranks:
                each.kill()
        if any(codes):
            raise RuntimeError(f"ranks ended with {codes}")


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
