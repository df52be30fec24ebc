"""``python -m unickpt.agent FOLDER [--listen FD]``: what training starts; by hand it is ``unickpt agent``."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from socket import create_server, socket

from unickpt.agent.hub import Hub, secret_of, serve
from unickpt.agent.starting import read_address
from unickpt.agent.watching import watch


def tell(line: str) -> None:
    """Into the training log: the first rank of the host has started this process."""
    print(f"unickpt: {line}", file=sys.stderr, flush=True)


def main() -> None:
    """Watch the ranks of this host until they have ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--listen", type=int)
    parser.add_argument("--metrics-port", type=int, default=0)
    args = parser.parse_args()
    hub = None
    if args.listen is not None:
        hub = Hub()
        secret = secret_of(read_address(args.folder))
        serve(hub, socket(fileno=args.listen), secret)
        if args.metrics_port:
            try:
                serve(hub, create_server(("", args.metrics_port)), secret, open_metrics=True)
            except OSError as err:
                tell(f"Prometheus is not answered on port {args.metrics_port}: {err}")
    with contextlib.suppress(KeyboardInterrupt):
        watch(args.folder, tell, hub=hub, gives_way=True)


if __name__ == "__main__":
    main()
