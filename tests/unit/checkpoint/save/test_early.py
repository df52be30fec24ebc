"""What a save does before the coordinator's announcement arrives, and what waits while training waits."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.rank_threads import alone, on_all_ranks
from tests.support.saves import assert_holds, part, stalled
from unickpt.base.garbage import collection_paused
from unickpt.checkpoint.coordination.message_exchange import Message, MessageExchange
from unickpt.checkpoint.save.requests import SaveOptions, SaveRequest
from unickpt.checkpoint.save.saver import Saver
from unickpt.checkpoint.save.shards import Contribution


def test_ranks_describe_their_state_while_the_coordinator_announces(tmp_path: Path) -> None:
    """The coordinator announces nothing until the others have begun."""
    begun = [threading.Event() for _ in range(3)]

    def announce() -> Message:
        assert all(event.wait(20) for event in begun[1:])
        return {"from": 0}

    def run(exchange: MessageExchange) -> Any:
        seen: list[Message] = []

        def contribute(announced: Message) -> Contribution:
            seen.append(announced)
            return part(1, exchange.rank)

        request = SaveRequest(contribute, str(tmp_path), "a", announce=announce, early=begun[exchange.rank].set)
        return Saver().save(request, exchange).committed, seen

    assert on_all_ranks(run) == [(True, [{"from": 0}])] * 3
    assert not begun[0].is_set()  # the coordinator goes straight to its announcement
    assert_holds(tmp_path, "a", 1)


def test_a_description_that_fails_early_is_a_failure_of_its_rank(tmp_path: Path) -> None:
    def fail() -> None:
        raise MemoryError("no room for the list")

    def run(exchange: MessageExchange) -> Any:
        def contribute(_: Message) -> Contribution:
            if exchange.rank == 1:
                fail()
            return part(1, exchange.rank)

        request = SaveRequest(contribute, str(tmp_path), "a", early=fail if exchange.rank == 1 else None)
        result = Saver().save(request, exchange).result
        return [(failure.rank, failure.text) for failure in result.failures] if result is not None else None

    found = on_all_ranks(run)
    assert found[0] == found[1] == found[2]
    assert [rank for rank, _ in found[0]] == [1]
    assert "no room for the list" in found[0][0][1]


@pytest.fixture
def eager_collector() -> Iterator[list[str]]:
    """Begins a collection at almost every object. Yields the generations that it has collected."""
    began: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            began.append(str(info["generation"]))

    before = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(1, 1, 1)
    yield began
    gc.set_threshold(*before)
    gc.callbacks.remove(note)


def test_no_garbage_is_collected_while_a_state_is_described(tmp_path: Path, eager_collector: list[str]) -> None:
    during: list[str] = []

    def contribute(_: Message) -> Contribution:
        eager_collector.clear()
        held = [[number] for number in range(2000)]
        during.extend(eager_collector)
        assert len(held) == 2000
        return part(1, 0, 1)

    save = Saver().save(SaveRequest(contribute, str(tmp_path), "a"), alone())
    assert save.committed
    assert not during
    assert eager_collector  # afterwards it goes on


def test_the_collector_is_left_as_it_was() -> None:
    enabled = []

    @collection_paused()
    def fail() -> None:
        enabled.append(gc.isenabled())
        raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert enabled == [False]
    assert gc.isenabled()
    gc.disable()
    try:
        with collection_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_save_that_skips_itself_describes_nothing(tmp_path: Path) -> None:
    described: list[str] = []
    begun = threading.Barrier(3)

    def run(exchange: MessageExchange) -> list[bool]:
        saver = Saver(SaveOptions(asynchronous=True, on_busy="skip"))
        saves = []
        for tag in "ab":
            request = SaveRequest(
                lambda _: part(1, exchange.rank), str(tmp_path), tag, early=partial(described.append, f"{tag}{exchange.rank}")
            )
            saves.append(saver.save(request, exchange.separate(tag)))
            if tag == "a":
                begun.wait(20)  # its threads cannot write yet
        stall.gate.set()
        assert saver.finish(60)
        return [save.result is not None and save.result.skipped for save in saves]

    with stalled(tmp_path) as stall:
        found = on_all_ranks(run)
    assert found == [[False, True]] * 3
    assert sorted(described) == ["a1", "a2"]


@pytest.mark.parametrize("skipped", [False, True])
def test_ctrl_c_while_a_rank_describes_early_reaches_the_others_at_once(tmp_path: Path, skipped: bool) -> None:
    """Also if the coordinator refuses the save, so that no rank waits for the interrupted one."""

    def run(exchange: MessageExchange) -> Any:
        def early() -> None:
            if exchange.rank == 1:
                raise KeyboardInterrupt

        def refuse() -> Message:
            if skipped:
                raise MemoryError("no announcement")
            return {}

        forgotten: list[int] = []
        request = SaveRequest(
            lambda _: part(1, exchange.rank), str(tmp_path), "a", announce=refuse, early=early,
            forget=partial(forgotten.append, exchange.rank),
        )  # fmt: skip
        try:
            save = Saver().save(request, exchange)
        except KeyboardInterrupt:
            assert forgotten == [exchange.rank]
            return "interrupted"
        assert forgotten == [exchange.rank]
        return save.cause()

    begin = time.monotonic()
    found = on_all_ranks(run, timeout_s=60)
    assert time.monotonic() - begin < 20
    assert found[1] == "interrupted"
    for cause in (found[0], found[2]):
        assert ("no announcement" if skipped else "KeyboardInterrupt") in cause
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []
