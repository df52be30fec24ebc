"""What a rank has spent on one phase of a save or load. Timing records it, so that a report can name the slowest rank."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class IoPhase(enum.Enum):
    """Phase of a save or load on one rank."""

    STAGE = "save_stage"  # describe the state, and copy it to host memory if the save goes on in the background
    WRITE = "save_write"  # write the data file and the rows of the index
    COMMIT = "save_commit"  # wait for the other ranks; on rank 0 also index, manifest and removal of old checkpoints
    READ = "load_read"  # read from storage, and check
    GATHER = "load_gather"  # copy what other ranks of the host have read, and wait for them
    SET = "load_set"  # everything else: open, plan, agree, set tensors and objects


@dataclass(frozen=True, slots=True)
class IoTime:
    """One phase on one rank.

    Attributes:
        phase: phase.
        step: step of the checkpoint.
        begin_ns, end_ns: on the monotonic clock of this host.
        size_bytes: bytes that this rank has copied, written, read or received; 0 without data.
        background: whether training went on meanwhile.
    """

    phase: IoPhase
    step: int
    begin_ns: int
    end_ns: int
    size_bytes: int = 0
    background: bool = False


def of_load(
    step: int, end_ns: int, *, seconds: float, read_seconds: float, gather_seconds: float, bytes_read: int, bytes_gathered: int
) -> tuple[IoTime, ...]:
    """Return the phases of a load. Reading and gathering overlap, so they are laid one behind the other.

    Args:
        end_ns: end of the load on the monotonic clock.
        seconds: wall time of the load.
        read_seconds: part of it that was spent in reading and gathering.
        gather_seconds: part of that without reading.
        bytes_read, bytes_gathered: bytes from storage, and from other ranks of the host.
    """
    gathered_ns = end_ns - max(0, int((seconds - read_seconds) * 1e9))
    read_ns = gathered_ns - int(gather_seconds * 1e9)
    begin_ns = read_ns - max(0, int((read_seconds - gather_seconds) * 1e9))
    gather = (IoTime(IoPhase.GATHER, step, read_ns, gathered_ns, bytes_gathered),) if bytes_gathered else ()
    return (IoTime(IoPhase.READ, step, begin_ns, read_ns, bytes_read), *gather, IoTime(IoPhase.SET, step, gathered_ns, end_ns))
