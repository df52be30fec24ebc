"""The stack of a process that does not come back from a call."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.repository import REPO
from unickpt.diagnosis.host import stack_dumps
from unickpt.testing.launch import environment

STUCK = """
import sys, time
from pathlib import Path
from unickpt.diagnosis.host import stack_dumps as stacks
listening = stacks.listen(Path(sys.argv[1]))
def busy():
    print("here", flush=True)
    {body}
def outer():
    busy()
outer()
"""


@pytest.mark.parametrize("body", ["while True: pass", "time.sleep(3600)", "sum(iter(int, 1))"])
def test_the_stack_of_a_process_that_is_stuck(tmp_path: Path, body: str) -> None:
    path = tmp_path / "0.stacks"
    command = [sys.executable, "-c", STUCK.format(body=body), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=REPO, env=environment(UNICKPT_AUTOLOAD="0")) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(0.2)  # it says so a line before it is
            for _ in range(2):
                frames = stack_dumps.ask_all({process.pid: path})[process.pid]
                assert frames[:2] == (stack_dumps.Frame("busy", "<string>", 8), stack_dumps.Frame("outer", "<string>", 10))
            assert process.poll() is None
        finally:
            process.kill()


BUSY = STUCK.replace(
    "def busy",
    """import threading
def deep(depth):
    return depth and deep(depth - 1)
def runs():
    while True:
        deep(200)
        exec("def made(): return 1\\nmade()", {{}})
for _ in range(3):
    threading.Thread(target=runs, daemon=True).start()
def busy""",
)


def test_a_process_with_busy_threads_survives_requests_for_its_stack(tmp_path: Path) -> None:
    """Stacks of threads that run would be read while they change."""
    path = tmp_path / "0.stacks"
    command = [sys.executable, "-c", BUSY.format(body="time.sleep(3600)"), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=REPO, env=environment(UNICKPT_AUTOLOAD="0")) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            for _ in range(300):
                with contextlib.ExitStack() as files:
                    assert stack_dumps._signalled(process.pid, path, files) is not None
                time.sleep(0.001)
            frames = stack_dumps.ask_all({process.pid: path})[process.pid]
            assert [frame.function for frame in frames[:2]] == ["busy", "outer"]
            assert process.poll() is None
        finally:
            process.kill()


ENDED = STUCK.replace("def busy", "fatal = stacks.listen_to_end(listening)\nimport os, signal\ndef busy")
ALONE = environment(UNICKPT_AUTOLOAD="0", PYTHONFAULTHANDLER="")  # as users have it


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGABRT, signal.SIGSEGV])
def test_a_process_that_a_signal_ends_has_left_its_stack(tmp_path: Path, number: signal.Signals) -> None:
    path = tmp_path / "0.stacks"
    command = [sys.executable, "-c", ENDED.format(body="time.sleep(3600)"), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=REPO, env=ALONE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.2)
        process.send_signal(number)
        assert process.wait(20) == -number
    frames = stack_dumps.kept(path, 0)
    assert [frame.function for frame in frames[:2]] == ["busy", "outer"]


RAISED = """
import sys, time
import torch, torch.distributed as dist
import unickpt
from unickpt.base.options.job import TimingOptions
class Slow(Exception):
    def __str__(self):  # as one that reads files, or formats many numbers
        print("said", flush=True)
        time.sleep(5)
        return "slow"
folder = sys.argv[1]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
unickpt.time_collectives(TimingOptions(enabled=True, watch=False, folder=folder + "/rings"))
def fails():
    raise Slow
fails()
"""


def test_a_process_that_fails_is_where_the_exception_was_raised(tmp_path: Path) -> None:
    """While the end of it is described, its stack is that of the description."""
    command = [sys.executable, "-c", RAISED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=REPO, env=environment()) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            [path] = tmp_path.rglob("*.stacks")
            assert stack_dumps.ask_all({process.pid: path}) == {process.pid: ()}
            assert stack_dumps.place_of(stack_dumps.kept(path, 0)) == stack_dumps.Frame("fails", "<string>", 15)
        finally:
            process.kill()


ABORTED = BUSY.replace("outer()\n", "").replace(
    "def busy",
    """import ctypes, os
from unickpt.diagnosis.recording import _fast
def first(fd, number):
    _fast.main_stack_first(fd, number)
    return True
