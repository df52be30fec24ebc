"""One rank's notes: which record is which call, and when it ended."""

from __future__ import annotations

import itertools
import logging
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from unickpt.dtypes import torch_dtype
from unickpt.timing import flights
from unickpt.timing.ranks import progressions
from unickpt.timing.records import DTYPES, END_OFFSET, RECORD, Flag, Op, Phase
from unickpt.timing.ring import CLOSED, RingWriter

logger = logging.getLogger("unickpt")

_now = time.monotonic_ns
_in_backward = torch._C._current_graph_task_id  # -1 outside of autograd's own threads and calls
TICK_S = 0.01
STANDS_NS = 2_000_000_000  # without a note: then it is worth to ask how far the device is
_REMEMBERED = 4096  # calls of a communicator that may be under way on a device
_MAX_COMMUNICATORS = 1 << 16
_MAX_ERRORS = 3
DTYPE_CODES = {torch_dtype(name): at for at, name in enumerate(DTYPES, start=1)}
HOST_BACKENDS = ("gloo", "mpi")  # a call of these has ended when it has ended on the host
_RECORD_BYTES = RECORD.itemsize
_pack_end = struct.Struct("<q").pack_into
_ASYNC = int(Flag.ASYNC)
_LAST_COLLECTIVE, _SEND = int(Op.BARRIER), int(Op.SEND)


class Communicator:
    """A process group as the records know it.

    Attributes:
        number: position in the ring's table.
        ranks: global ranks of the members, by their rank in the group.
        on_device: its calls end on a device: that the host goes on tells nothing of it.
        sequence: numbers of its collectives.
        given: records of what was given to the device last, the newest at the end.
        group: the process group, while it lives.
    """

    __slots__ = ("_pairs", "given", "group", "number", "on_device", "ranks", "sequence")

    def __init__(self, number: int, group: Any, ranks: Sequence[int], *, on_device: bool = False) -> None:
        self.number, self.group, self.ranks, self.on_device = number, weakref.ref(group), tuple(ranks), on_device
        self.sequence = itertools.count(1)
        self.given: deque[int] = deque(maxlen=_REMEMBERED)
        self._pairs: dict[tuple[int, int], itertools.count[int]] = {}

    def pair(self, source: int, destination: int) -> itertools.count[int]:
        """Numbers of the point-to-point calls from one rank to another, both global ranks."""
        found = self._pairs.get((source, destination))
        return found if found is not None else self._pairs.setdefault((source, destination), itertools.count(1))


