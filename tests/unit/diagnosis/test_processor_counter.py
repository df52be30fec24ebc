"""Times that are counted on from the last reading of the clock are those of the clock."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from unickpt.diagnosis.recording import processor_counter

_fast: Any = pytest.importorskip("unickpt.diagnosis.recording._fast")

BOUND_NS = 2000  # of the difference between a time and the monotonic clock
FLAGS = "flags\t\t: fpu tsc constant_tsc nonstop_tsc"
# A clock that stands for a while after a number of readings, as in a suspended host whose counter goes on.
CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>
int clock_gettime(clockid_t id, struct timespec *t)
{
    static int (*real)(clockid_t, struct timespec *);
    static double behind;
    if (!real)
        real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int found = real(id, t);
    const char *stands = getenv("CLOCK_STANDS_NS");
    if (stands)
        behind = atof(stands);
    if (id == CLOCK_MONOTONIC) {
        double ns = t->tv_sec * 1e9 + t->tv_nsec - behind;
        t->tv_sec = ns / 1e9;
        t->tv_nsec = ns - t->tv_sec * 1e9;
    }
    for (volatile int wait = 0; wait < 2000; wait++) /* slow, so that counting is worth it */
        ;
    return found;
}
"""
PROGRAM = """
import os, time
from unickpt.diagnosis.recording import _fast
state = _fast.State(bytearray(96), 1, 1, 0, {}, lambda: -1, True)
print(state.counts)
before = state.now()
os.environ["CLOCK_STANDS_NS"] = "5e6"
time.sleep(0.1)
print(state.now() > before, state.counts, time.monotonic_ns() <= state.now() <= time.monotonic_ns())
"""


def state(*, counter: bool) -> Any:
    return _fast.State(bytearray(96), 1, 1, 0, {}, lambda: -1, counter)


@pytest.mark.parametrize(
    ("processors", "source", "expected"),
    [
        (f"{FLAGS}\n\n{FLAGS} avx\n", "tsc\n", True),
        (f"{FLAGS}\n", "kvm-clock\n", False),
        (f"{FLAGS}\n\nflags : fpu tsc constant_tsc\n", "tsc\n", False),
        ("Features : fp asimd\n", "arch_sys_counter\n", False),
        ("", "tsc", False),
    ],
)
def test_the_kernel_says_whether_the_counter_is_steady(processors: str, source: str, expected: bool) -> None:
    assert processor_counter.steady(processors, source) is expected


def test_a_host_that_says_nothing_has_no_steady_counter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(processor_counter, "_SOURCE", tmp_path / "absent")
    assert not processor_counter.steady_here()


@pytest.mark.parametrize("counter", [False, True])
def test_times_are_those_of_the_monotonic_clock_and_never_go_back(counter: bool) -> None:
    made, last = state(counter=counter), 0
    assert counter or not made.counts
    for at in range(60_000):
        before = time.monotonic_ns()
        now = made.now()
        after = time.monotonic_ns()
        assert before - BOUND_NS <= now <= after + BOUND_NS
        assert now >= last
        last = now
        if at % 20_000 == 0:
            time.sleep(0.3)  # longer than times are counted on


@pytest.mark.skipif(not shutil.which("gcc"), reason="builds a clock")
def test_a_counter_that_disagrees_with_the_clock_is_not_used_again(tmp_path: Path) -> None:
    (tmp_path / "clock.c").write_text(CLOCK)
    library = tmp_path / "clock.so"
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", library, tmp_path / "clock.c", "-ldl"], check=True)
    env = {**os.environ, "LD_PRELOAD": str(library)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True)
    first, then = done.stdout.splitlines()
    if first == "0":
        pytest.skip("reading the counter is slow here")
    assert then == "True 0 True"
