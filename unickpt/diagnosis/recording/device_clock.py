"""Host time of instants on a device.

Events have distances, no times. One of them, the anchor, is placed on the host's monotonic clock by bounds. An event passes on
the device after the host has recorded it, after the last query that did not find it passed, and before the first query that
did. While the device is idle an event passes at once, and the first bound is tight. While the host is ahead, it queries often,
and the other two are. The tightest bounds of all events since then bound the anchor's time from both sides; the estimate is
their middle.
"""

from __future__ import annotations

DRIFT = 50e-6  # largest relative difference of the clocks' rates that is allowed for
RENEWED_NS = 2_000_000_000  # after which a new anchor is taken: ``elapsed_time`` is a float32, exact to 0.25 us up to here


class DeviceClock:
    """Host time of an anchor event, in nanoseconds on the monotonic clock.

    Args:
        recorded_ns: time before the anchor was recorded.
        passed_ns: time after a query has found that it has passed.
    """

    def __init__(self, recorded_ns: int, passed_ns: int) -> None:
        self._low, self._high = recorded_ns, max(passed_ns, recorded_ns)

    @property
    def anchor_ns(self) -> int:
        """Estimated time of the anchor."""
        return (self._low + self._high) // 2

    @property
    def error_ns(self) -> int:
        """Largest error of the estimate."""
        return (self._high - self._low + 1) // 2

    def after(self, since_ns: int, host_ns: int) -> None:
        """Take in that an event ``since_ns`` after the anchor passed after a host time."""
        self._low = max(self._low, host_ns - since_ns - _drift(since_ns))
        self._high = max(self._high, self._low)  # otherwise the clocks have drifted apart further than allowed for

    def before(self, since_ns: int, host_ns: int) -> None:
        """Take in that an event ``since_ns`` after the anchor passed before a host time."""
        self._high = min(self._high, host_ns - since_ns + _drift(since_ns))
        self._low = min(self._low, self._high)

    def renew(self, since_ns: int) -> None:
        """Make an event that passed ``since_ns`` after the anchor the new anchor."""
        self._low += since_ns - _drift(since_ns)
        self._high += since_ns + _drift(since_ns)

    def at(self, since_ns: int) -> int:
        """Return the host time of an instant ``since_ns`` after the anchor."""
        return self.anchor_ns + since_ns


def _drift(distance_ns: int) -> int:
    return int(abs(distance_ns) * DRIFT) + 1
