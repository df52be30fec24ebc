"""Interpreters that have imported what the jobs of a package need, and fork these jobs.

The imports of a framework take most of the time of a short job. Under ``shared_interpreters``, ``fork_ranks`` takes an
interpreter that has imported the module of the job, with all that it imports. The first job of a framework waits for the
imports. Later jobs import what is new. Imports depend on the environment and the folder: a job that differs in one of them, or
whose module is of another framework, gets another interpreter. A module of no framework shares with its package. Needs Linux.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from tests.support import framework_imports

# What differs between jobs, and no import reads.
_READ_LATER = re.compile(
    "PYTEST_CURRENT_TEST|UNICKPT_REPLAY|UNICKPT_ROUND|UNICKPT_TEST_URL|BREAK_SAVE|GLOO_SOCKET_IFNAME|TORCH_FR_BUFFER_SIZE|XDG_CACHE_HOME|AWS_.*"
)
_FRAMEWORKS = {  # of packages of jobs
    "tests.jobs.compression": "deepspeed",
    "tests.jobs.deepspeed": "deepspeed",
    "tests.jobs.hf": "deepspeed",
    "tests.jobs.megatron": "megatron",
}
_MOST = 3
_REQUEST_BYTES = 1 << 20
_IMPORT_S = 300.0

_current: ContextVar[_Servers | None] = ContextVar("unickpt_fork_servers", default=None)


@dataclass(frozen=True)
class Job:
    """Ranks that run a module.

    Attributes:
        world: number of ranks.
        module, arguments: their program.
        framework: ``deepspeed`` or ``megatron``, if the arguments and not the package of the module say which the job imports.
    """

    world: int
    module: str
    arguments: tuple[str, ...]
    framework: str = ""


class ForkedJob:
    """A job that an interpreter forked. Has what ``launch.end`` and ``launch.finish`` use of ``subprocess.Popen``.

    Attributes:
        pid: the process that forks the ranks. It leads a session.
        returncode: its exit status, negative for a signal; None before ``communicate`` or ``poll`` saw its end.
    """

    def __init__(self, module: str, messages: socket.socket, output: int | None) -> None:
        self._module, self._messages, self._output = module, messages, output
        self.returncode: int | None = None
        self._said, self._closed = b"", False
        messages.settimeout(_IMPORT_S)
        self.pid = int(messages.recv(32) or 0)  # after the imports
        if not self.pid:
            raise ChildProcessError(f"the interpreter that forks {module} has ended")
        self._process = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        """Return the exit status, or None if the job runs."""
        if self.returncode is None and select.select([self._process], [], [], 0)[0]:
            self._messages.setblocking(False)
            try:
                self.returncode = int(self._messages.recv(32))
            except (BlockingIOError, ValueError):
                self.returncode = -signal.SIGKILL  # it ended without a word
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status when the job has ended."""
        self.communicate(timeout)
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Return the output of all ranks when the job has ended and nobody holds the pipe any more. '' if it is a file.

        Raises:
            subprocess.TimeoutExpired: that takes more than ``timeout`` seconds. It has the output so far.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        if self._closed:
            return self._said.decode(errors="replace"), None
        waiting = [self._process] if self._output is None else [self._output, self._process]
        while waiting:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = select.select(waiting, [], [], left)[0]
            if not ready:
                assert timeout is not None
                raise subprocess.TimeoutExpired(self._module, timeout, output=self._said)
            if self._output is not None and self._output in ready:
                data = os.read(self._output, 1 << 16)
                self._said += data
                if not data:
                    waiting.remove(self._output)
            if self._process in ready:
                waiting.remove(self._process)
        self.poll()
        self.close()
        return self._said.decode(errors="replace"), None

    def kill(self) -> None:
        """Kill the process that forks the ranks, but not the ranks."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def close(self) -> None:
        """Close what belongs to an ended job."""
        for each in (self._output, self._process):
            with contextlib.suppress(OSError):
                if each is not None:
                    os.close(each)
        self._messages.close()
        self._closed = True


class _Servers:
    """The interpreters of one process, and the requests to them."""

    def __init__(self) -> None:
        self._sockets: OrderedDict[object, tuple[subprocess.Popen[bytes], socket.socket]] = OrderedDict()

    def start(self, job: Job, folder: str, env: Mapping[str, str], output: int | None) -> ForkedJob:
        """Start a job, with a pipe for its output or into an open file.

        Raises:
            OSError: the interpreter has ended, or its imports take more than five minutes. The next job gets another one.
        """
        kept = tuple(sorted(item for item in env.items() if not _READ_LATER.fullmatch(item[0])))
        package = job.module.rpartition(".")[0] or job.module
        framework = job.framework or _FRAMEWORKS.get(package, "")
        key = (folder, framework or package, kept)
        if key not in self._sockets:
            self._sockets[key] = _start_server(folder, env)
        self._sockets.move_to_end(key)
        while len(self._sockets) > _MOST:
            _end_server(*self._sockets.popitem(last=False)[1])
        reading, writing = os.pipe() if output is None else (None, os.dup(output))
        ours, theirs = _pair()
        try:
            request = {**asdict(job), "framework": framework, "env": dict(env)}
            socket.send_fds(self._sockets[key][1], [json.dumps(request).encode()], [writing, theirs.fileno()])
            os.close(writing)
            theirs.close()
            return ForkedJob(job.module, ours, reading)
        except OSError:
            _end_server(*self._sockets.pop(key))
            if reading is not None:
                os.close(reading)
            ours.close()
            raise

    def close(self) -> None:
        """End all interpreters. Their jobs run on."""
        while self._sockets:
            _end_server(*self._sockets.popitem()[1])


@contextlib.contextmanager
def shared_interpreters() -> Iterator[None]:
    """Within this context, jobs that ``fork_ranks`` starts share interpreters. Not in threads that the context starts."""
    servers = _Servers()
    before = _current.get()
    _current.set(servers)
    try:
        yield
    finally:
        _current.set(before)
        servers.close()


def start_shared(job: Job, folder: str, env: Mapping[str, str], output: int | None = None) -> ForkedJob | None:
    """Start a job in a shared interpreter. Returns None outside ``shared_interpreters``."""
    servers = _current.get()
    return None if servers is None else servers.start(job, folder, env, output)


def _pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # each message arrives by itself


def _start_server(folder: str, env: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = _pair()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.fork_server", str(theirs.fileno())],
        cwd=folder,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        start_new_session=True,
    )
    theirs.close()
    return process, ours


def _end_server(process: subprocess.Popen[bytes], requests: socket.socket) -> None:
    requests.close()
    process.kill()
    process.wait()


def main() -> None:
    from tests.support import forked_ranks  # noqa: F401 - with PyTorch, before the first fork

    requests = socket.socket(fileno=int(sys.argv[1]))
    jobs: set[int] = set()
    while True:
        data, handed, _, _ = socket.recv_fds(requests, _REQUEST_BYTES, 2)
        if not data:
            return
        request = json.loads(data)
        with contextlib.suppress(Exception, SystemExit):  # the job fails in the same way, and says so
            _import(request["framework"], request["module"], request["arguments"])
        job = os.fork()
        if job == 0:
            requests.close()
            _run_job(request, *handed)
        jobs.add(job)
        for each in handed:
            os.close(each)
        # Reaped one by one. Without SIGCHLD nobody would have to, but programs that imports start would not see their ends.
        jobs -= {each for each in jobs if os.waitpid(each, os.WNOHANG)[0]}


def _import(framework: str, module: str, arguments: list[str]) -> None:
    """Import what a job needs, and what its arguments say if all jobs of this interpreter are of one framework."""
    if framework:
        framework_imports.import_framework(framework)
    found = importlib.import_module(module)
    if framework and hasattr(found, "before_forks"):
        found.before_forks(arguments)


def _run_job(request: dict[str, Any], output: int, messages: int) -> NoReturn:
    """Run a job in this process and its ranks, in the environment of the request."""
    status = 1
    os.write(messages, b"%d" % os.getpid())
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        os.environ.clear()
        os.environ.update(request["env"])
        from tests.support import forked_ranks

        status = forked_ranks.run(request["world"], request["module"], request["arguments"])
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(messages, b"%d" % status)
    os._exit(status)


if __name__ == "__main__":
    main()
