"""Ctrl-C, SIGTERM and failures end a save: all ranks learn it, and nothing is left behind."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.faults.calls import CHANGING, Call, watched
from tests.support.extent import in_full
from tests.support.rank_threads import alone, on_all_ranks
from tests.support.saves import assert_counts, files, large, numbered, part, request, run_alone
from unickpt.base.errors import CoordinationError
from unickpt.checkpoint.coordination.failure import FailureKind
from unickpt.checkpoint.coordination.message_exchange import MessageExchange
from unickpt.checkpoint.format.layout import LOCK_FILE
from unickpt.checkpoint.format.manifest import MANIFEST_FILE
from unickpt.checkpoint.save import shutdown
from unickpt.checkpoint.save.requests import PendingSave, SaveOptions, SaveRequest
from unickpt.checkpoint.save.saver import Saver
from unickpt.checkpoint.save.shards import Contribution
from unickpt.checkpoint.save.staging_pool import StagingPool

BEHIND = SaveOptions(asynchronous=True)


@pytest.mark.parametrize("moment", ["describing", "pwrite", "rows"])
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path, moment: str) -> None:
    saver = Saver()
    assert saver.save(request(tmp_path, "a", large(1)), alone()).committed
    before = files(tmp_path)

    def contribute(announced: Any) -> Contribution:
        if moment == "describing":
            raise KeyboardInterrupt
        return request(tmp_path, "b", large(2)).contribute(announced)

    def interrupt(call: Call) -> None:
        if not call.after and (call.name == moment or (moment == "rows" and call.name == "open" and "/rows/" in call.path)):
            raise KeyboardInterrupt

    with watched(tmp_path, interrupt, ("pwrite", "open")), pytest.raises(KeyboardInterrupt):
        saver.save(SaveRequest(contribute, str(tmp_path), "b", True), alone())
    assert files(tmp_path) == before
    assert saver.pending == []
    assert saver.save(request(tmp_path, "b", large(1)), alone()).committed


class _AlarmError(Exception):
    """Raised by a signal handler of the program."""


@pytest.mark.parametrize(
    ("tag", "error"),
    [
        ("a", _AlarmError), ("b", KeyboardInterrupt),
        pytest.param("a", KeyboardInterrupt, marks=in_full), pytest.param("b", _AlarmError, marks=in_full),
    ],
)  # fmt: skip
def test_an_interrupt_at_any_call_leaves_complete_checkpoints_alone(
    tmp_path: Path, tag: str, error: type[BaseException]
) -> None:
    """Also after the manifest is in place, and of the checkpoint that the save replaces."""
    assert Saver().save(request(tmp_path, "a", numbered(1, 16)), alone()).committed
    whole = files(tmp_path)
    for number in itertools.count():
        seen = 0

        def interrupt(_: Call, number: int = number) -> None:
            nonlocal seen
            seen += 1
            if seen == number + 1:
                raise error

        saver = Saver()
        with watched(tmp_path, interrupt, CHANGING), contextlib.suppress(error, CoordinationError):
            saver.save(request(tmp_path, tag, numbered(1, 16)), alone())
        assert saver.pending == []
        assert_counts(tmp_path / "a", 1)
        if (tmp_path / "b" / MANIFEST_FILE).exists():
            assert_counts(tmp_path / "b", 1)
        elif error is KeyboardInterrupt and tag == "b":
            assert set(files(tmp_path)) - set(whole) <= {"b", f"b/{LOCK_FILE}"}
        retry = Saver().save(request(tmp_path, tag, numbered(1, 16)), alone())
        assert retry.committed, retry.cause()
        if seen <= number:
            return
        if tag == "b":
            shutil.rmtree(tmp_path / "b")


@pytest.mark.parametrize("moment", ["callback", "lock"])
def test_a_save_that_ctrl_c_interrupts_at_its_end_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Later saves and the end of the process would wait for it."""

    def interrupt(*_: Any) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    saver = Saver()
    if moment == "lock":
        monkeypatch.setattr(saver, "end_task", interrupt)
    wanted = request(tmp_path, "a", large(1), on_end=interrupt if moment == "callback" else None)
    with pytest.raises(KeyboardInterrupt):
        saver.save(wanted, alone())
    assert saver.pending == []
    assert saver.save(request(tmp_path, "a", large(1)), alone()).committed


