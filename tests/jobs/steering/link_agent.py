"""An agent without workers: it takes part in one round. ``link_agent.py NAME ENDPOINT ADDRESS HOSTS``.

Each line of its standard input names two hosts: the agent reports that the link between them is dead.
"""

from __future__ import annotations

import logging
import sys
import threading
import time

from unickpt.base.options.steering import SteeringOptions
from unickpt.steering.agent.peer import Peer
from unickpt.steering.policy.decisions import Decisions
from unickpt.steering.policy.policy import Fault, Finding
from unickpt.steering.policy.reports import HubReport
from unickpt.steering.state.limits import Limits
from unickpt.steering.state.membership import Arrived, Event, JobPhase, Opened, Ready, rank_in_round
from unickpt.steering.wire.codec import key_of


def report(peer: Peer) -> None:
    """Thread: report the links that are named, again and again, as a diagnosis agent does."""
    for line in sys.stdin:
        one, other = line.split()
        for _ in range(40):
            state = peer.read()
            if state is not None and {one, other} & set(state.parked):
                break
            if state is not None and state.round is not None:
                dead = Finding(Fault.DEAD_LINK, (one, other), 9.0, text="dead link")
                peer.found(HubReport(state.round.epoch, 5, 0.0, (dead,)))
            time.sleep(0.5)


def main() -> None:
    logging.basicConfig(level="INFO", format="%(message)s")
    name, endpoint, address, hosts = sys.argv[1:]
    limits = Limits(1, int(hosts), expiry_s=60.0, self_check=False)
    peer = Peer(name, endpoint, limits, key_of("links"), address, Decisions(SteeringOptions()))
    peer.start()
    threading.Thread(target=report, args=(peer,), daemon=True).start()
    said = (0, 0)
    while True:
        state = peer.wait(None, 0.1)
        rank = rank_in_round(state, name, peer.incarnation) if state is not None else -1
        news: list[Event] = [Arrived(name, peer.incarnation)]
        if state is not None and state.round is not None and rank >= 0:
            epoch = state.round.epoch
            news = [Ready(name, peer.incarnation, epoch)] if rank else [Opened(name, peer.incarnation, epoch, "s:1", "m:1")]
            if state.phase is JobPhase.RUNNING and said != epoch:
                said = epoch
                print(f"round {epoch[1]} of {len(state.round.members)} runs", flush=True)
            news = [] if state.phase is JobPhase.RUNNING else news
        peer.say(*news)
        time.sleep(0.1)


if __name__ == "__main__":
    main()
