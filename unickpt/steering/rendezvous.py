"""Rendezvous backend ``unickpt`` of torchrun, found by the entry point group ``torchrun.handlers``.

    torchrun --nnodes 6:8 --nproc-per-node 8 --rdzv-backend unickpt --rdzv-endpoint HOST:29400 --max-restarts 100 train.py

torchrun's agent asks ``num_nodes_waiting`` several times per second while its workers run: a value above 0 makes it restart
them without using up a restart. ``next_rendezvous`` returns rank, size and stores of the next round, or waits: spare and parked
hosts wait there. Written for torch 2.13, ``torch/distributed/elastic/agent/server/api.py``.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousParameters,
)

from unickpt.base.errors import ConfigError
from unickpt.base.left_workers import WorkerRecord
from unickpt.base.logs import logger, make_visible
from unickpt.base.options.steering import SteeringOptions, from_rendezvous
from unickpt.base.private_files import SHARED_MEMORY
from unickpt.steering.agent.peer import Peer
from unickpt.steering.agent.waiting import WaitingNotice
from unickpt.steering.handler import SteeringHandler
from unickpt.steering.host.host_agent import HostAgent
from unickpt.steering.links.self_check import SelfCheck
from unickpt.steering.policy.decisions import Decisions
from unickpt.steering.publishing.observers import Observers
from unickpt.steering.state.forming import Expected, expected_hosts
from unickpt.steering.state.limits import Limits
from unickpt.steering.wire.addresses import is_loopback
from unickpt.steering.wire.asking import Contact, publish
from unickpt.steering.wire.codec import join_address, secret_key, split_address, split_endpoint

PORT = 29400  # torch's default
TIMEOUT_S = 600.0  # torch's default time limit of a rendezvous


def creator() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return the function that makes a handler. torch calls this when it looks for backends."""
    return create


def create(params: RendezvousParameters) -> RendezvousHandler:
    """Return the handler of this agent.

    Raises:
        ConfigError: an option of ``--rdzv-conf`` is unknown or wrong.
        RendezvousConnectionError: no port can be opened.
    """
    make_visible()
    options = from_rendezvous(params.config)
    single = params.max_nodes == 1
    host, given = split_endpoint(params.endpoint)
    endpoint = join_address(host or "localhost", (0 if single else PORT) if given is None else given)
    if split_address(endpoint)[1] == 0 and not single:
        raise ConfigError(f"--rdzv-endpoint {params.endpoint}: {params.max_nodes} hosts need a fixed port")
    key = secret_key(params.run_id, options.secret_file)
    name, observers = options.host or socket.gethostname(), Observers(options, params.run_id)
    timeout_s = float(params.get("timeout", TIMEOUT_S))
    local = (params.local_addr or "").strip("[]")
    limits = limits_of(params, options)
    peer = Peer(name, endpoint, limits, key, local, Decisions(options), observers.chronicle, timeout_s)
    observers.leads = lambda: peer.leads
    try:
        peer.start()
    except OSError as err:
        raise RendezvousConnectionError(f"unickpt: {err}") from err
    alone = single or is_loopback(split_address(peer.address)[0])
    record = WorkerRecord(key.hex())
    agent = HostAgent(
        params.run_id, key, lambda: peer.name, lambda: split_address(peer.address)[0], alone, peer.found, record.path,
        options.job_name(params.run_id),
    )  # fmt: skip
    check = SelfCheck(key, lambda: peer.loopbacks, peer.read, peer.keep)
    contact = _publish(peer, key)
    notice = WaitingNotice(peer, limits, _expected(peer, options), host if is_loopback(host) else "")
    return SteeringHandler(peer, agent, check, notice, params.run_id, timeout_s, record, contact, observers)


def _expected(peer: Peer, options: SteeringOptions) -> Expected:
    listed = {key: names_in(getattr(options, key)) for key in ("hosts", "order")}
    return expected_hosts(listed, os.environ, [*peer.last_names, peer.name] if peer.last_names else [])


def _publish(peer: Peer, key: bytes) -> Path | None:
    """Let this user's command line find the job. Return the folder that says where it is."""
    try:
        return publish(SHARED_MEMORY, Contact(peer.address, key))
    except OSError as err:
        logger.warning("unickpt: steering: 'unickpt hosts' needs --rdzv-endpoint on this host: %s", err)
        return None


def limits_of(params: RendezvousParameters, options: SteeringOptions) -> Limits:
    """Return the rules of the membership.

    Raises:
        ConfigError: ``sizes`` is not a list of numbers between MIN and MAX, or ``order`` has a name twice.
    """
    words = [word for word in options.sizes.split("+") if word]
    sizes = frozenset(int(word) for word in words if word.isdigit() and params.min_nodes <= int(word) <= params.max_nodes)
    if len(sizes) != len(set(words)):
        raise ConfigError(
            f"--rdzv-conf sizes={options.sizes} must be numbers from {params.min_nodes} to {params.max_nodes}, as in 4+6+8"
        )
    order = names_in(options.order)
    twice = sorted({name for name in order if order.count(name) > 1})
    if twice:
        raise ConfigError(f"--rdzv-conf order={options.order} has {', '.join(twice)} more than once: name each host once")
    return Limits(
        params.min_nodes, params.max_nodes, sizes, join_s=options.join_seconds, arrive_s=options.arrive_seconds,
        expiry_s=options.expiry_seconds, settle_s=options.settle_seconds, grow=options.grow, lone=options.lone,
        fruitful_s=options.fruitful_seconds, boundary_s=options.boundary_seconds, out_s=options.out_seconds,
        longest_out_s=options.longest_out_seconds, retries=options.retries if options.act else None,
        self_check=options.self_check, start_check=options.start_check, check_share=options.check_share, order=order,
    )  # fmt: skip


def names_in(text: str) -> tuple[str, ...]:
    """Return the names of a list in an option, ``node1+node2``."""
    return tuple(word for word in text.split("+") if word)
