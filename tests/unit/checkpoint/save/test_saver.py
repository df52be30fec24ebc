"""Saves that go on behind training: what was copied is what is written, memory stays in its budget, and the end is clean."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.rank_threads import WORLD, alone, on_all_ranks
from tests.support.saves import MIB, assert_counts, assert_holds, background, large, part, request, stalled
from unickpt.base.errors import CoordinationError, UnsupportedLayoutError
from unickpt.checkpoint.coordination.message_exchange import MessageExchange
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.dtypes import torch_dtype
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.validation import is_checkpoint
from unickpt.checkpoint.load.verify import verify_checkpoint
from unickpt.checkpoint.save import staging
from unickpt.checkpoint.save.requests import PendingSave, SaveOptions, SaveRequest
from unickpt.checkpoint.save.saver import Saver
from unickpt.checkpoint.save.shards import Contribution, Shard, shards_of_flat_range
from unickpt.testing.launch import environment


def test_training_continues_while_its_earlier_state_is_written(tmp_path: Path) -> None:
    saver, shards = background(), large()
    with stalled(tmp_path) as stall:
        save = saver.save(request(tmp_path, "a", shards), alone())
        assert stall.met.wait(30)
        for shard in shards:
            shard.data.fill_(-1.0)
        assert saver.pending == [save]
        stall.gate.set()
        assert save.wait(30)
    assert save.committed
    assert save.result is not None
    assert 0.0 < save.stall_s <= save.result.seconds
    assert_counts(tmp_path / "a")


@pytest.mark.parametrize("behind", [False, True])
def test_views_whose_memory_has_other_elements_are_saved_as_they_are_read(tmp_path: Path, behind: bool) -> None:
    """torch conjugates and negates such views when they are read: rotary embeddings may be complex."""
    value = torch.view_as_complex(torch.arange(12.0).reshape(6, 2))
    views = {"conjugate": (value.conj(), "C64"), "negative": (value.conj().imag, "F32")}
    assert value.conj().is_conj()
    assert value.conj().imag.is_neg()
    shards = [
        Shard(TensorInfo(name, "weight", dtype, (6,), "buffer"), Box.whole((6,)), view) for name, (view, dtype) in views.items()
    ]
    saver = Saver(SaveOptions(asynchronous=behind))
    saver.save(request(tmp_path, "a", shards), alone()).wait()
    checkpoint = Checkpoint.open(tmp_path / "a")
    for name, (view, _) in views.items():
        assert torch.equal(checkpoint.read_tensor(name, "weight"), view.clone().resolve_conj().resolve_neg())


def test_staging_memory_is_kept_between_saves(tmp_path: Path) -> None:
    saver = background()
    seen = set()
    for tag in "abc":
        saver.save(request(tmp_path, tag, large()), alone()).wait()
        seen.add(saver._pool._buffers[0].buffer.tensor.data_ptr())
    assert len(seen) == 1
    assert 8 * MIB <= saver._pool.capacity_bytes < 9 * MIB


@pytest.mark.parametrize("budget", [3 * MIB, 3 * MIB + 5, 100])
def test_a_state_larger_than_the_budget_is_saved_within_it(tmp_path: Path, budget: int) -> None:
    saver = Saver(SaveOptions(asynchronous=True, staging_bytes=budget))
    shards = large()
    with stalled(tmp_path) as stall:
        save = saver.save(request(tmp_path, "a", shards), alone())
        for shard in shards:
            shard.data.fill_(-1.0)
        stall.gate.set()
        assert save.wait(30)
    assert save.committed, save.cause()
    assert saver._pool.capacity_bytes <= budget
    assert_counts(tmp_path / "a")


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F64"])
@pytest.mark.parametrize("budget", [None, 9 * MIB])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_weights_that_are_not_the_cast_of_their_masters_are_stored(
    tmp_path: Path, dtype: str, budget: int | None, asynchronous: bool
) -> None:
    """Five saves with one saver: the first needs no room for weights, the second some more, the last one none again."""
    torch.set_num_threads(1)  # as in a job's ranks: copied and compared at once
    saver = Saver(SaveOptions(staging_bytes=budget, asynchronous=asynchronous))
    masters = large(mib=1)
    weights = [shard.data.to(torch_dtype(dtype), copy=True) for shard in masters]

    def shards() -> list[Shard]:
        found = list(masters)
        for shard, weight in zip(masters, weights, strict=True):
            info = TensorInfo(shard.tensor.name, "weight", dtype, shard.tensor.shape, "parameter", derived_from="master")
            found += shards_of_flat_range(info, 0, info.numel, weight, unless=shard.data)
        return found

    def stored(tag: str) -> set[str]:
        assert saver.save(request(tmp_path, tag, shards()), alone()).wait(30)
        checkpoint = Checkpoint.open(tmp_path / tag)
        assert verify_checkpoint(tmp_path / tag).problems == ()
        for shard, weight in zip(masters, weights, strict=True):
            assert torch.equal(checkpoint.read_tensor(shard.tensor.name, "weight"), weight)
        index = checkpoint.index
        return {index.tensors[at].name for at in index.tensor.tolist() if index.tensors[at].state == "weight"}

    assert stored("a") == set()
    weights[3][-1] += 1
    assert stored("b") == {"t3"}
    for weight in weights:
        weight[7] -= 1
    assert stored("c") == stored("d") == {f"t{at}" for at in range(8)}
    weights[:] = [shard.data.to(torch_dtype(dtype), copy=True) for shard in masters]
    assert stored("e") == set()


def test_shards_of_any_strides_and_types_are_copied_in_their_order() -> None:
    base = torch.arange(24, dtype=torch.int64).view(4, 6)
    tensors = [base.t(), base[::2, 1:4], torch.tensor([True, False]), torch.zeros(0), torch.tensor([1.5], dtype=torch.bfloat16)]
    infos = [TensorInfo(f"x{at}", "s", "F32", tuple(t.shape), "parameter") for at, t in enumerate(tensors)]
    from unickpt.checkpoint.format.boxes import Box

    shards = [Shard(info, Box.whole(info.shape), t) for info, t in zip(infos, tensors, strict=True)]
    buffer = staging.StagingBuffer(staging.size_of(shards))
    staged = buffer.fill(shards)
    assert staged is not None
    copies, ready = staged.shards, staged.ready
    ready()
    for copy, tensor in zip(copies, tensors, strict=True):
        assert torch.equal(copy.data, tensor)
        assert copy.data.numel() == 0 or copy.data.untyped_storage().data_ptr() == buffer.tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("size", range(0, 60, 7))
def test_the_rest_fits_into_the_staging_buffer(size: int) -> None:
    shards = [
        Shard(TensorInfo(f"x{at}", "s", "F32", (n,), "parameter"), None, torch.zeros(n, dtype=kind))  # type: ignore[arg-type]
        for at, (n, kind) in enumerate([(3, torch.float64), (2, torch.float32), (5, torch.int16), (3, torch.uint8)])
    ]
    first = staging.first_that_fits(shards, size)
    assert staging.size_of(shards[first:]) <= size
    assert (first == 0) == (staging.size_of(shards) <= size)


def test_a_save_waits_for_a_running_one_and_logs_it(tmp_path: Path) -> None:
    saver = Saver(SaveOptions(asynchronous=True, on_busy="wait"))
    with stalled(tmp_path) as stall:
        first = saver.save(request(tmp_path, "a", large()), alone())
        stall.open_on_warning("training has waited")
        second = saver.save(request(tmp_path, "b", large()), alone(notice_s=0.01))
        assert stall.warned.is_set()
        assert first.done
        assert saver.finish(60)
    assert first.committed
    assert second.committed


def test_a_save_that_finds_another_one_skips_itself(tmp_path: Path) -> None:
    saver = Saver(SaveOptions(asynchronous=True, on_busy="skip"))
    with stalled(tmp_path) as stall:
        first = saver.save(request(tmp_path, "a", large()), alone())
        others = [saver.save(request(tmp_path, tag, large()), alone()) for tag in "bc"]
        assert saver.pending == [first]
        stall.gate.set()
        assert saver.finish(60)
    assert first.committed
    for save in others:
        assert save.result is not None
        assert save.result.skipped
    assert (saver.counts.committed, saver.counts.skipped, saver.counts.failed) == (1, 2, 0)
    assert not (tmp_path / "b").exists()


def test_a_save_that_finds_another_one_queues_with_a_second_copy(tmp_path: Path) -> None:
    saver = Saver(SaveOptions(asynchronous=True, on_busy="queue"))
    with stalled(tmp_path) as stall:
        saves = [saver.save(request(tmp_path, tag, large()), alone()) for tag in "ab"]
        assert saver.pending == saves
        stall.open_on_warning("training has waited")  # the third finds no memory for a copy
        saves.append(saver.save(request(tmp_path, "c", large()), alone(notice_s=0.01)))
        assert stall.warned.is_set()
        assert saves[0].written.is_set()  # it had that memory
        assert saver.finish(60)
    assert [save.committed for save in saves] == [True] * 3
    assert saver._pool.capacity_bytes < 17 * MIB
    assert (tmp_path / "latest").read_text() == "c"
    for tag in "abc":
        assert_counts(tmp_path / tag)


def test_many_saves_of_many_ranks_in_a_queue_keep_their_order(tmp_path: Path) -> None:
    def run(exchange: MessageExchange) -> list[bool]:
        saver = Saver(SaveOptions(asynchronous=True, on_busy="queue"))
        saves = []
        for step in range(12):
            # two directories only: a save never meets a running one of its own directory
            wanted = SaveRequest(lambda _, step=step: part(step, exchange.rank), str(tmp_path), f"t{step % 2}", True)
            saves.append(saver.save(wanted, exchange.separate("save")))
        saver.finish()
        return [save.committed for save in saves]

    assert on_all_ranks(run) == [[True] * 12] * WORLD
    assert_holds(tmp_path, "t0", 10)
    assert_holds(tmp_path, "t1", 11)


def test_an_asynchronous_error_is_logged_and_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = background()
    assert saver.save(request(tmp_path, "a", large()), alone()).wait()

    def broken(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", broken)
    ended = []
    save = saver.save(request(tmp_path, "a", large(), on_end=ended.append), alone())
    assert save.wait(30)
    assert not save.committed
    assert "No space left" in save.cause()
    assert ended == [save]
    assert (saver.counts.committed, saver.counts.failed) == (1, 1)
    monkeypatch.undo()
    assert_counts(tmp_path / "a")
    assert saver.save(request(tmp_path, "b", large()), alone()).wait()
    assert_counts(tmp_path / "b")


def test_a_layout_that_one_rank_cannot_describe_is_known_at_once_on_all(tmp_path: Path) -> None:
    def run(exchange: MessageExchange) -> PendingSave:
        def contribute(_: Any) -> Contribution:
            if exchange.rank == 1:
                raise UnsupportedLayoutError("a strange optimizer")
            return part(1, exchange.rank)

        return background().save(SaveRequest(contribute, str(tmp_path), "a"), exchange.separate("save"))

    for save in on_all_ranks(run):
        assert save.done
        assert save.result.unsupported == "a strange optimizer"
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_a_save_for_which_a_rank_did_not_come_does_not_hold_up_the_next(tmp_path: Path) -> None:
    store = torch.distributed.HashStore()
    saver = background()
    for _ in range(2):  # the second would wait for the first one's memory
        lonely = MessageExchange(store, rank=0, world=2, prefix=f"t{_}", timeout_s=0.3)
        with pytest.raises(CoordinationError, match="rank 1"):
            saver.save(request(tmp_path, "a", large()), lonely)
    assert saver.save(request(tmp_path, "b", large()), alone()).wait(30)
    assert_counts(tmp_path / "b")


def test_a_forked_child_neither_waits_nor_is_heard(tmp_path: Path) -> None:
    """A data loader's worker that is terminated must not terminate the training."""
    code = """
import multiprocessing, os, signal, sys, time
from pathlib import Path
from tests.support.rank_threads import alone
from tests.support.saves import background, large, request, stalled
with stalled(Path(sys.argv[1])) as stall:
    save = background().save(request(Path(sys.argv[1]), "a", large()), alone())
    context = multiprocessing.get_context("fork")
    runs = context.Event()
    child = context.Process(target=lambda: (runs.set(), time.sleep(60)))
    child.start()
    runs.wait()
    child.terminate()
    child.join()
    assert child.exitcode == -signal.SIGTERM, child.exitcode
    pid = os.fork()
    if pid == 0:
        sys.exit(7)  # runs atexit
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert not save.done  # the child did not wait for it
    stall.gate.set()
    assert save.wait(60) and save.committed
time.sleep(1)  # for a signal that we should not have heard
print("alive", flush=True)
os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "alive\n", (done.returncode, done.stderr[-2000:])


def test_a_forked_child_that_saves_itself_is_heard(tmp_path: Path) -> None:
    """As a launcher makes it that forks its ranks, after its own process has saved something."""
    code = """
