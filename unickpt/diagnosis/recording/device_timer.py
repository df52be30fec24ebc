"""Begin and end of calls on a device, by events that the calling thread records around them and reads later.

Where NCCL works runs (``torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp``, ``collective``; torch 2.13):

- ``async_op=False``: the kernel is put into the caller's current stream, and no work is returned. An event before the call and
  an event after it enclose the kernel: the stream has arrived at the call, and has left it.
- ``async_op=True``, and every single send and receive: the kernel is in a stream of NCCL's own, which waits for the current
  stream at the call (``syncStream``). ``Work.wait`` makes the current stream wait for the kernel (``synchronizeStream``) and
  does not block the host. An event before the call is the arrival at the call; events around ``wait`` enclose the time in
  which the current stream stands still. The last one is the end of the call only if the stream stood still; otherwise the
  call ended before. That is also what gloo shows, and what the detectors expect.

Alternatives, and why they are not used:

- ``Work.wait`` on another stream, to see the end of the kernel itself: it also clears the shelf that keeps the tensors of the
  call from the allocator (``stashed_for_allocator_safety_``), and they could be overwritten.
- ``Work._get_duration`` and the durations in the flight recorder need ``TORCH_NCCL_ENABLE_TIMING`` (a start event for every
  work of the job), and are durations only: they do not tell which rank came late. Dumping the flight recorder queries events
  under the mutex that every call takes.
- ``_register_on_completion_hook`` runs Python in a thread of its own and keeps every work until then.

The calling thread reads the events, a few at every later call and all at the end of a step, and never waits for one. A thread
beside training must not: its queries would invalidate a graph that is being captured. So the last calls before a hang stay
unread, and ``flight_recorder`` shows where the rank waits.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

from unickpt.base.logs import logger
from unickpt.diagnosis.recording.device_clock import RENEWED_NS, DeviceClock
from unickpt.diagnosis.recording.device_events import EventSource, TimedEvent

MOST_EVENTS = 4096  # of a device, about 4 KB of memory each at most; calls beyond are recorded without times
READ_AT_A_CALL, READ_AT_A_STEP = 4, 1024
_now = time.monotonic_ns


class DeviceTimes(Protocol):
    """Where the times go. All times are on the host's monotonic clock."""

    def device_call(self, number: int, start_ns: int, wait_ns: int, end_ns: int) -> None:
        """Write the times of the call with this record."""

    def device_step(self, number: int, begin_ns: int, end_ns: int) -> None:
        """Write the times of the step with this record."""


@dataclass(slots=True, eq=False)
class DeviceCall:
    """A call that is timed, or several that were issued as one.

    Attributes:
        numbers: its records.
        place: number of the device.
        recorded_ns: host time before the start was recorded.
        start: arrival of the current stream at the call.
        wait: begin of the wait for the call in the current stream; None if it waits from the start.
        end: end of that wait.
        lost: whether an event could not be recorded, so that the times would be wrong.
    """

    numbers: tuple[int, ...]
    place: int
    recorded_ns: int
    start: TimedEvent
    wait: TimedEvent | None = None
    end: TimedEvent | None = None
    lost: bool = False


@dataclass(slots=True, eq=False)
class _StepEnd:
    """The end of a step. ``number``: its record. ``follows``: whether the end before was marked, too."""

    number: int
    recorded_ns: int
    end: TimedEvent
    follows: bool


class _Device:
    """Events of one device: a pool, the clock, and what is to be read, the oldest first."""

    def __init__(self) -> None:
        self.free: deque[TimedEvent] = deque()
        self.made = 0
        self.unread: deque[DeviceCall | _StepEnd] = deque()
        self.refused_ns = 0  # time of the last query that did not find the oldest of them passed
        self.anchor: TimedEvent | None = None
        self.clock: DeviceClock | None = None
        self.step_since_ns = 0  # end of the last step that was read, after the anchor
        self.step_marked = False  # the end of the last step was