fatal = stacks.listen_to_end(listening, first)
libc = ctypes.CDLL(None)
def native():
    assert libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, ctypes.cast(libc.abort, ctypes.c_void_p), None) == 0
def busy""",
)


@pytest.mark.parametrize(
    "ends",
    ["native()", "threading.Thread(target=os.abort).start()", "os.abort()"],
    ids=["thread without Python", "thread of Python", "main thread"],
)
def test_the_main_thread_writes_its_stack_before_a_fatal_signal_in_another_one_ends_the_process(
    tmp_path: Path, ends: str
) -> None:
    """Threads of Python run meanwhile, whose frames nobody may read."""
    pytest.importorskip("unickpt.diagnosis.recording._fast", reason="built without a compiler")
    path = tmp_path / "0.stacks"
    program = ABORTED.format(body=f"{ends}; time.sleep(60)") + "\nouter()"
    done = subprocess.run([sys.executable, "-c", program, str(path)], cwd=REPO, env=ALONE, check=False, capture_output=True)
    assert done.returncode == -signal.SIGABRT, done.stderr
    names = [frame.function for frame in stack_dumps.kept(path, 0)]
    assert "busy" in names[:4]  # a thread that starts another one waits for that
    assert b"runs" not in path.read_bytes()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("stacks.ignore(fatal=fatal); native(); time.sleep(60)", -signal.SIGABRT),
        ("pid = os.fork(); native() if not pid else os._exit(os.waitpid(pid, 0)[1]); time.sleep(60)", int(signal.SIGABRT)),
    ],
    ids=["after the end of recording", "in a fork"],
)
def test_a_fatal_signal_leaves_no_stack_of_another_process_nor_after_the_end(tmp_path: Path, body: str, status: int) -> None:
    pytest.importorskip("unickpt.diagnosis.recording._fast", reason="built without a compiler")
    path = tmp_path / "0.stacks"
    program = ABORTED.format(body=body) + "\nouter()"
    done = subprocess.run([sys.executable, "-c", program, str(path)], cwd=REPO, env=ALONE, check=False, capture_output=True)
    assert done.returncode & ~0x80 == status & ~0x80, done.stderr  # with the bit of a core dump, or without
    assert stack_dumps.kept(path, 0) == ()


HANDLED = "signal.signal(signal.SIGTERM, lambda *_: os._exit(7)); "
TERM = "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)"


@pytest.mark.parametrize(
    "body",
    [HANDLED + TERM, f"stacks.ignore(fatal=fatal); {HANDLED}stacks.listen_to_end(listening); {TERM}"],
    ids=["later", "before"],
)
def test_a_handler_of_the_program_stays(tmp_path: Path, body: str) -> None:
    command = [sys.executable, "-c", ENDED.format(body=body), str(tmp_path / "0.stacks")]
    assert subprocess.run(command, cwd=REPO, env=ALONE, check=False).returncode == 7


def test_a_fork_that_is_ended_leaves_no_stack_of_the_rank(tmp_path: Path) -> None:
    body = (
        "os.register_at_fork(after_in_child=lambda: stacks.ignore(fatal=fatal)); child = os.fork(); "
        "time.sleep(0.5 if child else 60); os.kill(child, signal.SIGTERM); os.waitpid(child, 0)"
    )
    command = [sys.executable, "-c", ENDED.format(body=body), str(tmp_path / "0.stacks")]
    assert subprocess.run(command, cwd=REPO, env=ALONE, check=False).returncode == 0
    assert stack_dumps.kept(tmp_path / "0.stacks", 0) == ()


def test_a_process_without_handler_gets_no_signal(tmp_path: Path) -> None:
    (tmp_path / "0.stacks").write_text("main 0x1\n")
    process = subprocess.Popen(["sleep", "60"])
    try:
        assert stack_dumps.ask_all({process.pid: tmp_path / "0.stacks"})[process.pid] == ()
        time.sleep(0.1)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_a_signal_in_use_is_not_replaced(tmp_path: Path) -> None:
    assert stack_dumps.SIGNAL is not None
    before = signal.signal(stack_dumps.SIGNAL, lambda *_: None)
    try:
        assert stack_dumps.listen(tmp_path / "0.stacks") is None
    finally:
        signal.signal(stack_dumps.SIGNAL, before)
