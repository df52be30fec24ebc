"""The device that checks run on. A dry run uses the CPU, host memory and gloo, and makes the same calls."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from unickpt.diagnosis.recording.device_events import CudaEvents, EventSource, TimedEvent

_ALWAYS = {"GLOO_SOCKET_IFNAME": "lo", "TORCH_FR_BUFFER_SIZE": "2000"}  # the flight recorder counts calls


class HostEvent:
    """The time of the host's clock at ``record``. It has passed at once."""

    __slots__ = ("at_ns",)

    def __init__(self) -> None:
        self.at_ns = 0

    def record(self) -> None:
        self.at_ns = time.monotonic_ns()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: HostEvent, /) -> float:
        return (end_event.at_ns - self.at_ns) / 1e6


class HostEvents:
    """Events on the host's clock.

    Args:
        backends: names of the backends whose calls these events time. These calls end on the host: the thread that waits for
            one continues when it has ended, and an event that is recorded then has its time.
    """

    def __init__(self, backends: tuple[str, ...] = ("gloo",)) -> None:
        self.backends = backends
        self.lock = threading.Lock()

    def make(self) -> TimedEvent:
        return HostEvent()

    def usable(self) -> bool:
        return True

    def place(self) -> int:
        return 0

    def close(self) -> None:
        """Nothing has been changed."""


@dataclass(frozen=True)
class Place:
    """Where a group of checks runs.

    Attributes:
        dry: on the CPU.
        backend: of the process groups.
        ranks: number of ranks that can communicate.
        shared: whether several ranks share a GPU.
    """

    dry: bool
    backend: str
    ranks: int
    shared: bool

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.dry else torch.device("cuda", torch.cuda.current_device())

    @property
    def name(self) -> str:
        return f"dry, {self.backend}" if self.dry else f"{torch.cuda.get_device_name()}, {self.backend}"

    def variables(self, rank: int) -> dict[str, str]:
        """Environment of one rank.

        With one GPU, NCCL refuses two ranks of one host on one device. Ranks with different ``NCCL_HOSTID`` count as ranks of
        different hosts, and communicate through sockets.
        """
        if self.dry:
            return {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(rank), **_ALWAYS}
        found = {"LOCAL_RANK": "0" if self.shared else str(rank), **_ALWAYS}
        if self.shared:
            found |= {
                "NCCL_HOSTID": f"rank{rank}",
                "NCCL_P2P_DISABLE": "1",
                "NCCL_SHM_DISABLE": "1",
                "NCCL_IB_DISABLE": "1",
                "NCCL_NET": "Socket",
                "NCCL_SOCKET_IFNAME": "lo",
            }
        return found

    def enter(self) -> None:
        """Select the device of this rank."""
        torch.set_num_threads(1)
        if not self.dry:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))

    def synchronize(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def events(self) -> EventSource:
        """Events that time calls of the backend."""
        return CudaEvents() if self.backend == "nccl" else HostEvents((self.backend,))

    def seconds(self, action: Callable[[], Any]) -> float:
        """Seconds from an idle device until everything that an action began on it is over."""
        self.synchronize()
        begin = time.perf_counter()
        action()
        self.synchronize()
        return time.perf_counter() - begin
