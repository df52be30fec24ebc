"""A pytest plugin that runs torch's own tests of ``torch.distributed.checkpoint`` on a CPU, stock or with unickpt.

``evidence/torch/dcp_unit_tests.py`` starts pytest with it. From the environment:

- ``UNICKPT_UNIT_REPORT``: the folder for the results and for the marks of saves;
- ``UNICKPT_UNIT_ONLY``: names of tests, a line each; the others are left out;
- ``UNICKPT_UNIT_EXPLICIT=1``: ``FileSystemWriter`` and ``FileSystemReader`` of ``torch.distributed.checkpoint`` are unickpt's.

Nothing in the tests is changed. What they demand of the machine is: ranks are forked instead of spawned, tests for several GPUs
run on a CPU with gloo, and tensors that they create on ``cuda`` are on the CPU. Tests whose ranks are forked run before those
of this process, which starts threads.
"""

from __future__ import annotations

import enum
import inspect
import json
import os
import re
import sys
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
import torch.multiprocessing
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.remote_device import _remote_device
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_device_type, common_distributed, common_utils
from torch.testing._internal.distributed._shard import sharded_tensor as common_sharded
from torch.testing._internal.distributed._tensor import common_dtensor

from evidence.unit_results import keep_chosen, reason_of

REPORT = Path(os.environ["UNICKPT_UNIT_REPORT"])
_CPU, GPUS = torch.device("cpu"), 4  # as many as the tests ask for at most
_FORKED = (common_distributed.MultiProcessTestCase, common_distributed.MultiProcContinuousTest)


class OnCpu(TorchFunctionMode):
    """Creates on the CPU what a test asks of a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs and str(kwargs["device"]).partition(":")[0] in ("cuda", "0", "1", "2", "3"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def _forked_cpu_ranks() -> None:
    torch.multiprocessing.set_start_method("fork")
    common_distributed.MultiProcessTestCase._spawn_processes = lambda self: self._start_processes(
        torch.multiprocessing.get_context("fork").Process
    )
    torch.nn.Module.cuda = lambda self, *_: self
    torch.Tensor.cuda = lambda self, *_, **__: self
    demanded, instantiated = common_distributed.skip_if_lt_x_gpu, common_device_type.instantiate_device_type_tests
    for module in (common_distributed, common_dtensor):
        module.skip_if_lt_x_gpu = lambda x, **_: demanded(x, allow_cpu=True)
    common_device_type.instantiate_device_type_tests = lambda test, scope, **_: instantiated(test, scope, only_for="cpu")
    wrap = FullyShardedDataParallel.__init__
    FullyShardedDataParallel.__init__ = lambda self, *args, **given: wrap(self, *args, **{"device_id": _CPU, **given})
    started = common_dtensor.DTensorTestBase.init_pg
    common_dtensor.DTensorTestBase.init_pg = lambda self, eager, backend=None: started(self, eager, _on_cpu(self, backend))
    for base, name in zip(_FORKED, ("run_test", "_run_test_given_id"), strict=True):
        setattr(base, name, _in_mode(inspect.getattr_static(base, name)))
    _counted_gpus()


def _counted_gpus() -> None:
    """Let tests that count GPUs have that number of ranks, and their meshes and sharded tensors be on the CPU."""
    torch.cuda.device_count = torch.accelerator.device_count = lambda: GPUS
    for name in ("requires_nccl", "requires_accelerator_dist_backend"):
        setattr(common_distributed, name, lambda *_: lambda test: test)
    with_comms = common_sharded.with_comms
    common_sharded.with_comms = lambda func=None, init_rpc=True, **_: with_comms(func, init_rpc=init_rpc, backend="gloo")
    made = torch.distributed.init_device_mesh

    @wraps(made)
    def on_cpu(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return made("cpu", *args, **kwargs)

    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("init_device_mesh") is made:
            module.init_device_mesh = on_cpu  # type: ignore[attr-defined]
    placed = _remote_device.__init__
    _remote_device.__init__ = lambda self, at: placed(self, re.sub(r"(cuda|cpu)(:\d+)?", "cpu", str(at)))


def _on_cpu(test: Any, backend: str | None) -> str:
    return "gloo" if "cpu:gloo" in (backend or test.backend) else backend or test.backend


def _in_mode(wrapped: Any) -> Any:
    function = getattr(wrapped, "__func__", wrapped)

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with OnCpu():
            return function(*args, **kwargs)

    return classmethod(run) if isinstance(wrapped, classmethod) else run


def _newer_names() -> None:
    """Add names that sources newer than the installed torch import."""
    if not hasattr(common_utils, "HardwareClassification"):
        common_utils.HardwareClassification = enum.Enum("HardwareClassification", "GENERIC CPU ACCELERATOR")
    if not hasattr(common_dtensor, "_get_device_type"):
        common_dtensor._get_device_type = lambda *_: "cpu"


def _explicit() -> None:
    from torch_unickpt import UnickptReader, UnickptWriter

    class Writer(UnickptWriter):
        def __new__(cls, path: Any, *_: Any, **__: Any) -> Any:
            return UnickptWriter(path)

    class Reader(UnickptReader):
        def __new__(cls, path: Any, *_: Any, **__: Any) -> Any:
            return UnickptReader(path)

    import torch.distributed.checkpoint.format_utils  # keeps torch's own

    package: Any = torch.distributed.checkpoint
    package.FileSystemWriter, package.FileSystemReader = Writer, Reader


def _count_saves() -> None:
    from torch_unickpt.dcp import saving, switched  # noqa: F401  # before the forks

    committed = saving._committed

    def counted(directory: str) -> None:
        with (REPORT / "saves").open("a") as marks:
            marks.write(".")
        committed(directory)

    saving._committed = counted


class Results:
    """Writes a line for each event of a test."""

    def __init__(self) -> None:
        self.outcome, self.reason, self.saves = "passed", "", 0

    def write(self, **line: Any) -> None:
        with (REPORT / "results.jsonl").open("a") as results:
            results.write(json.dumps(line) + "\n")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        keep_chosen(items)
        items.sort(key=lambda item: not issubclass(getattr(item, "cls", None) or object, _FORKED))
        self.write(event="collected", tests=[item.nodeid for item in items])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.outcome, self.reason, self.saves = "passed", "", self._saves()
        self.write(test=nodeid, event="begin")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.passed or self.outcome == "failed":
            return
        self.outcome, self.reason = report.outcome, reason_of(report, 20000)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        saves = self._saves() - self.saves
        self.write(test=nodeid, event="end", outcome=self.outcome, reason=self.reason, saves=saves)

    def _saves(self) -> int:
        marks = REPORT / "saves"
        return marks.stat().st_size if marks.exists() else 0


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Results(), "unickpt-results")


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End the process with its threads."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


_forked_cpu_ranks()
_newer_names()
if os.environ.get("UNICKPT_UNIT_EXPLICIT") == "1":
    _explicit()
if os.environ.get("UNICKPT_AUTOLOAD") != "0":
    _count_saves()
