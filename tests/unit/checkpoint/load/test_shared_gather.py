"""The ranks of a host gather tensors through their memory: threads as ranks, the shared memory and its files are real."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.rank_threads import WORLD, on_all_ranks
from unickpt.base.errors import HostPeerFailedError
from unickpt.checkpoint.coordination import host_peers
from unickpt.checkpoint.coordination.host_peers import READY, HostMemory, HostPeers, prepare_peers
from unickpt.checkpoint.coordination.message_exchange import MessageExchange
from unickpt.checkpoint.load import shared_gather
from unickpt.checkpoint.load.shared_gather import SplitTensor, gather

Group = tuple[tuple[int, ...], int, torch.dtype, torch.dtype]
SMALL: list[Group] = [
    ((0, 1, 2), 1000, torch.float32, torch.bfloat16),
    ((0, 2), 333, torch.float32, torch.float32),
    ((0, 1, 2), 7, torch.float64, torch.float16),  # a second tensor of the same ranks
    ((2, 1), 50_001, torch.bfloat16, torch.float32),  # part 0 is that of rank 2
    ((1,), 5, torch.float32, torch.float32),
    ((0, 1, 2), 0, torch.float32, torch.float32),
]


@pytest.fixture(autouse=True)
def own_shared_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="unickpt-test-", dir=host_peers.SHARED_MEMORY) as folder:
        monkeypatch.setattr(host_peers, "SHARED_MEMORY", Path(folder))
        yield


def masters(number: int, rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    values = torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)
    if numel > 4:
        values[:3] = torch.tensor([float("nan"), float("inf"), -0.0], dtype=dtype)
    return values


def tensors_of(groups: Sequence[Group], rank: int) -> list[SplitTensor]:
    found = []
    for number, (ranks, numel, source, dtype) in enumerate(groups):
        if rank in ranks:
            whole = torch.full((numel * len(ranks),), 3.0, dtype=dtype)
            parts = [whole.narrow(0, at * numel, numel) for at in range(len(ranks))]
            found.append(SplitTensor(ranks, ranks.index(rank), parts, masters(number, rank, numel, source)))
    return found


def bits(tensor: torch.Tensor) -> list[int]:
    found: list[int] = tensor.contiguous().view(torch.uint8).tolist()
    return found


def opened(exchange: MessageExchange) -> HostMemory:
    failures, opener = prepare_peers(exchange, np.arange(3), None, wanted_bytes=10)
    assert not failures
    assert opener is not None
    return HostMemory(opener)


def gathered(memory: HostMemory, tensors: list[SplitTensor] | None, *, filled: bool = False) -> bool:
    def part(peers: HostPeers | None) -> bool:
        assert peers is not None
        return gather(peers, tensors, filled=filled)

    return memory.use(part)


@pytest.mark.parametrize("slot_bytes", [256, 4096, 512 << 10])
def test_every_rank_has_the_casts_of_all_ranks(monkeypatch: pytest.MonkeyPatch, slot_bytes: int) -> None:
    monkeypatch.setattr(shared_gather, "_SLOT_BYTES", slot_bytes)

    def run(exchange: MessageExchange) -> list[list[SplitTensor]]:
        twice = [tensors_of(SMALL, exchange.rank), tensors_of(SMALL[::-1], exchange.rank)]
        with opened(exchange) as memory:
            assert all(gathered(memory, tensors) for tensors in twice)
        return twice

    for rank, twice in enumerate(on_all_ranks(run)):
        for groups, found in zip((SMALL, SMALL[::-1]), twice, strict=True):
            own = [(number, group) for number, group in enumerate(groups) if rank in group[0]]
            for (number, (ranks, numel, source, dtype)), tensor in zip(own, found, strict=True):
                for other, part in zip(ranks, tensor.parts, strict=True):
                    assert bits(part) == bits(masters(number, other, numel, source).to(dtype)), (rank, other, number)


def test_a_rank_without_tensors_takes_part() -> None:
    def run(exchange: MessageExchange) -> list[SplitTensor]:
        found = tensors_of([((0, 2), 4000, torch.float32, torch.float32)], exchange.rank)
        with opened(exchange) as memory:
            assert gathered(memory, found)
        return found

    first, second, third = on_all_ranks(run)
    assert not second
    assert [bits(part) for part in first[0].parts] == [bits(part) for part in third[0].parts]


@pytest.mark.parametrize("missing", [None, 0, 1], ids=["all-filled", "first-not", "second-not"])
def test_filled_parts_are_gathered_only_if_a_rank_lacks_some(missing: int | None) -> None:
    def run(exchange: MessageExchange) -> tuple[bool, list[SplitTensor]]:
        found = tensors_of([((0, 1), 100, torch.float32, torch.float32)], exchange.rank)
        with opened(exchange) as memory:
            did = [gathered(memory, found, filled=exchange.rank != missing), gathered(memory, found, filled=True)]
        return all(did), found

    (first, (mine,)), (second, (other,)), (third, nothing) = on_all_ranks(run)
    assert first
    assert second
    assert third
    assert not nothing
    filled = all(bool((part == 3.0).all()) for tensor in (mine, other) for part in tensor.parts)
    assert filled is (missing is None)
    assert [bits(part) for part in mine.parts] == [bits(part) for part in other.parts]


def _unequal(tensors: list[SplitTensor]) -> list[SplitTensor]:
    first = tensors[0]
    return [SplitTensor(first.ranks, first.me, [first.parts[0], first.parts[1][1:]], first.source)]


def _of_another_host(tensors: list[SplitTensor]) -> list[SplitTensor]:
    first = tensors[0]
    return [SplitTensor((first.ranks[0], 9), 0, first.parts, first.source)]


@pytest.mark.parametrize("change", [_unequal, _of_another_host, lambda _: None], ids=["unequal", "other-host", "none"])
@pytest.mark.parametrize("filled", [False, True])
def test_all_ranks_of_a_host_gather_in_another_way_if_one_must(change: Any, filled: bool) -> None:
    """Also if all of them have filled their parts: ranks of another host would wait for them."""

    def run(exchange: MessageExchange) -> tuple[bool, list[SplitTensor]]:
        found = tensors_of([((0, 1), 100, torch.float32, torch.float32)], exchange.rank)
        given = change(found) if exchange.rank == 0 else found
        with opened(exchange) as memory:
            return gathered(memory, given, filled=filled), found

    for did, found in on_all_ranks(run):
        assert did is False
        assert all(bool((part == 3.0).all()) for tensor in found for part in tensor.parts)


def test_tensors_too_many_for_one_slot_are_gathered_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_gather, "_SLOT_BYTES", 256)
    many: list[Group] = [((0, 1, 2), 4, torch.float32, torch.float32)] * 10

    def run(exchange: MessageExchange) -> bool:
        with opened(exchange) as memory:
            return gathered(memory, tensors_of(many, exchange.rank))

    assert on_all_ranks(run) == [False] * WORLD


@pytest.mark.parametrize("round_number", [0, 3, 20])
def test_no_rank_waits_for_a_rank_that_failed(monkeypatch: pytest.MonkeyPatch, round_number: int) -> None:
    monkeypatch.setattr(shared_gather, "_SLOT_BYTES", 256)
    publish = HostPeers.publish

    def failing(self: HostPeers, field: int, value: int) -> None:
        if self.me == 1 and field == READY and value == round_number + 1:
            raise ValueError("no")
        publish(self, field, value)

    monkeypatch.setattr(HostPeers, "publish", failing)
    ended = threading.Barrier(WORLD)

    def run(exchange: MessageExchange) -> bool:
        with opened(exchange) as memory:
            try:
                return gathered(memory, tensors_of(SMALL, exchange.rank))
            finally:
                ended.wait(20)  # as in a load: the memory stays open until all ranks know the outcome

    first, second, third = on_all_ranks(run, timeout_s=60.0)
    assert isinstance(second, ValueError)
    assert isinstance(first, HostPeerFailedError)
    assert isinstance(third, HostPeerFailedError)
    assert "rank 1 of this host failed" in str(first)
    assert not list(host_peers.SHARED_MEMORY.glob("unickpt-load-*"))
