"""What a user may say about timing; the same for both adapters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def _option(default: Any, doc: str) -> Any:
    return field(default=default, metadata={"doc": doc, "choices": ()})


@dataclass(frozen=True, slots=True)
class TimingOptions:
    """How collectives are timed."""

    enabled: bool = _option(False, "note every collective of this job")
    watch: bool = _option(True, "start an agent on every host that tells in the log which rank the others wait for")
    metrics_port: int = _option(
        0, "port on which the agent on rank 0's host answers Prometheus (/metrics, without a password); 0 for none"
    )
    metrics_address: str = _option(
        "127.0.0.1", "address that metrics_port listens on; 0.0.0.0 (or :: for IPv6) lets other hosts ask, too"
    )
    folder: str = _option("", "where the ranks' rings are; a folder of the job in shared memory if not given")
    records: int = _option(65_536, "that a rank's ring holds, of 96 bytes each")
