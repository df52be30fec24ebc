"""Counters, speeds, shares and GPUs: what is a change, and what is usual."""

from __future__ import annotations

from unickpt.diagnosis.hardware import counters
from unickpt.diagnosis.hardware.counters import Counter, CounterRule, Levels, Rises, Shares
from unickpt.diagnosis.hardware.events import EventKind, EventLog, HostEvent
from unickpt.diagnosis.hardware.gpus import GpuReading, Gpus

S = 1_000_000_000
EVERY = 5 * S


def rises(values: list[int], least: int) -> list[int]:
    """Return the numbers of the readings with an event."""
    found, counter = Rises(), Counter("mlx5_0/1", "symbol_error", CounterRule(EventKind.LINK_ERRORS, least))
    return [at for at, value in enumerate(values) if found.events({counter: value}, at * EVERY, (at + 1) * EVERY)]


def test_a_rise_counts_if_it_is_large_and_unusual() -> None:
    assert rises([3] * 10 + [103, 103, 103], 50) == [10]
    assert rises([at * 60 for at in range(40)], 50) == []  # it always rises so
    assert rises([3] * 10 + [3 + 40], 50) == []
    assert rises([10**9, 10**9] + [0] * 5, 50) == []  # reset
    assert rises([0, 500, 500], 50) == []  # nothing is usual yet
    assert rises([7, 8, 8], 1) == [1]  # a link that goes down need not be learnt


def test_a_link_is_compared_with_its_best_speed() -> None:
    levels = Levels()
    assert levels.events({"eth0": 0.0, "mlx5_0/1": 400.0}, 0, EVERY) == []  # it was never up
    assert levels.events({"eth0": 25.0, "mlx5_0/1": 400.0}, EVERY, 2 * EVERY) == []
    slower, down = levels.events({"eth0": 10.0, "mlx5_0/1": 0.0}, 2 * EVERY, 3 * EVERY)
    assert (slower.kind, slower.device, slower.amount) == (EventKind.LINK_SLOWER, "eth0", 0.4)
    assert (down.kind, down.device, down.begin_ns) == (EventKind.LINK_DOWN, "mlx5_0/1", 2 * EVERY)


def test_a_pressure_counts_if_it_is_unusual_and_a_limit_always() -> None:
    least = {EventKind.MEMORY_PRESSURE: 0.1, EventKind.CPU_LIMIT: 0.1}
    steady, sudden = Shares(), Shares()
    key = EventKind.MEMORY_PRESSURE, ""
    found = [steady.events({key: at * 2.0}, least, at * EVERY, (at + 1) * EVERY) for at in range(60)]
    assert all(not each for each in found)  # 40% of the time, as always
    for at in range(10):
        assert sudden.events({key: 0.0}, least, at * EVERY, (at + 1) * EVERY) == []
    (event,) = sudden.events({key: 3.0}, least, 10 * EVERY, 11 * EVERY)
    assert event.amount == 0.6
    limits = Shares()
    limits.events({(EventKind.CPU_LIMIT, "/a"): 0.0}, least, 0, EVERY)
    (event,) = limits.events({(EventKind.CPU_LIMIT, "/a"): 2.5}, least, EVERY, 2 * EVERY)
    assert (event.kind, event.device, event.amount) == (EventKind.CPU_LIMIT, "/a", 0.5)


def test_gpus_are_compared_with_the_reading_before() -> None:
    sound = GpuReading(uncorrected=4, retired=1, clock_mhz=1980, most_mhz=1980, celsius=60)
    gpus = Gpus()
    assert gpus.events({"a": sound, "b": sound}, 0, S) == []  # what was there before the job is no change
    worse = GpuReading(5, 1, False, 0, 1980, 1980, 60)
    (event,) = gpus.events({"a": worse, "b": sound}, S, 2 * S)
    assert (event.kind, event.device, event.amount) == (EventKind.GPU_MEMORY, "a", 1)
    hot = GpuReading(5, 1, False, 0x48, 900, 1980, 91)
    assert gpus.events({"a": hot, "b": sound}, 2 * S, 3 * S) == []  # at one reading alone
    (event,) = gpus.events({"a": hot, "b": sound}, 3 * S, 4 * S)
    assert (event.kind, event.amount) == (EventKind.GPU_HOT, 91)
    usual = GpuReading(5, 1, False, 0x1 | 0x2 | 0x4 | 0x10 | 0x100, 900, 1980, 60)
    assert not any(gpus.events({"a": usual, "b": sound}, at * S, (at + 1) * S) for at in range(4, 8))
    (event,) = gpus.events({"a": usual}, 9 * S, 10 * S)
    assert (event.kind, event.device) == (EventKind.GPU_LOST, "b")
    recovered = GpuReading(5, 1, False, 0, 1980, 1980, 60, recoveries=1)
    assert EventKind.NVLINK in {event.kind for event in gpus.events({"a": recovered, "b": sound}, 10 * S, 11 * S)}


def test_what_goes_on_is_one_event() -> None:
    log = EventLog()
    for at in range(5):
        log.add(HostEvent(EventKind.LINK_ERRORS, "eth0", at * S, (at + 1) * S, 30.0), within_ns=S)
    log.add(HostEvent(EventKind.LINK_ERRORS, "eth1", 0, S, 30.0), within_ns=S)
    first, second = sorted(log.newest(6 * S), key=lambda event: event.device)
    assert (first.begin_ns, first.end_ns, first.amount) == (0, 5 * S, 150.0)
    assert second.amount == 30.0
    assert log.newest(2000 * S) == ()


def test_files_of_the_kernel_are_parsed() -> None:
    text = "some avg10=0.00 avg60=0.12 avg300=0.05 total=2500000\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=7\n"
    assert counters.parse_pressure(text) == {"some": 2.5, "full": 7e-6}
    assert counters.parse_pressure("nonsense\nsome total=x") == {}
    assert counters.parse_pairs("oom 1\noom_kill 2\nname with words 3\n") == {"oom": 1, "oom_kill": 2}
    assert [counters.parse_rate(each) for each in ("400 Gb/sec (4X NDR)", "100000", "", "-1")] == [400.0, 100000.0, 0.0, -1.0]
    assert counters.parse_groups("4:memory:/a\n1:cpu,cpuacct:/b\n0::/c:d\n") == {
        "memory": "/a", "cpu": "/b", "cpuacct": "/b", "": "/c:d",
    }  # fmt: skip
