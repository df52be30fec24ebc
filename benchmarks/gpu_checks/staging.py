"""Copies behind training, and loads into device tensors. One rank, no process group."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_checks.place import Place
from benchmarks.gpu_checks.rows import NotHereError, Row, Rows
from benchmarks.measure import Peak
from unickpt.checkpoint.coordination.message_exchange import MessageExchange
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.format.manifest import Writer
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.fragments import Request
from unickpt.checkpoint.save.device_copy import DeviceCopies
from unickpt.checkpoint.save.requests import PendingSave, SaveOptions, SaveRequest
from unickpt.checkpoint.save.saver import Saver
from unickpt.checkpoint.save.shards import Contribution, shards_of_flat_range

ROWS = (
    "copy to host memory", "training stands still", "host blocked", "no allocation after the first save",
    "what is saved is what training had", "sources freed at once", "graph captured during a save", "load into device tensors",
    "load with a cast, into other layouts", "memory that cannot be locked", "a step waits for late copies",
    "training time lost per save, late copies",
)  # fmt: skip
ROUNDS = 3
WRITER = Writer("gpu_checks", "1", "0", torch.__version__, "none", {"world_size": 1})


class State:
    """Tensors to save: ``count`` of ``elements`` float32 each."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.count, self.elements = (16, 1 << 20) if place.dry else (16, 1 << 24)
        self.infos = [TensorInfo(f"t{at}", "master", "F32", (self.elements,), "parameter") for at in range(self.count)]

    @property
    def size_bytes(self) -> int:
        return self.count * self.elements * 4

    def tensors(self, value: float) -> list[torch.Tensor]:
        return [torch.full((self.elements,), value + at, device=self.place.device) for at in range(self.count)]

    def save(self, saver: Saver, folder: str, tag: str, tensors: list[torch.Tensor], *, steady: bool = False) -> PendingSave:
        shards = [
            replace(shard, steady=steady)
            for info, tensor in zip(self.infos, tensors, strict=True)
            for shard in shards_of_flat_range(info, 0, info.numel, tensor)
        ]
        request = SaveRequest(lambda _: Contribution(shards, 1, WRITER), folder, tag, True)
        return saver.save(request, MessageExchange(None, rank=0, world=1, prefix=tag))

    def wrong(self, folder: str, tag: str, value: float) -> list[str]:
        """Names of the tensors that are not as they were at the save."""
        checkpoint = Checkpoint.open(Path(folder) / tag)
        return [
            info.name
            for at, info in enumerate(self.infos)
            if not bool((checkpoint.read_tensor(info.name, "master") == value + at).all())
        ]


def check(place: Place, path: Path) -> None:
    """Make all checks of this group."""
    state, rows = State(place), Rows(path, "staging", place.name)
    saver = Saver(SaveOptions(asynchronous=True))
    with tempfile.TemporaryDirectory() as folder:
        tensors = state.tensors(1.0)
        copy_s = 0.0
        with rows.row(ROWS[0]) as row:
            copy_s = _copy_seconds(place, state, tensors)
            row.values |= {"GB": state.size_bytes / 1e9, "ms": copy_s * 1e3, "GB/s": state.size_bytes / copy_s / 1e9}
        stalls, blocked = _stalls(place, state, saver, folder, tensors)
        goal = "" if place.dry else "at most 1.15 copies"
        with rows.row(ROWS[1], goal) as row:
            row.values |= {"ms": stalls * 1e3, "copies": stalls / copy_s}
            row.require(place.dry or stalls <= 1.15 * copy_s, "longer than 1.15 copies")
        with rows.row(ROWS[2], "" if place.dry else "below 5 ms for 1 GB") as row:
            plain = Saver(SaveOptions(asynchronous=True, pinned_staging=False))
            _, otherwise = _stalls(place, state, plain, str(Path(folder) / "plain"), tensors)
            row.values |= {"ms": blocked * 1e3, "ms without the option": otherwise * 1e3}
            row.require(place.dry or blocked < 5e-3 * max(state.size_bytes / 1e9, 1), "longer")
        with rows.row(ROWS[3], "the same buffer, nothing new on the device") as row:
            _no_allocation(place, state, saver, folder, tensors, row)
        with rows.row(ROWS[4], "every bit") as row:
            _overwritten(state, saver, folder, row)
        with rows.row(ROWS[5], "every bit") as row:
            _freed(place, state, saver, folder, row)
        with rows.row(ROWS[6], "the graph replays, the save is right") as row:
            _captured(place, state, saver, folder, row)
        with rows.row(ROWS[7], "every bit; at most 128 MiB of host memory") as row:
            _loaded(place, state, saver, folder, row)
        with rows.row(ROWS[8], "every bit") as row:
            _cast(place, state, folder, row)
        with rows.row(ROWS[9], "a warning, no error in training; every bit") as row:
            _unlocked(place, row)
        with rows.row(ROWS[10], "every bit") as row:
            _stepped(state, folder, row)
        with rows.row(ROWS[11], "" if place.dry else "at most 0.05 copies; host blocked below 1 ms for 1 GB") as row:
            _lost(place, state, folder, copy_s, row)


