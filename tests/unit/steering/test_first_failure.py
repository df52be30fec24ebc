"""An exception that the end of another process has caused is no fault of the program: real process groups of two processes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.support.repository import REPO
from unickpt.base.first_failure import failed
from unickpt.testing.launch import environment

CALLS = ("all_reduce", "wrapped", "backward", "functional")
PROGRAM = """
import os, signal, sys
from datetime import timedelta
import torch
import torch._dynamo  # DistributedDataParallel imports it: once here, not in each rank
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from unickpt.base.first_failure import failed


def run(rank, store, call):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    loss = model(torch.ones(1, 2)).sum()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
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
        print(call, "excused" if found.excused else "blamed", found.text.splitlines()[0], flush=True)
    os._exit(0)


for call in sys.argv[2:]:
    ranks = []
    for rank in (0, 1):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            run(rank, sys.argv[1] + call, call)
    for each in ranks:
        os.waitpid(each, 0)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What rank 0 says of its exception, for each call."""
    store = tmp_path_factory.mktemp("stores") / "of_"
    command = [sys.executable, "-c", PROGRAM, str(store), *CALLS]
    done = subprocess.run(command, env=environment(REPO), stdout=subprocess.PIPE, text=True, timeout=240)
    return {call: text for call, _, text in (line.partition(" ") for line in done.stdout.splitlines())}


@pytest.mark.parametrize("call", CALLS)
def test_the_loss_of_a_peer_of_gloo_is_not_a_fault_of_the_program(said: dict[str, str], call: str) -> None:
    assert said[call].startswith("excused ")


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


FORKED = """
import os, sys
from unickpt.base.first_failure import on_last_exception
said = []
remove = on_last_exception(
    lambda failure: print(failure.error, *said, flush=True), first=lambda trace: said.append(trace is not None)
)
if os.fork():
    os.wait()
    if sys.argv[1] == "removed": remove()
    raise KeyError("of the rank")
raise ValueError("of a fork")
"""


@pytest.mark.parametrize(("how", "said"), [("kept", "KeyError True\n"), ("removed", "")])
def test_the_last_exception_of_a_process_is_noted_and_not_that_of_a_fork(how: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED, how], env=environment(REPO), capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == (said, 1)
    assert "KeyError: 'of the rank'" in done.stderr
