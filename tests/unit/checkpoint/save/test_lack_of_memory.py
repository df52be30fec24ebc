"""Saves for which a rank has too little memory, or no more threads. The errors are real: they ask for more than there is."""

from __future__ import annotations

import errno
import mmap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.rank_threads import alone, on_all_ranks
from tests.support.saves import assert_holds, large, part, request
from unickpt.checkpoint.coordination.failure import FailureKind
from unickpt.checkpoint.coordination.message_exchange import MessageExchange
from unickpt.checkpoint.save.failure import save_failure
from unickpt.checkpoint.save.requests import PendingSave, SaveOptions, SaveRequest
from unickpt.checkpoint.save.saver import Saver
from unickpt.checkpoint.save.shards import Contribution

TOO_MUCH = 1 << 50  # bytes; more than an address space has
LACKS: dict[str, Callable[[], object]] = {
    "python": lambda: bytearray(TOO_MUCH),
    "torch": lambda: torch.empty(TOO_MUCH, dtype=torch.uint8),
    "mmap": lambda: mmap.mmap(-1, TOO_MUCH),
}


@pytest.mark.parametrize("lack", LACKS)
@pytest.mark.parametrize("describing", [False, True])
def test_a_lack_of_memory_is_no_reason_for_the_framework_to_save(lack: str, describing: bool) -> None:
    with pytest.raises((MemoryError, RuntimeError, OSError)) as raised:
        LACKS[lack]()
    failure = save_failure(raised.value, 2, describing=describing)
    assert (failure.kind, failure.rank) == (FailureKind.MEMORY, 2)
    assert "test_lack_of_memory.py" in failure.text


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), OSError(errno.EIO, "I/O error")])
def test_other_errors_are_none(error: Exception) -> None:
    assert save_failure(error, 0, describing=True).kind is FailureKind.UNEXPECTED


def test_after_a_lack_of_memory_on_a_rank_saves_make_no_copy_until_one_is_committed(tmp_path: Path) -> None:
    def run(exchange: MessageExchange) -> list[PendingSave]:
        saver = Saver(SaveOptions(asynchronous=True))

        def contribute(_: Any) -> Contribution:
            if exchange.rank == 1:
                bytearray(TOO_MUCH)
            return part(1, exchange.rank)

        def saved(tag: str, contribute: Callable[[Any], Contribution]) -> PendingSave:
            return saver.save(SaveRequest(contribute, str(tmp_path), tag, True), exchange.separate("save"))

        saves = [saved("a", contribute), *(saved(tag, lambda _: part(1, exchange.rank)) for tag in "bc")]
        assert saver.finish(30)
        return saves

    for saves in on_all_ranks(run):
        assert isinstance(saves, list), saves
        assert [failure.kind for failure in saves[0].result.failures] == [FailureKind.MEMORY]
        assert not saves[0].result.framework_saves
        assert [save.committed for save in saves] == [False, True, True]
        assert [save.background for save in saves] == [False, False, True]
    assert not (tmp_path / "a").exists()
    assert_holds(tmp_path, "c", 1)


def test_a_save_for_which_no_thread_starts_is_written_in_the_call(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saver = Saver(SaveOptions(asynchronous=True))
    before = threading.stack_size(1 << 46)  # bytes
    try:
        save = saver.save(request(tmp_path, "a", large(1)), alone())
    finally:
        threading.stack_size(before)
    assert save.committed, "the call has returned, and the checkpoint is not there"
    assert "can't start new thread" in caplog.text
    assert saver.finish(30)