def _copy_seconds(place: Place, state: State, tensors: list[torch.Tensor]) -> float:
    """Seconds of a copy of all tensors into warm, on a device locked, host memory."""
    host = [torch.empty(state.elements, pin_memory=not place.dry).fill_(0.0) for _ in tensors]

    def copy() -> None:
        for target, source in zip(host, tensors, strict=True):
            target.copy_(source, non_blocking=True)

    return min(place.seconds(copy) for _ in range(ROUNDS + 2))


def _stalls(place: Place, state: State, saver: Saver, folder: str, tensors: list[torch.Tensor]) -> tuple[float, float]:
    """Median seconds for which the training stream stands still, and for which the host is blocked, after a first save."""
    state.save(saver, folder, "first", tensors).wait()
    still, blocked = [], []
    for at in range(ROUNDS):
        place.synchronize()
        marks: list[Any] = []
        if not place.dry:
            cuda: Any = torch.cuda
            marks = [cuda.Event(enable_timing=True) for _ in range(2)]
            marks[0].record()
        begin = time.perf_counter()
        save = state.save(saver, folder, f"stall{at}", tensors)
        blocked.append(time.perf_counter() - begin)
        if marks:
            marks[1].record()
            marks[1].synchronize()
        still.append(marks[0].elapsed_time(marks[1]) / 1e3 if marks else blocked[-1])
        save.wait()
    return statistics.median(still), statistics.median(blocked)


def _no_allocation(place: Place, state: State, saver: Saver, folder: str, tensors: list[torch.Tensor], row: Row) -> None:
    def seen() -> tuple[int, ...]:
        buffers = [held.buffer.tensor.data_ptr() for held in saver._pool._buffers]
        device = 0 if place.dry else int(torch.cuda.memory_stats()["allocation.all.allocated"])
        return (*buffers, device)

    before = seen()
    for at in range(ROUNDS):
        state.save(saver, folder, f"again{at}", tensors).wait()
    row.values["staging MB"] = saver._pool.capacity_bytes / 1e6
    row.require(seen() == before, f"buffers and allocations {before} before, {seen()} after")


def _overwritten(state: State, saver: Saver, folder: str, row: Row) -> None:
    """Training changes its tensors as soon as the call returns."""
    tensors = state.tensors(5.0)
    save = state.save(saver, folder, "order", tensors)
    for tensor in tensors:
        tensor.fill_(-1.0)
    save.wait()
    row.require(save.committed, save.cause())
    row.require(not (found := state.wrong(folder, "order", 5.0)), f"other values in {found}")


def _freed(place: Place, state: State, saver: Saver, folder: str, row: Row) -> None:
    """The sources belong to another stream, are freed at once, and their memory is asked for again there."""

    def make_and_save() -> PendingSave:
        tensors = state.tensors(7.0)
        if not place.dry:
            torch.cuda.default_stream().wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(torch.cuda.default_stream()):
                return state.save(saver, folder, "freed", tensors)
        return state.save(saver, folder, "freed", tensors)

    def again() -> list[list[torch.Tensor]]:
        return [state.tensors(-3.0) for _ in range(2)]

    kept = []
    if place.dry:
        save = make_and_save()
        kept += again()
    else:
        cuda: Any = torch.cuda
        with torch.cuda.stream(cuda.Stream()):
            save = make_and_save()
            kept += again()
    save.wait()
    row.values["tensors made meanwhile"] = sum(map(len, kept))
    row.require(not (found := state.wrong(folder, "freed", 7.0)), f"other values in {found}")


