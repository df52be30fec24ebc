"""A pytest plugin that runs DeepSpeed's own unit tests on CPU, stock or with the ``unickpt`` key in every config.

``evidence/deepspeed/unit_tests.py`` starts pytest with it. From the environment:

- ``UNICKPT_UNIT_REPORT``: the file (JSON lines) of results; tests that already have one are left out;
- ``UNICKPT_UNIT_LIMIT``: seconds for one test;
- ``UNICKPT_UNIT_END``: the time (seconds since the epoch) after which no further test begins;
- ``UNICKPT_UNIT_ONLY``: a file with names of tests, one per line; the others are left out;
- ``UNICKPT_UNIT_KEY=1``: every DeepSpeed config gets ``"unickpt": {"enabled": true}``.

No file of the tests is changed. What differs from ``pytest`` in DeepSpeed's tree:

- Ranks are forked from a server that has imported torch and deepspeed. A rank that fails, dies or hangs fails its test;
  upstream, a hang ends the whole run.
- The fixtures that are classes (``DistributedFixture``) are also declared in the way that pytest 8.4 and later accept.
- The CPU accelerator says that it supports fp16. It computes in fp16, and the tests of MoE and pipelines want it.
- ``DeepSpeedEngine`` has the attribute ``sparse_tensor_module_names`` (empty) where the version no longer has it.
- With the key, ``ds_to_universal`` copies a unickpt checkpoint: it needs no conversion, and the tests load the result.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import math
import multiprocessing
import os
import shutil
import signal
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint import ds_to_universal
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine

from evidence.unit_results import reason_of
from unickpt.checkpoint.format.manifest import MANIFEST_FILE

KEY = {"unickpt": {"enabled": True}}
GRACE_S = 10.0  # time for the other ranks after one has failed


def _adapt_deepspeed() -> None:
    """Runs in pytest's process and in every rank, because both import this module."""
    type(get_accelerator()).is_fp16_supported = lambda _: True
    if not hasattr(DeepSpeedEngine, "sparse_tensor_module_names"):
        DeepSpeedEngine.sparse_tensor_module_names = frozenset()
    if os.environ.get("UNICKPT_UNIT_KEY") != "1":
        return
    initialise, convert = DeepSpeedConfig.__init__, ds_to_universal.main

    def with_key(self: Any, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        self._param_dict = {**self._param_dict, **KEY}

    def convert_or_copy(args: Any) -> None:
        if Path(args.input_folder, MANIFEST_FILE).exists():
            shutil.copytree(args.input_folder, args.output_folder)
        else:
            convert(args)

    DeepSpeedConfig.__init__ = with_key
    ds_to_universal.main = convert_or_copy


def _load_before_forking() -> None:
    """Import the modules that every rank needs once, in the server that forks the ranks.

    A C++ operator takes a second. DeepSpeed's Muon, which ``deepspeed.initialize`` imports for every optimizer, applies
    ``torch.compile`` to a function: that imports TorchDynamo and Inductor, 1,400 modules and 8 s of processor time.
    """
    for name in ("FusedAdamBuilder", "CPUAdamBuilder", "ShareMemCommBuilder"):
        get_accelerator().create_op_builder(name).load()
    with contextlib.suppress(ImportError):  # older versions lack Muon
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")


_adapt_deepspeed()
_load_before_forking()


def run_rank(test: Any, rank: int, world: int, port: str, init_method: str, pipe: Connection) -> None:
    """Run one rank of a test or fixture, in a process of its own."""
    try:
        skipped = test._dist_run(rank, world, port, init_method)
        test._dist_destroy()
        pipe.send(("skipped", skipped) if skipped else ("passed", ""))
    except BaseException as err:
        traceback.print_exc()
        pipe.send(("failed", "".join(traceback.format_exception_only(err)).strip()))


def launch(test: Any, world: int, init_method: str) -> None:
    """Run all ranks of a test or fixture. Replaces ``DistributedExec._launch_daemonic_procs``."""
    from unit import common  # of the tree

    test.non_daemonic_procs = False  # the skip message is returned, not put into a queue
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "deepspeed", __name__])
    port = common.get_master_port()
    pipes, processes = [], []
    for rank in range(world):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=run_rank, args=(test, rank, world, port, init_method, theirs))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    outcomes = _outcomes(pipes, time.monotonic() + float(os.environ["UNICKPT_UNIT_LIMIT"]))
    for process in processes:
        process.join(GRACE_S if len(outcomes) == world else 0)
        if process.is_alive():
            os.kill(process.pid or 0, signal.SIGKILL)
            process.join()
    failed = [f"rank {rank}: {text}" for rank, (outcome, text) in sorted(outcomes.items()) if outcome == "failed"]
    hung = [str(rank) for rank in range(world) if rank not in outcomes]
    if hung:
        failed.append(f"rank {', '.join(hung)}: still running after {'the others failed' if failed else 'the time limit'}")
    if failed:
        pytest.fail("\n".join(failed), pytrace=False)
    skipped = {text for outcome, text in outcomes.values() if outcome == "skipped"}
    if skipped:
        pytest.skip(sorted(skipped)[0])


