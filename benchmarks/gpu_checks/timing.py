"""Times of calls on the device beside the profiler's, around a captured graph, and what they cost."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu_checks.place import Place
from benchmarks.gpu_checks.rows import Row, Rows
from unickpt.diagnosis.recording.process_group_hooks import ProcessGroupHooks
from unickpt.diagnosis.recording.recorder import CallRecorder
from unickpt.diagnosis.recording.records import Flag, Op, Records
from unickpt.diagnosis.recording.ring import Identity, RingReader, RingWriter

ROWS = ("beside the profiler", "asynchronous calls", "around a captured graph", "cost of a call", "cost of a step")
KERNELS = {"nccl": "ncclDevKernel_AllReduce", "gloo": "gloo:all_reduce"}  # of an all_reduce, in the profiler's trace


class Recording:
    """A recorder with hooks and timed events, in a ring of its own, while a ``with`` block runs."""

    def __init__(self, place: Place, folder: str, name: str, *, device: bool = True) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        self.path = Path(folder) / f"{name}-{rank:05d}.ring"
        ring = RingWriter(self.path, Identity.here(rank, world, "checks"), capacity=8192)
        self.recorder = CallRecorder(ring, _describe, place.events() if device else None)
        self._hooks = ProcessGroupHooks(self.recorder)

    def __enter__(self) -> Recording:
        self._hooks.install()
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.uninstall()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.recorder.close()

    def calls(self) -> Records:
        """All calls, the oldest first."""
        records = RingReader(self.path).read().records
        found: Records = records[records["op"] <= Op.RECEIVE]
        return found


def _describe(group: Any) -> dict[str, Any]:
    return {"ranks": dist.get_process_group_ranks(group), "label": "", "backend": group.name()}


def check(place: Place, path: Path) -> None:
    """Make all checks of this group. All ranks call it."""
    dist.init_process_group(place.backend)
    rows = Rows(path if dist.get_rank() == 0 else None, "timing", place.name)
    x = torch.ones(1 << (16 if place.dry else 24), device=place.device)
    dist.all_reduce(x)  # makes the communicator
    calls = 50
    with tempfile.TemporaryDirectory() as folder:
        # the profiler shows gloo's own work, without the time until the waiting thread wakes up
        goal = "medians within 20% or 0.1 ms" if place.backend == "nccl" else "at least the profiler's"
        with rows.row(ROWS[0], goal) as row:
            _beside_profiler(place, folder, x, calls, row)
        with rows.row(ROWS[1], "all timed; no wait before the call") as row:
            _asynchronous(place, folder, x, calls, row)
        with rows.row(ROWS[2], "calls before and after are timed, those inside are not") as row:
            _around_a_capture(place, folder, x, row)
        with rows.row(ROWS[3]) as row:
            _cost_of_a_call(place, folder, calls, row)
        with rows.row(ROWS[4]) as row:
            _cost_of_a_step(place, folder, 40, row)
    dist.barrier()
    dist.destroy_process_group()


def _timed(calls: Records) -> Records:
    found: Records = calls[(calls["flags"] & int(Flag.DEVICE_TIMES)) > 0]
    return found


def _beside_profiler(place: Place, folder: str, x: torch.Tensor, calls: int, row: Row) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU if place.backend == "gloo" else torch.profiler.ProfilerActivity.CUDA]
    recording = Recording(place, folder, "profiler")
    dist.barrier()
    with torch.profiler.profile(activities=activities) as profiler, recording:
        for _ in range(calls):
            dist.all_reduce(x)
        place.synchronize()
    kernel = KERNELS[place.backend]
    theirs = [event.time_range.elapsed_us() for event in profiler.events() or () if event.name.startswith(kernel)]
    timed = _timed(recording.calls())
    ours = ((timed["end_ns"] - timed["start_ns"]) / 1e3).tolist()
    row.require(len(timed) == calls, f"{len(timed)} of {calls} calls are timed")
    row.require(bool(theirs), f"the profiler shows no {kernel}")
    if not ours or not theirs:
        return
    middle, other = statistics.median(ours), statistics.median(theirs)
    row.values |= {"us": middle, "profiler us": other, "calls": len(ours), "kernels": len(theirs)}
    if place.backend == "nccl":
        row.require(abs(middle - other) <= max(0.2 * other, 100.0), "further apart")
    row.require(middle >= 0.8 * other, "shorter than the profiler's")


def _asynchronous(place: Place, folder: str, x: torch.Tensor, calls: int, row: Row) -> None:
    other = torch.ones(256, 256, device=place.device)
    recording = Recording(place, folder, "async")
    with recording:
        for _ in range(calls):
            work = dist.all_reduce(x, async_op=True)
            other = other @ other / 256
            work.wait()
        for _ in range(calls):  # issued as one
            with dist.distributed_c10d._coalescing_manager(device=place.device if place.backend == "nccl" else None):
                dist.all_reduce(x[:64])
                dist.all_reduce(x[64:128])
    found = recording.calls()
    timed = _timed(found)
    row.values |= {"calls": len(found), "timed": len(timed)}
    row.require(len(found) == len(timed), "calls without times")
    row.require(bool((timed["wait_ns"] >= timed["start_ns"]).all()), "waits before their calls")
    row.require(bool((timed["end_ns"] >= timed["wait_ns"]).all()), "ends before their waits")


def _around_a_capture(place: Place, folder: str, x: torch.Tensor, row: Row) -> None:
    """A graph with a collective is captured with recording on. On the CPU, two calls are made as if a capture were on."""
    y = torch.ones(1024, device=place.device)
    recording = Recording(place, folder, "graph")
    with recording:
        dist.all_reduce(x)
        if place.backend == "nccl":
            cuda: Any = torch.cuda
            graph = cuda.CUDAGraph()
            place.synchronize()
            with cuda.graph(graph):
                dist.all_reduce(y)
                dist.all_reduce(y)
            y.fill_(1.0)
            graph.replay()
            place.synchronize()
        else:
            events = place.events()
            device = recording.recorder._device
            assert device is not None
            events.usable, device._source = lambda: False, events  # type: ignore[method-assign]
            dist.all_reduce(y)
            dist.all_reduce(y)
            del events.usable
        dist.all_reduce(x)
    found = recording.calls()
    known = [bool(flags & int(Flag.DEVICE_TIMES)) for flags in found["flags"].tolist()]
    row.values |= {"calls": len(found), "timed": sum(known)}
    row.require(float(y[0]) == float(dist.get_world_size()) ** 2, f"the graph gave {float(y[0])}")
    row.require(known == [True, False, False, True], f"timed: {known}")


def _cost_of_a_call(place: Place, folder: str, calls: int, row: Row) -> None:
    """Processor time of the calling thread for a small all_reduce: without recording, recorded, timed on the device.

    In a group of this rank alone, so that the transfers, which take other threads of the process, do not disturb.
    """
    small = torch.ones(8, device=place.device)
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    mine = groups[dist.get_rank()]

    def busy_us() -> float:
        for _ in range(10):
            dist.all_reduce(small, group=mine)
        place.synchronize()
        begin = time.thread_time_ns()
        for _ in range(calls * 4):
            dist.all_reduce(small, group=mine)
        return (time.thread_time_ns() - begin) / calls / 4e3

    found: dict[str, list[float]] = {}
    for turn in range(7):
        found.setdefault("us without", []).append(busy_us())
        for name, device in (("us recorded", False), ("us timed", True)):
            with Recording(place, folder, f"cost{turn}{device}", device=device):
                found.setdefault(name, []).append(busy_us())
    row.values |= {name: statistics.median(values) for name, values in found.items()}


def _cost_of_a_step(place: Place, folder: str, steps: int, row: Row) -> None:
    """Seconds of a step with eight matrix products and four collectives."""
    size = 256 if place.dry else 4096
    weight = torch.ones(size, size, device=place.device) / size
    small = torch.ones(1 << 16, device=place.device)

    def train(stepped: Callable[[], None]) -> None:
        for _ in range(steps):
            y = weight
            for at in range(8):
                y = y @ weight
                if at % 2:
                    dist.all_reduce(small)
            stepped()

    train(lambda: None)
    off, on = [], []
    for turn in range(5):
        dist.barrier()
        off.append(place.seconds(lambda: train(lambda: None)) / steps)
        with Recording(place, folder, f"step{turn}") as recording:
            last = [time.monotonic_ns()]

            def stepped(recorder: CallRecorder = recording.recorder, last: list[int] = last) -> None:
                now = time.monotonic_ns()
                recorder.moment(Op.STEP, last[0], now)
                last[0] = now
                recorder.state.step += 1

            dist.barrier()
            on.append(place.seconds(lambda stepped=stepped: train(stepped)) / steps)
    row.values |= {
        "ms without": statistics.median(off) * 1e3,
        "ms timed": statistics.median(on) * 1e3,
        "ratio": statistics.median([a / b for a, b in zip(on, off, strict=True)]),
    }


def probe() -> None:
    """One all_reduce of all ranks, with NCCL."""
    dist.init_process_group("nccl")
    x = torch.ones(8, device="cuda")
    dist.all_reduce(x)
    torch.cuda.synchronize()
    assert float(x[0]) == float(os.environ["WORLD_SIZE"])
    dist.destroy_process_group()
