"""Writer of one rank's records."""

from __future__ import annotations

import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from unickpt.base.io_times import IoTime
from unickpt.base.logs import logger
from unickpt.checkpoint.format.dtypes import torch_dtypes
from unickpt.diagnosis.recording import flight_recorder
from unickpt.diagnosis.recording.device_events import EventSource
from unickpt.diagnosis.recording.device_timer import DeviceCall, DeviceTimer
from unickpt.diagnosis.recording.fast_path import counter, state_of
from unickpt.diagnosis.recording.rank_ranges import progressions
from unickpt.diagnosis.recording.records import DTYPES, END_OFFSET, RECORD, Flag, Op, Phase
from unickpt.diagnosis.recording.ring import CLOSED, RAISED, RingWriter

_in_backward = torch._C._current_graph_task_id  # -1 outside of autograd's own threads and calls
TICK_S = 0.01
STANDS_NS = 2_000_000_000  # without a new record: then the progress on the device is read
_REMEMBERED = 4096  # calls of a communicator that may be in flight on a device
_MAX_COMMUNICATORS = 1 << 16
_MAX_CREATED = 512  # communicators in the table up to which the creation of groups is recorded
_MAX_ERRORS = 3
DTYPE_CODES = {dtype: DTYPES.index(name) + 1 for name, dtype in torch_dtypes().items()}
_BYTES = DTYPES.index("U8") + 1
HOST_BACKENDS = ("gloo", "mpi")  # backends whose calls end on the host
_RECORD_BYTES = RECORD.itemsize
_pack_end = struct.Struct("<q").pack_into
_ASYNC, _TIMED_ON_DEVICE = int(Flag.ASYNC), int(Flag.TIMED_ON_DEVICE)
_LAST_COLLECTIVE, _SEND = int(Op.BARRIER), int(Op.SEND)
Handle = int | DeviceCall  # a call whose end is still to be recorded: its record, or a call that is timed on the device


class Communicator:
    """A process group in the records.

    Attributes:
        number: position in the ring's table.
        ranks: global ranks of the members, by their rank in the group.
        on_device: whether its calls end on a device.
        timed: whether they are timed there.
        sequence: counter of its collectives.
        given: records of the calls given to the device last, the newest at the end.
        group: weak reference to the process group.
    """

    __slots__ = ("_pairs", "given", "group", "number", "on_device", "ranks", "sequence", "timed")

    def __init__(self, number: int, group: Any, ranks: Sequence[int], *, on_device: bool = False, timed: bool = False) -> None:
        self.number, self.group, self.ranks, self.on_device = number, weakref.ref(group), tuple(ranks), on_device
        self.timed = timed
        self.sequence = counter()
        self.given: deque[int] = deque(maxlen=_REMEMBERED)
        self._pairs: dict[tuple[int, int], Iterator[int]] = {}

    def pair(self, source: int, destination: int) -> Iterator[int]:
        """Return the counter of point-to-point calls from one global rank to another."""
        found = self._pairs.get((source, destination))
        return found if found is not None else self._pairs.setdefault((source, destination), counter())


