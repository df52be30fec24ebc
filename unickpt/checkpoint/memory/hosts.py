"""The hosts of a job with a memory tier: which ranks share memory, and where their keepers listen. All ranks agree on them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from unickpt.base.process_identity import boot_id
from unickpt.checkpoint.coordination.host_peers import grouped
from unickpt.checkpoint.coordination.message_exchange import Message, MessageExchange
from unickpt.checkpoint.memory.host_folder import HostFolder
from unickpt.checkpoint.memory.keeper_process import KeeperProcess, reach_of_job


@dataclass
class JobHosts:
    """The hosts of a job, for one save directory, as one rank sees them.

    Attributes:
        token: token of the save directory.
        folder: folder of the job on this host.
        rank: this rank.
        ranks: ranks of each host, ascending. Hosts are in the order of their first ranks.
        addresses: address of each host's keeper.
        names: name of each host, for messages.
        keeper: the keeper that this process has started; None on a rank that is not the first of its host.
        newest: highest number of a generation that any host held when the job began; 0 if there was none.
    """

    token: str
    folder: HostFolder
    rank: int
    ranks: Sequence[Sequence[int]]
    addresses: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    keeper: KeeperProcess | None = None
    newest: int = 0

    @property
    def here(self) -> int:
        """Position of this host."""
        return next(at for at, ranks in enumerate(self.ranks) if self.rank in ranks)

    @property
    def leads(self) -> bool:
        """Whether this rank is the first of its host."""
        return self.rank == self.ranks[self.here][0]

    @property
    def peers(self) -> list[str]:
        """Addresses of the keepers of the other hosts, the next one first: it is the one that copies from this host."""
        count, here = len(self.addresses), self.here
        return [self.addresses[(here + step) % count] for step in range(1, count)]


def connect(
    exchange: MessageExchange, parent: str, token_of: Callable[[], str], problems: list[str], *, needed: bool = True
) -> JobHosts | None:
    """Find the hosts of the job and start their keepers. Every rank calls this.

    Args:
        exchange: message exchange of all ranks, for this call only.
        parent: directory in memory that all users share.
        token_of: returns the token of the save directory; called on rank 0.
        problems: receives why there is no memory tier, the same on every rank.
        needed: an empty token is a problem. Otherwise it only means that there is nothing in memory.
    """
    opening: Message | None = None
    if exchange.rank == 0:
        try:
            opening = {"token": token_of(), "problem": ""}
        except Exception as err:  # the other ranks wait
            opening = {"token": "", "problem": f"rank 0: {err}"}
    opening = exchange.broadcast("memory-token", opening)
    token, problem = opening["token"], opening["problem"]
    if problem or not token:
        if problem or needed:
            problems.append(problem or "the save directory has no token")
        return None
    folder = HostFolder(parent, token)
    hosts = exchange.combined("memory-host", {"host": _key(parent)}, lambda all_: {"ranks": grouped([m["host"] for m in all_])})
    found = JobHosts(token, folder, exchange.rank, hosts["ranks"])
    problem = ""
    try:
        folder.make()
        if found.leads:
            found.keeper = KeeperProcess(parent, token, reach_of_job() if len(found.ranks) > 1 else "")
    except Exception as err:
        problem = f"rank {exchange.rank}: {err}"
    address = found.keeper.address if found.keeper is not None else ""
    newest = max(folder.inventory().files, default=0) if found.leads else 0

    def all_keepers(messages: list[Message]) -> Message:
        leaders = [messages[ranks[0]] for ranks in found.ranks]
        return {
            "addresses": [leader["address"] for leader in leaders],
            "names": [leader["name"] for leader in leaders],
            "problems": [m["problem"] for m in messages if m["problem"]],
            "newest": max(m["newest"] for m in messages),
        }

    own = {"address": address, "name": socket.gethostname(), "problem": problem, "newest": newest}
    told = exchange.combined("memory-keeper", own, all_keepers)
    if told["problems"]:
        problems.extend(told["problems"])
        if found.keeper is not None:
            found.keeper.stop()
        return None
    found.addresses, found.names, found.newest = told["addresses"], told["names"], told["newest"]
    return found


def _key(parent: str) -> str:
    """Return a text that is equal exactly for processes that share the directory in memory."""
    try:
        about = os.stat(parent)
    except OSError as err:
        return f"{socket.gethostname()} {err}"
    return f"{boot_id() or socket.gethostname()}/{about.st_dev}/{about.st_ino}/{os.geteuid()}"
