"""Entry point of the agent that training starts (``unickpt.diagnosis.agent.launch``). By hand, use ``unickpt agent``."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import threading
from pathlib import Path
from socket import socket

from unickpt.base.prometheus import Scrape, scrape_from
from unickpt.diagnosis.agent.launch import LONGEST_ADDRESS
from unickpt.diagnosis.agent.loop import watch
from unickpt.diagnosis.agent.server import Collector, answer_prometheus, secret_of, serve
from unickpt.diagnosis.agent.telling import notice, tell, with_role


def main() -> None:
    """Watch the ranks of this host until they have ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--listen", type=int)
    parser.add_argument("--metrics", type=json.loads)
    parser.add_argument("--role", default="")
    args = parser.parse_args()
    addresses: list[str] = []  # of the job's first agent, when it has arrived

    def read() -> str:
        """Wait for the address on standard input, where training writes it; '' if training has ended before."""
        addresses.append(sys.stdin.buffer.readline(LONGEST_ADDRESS).decode(errors="replace").strip())
        return addresses[0]

    collector, port = None, None
    if args.listen is None:
        threading.Thread(target=read, daemon=True).start()
    else:
        scrape = scrape_from(args.metrics) if args.metrics else Scrape()
        collector, secret = Collector(labels=scrape.labels), secret_of(read())
        if not secret:  # training has ended, or sent no secret
            return
        current = collector, secret
        serve(lambda: current, socket(fileno=args.listen), tell=notice)
        port = answer_prometheus(lambda: current, scrape, notice)
    with contextlib.suppress(KeyboardInterrupt):
        watch(
            args.folder, lambda line: tell(with_role(line, args.role)), collector=collector,
            address=lambda: "".join(addresses), gives_way=True,
        )  # fmt: skip
    if port is not None:
        port.withdraw()


if __name__ == "__main__":
    main()
