"""An exception that the end of another process has caused is no fault of the program: real process groups of two processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.repository import REPO
from unickpt.base.first_failure import failed
from unickpt.testing.launch import environment

PROGRAM = """
import os, signal, sys
from datetime import timedelta
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from unickpt.base.first_failure import failed
rank, store, call = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
loss = model(torch.ones(1, 2)).sum()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
os.environ["CALL"] = call
try:
    if call == "wrapped":
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as err:
            raise ValueError("the model cannot be set up") from err
    if call == "all_reduce":
        dist.all_reduce(torch.ones(1))
    if call == "backward":
        loss.backward()
    if call == "functional":
        print(functional.wait_tensor(functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD)))
except Exception as err:
    found = failed(err, err.__traceback__, False)
    print("excused" if found.excused else "blamed", found.text, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("call", ["all_reduce", "wrapped", "backward", "functional"])
def test_the_loss_of_a_peer_of_gloo_is_not_a_fault_of_the_program(tmp_path: Path, call: str) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "store"), call], env=environment(REPO),
            stdout=subprocess.PIPE, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert said[0].startswith("excused "), said[0]


def _raise(kind: str) -> None:
    if kind == "backward":
        torch.ones(1).backward()
    if kind == "shape":
        print(torch.ones(2, 3) @ torch.ones(2, 3))
    raise RuntimeError("a program's own")


@pytest.mark.parametrize("kind", ["backward", "shape", "own"])
def test_errors_of_the_program_are_its_own(kind: str) -> None:
    with pytest.raises(RuntimeError) as raised:
        _raise(kind)
    assert not failed(raised.value, raised.value.__traceback__, False).excused


def test_torchs_own_types_name_others() -> None:
    for kind in (torch.distributed.DistBackendError, torch.distributed.DistNetworkError, torch.distributed.DistStoreError):
        assert failed(kind("lost"), None, False).excused
    assert failed(ConnectionResetError(), None, False).excused
