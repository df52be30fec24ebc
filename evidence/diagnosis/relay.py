"""Two hosts with delayed packets: a TUN device in each network namespace, and a process between them.

relay NAMESPACE_A ADDRESS_A NAMESPACE_B ADDRESS_B

This kernel may have no netem. Lines on standard input, ``delay <ms from a to b> <ms from b to a>``, set how long packets are
kept; ``ready`` is written when both devices are there. Needs root.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import select
import struct
import subprocess
import sys
import time

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
MTU = 16_000


def device(namespace: str, address: str) -> int:
    """Create a TUN device in a namespace, with an address. Its descriptor works from any namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    if libc.setns(there, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"{namespace}: setns")
    try:
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", b"late0", _IFF_TUN | _IFF_NO_PI))
    finally:
        libc.setns(home, _CLONE_NEWNET)
        os.close(home)
        os.close(there)
    for command in (f"ip addr add {address}/24 dev late0", f"ip link set late0 mtu {MTU} up"):
        subprocess.run(["ip", "netns", "exec", namespace, *command.split()], check=True)
    return tun


def relay(tuns: tuple[int, int]) -> None:
    """Forward packets, each at its time, until standard input ends."""
    delays = [0.0, 0.0]  # seconds, by the side that packets come from
    waiting: list[tuple[float, int, int, bytes]] = []  # when, a number, where to, what
    count = 0
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, to, packet = heapq.heappop(waiting)
            with contextlib.suppress(OSError):  # its queue is full: lost, as on a wire
                os.write(tuns[to], packet)
        left = max(waiting[0][0] - time.monotonic(), 0) if waiting else None
        for ready in select.select([*tuns, sys.stdin], [], [], left)[0]:
            if ready is sys.stdin:
                line = sys.stdin.readline().split()
                if not line:
                    return
                delays = [float(word) / 1e3 for word in line[1:3]]
                continue
            side = tuns.index(ready)
            for _ in range(64):
                try:
                    packet = os.read(ready, MTU + 64)
                except BlockingIOError:
                    break
                count += 1
                heapq.heappush(waiting, (time.monotonic() + delays[side], count, 1 - side, packet))


def main() -> None:
    first, second = device(sys.argv[1], sys.argv[2]), device(sys.argv[3], sys.argv[4])
    print("ready", flush=True)
    relay((first, second))


if __name__ == "__main__":
    main()
