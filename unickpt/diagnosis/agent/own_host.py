"""What an agent sees of its own host at one look: the rings, the processes, their connections, the hardware."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path

from unickpt.base.errors import FormatError
from unickpt.diagnosis.agent.asked_ranks import AskedRanks
from unickpt.diagnosis.agent.layer_prior import LayerPrior
from unickpt.diagnosis.agent.telling import PREFIX, Tell
from unickpt.diagnosis.hardware.events import HostHardware
from unickpt.diagnosis.hardware.kept import keep
from unickpt.diagnosis.hardware.sampler import HardwareSampler
from unickpt.diagnosis.host.process_exits import ProcessExit, append_exits
from unickpt.diagnosis.host.process_state import CpuWaitSampler, State
from unickpt.diagnosis.host.tcp_counters import Sockets, connections_of
from unickpt.diagnosis.recording.ring_folder import HostRings
from unickpt.diagnosis.snapshot.snapshot import LayerSample, RankSnapshot, RankTables, Snapshot, take_snapshot
from unickpt.diagnosis.snapshot.tcp_windows import TcpSampler


class OwnHost:
    """State of the looks at one host.

    Args:
        folder: folder of the rings.
        tell: writes a line to the log.
        asked: ranks that are asked where they are.
        store: file with the times of layers in earlier jobs.
        name: name of this host in a job whose hosts ``unickpt hosts`` takes out; '' in other jobs.
        hardware: reads what the hardware of this host tells; None: nothing does.
    """

    def __init__(
        self, folder: Path, tell: Tell, asked: AskedRanks, store: Path, name: str, hardware: HardwareSampler | None
    ) -> None:
        self._folder, self._tell, self._asked, self._name = folder, tell, asked, name
        self._noted: dict[int, ProcessExit] = {}
        self._sampler, self._cpu_waits = TcpSampler(), CpuWaitSampler()
        self._sockets, self._tables = Sockets(), RankTables()
        self._prior = LayerPrior(folder, store)
        self._hardware, self._kept = hardware, HostHardware()
        self._dead: set[int] = set()  # ranks at the last look

    def look(self, job: HostRings, exits: Mapping[int, ProcessExit]) -> Snapshot:
        """Look once: at the rings as read, and the processes that have ended."""
        self._note_exits(exits)
        own = take_snapshot(job, self._asked.stacks(), exits, tables=self._tables)
        pids = {rank: one.pid for rank, one in own.ranks.items() if one.state is not State.DEAD}
        shares = self._cpu_waits.shares(time.monotonic_ns(), pids)
        layers = self._prior.look()
        self._remember_layers(own)
        ranks = {
            rank: self._with_movement(rank, one, shares.get(rank, 0.0), layers.get(rank)) for rank, one in own.ranks.items()
        }
        connections = connections_of(pids, self._sockets)
        self._asked.traffic.add(connections, time.monotonic())
        windows = self._sampler.window(time.monotonic_ns(), connections)
        own = self._asked.with_early_stacks(dataclasses.replace(own, ranks=ranks, windows=windows))
        return named(self._with_hardware(own), self._name)

    def _note_exits(self, exits: Mapping[int, ProcessExit]) -> None:
        new = {pid: end for pid, end in exits.items() if self._noted.get(pid) != end}
        self._noted.update(new)
        with contextlib.suppress(OSError):
            append_exits(self._folder, new)

    def _remember_layers(self, own: Snapshot) -> None:
        try:
            self._prior.remember(max((one.step for one in own.ranks.values()), default=0))
        except FormatError as err:
            self._tell(f"{PREFIX}the times of layers are not kept for later jobs, training is not affected ({err})")

    def _with_movement(self, rank: int, one: RankSnapshot, cpu_wait: float, layers: LayerSample | None) -> RankSnapshot:
        still, same_place = self._asked.stood(rank)
        return dataclasses.replace(one, cpu_wait=cpu_wait, still_s=still, same_place_s=same_place, layers=layers)

    def _with_hardware(self, own: Snapshot) -> Snapshot:
        """Return the snapshot with what the hardware tells, and keep that beside the rings."""
        if self._hardware is None:
            return own
        dead = {rank for rank, one in own.ranks.items() if one.state is State.DEAD}
        found = self._hardware.look(own.now_ns, [one.pid for one in own.ranks.values()], at_once=not dead <= self._dead)
        self._dead = dead
        hosts = {*(one.host for one in own.ranks.values()), *(one.host for one in own.absent.values())}
        if found.events != self._kept.events:
            self._kept = found
            with contextlib.suppress(OSError):
                for host in hosts:
                    keep(self._folder, host, found)
        return dataclasses.replace(own, hardware=dict.fromkeys(hosts, found))


def named(snapshot: Snapshot, host: str) -> Snapshot:
    """Return the snapshot of a host with the name that the job gives it; unchanged without one."""
    if not host:
        return snapshot
    ranks = {rank: dataclasses.replace(one, host=host) for rank, one in snapshot.ranks.items()}
    absent = {rank: dataclasses.replace(one, host=host) for rank, one in snapshot.absent.items()}
    hardware = dict.fromkeys([host], next(iter(snapshot.hardware.values()))) if snapshot.hardware else {}
    return dataclasses.replace(snapshot, ranks=ranks, absent=absent, hardware=hardware)
