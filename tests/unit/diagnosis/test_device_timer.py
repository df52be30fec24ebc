"""Times of calls on a device: read after they have passed, never waited for, bounded, and none in a capture."""

from __future__ import annotations

import gc
import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.rings import here
from tests.support.stream import Stream
from unickpt.diagnosis.detectors.stragglers import stragglers
from unickpt.diagnosis.recording import device_clock, device_timer
from unickpt.diagnosis.recording.device_clock import DeviceClock
from unickpt.diagnosis.recording.device_events import CudaEvents
from unickpt.diagnosis.recording.device_timer import DeviceCall, DeviceTimer
from unickpt.diagnosis.recording.records import Flag, Op
from unickpt.diagnosis.recording.ring import RingReader, RingWriter
from unickpt.diagnosis.recording.ring_folder import read_folder
from unickpt.diagnosis.snapshot.snapshot import take_snapshot
from unickpt.diagnosis.snapshot.steps import steps_of

MS = 1_000_000


class Times:
    """What was written, by record."""

    def __init__(self) -> None:
        self.calls: dict[int, tuple[int, int, int]] = {}
        self.steps: dict[int, tuple[int, int]] = {}

    def device_call(self, number: int, start_ns: int, wait_ns: int, end_ns: int) -> None:
        self.calls[number] = start_ns, wait_ns, end_ns

    def device_step(self, number: int, begin_ns: int, end_ns: int) -> None:
        self.steps[number] = begin_ns, end_ns


class Work:
    """The result of an asynchronous call."""


@pytest.fixture
def stream() -> Iterator[Stream]:
    made = Stream()
    yield made
    made.close()


@pytest.fixture
def times() -> Times:
    return Times()


def begin(timer: DeviceTimer, number: int) -> DeviceCall:
    call = timer.begin(number)
    assert call is not None
    return call


def test_a_call_has_the_times_of_the_stream_and_the_host_does_not_wait(stream: Stream, times: Times) -> None:
    timer = DeviceTimer(stream, times)
    before = time.monotonic_ns()
    over = threading.Event()
    stream.submit(lambda: (over.wait(30), None)[1])  # computation before the call: the host runs ahead of it
    call = begin(timer, 1)
    stream.kernel(0.1)
    timer.issued(call, None, mark=False)
    timer.read()
    assert times.calls == {}  # not over, and the host has not waited
    over.set()
    stream.drained()
    timer.read()
    start, wait, end = times.calls[1]
    assert start == wait
    assert 100 * MS <= end - start < 10_000 * MS
    assert 0 <= start - before < 10_000 * MS


def test_an_asynchronous_call_waits_from_where_the_stream_waits(stream: Stream, times: Times) -> None:
    timer = DeviceTimer(stream, times)
    call, work = begin(timer, 7), Work()
    timer.issued(call, work, mark=True)
    stream.kernel(0.05)  # computation beside the call
    waiting = timer.waits(work)
    assert waiting is call
    stream.kernel(0.03)  # the stream stands still for the call
    timer.end(call)
    stream.drained()
    timer.read()
    start, wait, end = times.calls[7]
    assert 50 * MS <= wait - start < 10_000 * MS
    assert 30 * MS <= end - wait < 10_000 * MS
    assert timer.waits(work) is None


def test_calls_issued_as_one_share_their_times(stream: Stream, times: Times) -> None:
    timer = DeviceTimer(stream, times)
    together = timer.joined((begin(timer, 1), begin(timer, 2), begin(timer, 3)))
    timer.issued(together, None, mark=True)
    stream.drained()
    timer.read()
    assert set(times.calls) == {1, 2, 3}
    assert len(set(times.calls.values())) == 1
    assert len(stream.made) == 3


def test_events_are_used_again_and_bounded(stream: Stream, times: Times) -> None:
    timer = DeviceTimer(stream, times, most_events=8)
    stream.kernel(0.2)
    for number in range(1, 51):  # none of them is over
        call = timer.begin(number)
        if call is not None:
            timer.issued(call, None, mark=False)
    assert len(stream.made) == 8
    assert timer.skipped == 50 - 4
    stream.drained()
    for number in range(51, 151):
        timer.issued(begin(timer, number), None, mark=False)
        stream.drained()
    timer.read()
    assert len(stream.made) == 8
    assert set(times.calls) == {1, 2, 3, 4, *range(51, 151)}


def test_work_without_a_wait_gives_its_events_back(stream: Stream, times: Times) -> None:
    timer = DeviceTimer(stream, times, most_events=2)
    for number in range(1, 5):
        work = Work()
        timer.issued(begin(timer, number), work, mark=True)
        del work
        gc.collect()
    assert (len(stream.made), timer.skipped, times.calls) == (1, 4, {})