import os, signal, sys, time
from pathlib import Path
from tests.support.rank_threads import alone
from tests.support.saves import background, large, request, stalled
saver = background()
assert saver.save(request(Path(sys.argv[1]), "a", large(1)), alone()).wait(30)
pid = os.fork()
if pid == 0:
    with stalled(Path(sys.argv[1])) as stall:
        stall.open_on_warning("SIGTERM; finishing the save")
        save = background().save(request(Path(sys.argv[1]), "b", large()), alone())
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert_counts(tmp_path / "b")


JOB = """
import logging, sys, threading, time, os
from pathlib import Path
import torch
from tests.jobs.faults.calls import watched
from tests.jobs.faults.stalling import Stall
from tests.support.rank_threads import alone
from tests.support.saves import large, request
from unickpt.checkpoint.save.requests import SaveOptions
from unickpt.checkpoint.save.saver import Saver
logging.basicConfig()
folder, what, grace = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
stall = Stall("pwrite")
watching = watched(folder, stall, ("pwrite",))
watching.__enter__()
if grace > 1:  # else the disk never answers
    stall.open_on_warning("SIGTERM; finishing the save")
save = Saver(SaveOptions(asynchronous=True, grace_s=grace)).save(request(folder, "a", large()), alone())
assert stall.met.wait(60)
leaving = threading.Event()
threading.Thread(target=lambda: (leaving.wait(), time.sleep(0.2), stall.gate.set()), daemon=True).start()
threading._register_atexit(leaving.set)  # runs before the saver's, as the last that was registered
print("begun", flush=True)
if what == "raise":
    raise RuntimeError("training failed")
if what == "wait":
    time.sleep(60)
if what == "stuck":  # in C++, as in a collective whose peer is gone: Python's own handlers do not run there
    import datetime
    torch.distributed.HashStore().wait(["never"], datetime.timedelta(seconds=60))
"""


def job(folder: Path, what: str, *, grace: float = 30.0) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", JOB, str(folder), what, str(grace)], env=environment(), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    return process


@pytest.mark.parametrize("what", ["end", "raise"])
def test_the_end_of_a_process_waits_for_the_save(tmp_path: Path, what: str) -> None:
    process = job(tmp_path, what)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == (1 if what == "raise" else 0), errors
    assert ("training failed" in errors) == (what == "raise")
    assert_counts(tmp_path / "a")


@pytest.mark.parametrize("what", ["wait", "stuck"])
def test_sigterm_lets_the_save_end_and_then_has_its_effect(tmp_path: Path, what: str) -> None:
    process = job(tmp_path, what)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM
    assert "SIGTERM; finishing the save" in errors
    assert_counts(tmp_path / "a")


def test_a_save_that_outlasts_the_grace_is_absent(tmp_path: Path) -> None:
    process = job(tmp_path, "wait", grace=0.3)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM
    assert "Gave up saving" in errors
    assert not is_checkpoint(tmp_path / "a")
    assert not (tmp_path / "latest").exists()