class Recorder:
    """Writes this rank's records. Methods that are called beside training never raise anything that training would see.

    Args:
        ring: where to.
        describe: what the table says of a process group: ``(group) -> entry`` with at least ``ranks``.

    Attributes:
        step: of training, as the adapter tells it.
        phase: of training; backward is found out where nothing else is known.
    """

    def __init__(self, ring: RingWriter, describe: Callable[[Any], dict[str, Any]]) -> None:
        self.ring, self._describe = ring, describe
        self._rank = ring.identity.rank
        self._pack, self._map, self._first, self._capacity = (
            ring.pack,
            ring.map,
            ring.first_byte,
            ring.capacity,
        )  # close at hand
        self.step, self.phase = 0, int(Phase.UNKNOWN)
        self._numbers = itertools.count(1)
        self._last = 0
        self._communicators: dict[str, Communicator] = {}
        self._of_group: dict[int, Communicator] = {}  # by id, while the group lives
        self._lock = threading.Lock()
        self._pending: dict[int, tuple[Any, int | tuple[int, ...], int]] = {}  # id of the work -> it, its records, their flags
        self._errors = 0
        self._quiet = (0, 0)  # the newest record, and when to ask if it still is that
        self._waiting = 0  # record of the call that this rank waits in, as the device tells
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="unickpt-timing", daemon=True)
        self._thread.start()

    def _communicator(self, group: Any) -> Communicator:
        """The communicator of a process group that was not seen before."""
        name = group.group_name
        with self._lock:
            found = self._communicators.get(name)
            if found is None:
                found = self._communicators[name] = self._list(group, name)
            weakref.finalize(group, self._of_group.pop, id(group), None).atexit = False
            self._of_group[id(group)] = found
        return found

    def _list(self, group: Any, name: str) -> Communicator:
        entry = self._describe(group)
        number = len(self._communicators)
        ranks = entry.pop("ranks")
        on_device = entry.get("backend", HOST_BACKENDS[0]) not in HOST_BACKENDS
        line = {**entry, "name": name, "ranks": progressions(ranks), "on_device": on_device}
        if number >= _MAX_COMMUNICATORS or not self.ring.list_communicator(line):
            raise OverflowError(f"the table of communicators is full: {number} are in it")
        return Communicator(number, group, ranks, on_device=on_device)

    def call(self, group: Any, what: tuple[int, int, int, int, int, int, int, int], more: int = 0) -> int:
        """Note a call that is about to be made; the number of its record, 0 if there is nothing more to note of it.

        Args:
            group: the process group.
            what: operation, dtype, elements in and out, flags, rank in the group (-1: none), tag, hash of the shape.
            more: further flags.
        """
        op, dtype, elements_in, elements_out, flags, peer, tag, shape = what
        communicator = self._of_group.get(id(group)) or self._communicator(group)
        if peer >= 0:
            peer = communicator.ranks[peer]
        if op <= _LAST_COLLECTIVE:
            seq = next(communicator.sequence)
        else:
            seq = next(communicator.pair(self._rank, peer) if op == _SEND else communicator.pair(peer, self._rank))
        phase = self.phase
        if phase <= 1 and _in_backward() != -1:
            phase = 2
        number = self._last = next(self._numbers)
        now = _now()
        wait = 0 if flags & _ASYNC or communicator.on_device else now
        at = self._first + (number - 1) % self._capacity * _RECORD_BYTES
        self._pack(
            self._map, at, number, now, 0, wait, 0, seq, elements_in, elements_out, communicator.number, op, dtype,
            flags | more, phase, 0, peer, tag, self.step, shape, number,
        )  # fmt: skip
        if communicator.on_device:
            communicator.given.append(number)
            return 0
        return number

    def end(self, numbers: int | tuple[int, ...]) -> None:
        """Note that records have ended now."""
        now = _now()
        for number in (numbers,) if type(numbers) is int else numbers:  # type: ignore[union-attr]
            if number > self._last - self._capacity:
                _pack_end(self._map, self._first + (number - 1) % self._capacity * _RECORD_BYTES + END_OFFSET, now)

    def issued(self, numbers: int | tuple[int, ...], work: Any, flags: int) -> None:
        """Note what a call has returned: work that goes on, or nothing, if all is done."""
        if work is None:
            self.end(numbers)
        else:
            self._pending[id(work)] = (work, numbers, flags)

    def waits(self, work: Any) -> int | tuple[int, ...]:
        """Note that somebody begins to wait for work on the host; the numbers of its records, which are theirs to end now.

        0 if there is nothing to end. A call that was not asynchronous is waited for from its beginning anyway.
        """
        found = self._pending.pop(id(work), None)
        if found is None:
            return 0
        _, numbers, flags = found
        if flags & _ASYNC:
            self.wait(numbers)
        return numbers

    def wait(self, numbers: int | tuple[int, ...]) -> None:
        """Note that somebody begins to wait for records' calls now."""
        now = _now()
        for number in (numbers,) if isinstance(numbers, int) else numbers:
            if number > self._last - self._capacity:
                self.ring.wait(number, now)

    def failed(self, numbers: int | tuple[int, ...]) -> None:
        """Note that a call, or its work, has failed. It stays without an end: to a rank that dies of it, it was the last."""
        for number in (numbers,) if isinstance(numbers, int) else numbers:
            if number > self._last - self._capacity:
                self.ring.flag(number, int(Flag.FAILED))

    def moment(self, op: Op, begin_ns: int, end_ns: int) -> None:
        """Note something that is over and is no call: a step, a pause, a wait for data."""
        number = self._last = next(self._numbers)
        self.ring.put(number, begin_ns, 0, begin_ns, end_ns, 0, 0, 0, 0, int(op), 0, 0, self.phase, 0, -1, 0, self.step, 0)

    def error(self, err: Exception) -> bool:
        """An error of our own beside a call; whether recording shall stop."""
        self._errors += 1
        if self._errors == _MAX_ERRORS:
            logger.warning(
                "unickpt: rank %d: collectives are no longer timed, training is not affected (%s: %s)",
                self.ring.identity.rank, type(err).__name__, err,
            )  # fmt: skip
        return self._errors >= _MAX_ERRORS

    def close(self) -> None:
        """The process ends in order, or recording does."""
        self._over.set()
        self._thread.join(1.0)
        self._sweep()
        self.ring.state(heartbeat_ns=_now(), step=self.step, newest=self._last, phase=self.phase, state=CLOSED)

    def publish(self) -> None:
        """Tell whoever reads the ring where training is."""
        self.ring.state(heartbeat_ns=_now(), step=self.step, newest=self._last, phase=self.phase)

    def _tick(self) -> None:
        """Beside training: the heartbeat, and ends of what nobody has waited for yet."""
        while not self._over.wait(TICK_S):
            try:
                self._sweep()
                self._ask()
                self.publish()
            except Exception as err:
                if self.error(err):
                    return

    def _sweep(self) -> None:
        for key, (work, numbers, _) in list(self._pending.items()):
            if work.is_completed():
                (self.end if _succeeded(work) else self.failed)(numbers)
                found = self._pending.get(key)
                if found is not None and found[0] is work:
                    del self._pending[key]

    def _ask(self) -> None:
        """Once a second while this rank stands: what of its calls has ended on the device, and which it waits in.

        Nothing is noted unless that is known of all of its communicators: what stands may be another one's call.
        """
        now, newest = _now(), self._last
        if newest != self._quiet[0]:
            self._quiet = newest, now + STANDS_NS
        if now < self._quiet[1] or not newest:
            return
        self._quiet = newest, now + STANDS_NS // 2
        given = [(each.given, group) for each in self._communicators.values() if each.given and (group := each.group())]
        known = flights.counts() if given else ()
        left = [flights.in_flight(group, known) for _, group in given]
        if newest != self._last:
            return
        over, under_way = [self._waiting], list[int]()
        for (records, _), count in zip(given, left, strict=True):
            if count is None or count > len(records):  # or some of them were begun before, or are counted in another way
                return
            if count:
                under_way.append(records[-count])
            if count < len(records):
                over.append(records[-1 - count])
        waits = min(under_way, default=0)  # for what was given first
        if waits and waits != self._waiting:
            self.wait(waits)
        self._waiting = waits
        self.end(tuple(number for number in over if number not in (0, waits) and not self.ring.ended(number)))


def _succeeded(work: Any) -> bool:
    """Of work that is complete. (``Work.is_success`` would warn in the log that torch may drop it.)"""
    try:
        future = work.get_future()
    except RuntimeError:  # point-to-point work has none: whoever waits for it is told
        return True
    try:
        future.wait()
    except RuntimeError:
        return False
    return True
