"""``unickpt plan ranks``: another order of hosts or ranks that avoids slow places and links."""

from __future__ import annotations

import argparse

from unickpt.cli.exit_codes import SOUND
from unickpt.cli.output import Output
from unickpt.cli.plan_command import JSON_SCHEMA
from unickpt.planning.plan.ranks import host_order, hostfile, plan_order, rankfile, rendezvous_order
from unickpt.planning.replay.sources import read_trace


def run(args: argparse.Namespace, out: Output) -> int:
    """Plan and print."""
    trace = read_trace(args.places)
    found = plan_order(trace, args.steps)
    hosts = host_order(trace, found.order)
    order = [int(trace.ranks[place]) for place in found.order]
    if args.json:
        out.json({
            "schema": JSON_SCHEMA, "order": order, "hosts": hosts, "node_ranks": {host: at for at, host in enumerate(hosts)},
            "rdzv_conf": rendezvous_order(trace, found.order),
            "step_s": found.step_s, "now_s": found.now_s, "tried": found.tried, "unknown": found.unknown,
        })  # fmt: skip
    elif args.hostfile:
        out.text(hostfile(trace, found.order).rstrip("\n"))
    elif args.rankfile:
        out.text(rankfile(trace, found.order).rstrip("\n"))
    else:
        now, then = found.now_s * 1e3, found.step_s * 1e3
        out.line(f"step now {now:,.2f} ms, with the best of {found.tried} orders {then:,.2f} ms ({then / now - 1:+.1%})")
        if found.unknown:
            out.line(f"{found.unknown} orders cannot be predicted: no transfer like theirs was measured")
        out.line(f"order: {','.join(map(str, order))}")
        if len(hosts) > 1:
            out.table("hosts", ("node rank", "host"), list(enumerate(hosts)))
            out.line(f"torchrun --rdzv-backend unickpt: --rdzv-conf {rendezvous_order(trace, found.order)}")
    return SOUND