def _captured(place: Place, state: State, saver: Saver, folder: str, row: Row) -> None:
    """A graph is captured while the save's thread waits for the copies and writes."""
    tensors = state.tensors(9.0)
    x = torch.ones(1024, device=place.device)
    step: Callable[[], Any] = lambda: x.mul_(2.0)  # noqa: E731
    if place.dry:
        save, alive = state.save(saver, folder, "graph", tensors), threading.active_count()
        step()
        row.values["capture"] = "none on a CPU: the same operations beside the save"
    else:
        cuda: Any = torch.cuda
        warm = cuda.Stream()
        warm.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm):
            step()
        torch.cuda.current_stream().wait_stream(warm)
        x.fill_(1.0)
        graph = cuda.CUDAGraph()
        save, alive = state.save(saver, folder, "graph", tensors), threading.active_count()
        with cuda.graph(graph):
            step()
        graph.replay()
    save.wait()
    place.synchronize()
    row.values["threads during it"] = alive
    row.require(save.committed, save.cause())
    row.require(float(x[0]) == 2.0, f"the graph gave {float(x[0])}, expected 2.0")
    row.require(not (found := state.wrong(folder, "graph", 9.0)), f"other values in {found}")


def _loaded(place: Place, state: State, saver: Saver, folder: str, row: Row) -> None:
    state.save(saver, folder, "load", state.tensors(11.0)).wait()
    checkpoint = Checkpoint.open(Path(folder) / "load")
    outs = [torch.zeros(state.elements, device=place.device) for _ in state.infos]
    host = [torch.zeros(state.elements) for _ in state.infos]
    with Peak() as peak:
        first = place.seconds(lambda: _read(checkpoint, state, outs))
    more = peak.bytes - (state.size_bytes if place.dry else 0)  # on the CPU the outputs themselves are host memory
    again = min(place.seconds(lambda: _read(checkpoint, state, outs)) for _ in range(ROUNDS))
    into_host = min(place.seconds(lambda: _read(checkpoint, state, host)) for _ in range(ROUNDS))
    row.values |= {
        "ms": first * 1e3,
        "ms again": again * 1e3,
        "ms into host memory": into_host * 1e3,
        "GB/s again": state.size_bytes / again / 1e9,
        "host MB": max(more, 0) / 1e6,
    }
    wrong = [at for at, out in enumerate(outs) if not bool((out == 11.0 + at).all())]
    row.require(not wrong, f"other values in {wrong}")
    row.require(more < 128 << 20, f"{more / 1e6:.0f} MB of host memory")


def _read(checkpoint: Checkpoint, state: State, outs: list[torch.Tensor]) -> None:
    checkpoint.read(
        [Request(checkpoint.ids[info.key], Box.whole(info.shape), out) for info, out in zip(state.infos, outs, strict=True)]
    )


def _cast(place: Place, state: State, folder: str, row: Row) -> None:
    """Into every second element of a bfloat16 tensor, and into all of one. Another stream is the current one."""
    checkpoint = Checkpoint.open(Path(folder) / "load")
    outs = [torch.zeros(2 * state.elements, dtype=torch.bfloat16, device=place.device)[::2] for _ in state.infos]
    dense = [torch.zeros(state.elements, dtype=torch.bfloat16, device=place.device) for _ in state.infos]
    cuda: Any = torch.cuda
    with contextlib.nullcontext() if place.dry else torch.cuda.stream(cuda.Stream()):
        for out in (*outs, *dense):
            out.fill_(-1.0)  # in the current stream: the load comes after it
        begun = time.perf_counter()
        _read(checkpoint, state, outs)
        _read(checkpoint, state, dense)
        row.values["ms"] = (time.perf_counter() - begun) * 1e3
        wrong = [at for at in range(state.count) if not bool((outs[at] == 11.0 + at).all() and (dense[at] == 11.0 + at).all())]
    row.require(not wrong, f"other values in {wrong}")


