"""The options of ``torchrun --rdzv-backend unickpt``, which come from its ``--rdzv-conf``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unickpt.base.options.declared import declarations, option, unknown


@dataclass(frozen=True, slots=True)
class SteeringOptions:
    """Options of ``torchrun --rdzv-backend unickpt --rdzv-conf KEY=VALUE,...``.

    All but ``host`` and ``history`` are equal on all hosts.
    """

    host: str = option("", "name of this host in the job; empty: the host name")
    secret_file: str = option("", "file with the secret that the hosts of the job share; empty: the `--rdzv-id` is the secret")
    history: str = option(
        "", "folder for the history of the job, for `unickpt report`: a file for each agent; empty: a folder in shared memory"
    )
    webhook: str = option("", "URL, or file with the URL, to which the leader posts orders, verdicts and lost rounds as JSON")
    metrics_port: int = option(
        0,
        "port on which each torchrun agent serves metrics of the steering for Prometheus; if it is taken, the next free one; "
        "0: none",
        most=65_535,
    )
    metrics_address: str = option("127.0.0.1", "address to which that port is bound")
    metrics_targets: str = option(
        "", "folder in which each agent writes its host and port as a file for Prometheus' `file_sd_configs`; empty: none"
    )
    job: str = option(
        "",
        "name of the job in metrics and alerts; empty: the `--rdzv-id` if there is a secret_file, for else it is the secret",
    )
    sizes: str = option("", "allowed numbers of hosts, as in `4+6+8`; empty: all from MIN to MAX")
    order: str = option("", "hosts in the order of their ranks, as in `node2+node0+node1`; empty: the order of their names")
    hosts: str = option(
        "",
        "names of all hosts, as in `node1+node2`, so that the log can name those that have not come; empty: `order`, Slurm's "
        "list, or the hosts of the last round",
    )
    grow: bool = option(True, "start a larger round as soon as more hosts arrive")
    lone: bool = option(
        False, "go on with half of the hosts or fewer, even if the others may still run behind a failed network"
    )
    join_seconds: float = option(30.0, "time that the first round waits for more than MIN hosts", unit="s")
    arrive_seconds: float = option(60.0, "time that a round waits for hosts that are still stopping their workers", unit="s")
    expiry_seconds: float = option(
        15.0, "time without a sign of life after which a host is out; a process that ended is noticed at once", unit="s"
    )
    settle_seconds: float = option(1.0, "time that a round waits for more hosts before it grows", unit="s")
    boundary_seconds: float = option(
        1800.0,
        "time that a round waits for the next checkpoint of unickpt before it grows, so that no steps are lost; a job "
        "that does not save with unickpt does not wait",
        unit="s",
    )
    act: bool = option(True, "give the orders of the policy; false: only log them")
    dead_seconds: float = option(
        45.0,
        "time that a rank is dead, and torchrun has not started it again, before its host is out; torchrun gives "
        "the other workers of the host 30 s to end",
        unit="s",
    )
    stopped_seconds: float = option(60.0, "time that a process is stopped before its host is out", unit="s")
    hang_seconds: float = option(300.0, "time that others wait for a rank that does not move before its host is out", unit="s")
    pause_factor: float = option(
        3.0, "hang_seconds is at least this multiple of the longest pause that the job has recovered from"
    )
    still_seconds: float = option(30.0, "time without any movement of a hung process before its host is out", unit="s")
    loop_seconds: float = option(
        420.0,
        "time that a hung process stays in the same functions, while it uses the processor, before its host is out; "
        "with NCCL, all ranks end after 600 s",
        unit="s",
    )
    broken_factor: float = option(
        0.2,
        "of hang_seconds, dead_seconds and slow_seconds, if the hardware of the host has failed by its own account (Xid, "
        "machine check, ...); the host is then out until a person admits it",
    )
    sound_factor: float = option(
        1.3,
        "of hang_seconds, loop_seconds and slow_seconds, if the hardware of the host can be read and tells of nothing",
    )
    retries: int = option(3, "restarts in a row without progress before the job is stopped")
    fruitful_seconds: float = option(1800.0, "time after which a round counts as progress, whatever its steps are", unit="s")
    slow: str = option("log", "what is done about a slow host", choices=("log", "evict"))
    slow_seconds: float = option(300.0, "time that a host is slow before it is out", unit="s")
    check_seconds: float = option(20.0, "time limit of a check of both ends of a link", unit="s")
    bad_link: str = option(
        "log",
        "what is done if only one link is bad, so that no host is at fault: only log it, or blame the host with the "
        "higher rank",
        choices=("log", "park"),
    )
    self_check: bool = option(True, "a host that returns, or was out for a fault, measures itself before it is admitted")
    start_check: str = option(
        "log",
        "what is done about a host whose measurement of itself at the start of the job shows a fault: nothing, only log it, or "
        "take it out, if enough hosts are left; with `refuse` the first round waits for the measurements, at most 5 s",
        choices=("off", "log", "refuse"),
    )
    check_share: float = option(
        0.5, "share of the median of the other hosts that it must reach in compute, memory and loop-back"
    )
    out_seconds: float = option(300.0, "time that a host stays out; doubles each time", unit="s")
    longest_out_seconds: float = option(86_400.0, "longest time that a host stays out", unit="s")

    def job_name(self, run_id: str) -> str:
        """Return the name of the job for strangers. Without a file of the secret, the ``--rdzv-id`` is the secret."""
        return self.job or (run_id if self.secret_file else "")


def from_rendezvous(configuration: Mapping[str, Any]) -> SteeringOptions:
    """Return the options that torchrun has read from ``--rdzv-conf``: strings by key. Its own ``timeout`` is ignored here.

    Raises:
        ConfigError: an option is unknown (the message names the nearest valid one) or its value is wrong.
    """
    known = {option.key: option for option in declarations(SteeringOptions)}
    values: dict[str, Any] = {}
    for key, value in configuration.items():
        if key == "timeout":
            continue
        if key not in known:
            raise unknown(key, list(known), "--rdzv-conf ")
        values[key] = known[key].checked(_typed(known[key].kind, value), f'"--rdzv-conf {key}"')
    return SteeringOptions(**values)


def _typed(kind: type[Any], text: Any) -> Any:
    """Return the value that a string spells; the string itself if it spells none."""
    if kind is bool:
        return {"true": True, "1": True, "false": False, "0": False}.get(str(text).lower(), text)
    try:
        return kind(text)
    except ValueError:
        return text