def test_ctrl_c_leaves_the_staging_memory_unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python code runs between the lock of a condition and the block: an interrupt there leaves it locked."""
    real, pool = threading.Condition.__enter__, StagingPool()
    buffer = pool.acquire(1)

    def interrupt(condition: threading.Condition) -> bool:
        real(condition)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(threading.Condition, "__enter__", interrupt)
        pool.release(buffer)
    releasing = threading.Thread(target=pool.release, args=(buffer,), daemon=True)
    releasing.start()
    releasing.join(5)
    assert not releasing.is_alive()


def test_ctrl_c_on_one_rank_reaches_the_others_at_once(tmp_path: Path) -> None:
    def run(exchange: MessageExchange) -> Any:
        def contribute(_: Any) -> Contribution:
            if exchange.rank == 0:
                raise KeyboardInterrupt
            return part(1, exchange.rank)

        try:
            return Saver().save(SaveRequest(contribute, str(tmp_path), "a", True), exchange.separate("save"))
        except KeyboardInterrupt:
            return "interrupted"

    begin = time.monotonic()
    first, *others = on_all_ranks(run, timeout_s=60)
    assert time.monotonic() - begin < 20
    assert first == "interrupted"
    for error in others:
        assert isinstance(error, CoordinationError)
        assert "KeyboardInterrupt" in str(error)
    assert files(tmp_path) == []


SIGTERM_JOB = """
import asyncio, logging, os, signal, sys, threading, time
from pathlib import Path
from tests.jobs.faults.calls import watched
from tests.support.extent import in_full
from tests.support.rank_threads import alone
from tests.support.saves import files, run_alone, large, request
from unickpt.checkpoint.save import shutdown
from unickpt.checkpoint.save.requests import SaveOptions
from unickpt.checkpoint.save.saver import Saver
logging.basicConfig(level=logging.INFO)
folder, what = Path(sys.argv[1]), sys.argv[2]
gate, met = threading.Event(), threading.Event()
def hold(call):
    if call.name == "pwrite" and not call.after:
        met.set()
        gate.wait()
watching = watched(folder, hold, ("pwrite",))
watching.__enter__()
behind = what != "synchronous"
made = []
def make():
    made.append(Saver(SaveOptions(asynchronous=behind, grace_s=float(sys.argv[3]), on_busy="queue")))
if what == "made in a thread":
    maker = threading.Thread(target=make)
    maker.start()
    maker.join()
else:
    make()
saver, = made
async def usual():
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, print)
if what == "after asyncio":
    asyncio.run(usual())  # at its end asyncio sets SIG_DFL
def end():
    met.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    if what != "never":
        time.sleep(0.5)
        gate.set()
threading.Thread(target=end, daemon=True).start()
save = saver.save(request(folder, "a", large()), alone())
met.wait()
while not shutdown.ending_signal():
    time.sleep(0.01)
