"""What training starts as its host's agent (``unickpt.agent.starting``); by hand it is ``unickpt agent``."""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
from pathlib import Path
from socket import AF_INET, AF_INET6, create_server, socket

from unickpt.agent.hub import Hub, secret_of, serve
from unickpt.agent.starting import LONGEST_ADDRESS
from unickpt.agent.watching import watch
from unickpt.logs import printable


def tell(line: str) -> None:
    """Into the training log: the first rank of the host has started this process."""
    print(f"unickpt: {printable(line)}", file=sys.stderr, flush=True)


class Pipe:
    """The address of the job's first agent, which training writes to this process's standard input when it is known."""

    def __init__(self) -> None:
        self._address = ""

    def read(self) -> str:
        """Wait for it; '' if training has ended before."""
        self._address = sys.stdin.buffer.readline(LONGEST_ADDRESS).decode(errors="replace").strip()
        return self._address

    def address(self) -> str:
        """What has come so far."""
        return self._address


def main() -> None:
    """Watch the ranks of this host until they have ended. Standard input brings the address of the job's first agent."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--listen", type=int)
    parser.add_argument("--metrics-port", type=int, default=0)
    parser.add_argument("--metrics-address", default="127.0.0.1")
    args = parser.parse_args()
    hub, pipe = None, Pipe()
    if args.listen is None:
        threading.Thread(target=pipe.read, daemon=True).start()
    else:
        hub, secret = Hub(), secret_of(pipe.read())
        if not secret:  # training has ended, or speaks of something else: nobody may be answered
            return
        serve(hub, socket(fileno=args.listen), secret, tell=tell)
        if args.metrics_port:
            _answer_prometheus(hub, args.metrics_address, args.metrics_port, secret)
    with contextlib.suppress(KeyboardInterrupt):
        watch(args.folder, tell, hub=hub, address=pipe.address, gives_way=True)


def _answer_prometheus(hub: Hub, address: str, port: int, secret: str) -> bool:
    """Whether it can be."""
    try:
        listener = create_server((address, port), family=AF_INET6 if ":" in address else AF_INET)
    except (OSError, ValueError, OverflowError) as err:
        tell(f"Prometheus is not answered on {address} port {port}: {err}")
        return False
    serve(hub, listener, secret, open_metrics=True, tell=tell)
    return True


if __name__ == "__main__":
    main()
