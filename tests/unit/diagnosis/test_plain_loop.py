"""A loop of plain torch with ``time_collectives``: its ring, of steps, evaluations, files and groups that are not made."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.repository import REPO
from unickpt.diagnosis.recording.records import Flag, Op, Phase
from unickpt.diagnosis.recording.ring_folder import read_folder
from unickpt.diagnosis.snapshot.steps import steps_of
from unickpt.testing.launch import environment

PROGRAM = """
import pickle, sys, threading
import torch, torch.distributed as dist
import unickpt
from unickpt.base.options.job import TimingOptions
folder = sys.argv[1]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
for _ in range(2):
    assert unickpt.time_collectives(TimingOptions(enabled=True, watch=False, folder=folder + "/rings"))
try:
    dist.new_group([0], backend="nonsense")
except Exception:
    pass
else:
    raise AssertionError
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    if step == 3:
        with unickpt.phase("evaluate"), torch.no_grad():
            model(torch.ones(1, 2))
    if step == 5:
        torch.save(model.state_dict(), folder + "/weights.pt")
    if step == 1:
        thread = threading.Thread(target=torch.save, args=(model.state_dict(), folder + "/copy.pt"))
        thread.start()
        thread.join()
assert pickle.loads(pickle.dumps(torch.save)) is torch.save
"""
TRIALS = """
import gc, sys, weakref
import torch, torch.distributed as dist
import unickpt
from unickpt.base.options.job import TimingOptions
folder = sys.argv[1]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
unickpt.time_collectives(TimingOptions(enabled=True, watch=False, folder=folder + "/rings"))
for trial in range(3):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    ended = weakref.ref(model.weight)
    del model, optimizer
    gc.collect()
    assert ended() is None, trial
"""
WRAPPED = """
import sys
import safetensors.numpy as arrays
from safetensors.torch import save_file
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import unickpt
from unickpt.base.options.job import TimingOptions
from unickpt.diagnosis import session
folder = sys.argv[1]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
unickpt.time_collectives(TimingOptions(enabled=True, watch=False, folder=folder + "/rings"))
plain = torch.nn.Linear(2, 2)
model = DistributedDataParallel(plain)
state, seen = session._process._session._recorder.state, []
def run(module):
    out = module(torch.ones(1, 2)).sum()
    seen.append(state.phase)
    return out
run(model).backward()
with torch.no_grad():
    run(plain)
run(model).backward()
plain.eval()
run(plain)
plain.train()
run(model).backward()
for write in (torch.save, save_file, arrays.save_file):
    write({}, folder + "/file")
    seen.append(state.phase)
    run(model).backward()
with unickpt.phase("evaluate"):
    run(model)
