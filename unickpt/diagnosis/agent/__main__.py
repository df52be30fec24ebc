"""Entry point of the agent that training starts (``unickpt.diagnosis.agent.launch``). By hand, use ``unickpt agent``."""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
from pathlib import Path
from socket import AF_INET, AF_INET6, create_server, socket

from unickpt.base.logs import printable
from unickpt.diagnosis.agent.launch import LONGEST_ADDRESS
from unickpt.diagnosis.agent.loop import PREFIX, watch
from unickpt.diagnosis.agent.server import Collector, secret_of, serve


def tell(line: str) -> None:
    """Write a line to the training log, which is the standard error of this process."""
    print(printable(line), file=sys.stderr, flush=True)


def _notice(text: str) -> None:
    tell(f"{PREFIX}{text}")


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
        serve(collector, socket(fileno=args.listen), secret, tell=_notice)
        if args.metrics_port:
            _answer_prometheus(collector, args.metrics_address, args.metrics_port, secret)
    with contextlib.suppress(KeyboardInterrupt):
        watch(args.folder, tell, collector=collector, address=pipe.address, gives_way=True)


def _answer_prometheus(collector: Collector, address: str, port: int, secret: str) -> bool:
    """Serve ``/metrics`` without the secret; return whether the port could be opened."""
    try:
        listener = create_server((address, port), family=AF_INET6 if ":" in address else AF_INET)
    except (OSError, ValueError, OverflowError) as err:
        tell(f"{PREFIX}Prometheus is not answered on {address} port {port}: {err}")
        return False
    serve(collector, listener, secret, open_metrics=True, tell=_notice)
    return True


if __name__ == "__main__":
    main()
