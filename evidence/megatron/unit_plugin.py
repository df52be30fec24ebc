"""A pytest plugin that runs Megatron's own unit tests on CPU, stock or with unickpt in place of torch_dist.

``evidence/megatron/unit_tests.py`` starts pytest with it under torchrun. From the environment:

- ``MEGATRON_LM``: the source tree whose tests are run;
- ``UNICKPT_UNIT_REPORT``: the folder for a file of results per rank;
- ``UNICKPT_UNIT_ONLY``: names of tests, a line each; the others are left out;
- ``UNICKPT_UNIT_REPLACES=1``: whoever saves with torch_dist, or without a strategy, saves with unickpt.

Nothing in the tests is changed. All ranks begin every test together, and after a failure they make new process groups,
so that a test that fails on one rank only does not fail those behind it.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import os
import sys
import time
import types
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatron_unickpt.testing import cpu

import pytest
from evidence.unit_results import keep_chosen, reason_of
import torch.distributed as dist
from torch.distributed import distributed_c10d

import tests

TREE = os.environ["MEGATRON_LM"]
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
GROUP_TIMEOUT = timedelta(seconds=30)  # a rank whose peers failed

sys.path.insert(0, TREE)
tests.__path__.append(os.path.join(TREE, "tests"))  # both trees call their tests "tests"
distributed_c10d.default_pg_timeout = GROUP_TIMEOUT
cpu.adapt_megatron()


def _without_download() -> None:
    """Replace fixtures for data, and those of ``conftest.py`` that compare TransformerEngine's version, which is None here."""
    module: Any = types.ModuleType("tests.test_utils.python_scripts.download_unit_tests_dataset")
    module.download_and_extract_asset = lambda **_: None
    sys.modules[module.__name__] = module
    from megatron.core import utils

    if utils.get_te_version() is None:
        utils.is_te_min_version = lambda *_, **__: False


_without_download()

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

saves = 0


def replaced(strategy: Any) -> Any:
    """Return a save strategy with unickpt in place of torch_dist, also inside wrappers."""
    from megatron_unickpt.dist_checkpointing.strategies import UnickptSaveStrategy

    if strategy is None or strategy == ("torch_dist", 1) or isinstance(strategy, TorchDistSaveShardedStrategy):
        return UnickptSaveStrategy()
    if hasattr(strategy, "base_strategy"):
        strategy = copy.copy(strategy)
        strategy.base_strategy = replaced(strategy.base_strategy)
    return strategy


def _replace() -> None:
    from megatron_unickpt.dist_checkpointing import saving
    from megatron_unickpt.pretraining import scripts
    from megatron_unickpt.edge import RUNTIME

    native, own = serialization.save, saving.save

    def save(sharded_state_dict: Any, checkpoint_dir: Any, sharded_strategy: Any = None, *args: Any, **kwargs: Any) -> Any:
        return native(sharded_state_dict, checkpoint_dir, replaced(sharded_strategy), *args, **kwargs)

    def counted(*args: Any, **kwargs: Any) -> Any:
        global saves
        saves += 1
        return own(*args, **kwargs)

    serialization.save = dist_checkpointing.save = save
    saving.save = counted
    scripts.active = lambda: True  # the scripts act as with --ckpt-format unickpt
    RUNTIME.timeout_s = GROUP_TIMEOUT.total_seconds()


if os.environ.get("UNICKPT_UNIT_REPLACES") == "1":
    _replace()


class Results:
    """Synchronizes the ranks, and records the outcome of each test: one line when it begins, one when it ends."""

    def __init__(self) -> None:
        self.file = (Path(os.environ["UNICKPT_UNIT_REPORT"]) / f"rank{RANK}.jsonl").open("a")
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        own_server = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and RANK == 0
        self.store = dist.TCPStore(host, port, WORLD, is_master=own_server, timeout=timedelta(hours=1))
        self.tests, self.outcome, self.reason = 0, "", ""
        self.groups = 0

    def write(self, **line: Any) -> None:
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()

    def exchange(self, what: str, failed: bool = False) -> bool:
        """Wait for all ranks. Returns whether any failed."""
        name = f"unit/{what}/{self.tests}"
        self.store.add(f"{name}/failed", int(failed))
        self.store.add(name, 1)
        while self.store.add(name, 0) < WORLD:
            time.sleep(0.02)
        return bool(self.store.add(f"{name}/failed", 0) > 0)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        keep_chosen(items)
        self.write(event="collected", tests=[item.nodeid for item in items])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        global saves
        self.tests += 1
        self.outcome, self.reason, saves = "passed", "", 0
        self.exchange("begin")
        self.write(test=nodeid, event="begin")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.passed or self.outcome == "failed":
            return
        self.outcome, self.reason = report.outcome, reason_of(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.write(test=nodeid, event="end", outcome=self.outcome, reason=self.reason, saves=saves)
        if self.exchange("end", self.outcome == "failed"):
            self.anew()
        elif not parallel_state.is_initialized():
            _end_groups()

    def anew(self) -> None:
        """Create new process groups for the next test. In the old ones, a rank may still wait for another."""
        from tests.unit_tests import test_utilities  # of the tree

        self.groups += 1
        with contextlib.suppress(Exception):
            parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
        test_utilities.Utils.inited = False
        prefix = f"unit{self.groups}/"  # the store still has the addresses of the old groups
        test_utilities.PrefixStore = lambda name, store: dist.PrefixStore(prefix + name, store)


def _end_groups() -> None:
    """Destroy Megatron's groups. Megatron only drops its references, and their threads would accumulate."""
    if not dist.is_initialized():
        return
    gc.collect()
    for group in list(distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Results(), "unickpt-results")


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End the process: see ``unickpt.testing.launch.leave``."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