class CallRecorder:
    """Writer of this rank's records. Errors never reach training.

    Args:
        ring: ring to write to.
        describe: returns the table's entry for a process group, with at least ``ranks``.
        events: events that time calls on a device; None: these calls are recorded without times.
        extension: record usual calls in C if the extension is installed.

    Attributes:
        state: numbers, step and phase, which the extension shares. A backward pass is detected if the phase is unknown.
    """

    def __init__(
        self,
        ring: RingWriter,
        describe: Callable[[Any], dict[str, Any]],
        events: EventSource | None = None,
        *,
        extension: bool = True,
    ) -> None:
        self.ring, self._describe = ring, describe
        self._device = None if events is None else DeviceTimer(events, self)
        self._rank = ring.identity.rank
        self._pack, self._map, self._first, self._capacity = (ring.pack, ring.map, ring.first_byte, ring.capacity)
        self.state = state_of(ring, DTYPE_CODES, extension=extension)
        self.state.blocked, self.state.waits_blocked = 1, 1 + (self._device is not None)  # ``ProcessGroupHooks`` take 1 off
        self._communicators: dict[str, Communicator] = {}
        self._of_group: dict[int, Communicator] = {}  # by id, while the group lives
        self._lock = threading.Lock()
        self._errors = 0
        self._quiet = (0, 0)  # newest record, and time of the next look at the device
        self._waiting = 0  # record of the call that this rank waits in on the device
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="unickpt-timing", daemon=True)
        self._thread.start()

    def _communicator(self, group: Any) -> Communicator:
        """Return the communicator of a process group that is new."""
        name = group.group_name
        with self._lock:
            found = self._communicators.get(name)
            if found is None:
                found = self._communicators[name] = self._list(group, name)
            weakref.finalize(group, self._forget_group, id(group)).atexit = False
            self._of_group[id(group)] = found
            if not found.timed:
                given = found.given if found.on_device else None
                self.state.add_group(id(group), (found.number, found.sequence, found.ranks, found.pair, given))
        return found

    def _forget_group(self, key: int) -> None:
        self._of_group.pop(key, None)
        self.state.remove_group(key)

    def _list(self, group: Any, name: str) -> Communicator:
        entry = self._describe(group)
        number = len(self._communicators)
        ranks = entry.pop("ranks")
        backend = entry.get("backend", HOST_BACKENDS[0])
        timed = self._device is not None and self._device.covers(backend)
        on_device = timed or backend not in HOST_BACKENDS
        line = {**entry, "name": name, "ranks": progressions(ranks), "on_device": on_device}
        if number >= _MAX_COMMUNICATORS or not self.ring.list_communicator(line):
            raise OverflowError(f"the table of communicators is full: {number} are in it")
        return Communicator(number, group, ranks, on_device=on_device, timed=timed)

    def call(self, group: Any, what: tuple[int, int, int, int, int, int, int, int], more: int = 0) -> Handle:
        """Record a call that is about to be made.

        Args:
            group: process group.
            what: operation, dtype, elements in and out, flags, rank in the group (-1: none), tag, hash of the shape.
            more: further flags.

        Returns:
            The call, for the methods below; 0 if its end is not to be recorded.
        """
        op, dtype, elements_in, elements_out, flags, peer, tag, shape = what
        communicator = self._of_group.get(id(group)) or self._communicator(group)
        if peer >= 0:
            peer = communicator.ranks[peer]
        if op <= _LAST_COLLECTIVE:
            seq = next(communicator.sequence)
        else:
            seq = next(communicator.pair(self._rank, peer) if op == _SEND else communicator.pair(peer, self._rank))
        state = self.state
        phase = state.phase
        if phase <= 1 and _in_backward() != -1:
            phase = 2
        number = state.next()
        now = state.now()
        wait = 0 if flags & _ASYNC or communicator.on_device else now
        if communicator.timed:
            more |= _TIMED_ON_DEVICE
        at = self._first + (number - 1) % self._capacity * _RECORD_BYTES
        self._pack(
            self._map, at, number, now, 0, wait, 0, seq, elements_in, elements_out, communicator.number, op, dtype,
            flags | more, phase, 0, peer, tag, state.step, shape, number,
        )  # fmt: skip
        if communicator.on_device:
            communicator.given.append(number)
            return 0 if not communicator.timed or self._device is None else self._device.begin(number) or 0
        return number

    def new_group(self, ranks: Sequence[int]) -> int:
        """Record that this rank begins to create a process group with some ranks. Return the call; 0 if it is not recorded.

        Groups with the same ranks are created one after the other, so they are one communicator.
        """
        key = f"new group {progressions(ranks)}"
        with self._lock:
            found = self._communicators.get(key)
            if found is None:
                if len(self._communicators) >= _MAX_CREATED:  # leave room in the table for groups that communicate
                    return 0
                number = len(self._communicators)
                line = {"label": "new", "backend": "", "name": key, "ranks": progressions(ranks), "on_device": False}
                if not self.ring.list_communicator(line):
                    return 0
                found = self._communicators[key] = Communicator(number, self, ranks)
        number, now = self.state.next(), self.state.now()
        self.ring.put(
            number, now, 0, now, 0, next(found.sequence), 0, 0, found.number, int(Op.NEW_GROUP), 0, 0, self.state.phase, 0, -1,
            0, self.state.step, 0,
        )  # fmt: skip
        return number

    def together(self, calls: list[Handle]) -> Handle | tuple[int, ...]:
        """Return calls that were issued as one."""
        device = tuple(call for call in calls if isinstance(call, DeviceCall))
        if device and self._device is not None:
            return self._device.joined(device)
        return tuple(call for call in calls if isinstance(call, int))

    def end(self, numbers: Handle | tuple[int, ...]) -> None:
        """Record that calls have ended now, or that the current stream has them behind it."""
        if type(numbers) is DeviceCall:
            if self._device is not None:
                self._device.end(numbers)
            return
        now = self.state.now()
        for number in (numbers,) if type(numbers) is int else numbers:  # type: ignore[union-attr]
            if number > self.state.last - self._capacity:
                _pack_end(self._map, self._first + (number - 1) % self._capacity * _RECORD_BYTES + END_OFFSET, now)

    def issued(self, numbers: Handle | tuple[int, ...], work: Any, flags: int) -> None:
        """Record the result of a call: its work, or None if the call has ended."""
        if isinstance(numbers, DeviceCall):
            if self._device is not None:
                self._device.issued(numbers, work, mark=bool(flags & _ASYNC))
        elif work is None:
            self.end(numbers)
        else:
            self.state.pending[id(work)] = (work, numbers, flags)

    def waits(self, work: Any) -> Handle | tuple[int, ...]:
        """Record that the host or the current stream begins to wait for work.

        Returns:
            Its calls, which the caller ends; 0 for none. A synchronous call is waited for from its beginning.
        """
        found = self.state.pending.pop(id(work), None)
        if found is None:
            return 0 if self._device is None else self._device.waits(work) or 0
        _, numbers, flags = found
        if flags & _ASYNC:
            self.wait(numbers)
        return numbers

    def forget(self, call: Handle) -> None:
        """Give up recording the end of a call."""
        if isinstance(call, DeviceCall) and self._device is not None:
            self._device.drop(call)

    def wait(self, numbers: Handle | tuple[int, ...]) -> None:
        """Record that a wait for calls begins now."""
        if isinstance(numbers, DeviceCall):
            if self._device is not None:
                self._device.mark_wait(numbers)
            return
        now = self.state.now()
        for number in (numbers,) if isinstance(numbers, int) else numbers:
            if number > self.state.last - self._capacity:
                self.ring.wait(number, now)

    def failed(self, numbers: Handle | tuple[int, ...]) -> None:
        """Record that a call or its work has failed. The record stays without an end."""
        if isinstance(numbers, DeviceCall):
            if self._device is not None:
                self._device.drop(numbers)
            numbers = numbers.numbers
        for number in (numbers,) if isinstance(numbers, int) else numbers:
            if number > self.state.last - self._capacity:
                self.ring.flag(number, int(Flag.FAILED))

    def moment(self, op: Op, begin_ns: int, end_ns: int, phase: int | None = None) -> None:
        """Record an event that is over: a step, a pause, a wait for data. ``phase``: default: the current one."""
        now = self.state.phase if phase is None else phase
        number = self.state.next()
        self.ring.put(number, begin_ns, 0, begin_ns, end_ns, 0, 0, 0, 0, int(op), 0, 0, now, 0, -1, 0, self.state.step, 0)
        if op is Op.STEP and self._device is not None:
            self._device.step(number)

    def checkpoint_io(self, time: IoTime) -> None:
        """Record a phase of a save or load that is over. Any thread may call this."""
        number = self.state.next()
        flags, op = _ASYNC if time.background else 0, int(Op[time.phase.value.upper()])
        self.ring.put(
            number, time.begin_ns, 0, 0, time.end_ns, 0, time.size_bytes, 0, 0, op, _BYTES, flags, int(Phase.CHECKPOINT), 0,
            -1, 0, time.step, 0,
        )  # fmt: skip

    def device_call(self, number: int, start_ns: int, wait_ns: int, end_ns: int) -> None:
        """Write the times of a call on its device."""
        if number > self.state.last - self._capacity:
            self.ring.device_call(number, start_ns, wait_ns, end_ns)

    def device_step(self, number: int, begin_ns: int, end_ns: int) -> None:
        """Write the times of a step on the device."""
        if number > self.state.last - self._capacity:
            self.ring.device_step(number, begin_ns, end_ns)

    def error(self, err: Exception) -> bool:
        """Count an error of the recorder; return whether recording shall stop."""
        self._errors += 1
        if self._errors == _MAX_ERRORS:
            logger.warning(
                "unickpt: rank %d: collectives are no longer timed, training is not affected (%s: %s)",
                self.ring.identity.rank,
                type(err).__name__,
                err,
            )
        return self._errors >= _MAX_ERRORS

    def close(self, *, raised: bool = False) -> None:
        """End recording. ``raised``: an exception ends the process."""
        self._over.set()
        self._thread.join(1.0)
        self._sweep()
        if self._device is not None:
            self._device.close()
        self.ring.state(
            heartbeat_ns=self.state.now(), step=self.state.step, newest=self.state.last, phase=self.state.phase,
            state=RAISED if raised else CLOSED,
        )  # fmt: skip

    def publish(self) -> None:
        """Write heartbeat, step and phase to the ring."""
        self.ring.state(heartbeat_ns=self.state.now(), step=self.state.step, newest=self.state.last, phase=self.state.phase)

    def _tick(self) -> None:
        """Thread beside training: write the heartbeat and the ends of calls without a wait."""
        while not self._over.wait(TICK_S):
            try:
                self._sweep()
                self._ask()
                self.publish()
            except Exception as err:
                if self.error(err):
                    return

    def _sweep(self) -> None:
        for key, (work, numbers, _) in list(self.state.pending.items()):
            if work.is_completed():
                (self.end if _succeeded(work) else self.failed)(numbers)
                found = self.state.pending.get(key)
                if found is not None and found[0] is work:
                    del self.state.pending[key]

    def _ask(self) -> None:
        """While this rank makes no call, record once a second which calls have ended on the device and in which it waits.

        Nothing is recorded unless the progress of all communicators is known: the rank may wait in a call of any of them.
        """
        now, newest = self.state.now(), self.state.last
        if newest != self._quiet[0]:
            self._quiet = newest, now + STANDS_NS
        if now < self._quiet[1] or not newest:
            return
        self._quiet = newest, now + STANDS_NS // 2
        given = [(each.given, group) for each in self._communicators.values() if each.given and (group := each.group())]
        known = flight_recorder.counts() if given else ()
        left = [flight_recorder.in_flight(group, known) for _, group in given]
        if newest != self.state.last:
            return
        over, under_way = [self._waiting], list[int]()
        for (records, _), count in zip(given, left, strict=True):
            if count is None or count > len(records):  # unknown, or begun before recording
                return
            if count:
                under_way.append(records[-count])
            if count < len(records):
                over.append(records[-1 - count])
        waits = min(under_way, default=0)  # the call given first
        if waits and waits != self._waiting:
            self.wait(waits)
        self._waiting = waits
        self.end(tuple(number for number in over if number not in (0, waits) and not self.ring.ended(number)))


def _succeeded(work: Any) -> bool:
    """Return whether completed work succeeded. ``Work.is_success`` would log a deprecation warning."""
    try:
        future = work.get_future()
    except RuntimeError:  # point-to-point work has no future; its error is raised by the wait
        return True
    try:
        future.wait()
    except RuntimeError:
        return False
    return True