def _outcomes(pipes: list[Connection], deadline: float) -> dict[int, tuple[str, str]]:
    """Return the reports by rank, of the ranks that ended by the deadline or soon after the failure of another one."""
    outcomes: dict[int, tuple[str, str]] = {}
    while len(outcomes) < len(pipes) and (left := deadline - time.monotonic()) > 0:
        ready = wait([pipe for rank, pipe in enumerate(pipes) if rank not in outcomes], left)
        for rank, pipe in enumerate(pipes):
            if pipe in ready:
                try:
                    outcomes[rank] = pipe.recv()
                except EOFError:
                    outcomes[rank] = ("failed", "the process died")
        if any(outcome == "failed" for outcome, _ in outcomes.values()):
            deadline = min(deadline, time.monotonic() + GRACE_S)
    return outcomes


@pytest.hookimpl(tryfirst=True)
def pytest_make_collect_report(collector: pytest.Collector) -> None:
    """Declare a module's class fixtures, under other attributes: ranks unpickle the classes by their own names."""
    if not isinstance(collector, pytest.Module):
        return
    with contextlib.suppress(Exception, pytest.skip.Exception, pytest.Collector.CollectError):  # pytest meets and reports it
        for name, found in list(vars(collector.obj).items()):
            if isinstance(found, type) and getattr(found, "is_dist_fixture", False):
                setattr(collector.obj, f"_declared_{name}", _declared(found))


def _declared(cls: type) -> Any:
    def make() -> Any:
        return cls()

    make.is_dist_fixture = True  # type: ignore[attr-defined]  # DeepSpeed's conftest looks for it
    return pytest.fixture(name=cls.__name__)(make)


class Results:
    """Records the outcome of every test: one line when it begins, and one when it has ended."""

    def __init__(self) -> None:
        self.path = Path(os.environ["UNICKPT_UNIT_REPORT"])
        lines = [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []
        self.over = {line["test"] for line in lines if line["event"] == "end"}
        self.file = self.path.open("a")
        self.end = float(os.environ.get("UNICKPT_UNIT_END", "inf"))
        self.outcome, self.reason, self.begin = "", "", 0.0

    def write(self, **line: Any) -> None:
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()

    def pytest_collectreport(self, report: Any) -> None:
        if report.outcome != "passed":
            self.write(event="not collected", outcome=report.outcome, reason=_reason(report))

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if "UNICKPT_UNIT_ONLY" in os.environ:
            chosen = set(Path(os.environ["UNICKPT_UNIT_ONLY"]).read_text().splitlines())
            items[:] = [item for item in items if item.nodeid in chosen]
        self.write(event="collected", tests=[item.nodeid for item in items])
        items[:] = [item for item in items if item.nodeid not in self.over]
        if self.end < math.inf:  # a limited run gets a sample of all tests, the same one in both halves
            items.sort(key=lambda item: hashlib.sha256(item.nodeid.encode()).digest())

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.outcome, self.reason, self.begin = "passed", "", time.time()
        self.write(event="begin", test=nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if not report.passed and self.outcome != "failed":
            self.outcome, self.reason = report.outcome, _reason(report)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        done = yield
        temporary = Path(item.config.getoption("basetemp"))
        universal = any(path.stat().st_mtime >= self.begin for path in temporary.rglob(MANIFEST_FILE))
        seconds = round(time.time() - self.begin, 1)
        self.write(
            event="end", test=item.nodeid, outcome=self.outcome, reason=self.reason, universal=universal, seconds=seconds
        )
        if time.time() > self.end:
            item.session.shouldstop = "the time is over"
        return done


def _reason(report: Any) -> str:
    return reason_of(report).removeprefix("Failed: ")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Results(), "unickpt-results")


def pytest_collection(session: pytest.Session) -> None:
    """Import the tree's own modules, which its conftest has put on the path."""
    from unit.common import DistributedExec

    DistributedExec._launch_daemonic_procs = launch
    DistributedExec._launch_non_daemonic_procs = launch