print(*seen)
"""


def test_a_rank_of_a_wrapped_model_evaluates_until_it_trains_again(tmp_path: Path) -> None:
    """What the program has announced lasts as long as it says."""
    command = [sys.executable, "-c", WRAPPED, str(tmp_path)]
    said = subprocess.run(command, env=environment(REPO), check=True, timeout=120, capture_output=True, text=True).stdout
    none, evaluates, saves = int(Phase.UNKNOWN), int(Phase.EVALUATION), int(Phase.CHECKPOINT)
    expected = [none, evaluates, none, evaluates, none, *3 * [saves, none], evaluates]
    assert said.split() == [str(each) for each in expected]


def test_steps_count_once_and_those_with_an_evaluation_or_a_file_are_not_judged(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    subprocess.run(command, env=environment(REPO), check=True, timeout=120)
    (folder,) = {path.parent for path in (tmp_path / "rings").rglob("*.ring")}
    records = read_folder(folder).ranks[0].records
    steps = steps_of(0, records)
    assert steps["number"].tolist() == list(range(1, 8))
    assert steps["number"][steps["long"] > 0].tolist() == [4, 6]
    (made,) = records[(records["op"] == Op.NEW_GROUP)]
    assert made["end_ns"] > 0
    assert made["flags"] & int(Flag.FAILED)


def test_an_optimizer_that_has_ended_is_freed_and_the_next_ones_steps_count(tmp_path: Path) -> None:
    """As in a search for hyperparameters, which trains one model after another."""
    subprocess.run([sys.executable, "-c", TRIALS, str(tmp_path)], env=environment(REPO), check=True, timeout=120)
    (folder,) = {path.parent for path in (tmp_path / "rings").rglob("*.ring")}
    assert steps_of(0, read_folder(folder).ranks[0].records)["number"].tolist() == list(range(1, 6))


RESUMED = """
import sys
import torch, torch.distributed as dist
import torch_unickpt, unickpt
from unickpt.base.options.job import TimingOptions
folder, steps = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/store{steps}", rank=0, world_size=1)
unickpt.time_collectives(TimingOptions(enabled=True, watch=False, folder=f"{folder}/rings{steps}"))
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
start = torch_unickpt.resume_or_start(model, optimizer, folder + "/out")
for step in range(start.step, steps):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
unickpt.save_training(model, optimizer, f"{folder}/out/step{steps}", step=steps)
"""


def test_steps_go_on_from_the_one_that_was_loaded(tmp_path: Path) -> None:
    """Otherwise a job that starts again counts from 1, steering sees no progress, and ends it after three restarts."""
    numbers = []
    for steps in (3, 7):
        command = [sys.executable, "-c", RESUMED, str(tmp_path), str(steps)]
        subprocess.run(command, env=environment(REPO), check=True, timeout=120)
        (folder,) = {path.parent for path in (tmp_path / f"rings{steps}").rglob("*.ring")}
        numbers.append(steps_of(0, read_folder(folder).ranks[0].records)["number"].tolist())
    assert numbers == [[1, 2], [4, 5, 6]]  # the begin of the first one is not known


LOADED = """
import sys
import torch, torch.distributed as dist
import unickpt
from unickpt.base.options.job import TimingOptions
folder = sys.argv[1]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
model = torch.nn.Linear(2, 2)
def train(steps, state):
    optimizer = torch.optim.AdamW(model.parameters())
    if state is not None:
        optimizer.load_state_dict(state)
    for step in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return optimizer.state_dict()
state = train(3, None)
unickpt.time_collectives(TimingOptions(enabled=True, watch=False, folder=folder + "/rings"))
train(4, state)
"""


def test_steps_go_on_from_the_state_of_an_optimizer_that_was_loaded_in_another_way(tmp_path: Path) -> None:
    """As programs with ``torch.load`` do, and libraries on torch."""
    subprocess.run([sys.executable, "-c", LOADED, str(tmp_path)], env=environment(REPO), check=True, timeout=120)
    (folder,) = {path.parent for path in (tmp_path / "rings").rglob("*.ring")}
    records = read_folder(folder).ranks[0].records
    assert records["step"][records["op"] == Op.STEP].tolist() == [4, 5, 6]  # the begin of the first one is not known


UNCHANGED = """
import sys
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
from unickpt.diagnosis import session
state = session._process._session._recorder.state
trains = state.phase
model.module.eval()
model.module(torch.ones(1, 2))
print(trains, state.phase, session.folder())
"""


def test_the_reducer_of_the_model_that_begins_the_timing_is_recorded_and_its_evaluation_seen(tmp_path: Path) -> None:
    """Under ``unickpt watch`` a program has no call of its own: timing begins while its model is made."""
    variables = environment(REPO, UNICKPT_TIMING="1", UNICKPT_AUTOLOAD="1", MASTER_PORT=str(os.getpid()))
    command = [sys.executable, "-c", UNCHANGED, str(tmp_path)]
    done = subprocess.run(command, env=variables, check=True, timeout=120, capture_output=True, text=True)
    trains, evaluates, name = done.stdout.split()
    folder = Path(name)
    try:
        assert (int(trains), int(evaluates)) == (Phase.UNKNOWN, Phase.EVALUATION)
        records = read_folder(folder).ranks[0].records
        reduced = records[(records["op"] == Op.ALL_REDUCE) & (records["flags"] & int(Flag.FROM_NATIVE) > 0)]
        assert reduced["step"].tolist() == [0, 1, 2]
    finally:
        shutil.rmtree(folder)