def _unlocked(place: Place, row: Row) -> None:
    """The memory is locked already, so locking it fails."""
    if place.dry:
        raise NotHereError("nothing is locked on a CPU")
    cuda: Any = torch.cuda
    region = torch.zeros(1 << 20, dtype=torch.uint8)
    cuda.cudart().cudaHostRegister(region.data_ptr(), region.numel(), 1)
    copies = DeviceCopies(region)
    source = torch.arange(1 << 20, device=place.device, dtype=torch.uint8)
    torch.ones(8, device=place.device).mul_(2.0)  # would raise an error that was left
    copies.copy([region], [source])[0]()
    row.require(not copies.pinned, "it was locked")
    row.require(torch.equal(region, source.cpu()), "other values")
    del copies
    cuda.cudart().cudaHostUnregister(region.data_ptr())
    torch.ones(8, device=place.device).mul_(2.0)


def _trained(state: State, value: float) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
    """Return parameters, and an optimizer whose step subtracts 1 from them."""
    parameters = [torch.nn.Parameter(tensor) for tensor in state.tensors(value)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return parameters, torch.optim.SGD(parameters, lr=1.0)


def _stepped(state: State, folder: str, row: Row) -> None:
    """A step follows the call at once; another one, that fails, before it."""
    parameters, optimizer = _trained(state, 5.0)
    tensors = [parameter.detach() for parameter in parameters]
    saver = Saver(SaveOptions(asynchronous=True))
    state.save(saver, folder, "before", tensors, steady=True).wait()
    for at in range(ROUNDS):
        save = state.save(saver, folder, f"late{at}", tensors, steady=True)
        optimizer.step()
        optimizer.step()
        save.wait()
        row.require(save.committed, save.cause())
        row.require(not (found := state.wrong(folder, f"late{at}", 5.0 - 2 * at)), f"other values in {found}")


def _lost(place: Place, state: State, folder: str, copy_s: float, row: Row) -> None:
    """Seconds of a save, work that takes three copies, and a step, minus those of the work and the step."""
    parameters, optimizer = _trained(state, 3.0)
    tensors = [parameter.detach() for parameter in parameters]
    matrix = torch.rand(256 if place.dry else 4096, 256 if place.dry else 4096, device=place.device)
    one = min(place.seconds(lambda: matrix @ matrix) for _ in range(ROUNDS + 2))
    count = max(1, round(3 * copy_s / one))

    def work() -> None:
        for _ in range(count):
            matrix @ matrix
        optimizer.step()

    alone = statistics.median(place.seconds(work) for _ in range(2 * ROUNDS))
    for name, late in (("late", True), ("eager", False)):
        saver = Saver(SaveOptions(asynchronous=True, copy_behind_training=late))
        state.save(saver, folder, f"{name} first", tensors, steady=True).wait()
        lost, blocked = [], []
        for at in range(2 * ROUNDS):
            saves: list[PendingSave] = []

            def saved(saver: Saver = saver, tag: str = f"{name}{at}", saves: list[PendingSave] = saves) -> None:
                begin = time.perf_counter()
                saves.append(state.save(saver, folder, tag, tensors, steady=True))
                blocked.append(time.perf_counter() - begin)  # noqa: B023
                work()

            lost.append(place.seconds(saved) - alone)
            saves[0].wait()
            row.require(saves[0].committed, saves[0].cause())
        row.values |= {
            f"{name}: copies lost": statistics.median(lost) / copy_s,
            f"{name}: ms blocked": statistics.median(blocked) * 1e3,
        }
    row.values["ms of the work"] = alone * 1e3
    row.require(place.dry or row.values["late: copies lost"] <= 0.05, "more than 0.05 copies")
    row.require(place.dry or row.values["late: ms blocked"] <= max(1.0, state.size_bytes / 1e9), "the host was blocked longer")