class DeviceTimer:
    """Times calls on a device. No method raises; after an error it stops with one warning.

    Args:
        source: events.
        times: where the times of calls and steps go, after they are over.
        most_events: events per device. Without a free one, a call is recorded without times.

    Attributes:
        skipped: calls and steps without times: in a capture, without a free event, or given up by the caller.
    """

    def __init__(self, source: EventSource, times: DeviceTimes, *, most_events: int = MOST_EVENTS) -> None:
        self._source, self._times, self._most = source, times, most_events
        self._devices: dict[int, _Device] = {}
        self._waited: dict[int, tuple[weakref.ref[Any], DeviceCall, bool]] = {}  # by id of the work
        self._running = True
        self.skipped = 0

    def covers(self, backend: str) -> bool:
        """Return whether calls of this backend are timed."""
        return backend in self._source.backends

    def begin(self, number: int) -> DeviceCall | None:
        """Mark the arrival at a call that is about to be made. None: it is not timed."""
        if not self._running:
            return None
        try:
            with self._source.lock:
                marked = self._marked_now(READ_AT_A_CALL)
                return None if marked is None else DeviceCall((number,), *marked)
        except Exception as err:
            self._stop(err)
            return None

    def joined(self, calls: tuple[DeviceCall, ...]) -> DeviceCall:
        """Return calls that were issued as one as a single call, which begins with the first of them."""
        for other in calls[1:]:
            self._give_back(other)
        calls[0].numbers = tuple(number for call in calls for number in call.numbers)
        return calls[0]

    def issued(self, call: DeviceCall, work: Any, *, mark: bool) -> None:
        """The call was made.

        Args:
            call: the call.
            work: its result; None if the current stream contains the call.
            mark: whether a wait for the work begins only when the caller asks for it; otherwise it begins with the call.
        """
        if work is None:
            self.end(call)
            return
        key = id(work)

        def forget(_: Any) -> None:  # no wait from Python: the end of the call is not seen
            found = self._waited.pop(key, None)
            if found is not None:
                self.drop(found[1])  # appends to a deque: this may run at any time, in any thread

        try:  # a strong reference would keep the tensors of a call without a wait
            self._waited[key] = (weakref.ref(work, forget), call, mark)
        except TypeError:  # a work of another kind
            self.drop(call)

    def waits(self, work: Any) -> DeviceCall | None:
        """The current stream is about to wait for work. None: the work is not timed."""
        found = self._waited.pop(id(work), None)
        if found is None:
            return None
        _, call, mark = found
        if mark:
            self.mark_wait(call)
        return call

    def mark_wait(self, call: DeviceCall) -> None:
        """The current stream is about to wait for a call that was made before."""
        call.wait = self._mark(call)
        call.lost = call.wait is None

    def end(self, call: DeviceCall) -> None:
        """The current stream has the call, or the wait for it, behind it."""
        call.end = self._mark(call)
        device = self._devices.get(call.place)
        if device is None or call.end is None or call.lost:
            self.drop(call)
        else:
            device.unread.append(call)

    def drop(self, call: DeviceCall) -> None:
        """The call has failed, or cannot be timed."""
        self.skipped += 1
        self._give_back(call)

    def step(self, number: int) -> None:
        """Mark the end of a training step, and read what has passed."""
        if not self._running or not self._devices:
            return
        try:
            with self._source.lock:
                marked = self._marked_now(READ_AT_A_STEP)
                if marked is None:  # so the begin of the next step is unknown
                    for device in self._devices.values():
                        device.step_marked = False
                    return
                place, recorded_ns, event = marked
                device = self._devices[place]
                device.unread.append(_StepEnd(number, recorded_ns, event, device.step_marked))
                device.step_marked = True
        except Exception as err:
            self._stop(err)

    def _marked_now(self, reads: int) -> tuple[int, int, TimedEvent] | None:
        """Read up to ``reads`` entries, and mark this instant. The caller holds the lock.

        Returns:
            Number of the device, host time before, and the event; None, which counts as skipped, if there is none.
        """
        if self._source.usable():
            place = self._source.place()
            device = self._device(place)
            self._read(device, reads)
            event = self._take(device)
            if event is not None:
                recorded_ns = _now()
                event.record()
                return place, recorded_ns, event
        self.skipped += 1
        return None

    def read(self) -> None:
        """Read what has passed. For the end of recording."""
        if not self._running:
            return
        try:
            with self._source.lock:
                if self._source.usable():
                    for device in self._devices.values():
                        self._read(device, READ_AT_A_STEP)
        except Exception as err:
            self._stop(err)

    def close(self) -> None:
        """Stop, and release the events."""
        self.read()
        with self._source.lock:
            self._running = False
            self._waited.clear()
            self._devices.clear()
        self._source.close()

    def _device(self, place: int) -> _Device:
        found = self._devices.get(place)
        return found if found is not None else self._devices.setdefault(place, _Device())

    def _mark(self, call: DeviceCall) -> TimedEvent | None:
        """Return an event that is recorded now for a call; None if there is none."""
        if not self._running:
            return None
        try:
            with self._source.lock:
                device = self._devices.get(call.place)
                if device is None or not self._source.usable() or self._source.place() != call.place:
                    return None
                event = self._take(device)
                if event is not None:
                    event.record()
                return event
        except Exception as err:
            self._stop(err)
            return None

    def _take(self, device: _Device) -> TimedEvent | None:
        if device.free:
            return device.free.popleft()  # the one that was used longest ago
        if device.made >= self._most:
            return None
        device.made += 1
        return self._source.make()

    def _give_back(self, call: DeviceCall, *, but: TimedEvent | None = None) -> None:
        device = self._devices.get(call.place)
        if device is not None:
            for event in (call.start, call.wait, call.end):
                if event is not None and event is not but:
                    device.free.append(event)

    def _read(self, device: _Device, most: int) -> None:
        """Read up to ``most`` entries that have passed, in order. Never waits."""
        for _ in range(min(most, len(device.unread))):
            entry, asked_ns = device.unread[0], _now()
            if entry.end is None or not entry.end.query():  # what was recorded before it has passed, too
                device.refused_ns = asked_ns
                return
            device.unread.popleft()
            passed_ns = _now()
            if isinstance(entry, DeviceCall):
                self._read_call(device, entry, passed_ns)
            else:
                self._read_step(device, entry, passed_ns)
            device.refused_ns = 0

    def _read_call(self, device: _Device, call: DeviceCall, passed_ns: int) -> None:
        assert call.end is not None
        clock, anchor = self._anchored(device, call.start, call.recorded_ns, passed_ns)
        since, until = _ns(anchor, call.start), _ns(anchor, call.end)
        clock.after(since, call.recorded_ns)
        clock.after(until, device.refused_ns)
        clock.before(until, passed_ns)
        start_ns = clock.at(since)
        wait_ns = start_ns if call.wait is None else max(clock.at(_ns(anchor, call.wait)), start_ns)
        end_ns = max(clock.at(until), wait_ns)
        self._renew(device, call.start, since)
        self._give_back(call, but=device.anchor)
        for number in call.numbers:
            self._times.device_call(number, start_ns, wait_ns, end_ns)

    def _read_step(self, device: _Device, step: _StepEnd, passed_ns: int) -> None:
        clock, anchor = self._anchored(device, step.end, step.recorded_ns, passed_ns)
        since = _ns(anchor, step.end)
        clock.after(since, max(step.recorded_ns, device.refused_ns))
        clock.before(since, passed_ns)
        if step.follows:  # both ends by the same estimate of the anchor: the distance is the device's own
            self._times.device_step(step.number, clock.at(device.step_since_ns), clock.at(max(since, device.step_since_ns)))
        device.step_since_ns = since
        self._renew(device, step.end, since)
        if device.anchor is not step.end:
            device.free.append(step.end)

    def _renew(self, device: _Device, event: TimedEvent, since_ns: int) -> None:
        """Make an event the anchor if the anchor is old."""
        if since_ns >= RENEWED_NS and device.anchor is not None and device.clock is not None:
            device.clock.renew(since_ns)
            device.step_since_ns -= since_ns
            device.free.append(device.anchor)
            device.anchor = event

    def _anchored(self, device: _Device, event: TimedEvent, recorded_ns: int, passed_ns: int) -> tuple[DeviceClock, TimedEvent]:
        """Return the clock and the anchor. The first event that is read becomes the anchor."""
        if device.anchor is None or device.clock is None:
            device.anchor, device.clock = event, DeviceClock(recorded_ns, passed_ns)
        return device.clock, device.anchor

    def _stop(self, err: Exception) -> None:
        self._running = False
        logger.warning(
            "unickpt: calls are no longer timed on the device, training is not affected (%s: %s)", type(err).__name__, err
        )


def _ns(begin: TimedEvent, end: TimedEvent) -> int:
    """Return the nanoseconds between two events that have passed; negative if ``end`` is the earlier one."""
    return round(begin.elapsed_time(end) * 1e6)
