"""``unickpt hosts``: show the hosts of a job under ``torchrun --rdzv-backend unickpt``, park one, or admit one.

It also shows the checkpoints in the memory of the hosts, with or without that backend.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from unickpt.base.errors import ConfigError
from unickpt.base.logs import printable
from unickpt.base.private_files import SHARED_MEMORY
from unickpt.checkpoint.memory.contact import GenerationRow, MemoryJob, age_s, as_json, jobs, look
from unickpt.checkpoint.memory.generations import folder_of
from unickpt.cli.exit_codes import SOUND, UNUSABLE
from unickpt.cli.output import Output, human_bytes
from unickpt.cli.parsers.hosts import END
from unickpt.steering.state.hosts import host_rows, table
from unickpt.steering.wire import asking
from unickpt.steering.wire.codec import secret_key

JSON_SCHEMA = 1


def contact(args: argparse.Namespace) -> asking.Contact:
    """Return the agent that the arguments name.

    Raises:
        ConfigError: the job is not named completely, or the secret cannot be read.
    """
    if not args.rdzv_endpoint:
        if args.rdzv_id or args.secret_file:
            raise ConfigError("--rdzv-id and --secret-file need --rdzv-endpoint")
        return asking.the_only(SHARED_MEMORY)
    if not args.rdzv_id:
        raise ConfigError("--rdzv-endpoint needs --rdzv-id")
    endpoint = args.rdzv_endpoint if ":" in args.rdzv_endpoint else f"{args.rdzv_endpoint}:29400"
    return asking.Contact(endpoint, secret_key(args.rdzv_id, args.secret_file))


def run(args: argparse.Namespace, out: Output) -> int:
    """Ask the job, and print."""
    if args.action == END and args.host:
        raise ConfigError("unickpt hosts end ends the whole job: leave the host out, or park it")
    if args.action and args.action != END and not args.host:
        raise ConfigError(f"unickpt hosts {args.action} needs the name of a host")
    if args.action:
        done, note = asking.order(contact(args), args.action, args.host or "")
        if args.json:
            out.json({"schema": JSON_SCHEMA, "done": done, "note": note})
        else:
            out.line(done)
            if note:
                out.line(note, style="yellow")
        return SOUND
    named = bool(args.rdzv_endpoint or args.rdzv_id or args.secret_file)
    memory = [(job, look(job)) for job in jobs(args.memory_folder)] if args.json or not named else []
    state, now_s, unknown = None, 0.0, ""
    try:
        state, now_s = asking.hosts(contact(args))
    except ConfigError as err:
        if named or not memory:
            raise
        unknown = str(err)
    code = UNUSABLE if unknown and asking.published(SHARED_MEMORY) else SOUND
    rows = [] if state is None else host_rows(state, now_s)
    now_ns = time.time_ns()
    if args.json:
        round_ = None if state is None or state.round is None else f"{state.round.epoch[0]}.{state.round.epoch[1]}"
        out.json(
            {
                "schema": JSON_SCHEMA,
                "phase": None if state is None else state.phase.value,
                "round": round_,
                "closed": "" if state is None else state.closed,
                "hosts": [row.as_json() for row in rows],
                "orders": [] if state is None else [order.text for order in state.orders],
                "memory": [as_json(job, found, now_ns) for job, found in memory],
                "unknown": unknown,
            }
        )
        return code
    if state is not None:
        for line in table(rows).splitlines():
            out.line(line)
    for job, found in memory:
        _show_memory(out, job, found, now_ns)
    if unknown:
        out.line()
        out.line(unknown, style="yellow")
    return code


def _show_memory(out: Output, job: MemoryJob, rows: Sequence[GenerationRow], now_ns: int) -> None:
    """Print the generations of a job: in how many places each file is, and what each host holds."""
    out.line()
    out.line(f"in memory: {printable(job.directory) or 'a job that has not said its save directory'}", style="bold")
    out.line(f"{job.folder.url}, here in {job.folder.root}")
    cells = []
    for row in rows:
        of_files = (
            f"{row.places} of each file" if row.places else f"incomplete: no {row.missing}" if row.missing else "incomplete"
        )
        step = "-" if row.step is None else str(row.step)
        cells.append([folder_of(row.number), step, printable(row.tag) or "-", f"{age_s(row, now_ns):.0f} s", of_files])
    out.table(f"generations ({len(rows)})", ["generation", "step", "tag", "age", "replicas"], cells)
    held = []
    for at, host in enumerate(job.hosts):
        told = [(row, row.hosts[at]) for row in rows]
        said = [f"{folder_of(row.number)}: {human_bytes(h[0])}, {h[1]} own files, {h[2]} copies" for row, h in told if h]
        silent = any(h is None for _, h in told)
        ranks = ", ".join(map(str, host.ranks))
        held.append([printable(host.name), ranks, "its keeper does not answer" if silent else "; ".join(said) or "nothing"])
    if held:
        out.table("hosts", ["host", "ranks", "holds"], held)
