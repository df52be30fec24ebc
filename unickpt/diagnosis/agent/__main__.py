"""Entry point of the agent that training starts (``unickpt.diagnosis.agent.launch``). By hand, use ``unickpt agent``."""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
from pathlib import Path
from socket import socket

from unickpt.diagnosis.agent.launch import LONGEST_ADDRESS
from unickpt.diagnosis.agent.loop import notice, tell, watch
from unickpt.diagnosis.agent.server import Collector, answer_prometheus, secret_of, serve


class Pipe:
    """Address of the job's first agent, from standard input, where training writes it."""

    def __init__(self) -> None:
        self._address = ""

    def read(self) -> str:
        """Wait for the address; '' if training has ended before."""
        self._address = sys.stdin.buffer.readline(LONGEST_ADDRESS).decode(errors="replace").strip()
        return self._address

    def address(self) -> str:
        """Return the address, '' if it has not arrived."""
        return self._address


def main() -> None:
    """Watch the ranks of this host until they have ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--listen", type=int)
    parser.add_argument("--metrics-port", type=int, default=0)
    parser.add_argument("--metrics-address", default="127.0.0.1")
    args = parser.parse_args()
    collector, pipe = None, Pipe()
    if args.listen is None:
        threading.Thread(target=pipe.read, daemon=True).start()
    else:
        collector, secret = Collector(), secret_of(pipe.read())
        if not secret:  # training has ended, or sent no secret
            return
        current = collector, secret
        serve(lambda: current, socket(fileno=args.listen), tell=notice)
        if args.metrics_port:
            answer_prometheus(lambda: current, args.metrics_address, args.metrics_port, notice)
    with contextlib.suppress(KeyboardInterrupt):
        watch(args.folder, tell, collector=collector, address=pipe.address, gives_way=True)


if __name__ == "__main__":
    main()