def test_nothing_is_recorded_or_read_in_a_capture(stream: Stream, times: Times) -> None:
    timer = DeviceTimer(stream, times)
    open_call, work, other = begin(timer, 1), Work(), begin(timer, 2)
    timer.issued(open_call, work, mark=True)
    stream.drained()
    stream.capturing = True
    records = [event.records for event in stream.made]
    assert timer.begin(3) is None
    waiting = timer.waits(work)  # issued before the capture, waited for inside
    assert waiting is not None
    timer.end(waiting)
    timer.end(other)
    timer.step(4)
    timer.read()
    assert [event.records for event in stream.made] == records
    stream.capturing = False
    timer.read()
    assert times.calls == {}
    timer.issued(begin(timer, 5), None, mark=False)
    stream.drained()
    timer.read()
    assert set(times.calls) == {5}


def test_a_wait_that_began_in_a_capture_gives_no_times(stream: Stream, times: Times) -> None:
    """The end alone would be taken for a wait from the start."""
    timer = DeviceTimer(stream, times)
    work = Work()
    timer.issued(begin(timer, 1), work, mark=True)
    stream.capturing = True
    waiting = timer.waits(work)
    stream.capturing = False
    assert waiting is not None
    timer.end(waiting)
    stream.drained()
    timer.read()
    assert times.calls == {}