if what == "another":
    other = saver.save(request(folder, "b", large()), alone())
    print("kind", other.result.failures[0].kind.value, other.committed, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("what", ["synchronous", "another", "made in a thread", "after asyncio"])
def test_after_sigterm_a_running_save_finishes_and_no_other_begins(tmp_path: Path, what: str) -> None:
    done = run_alone(SIGTERM_JOB, str(tmp_path), what, "30")
    assert done.returncode == -signal.SIGTERM, done.stderr[-2000:]
    assert_counts(tmp_path / "a")
    assert not (tmp_path / "b").exists()
    if what == "another":
        assert done.stdout == "kind interrupted False\n"


def test_an_abandoned_save_leaves_no_checkpoint_and_the_log_has_its_duration(tmp_path: Path) -> None:
    begin = time.monotonic()
    done = run_alone(SIGTERM_JOB, str(tmp_path), "never", "1.5")
    assert done.returncode == -signal.SIGTERM, done.stderr[-2000:]
    assert time.monotonic() - begin < 40
    assert files(tmp_path) == []
    assert "Gave up saving" in done.stderr
    assert "No checkpoint was written; earlier checkpoints are intact." in done.stderr


OTHER_CODE_JOB = """
import asyncio, os, signal, sys, time
from pathlib import Path
from tests.support.extent import in_full
from tests.support.rank_threads import alone
from tests.support.saves import files, run_alone, large, request
from unickpt.api.preemption import Preemption
from unickpt.checkpoint.save.requests import SaveOptions
from unickpt.checkpoint.save.saver import Saver
folder, what = Path(sys.argv[1]), sys.argv[2]
saver = Saver(SaveOptions())
assert saver.save(request(folder, "a", large()), alone()).committed
preemption = Preemption() if "stopping" in what else None
async def usual():
    heard = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, heard.set)
    os.kill(os.getpid(), signal.SIGUSR1)
    await heard.wait()
    if "within" in what:
        await end()
async def end():
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(5)
def handler(number, frame):
    print("cleaned", flush=True)
    if callable(before):
        before(number, frame)
    else:
        signal.signal(number, before)
        os.kill(os.getpid(), number)
if "asyncio" in what:
    asyncio.run(usual())
else:
    before = signal.signal(signal.SIGTERM, handler)
    child = os.fork()
    if not child:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(20)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGTERM
    time.sleep(0.5)
os.kill(os.getpid(), signal.SIGTERM)
steps, until = 0, time.monotonic() + 20
while time.monotonic() < until:
    time.sleep(0.05)
    steps += 1
    if preemption is not None and preemption.due(steps):
        preemption.leave()
"""


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("after asyncio", -signal.SIGTERM),
        ("within asyncio", -signal.SIGTERM),
        ("stopping after asyncio", 143),
        ("a handler that calls the one before", -signal.SIGTERM),
        ("stopping: a handler that calls the one before", 143),
    ],
)
def test_sigterm_ends_a_process_whose_other_code_handles_signals_after_a_save(tmp_path: Path, what: str, code: int) -> None:
    """asyncio takes the descriptor of ``signal.set_wakeup_fd``, and does not give it back."""
    done = run_alone(OTHER_CODE_JOB, str(tmp_path), what)
    assert done.returncode == code, done.stderr[-2000:]
    assert done.stdout.count("cleaned") == (2 if "handler" in what else 0), "of the child, and of the process"


def test_the_log_states_the_time_waited_and_not_the_grace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An ordinary end grants more than the grace to writing itself."""
    monkeypatch.setattr(shutdown, "WRITING_S", 1.0)
    gate = threading.Event()

    def hold(call: Call) -> None:
        if not call.after:
            gate.wait()

    saver = Saver(SaveOptions(asynchronous=True, grace_s=0.2))
    with watched(tmp_path, hold, ("pwrite",)):
        saver.save(request(tmp_path, "a", large(1)), alone())
        shutdown.finish_all()
        gate.set()
    text = next(record.getMessage() for record in caplog.records if "Gave up saving" in record.getMessage())
    assert "after 1.2 s" in text or "after 1.3 s" in text or "after 1.4 s" in text, text
    saver.finish(30)
    assert files(tmp_path) == []


def test_nothing_is_left_of_a_save_that_failed(tmp_path: Path) -> None:
    def run(exchange: MessageExchange) -> PendingSave:
        return Saver().save(
            SaveRequest(lambda _: part(1, exchange.rank), str(tmp_path / "run"), "a", True), exchange.separate("save")
        )

    def full(call: Call) -> None:
        if call.name == "pwrite" and "rank00001" in call.path:
            raise OSError(28, "No space left on device")

    with watched(tmp_path, full, ("pwrite",)):
        for save in on_all_ranks(run):
            assert [failure.kind for failure in save.result.failures] == [FailureKind.STORAGE]
            assert not save.result.framework_saves
    assert files(tmp_path) == ["run"]