def test_an_error_of_the_device_ends_timing_and_not_training(
    stream: Stream, times: Times, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    timer = DeviceTimer(stream, times)
    call = begin(timer, 1)

    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(stream.made[0].__class__, "record", lambda _: broken())
    timer.end(call)
    timer.step(2)
    assert timer.begin(3) is None
    assert len(caplog.records) == 1
    assert "training is not affected (RuntimeError: CUDA error" in caplog.text


def test_steps_end_where_the_stream_comes_to_their_end(stream: Stream, times: Times) -> None:
    timer = DeviceTimer(stream, times)
    timer.issued(begin(timer, 1), None, mark=False)
    for number in (2, 3, 4):
        stream.kernel(0.03)
        timer.step(number)
    stream.drained()
    timer.read()
    assert set(times.steps) == {3, 4}  # the begin of the first one is unknown
    assert all(30 * MS <= end - start < 10_000 * MS for start, end in times.steps.values())


def test_a_step_after_one_whose_end_is_not_marked_has_no_times(stream: Stream, times: Times) -> None:
    timer = DeviceTimer(stream, times)
    timer.issued(begin(timer, 1), None, mark=False)
    for number in range(2, 8):
        stream.capturing = number == 4
        timer.step(number)
    stream.drained()
    timer.read()
    assert set(times.steps) == {3, 6, 7}  # the fifth would contain the fourth


def test_an_old_anchor_is_replaced(stream: Stream, times: Times, monkeypatch: pytest.MonkeyPatch) -> None:
    """``elapsed_time`` is a float32, and the clocks drift."""
    monkeypatch.setattr(device_timer, "RENEWED_NS", 5 * MS)
    timer = DeviceTimer(stream, times)
    anchors = set()
    for number in range(1, 7):
        timer.issued(begin(timer, number), None, mark=False)
        stream.kernel(0.01)
        stream.drained()
        timer.read()
        anchors.add(id(timer._devices[0].anchor))
    assert len(anchors) > 1
    starts = [times.calls[number][0] for number in range(1, 7)]
    assert all(8 * MS < later - earlier < 10_000 * MS for earlier, later in itertools.pairwise(starts))
    assert len(stream.made) == 3  # two of a call, and the anchor


@pytest.mark.parametrize("busy", [0.0, 0.3, 1.0])
def test_the_clock_of_a_device_is_bounded_by_what_the_host_sees(busy: float) -> None:
    """The device runs 10 ppm fast, and is idle, sometimes behind the host, or always 80 ms behind. The host asks for the oldest
    event every 0.2 to 2 ms. Distances are float32 milliseconds, as CUDA's."""
    rng, rate, host, passed = random.Random(3), 1 + 10e-6, 5_000_000_000, 0
    waiting: deque[tuple[int, int]] = deque()  # recorded, passed
    refused, anchor, worst = 0, 0, 0
    clock: DeviceClock | None = None
    for _ in range(20_000):
        host += rng.randrange(200_000, 2_000_000)
        while waiting:
            recorded, at = waiting[0]
            if at > host:
                refused = host
                break
            waiting.popleft()
            clock, anchor = (clock, anchor) if clock is not None else (DeviceClock(recorded, host), at)
            since = int(np.float32((at - anchor) * rate / 1e6) * np.float64(1e6))
            clock.after(since, max(recorded, refused))
            clock.before(since, host)
            refused = 0
            if host > 6_000_000_000:
                worst = max(worst, abs(clock.at(since) - at))
            if since > device_clock.RENEWED_NS:
                clock.renew(since)
                anchor = at
        passed = max(host + (80_000_000 if rng.random() < busy else 5_000), passed + 1000)
        waiting.append((host, passed))
    assert clock is not None
    assert clock.error_ns < 1_200_000
    assert worst < 1_200_000


def test_a_clock_that_contradicts_its_bounds_begins_anew() -> None:
    clock = DeviceClock(1000, 2000)
    clock.after(0, 50_000)
    assert abs(clock.anchor_ns - 50_000) < 10
    clock.before(0, 1000)
    assert abs(clock.anchor_ns - 1000) < 10


def test_captures_on_any_thread_are_counted_and_torch_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    graph: Any = torch.cuda.CUDAGraph
    before = dict(vars(graph))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    events = CudaEvents()
    assert events.usable()
    with pytest.raises(Exception):  # noqa: B017, PT011 - there is no device: torch's own error
        graph.capture_begin(object())
    assert events.usable()  # that capture did not begin
    monkeypatch.setattr(events, "_captures", 1)
    assert not events.usable()
    events.close()
    assert {name: vars(graph).get(name) for name in before} == before


def ring(
    path: Path, rank: int, own_ns: int, *, timed: bool = True, without: tuple[int, ...] = (), unmarked: tuple[int, ...] = ()
) -> RingReader:  # fmt: skip
    """Twenty-four steps of 100 ms: a host that is two steps ahead, a device that computes, then waits in a call."""
    writer = RingWriter(path / f"{rank:05d}.ring", here(rank=rank, world=4), capacity=256)
    writer.list_communicator({"name": "g", "label": "", "ranks": [[0, 1, 4]], "on_device": True})
    number, flags = 0, int(Flag.TIMED_ON_DEVICE)
    for step in range(1, 25):
        host, device = (step + 8) * 100 * MS, (step + 10) * 100 * MS
        number += 1
        writer.put(number, host, 0, 0, 0, step, 4, 4, 0, int(Op.ALL_REDUCE), 2, flags, 0, 0, -1, 0, step, 99)
        if timed and step not in without:
            writer.device_call(number, device + own_ns, device + own_ns, device + 99 * MS)
        number += 1
        writer.put(number, host, 0, host, host + 100 * MS, 0, 0, 0, 0, int(Op.STEP), 0, 0, 0, 0, -1, 0, step, 0)
        if timed and step not in unmarked:
            writer.device_step(number, device, device + 100 * MS)
    writer.state(heartbeat_ns=1, step=24, newest=number, phase=0)
    return RingReader(writer.path)


def test_a_slow_rank_is_found_by_the_times_of_the_device(tmp_path: Path) -> None:
    rings = {rank: ring(tmp_path, rank, own_ns=(40 if rank == 2 else 10) * MS) for rank in range(4)}
    steps = np.concatenate([steps_of(rank, each.read().records) for rank, each in rings.items()])
    assert set((steps["end_ns"] - steps["begin_ns"]).tolist()) == {100 * MS}
    assert {int(own) for own in steps["own_ns"][steps["rank"] == 2]} == {41 * MS}
    assert [verdict.ranks for verdict in stragglers(steps)] == [(2,)]


def test_steps_without_all_times_of_the_device_are_left_out(tmp_path: Path) -> None:
    """The host of such a rank waits nowhere: the whole step would be its own time, and the rank would look slow."""
    rings = {rank: ring(tmp_path, rank, own_ns=10 * MS, timed=rank != 2) for rank in range(4)}
    steps = np.concatenate([steps_of(rank, each.read().records) for rank, each in rings.items()])
    assert set(steps["rank"].tolist()) == {0, 1, 3}
    assert stragglers(steps) == []
    numbers = steps_of(3, ring(tmp_path, 3, own_ns=10 * MS, without=(5, 9), unmarked=(11,)).read().records)
    assert numbers["number"].tolist() == [step for step in range(2, 25) if step not in (5, 9, 11)]


def test_calls_are_compared_from_the_arrival_of_the_device(tmp_path: Path) -> None:
    """Links, clocks of hosts and reports: the host's call is long before, and by how much says nothing."""
    ring(tmp_path, 1, own_ns=10 * MS, without=(7,))
    job = read_folder(tmp_path)
    calls, offset = take_snapshot(job).calls, job.offsets_ns[1]
    arrival = dict(zip(calls["seq"].tolist(), (calls["call_ns"] - offset).tolist(), strict=True))
    assert arrival[6] == (6 + 10) * 100 * MS + 10 * MS
    assert arrival[7] == (7 + 8) * 100 * MS  # of the host, as nothing better is known
