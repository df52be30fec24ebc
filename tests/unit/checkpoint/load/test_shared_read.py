"""What several ranks of a host want is read once: threads as ranks, their shared memory and their files are real."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.rank_threads import WORLD, on_all_ranks
from tests.support.saves import WRITER
from tests.support.saving import save
from unickpt.base.errors import CorruptCheckpointError, HostPeerFailedError, StorageError
from unickpt.checkpoint.coordination import host_peers
from unickpt.checkpoint.coordination.failure import Failure, FailureKind
from unickpt.checkpoint.coordination.host_peers import HostPeers, prepare_peers
from unickpt.checkpoint.coordination.message_exchange import MessageExchange
from unickpt.checkpoint.format import rank_rows as rows_module
from unickpt.checkpoint.format.boxes import Box, split_flat_range
from unickpt.checkpoint.format.index import FragmentRow, TensorInfo
from unickpt.checkpoint.load import shared_read
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.fragments import Request
from unickpt.checkpoint.load.reader import ReadStats
from unickpt.checkpoint.load.shared_gather import SplitTensor, gather
from unickpt.checkpoint.save import shards as contribution
from unickpt.checkpoint.save.shards import Contribution, shards_of_flat_range
from unickpt.checkpoint.storage import posix

SHAPES = [(64, 96), (5,), (300, 7), (1,), (40, 3, 11), (20_000,)]
INFOS = [TensorInfo(f"t{at}", "master", "F32" if at % 2 else "BF16", shape, "parameter") for at, shape in enumerate(SHAPES)]


def whole(info: TensorInfo) -> torch.Tensor:
    values = torch.arange(info.numel, dtype=torch.float32).reshape(info.shape) % 251
    return values.to(torch.float32 if info.dtype == "F32" else torch.bfloat16)


def saved(folder: Path) -> Path:
    """By three ranks, each a third of everything as a flat range."""

    def run(exchange: MessageExchange) -> None:
        shards = []
        for info in INFOS:
            lo, hi = (info.numel * at // WORLD for at in (exchange.rank, exchange.rank + 1))
            shards += shards_of_flat_range(info, lo, hi, whole(info).reshape(-1)[lo:hi])
        contribution = Contribution(shards, 3, WRITER)
        save(lambda _: contribution, save_dir=str(folder), tag="a", save_latest=True, exchange=exchange)

    on_all_ranks(run)
    return folder / "a"


def wanted(checkpoint: Checkpoint, rank: int) -> list[tuple[Request, torch.Tensor]]:
    """Everything on ranks 0 and 1, halves across on rank 2; and what it has to become."""
    found = []
    for info in INFOS:
        half = Box((0,) * len(info.shape), (*info.shape[:-1], max(info.shape[-1] // 2, 1)))
        box = half if rank == 2 else Box.whole(info.shape)
        expected = whole(info)[box.slices()].float()
        found.append((Request(checkpoint.ids[info.key], box, torch.full((box.numel,), -1.0)), expected))
    return found


def loaded(
    directory: Path, exchange: MessageExchange, *, share: bool = True, verify: str = "always", cached: bool = False
) -> ReadStats:
    checkpoint = Checkpoint.open(directory)
    pairs = wanted(checkpoint, exchange.rank)
    planned = checkpoint.plan([request for request, _ in pairs])
    failures, near = prepare_peers(
        exchange, planned.shareable, None, wanted_bytes=planned.size_bytes, cached=cached, share=share
    )
    assert not failures
    if near is None:
        stats = checkpoint.fill(planned, verify=verify)
    else:
        with near() as ranks:
            stats = checkpoint.fill(planned, verify=verify, host_peers=ranks)
    for request, expected in pairs:
        assert torch.equal(request.out.view(expected.shape), expected)
    return stats


@pytest.fixture(autouse=True)
def own_shared_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder of this test's own, so that loads of other processes on this machine do not show."""
    with tempfile.TemporaryDirectory(prefix="unickpt-test-", dir=host_peers.SHARED_MEMORY) as folder:
        monkeypatch.setattr(host_peers, "SHARED_MEMORY", Path(folder))
        yield


def left_behind() -> list[Path]:
    return list(host_peers.SHARED_MEMORY.glob("unickpt-load-*"))


@pytest.mark.parametrize("verify", ["always", "off"])
def test_every_byte_is_read_once_for_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify: str) -> None:
    monkeypatch.setattr(shared_read, "_RUN_BYTES", 8192)
    directory = saved(tmp_path)
    each = on_all_ranks(lambda exchange: loaded(directory, exchange, share=False))
    together = on_all_ranks(lambda exchange: loaded(directory, exchange, verify=verify))
    total = sum(info.size_bytes for info in INFOS)
    assert sum(stats.bytes_read for stats in each) > 2.5 * total
    assert sum(stats.bytes_read for stats in together) == total
    assert [stats.bytes_needed for stats in together] == [stats.bytes_needed for stats in each]
    assert max(stats.bytes_read for stats in together) < 0.5 * total
    assert not left_behind()


@pytest.mark.parametrize("uncached", [None, 0, 2], ids=["all-cached", "first-not", "last-not"])
@pytest.mark.parametrize("times", [4, 2])
def test_ranks_read_for_themselves_what_the_page_cache_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uncached: int | None, times: int
) -> None:
    """Unless one of them does not find it there, or they would read everything too often: three ranks, three times."""
    monkeypatch.setattr(shared_read, "_MOST_TIMES", times)
    directory = saved(tmp_path)
    found = on_all_ranks(lambda exchange: loaded(directory, exchange, cached=exchange.rank != uncached))
    total = sum(info.size_bytes for info in INFOS)
    shared = uncached is not None or times == 2
    read = sum(stats.bytes_read for stats in found)
    assert read == total if shared else read > 2.5 * total
    assert all(stats.bytes_gathered == 0 for stats in found) is not shared
    assert not left_behind()


def test_a_large_plan_knows_whether_the_page_cache_has_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = saved(tmp_path)
    for path in (directory / "data").iterdir():
        path.read_bytes()

    def cached() -> bool:
        checkpoint = Checkpoint.open(directory)
        return checkpoint.plan([request for request, _ in wanted(checkpoint, 0)]).cached

    assert cached() is False
    monkeypatch.setattr("unickpt.checkpoint.load.checkpoint._LARGE_BYTES", 1)
    assert cached() is True
    monkeypatch.setattr(posix._DescriptorReader, "is_cached", lambda *_: False)
    assert cached() is False


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("rank_bytes", [256, 4096, 5000])
def test_shared_reads_work_with_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank_bytes: int, cached: bool
) -> None:
    monkeypatch.setattr(host_peers, "_RANK_BYTES", rank_bytes)
    monkeypatch.setattr(host_peers, "_LEAST_RANK_BYTES", rank_bytes)
    monkeypatch.setattr(posix._DescriptorReader, "is_cached", lambda *_: cached)
    directory = saved(tmp_path)
    together = on_all_ranks(lambda exchange: loaded(directory, exchange))
    assert sum(stats.bytes_read for stats in together) == sum(info.size_bytes for info in INFOS)


def test_a_file_on_a_disk_stays_open_and_is_read_front_to_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reads ahead of an open file that one thread reads in order."""
    monkeypatch.setattr(host_peers, "_RANK_BYTES", 4096)
    monkeypatch.setattr(host_peers, "_LEAST_RANK_BYTES", 4096)
    monkeypatch.setattr(posix._DescriptorReader, "is_cached", lambda *_: False)
    directory = saved(tmp_path)
    reads: dict[int, list[int]] = {}
    kept: list[posix._DescriptorReader] = []  # so that no two have the same id
    read_into = posix._DescriptorReader.read_into

    def recorded(reader: posix._DescriptorReader, parts: Sequence[memoryview], offset_bytes: int) -> None:
        if "data" in reader.path and sum(map(len, parts)):
            kept.append(reader)
            reads.setdefault(id(reader), []).append(offset_bytes)
        read_into(reader, parts, offset_bytes)

    monkeypatch.setattr(posix._DescriptorReader, "read_into", recorded)
    on_all_ranks(lambda exchange: loaded(directory, exchange))
    assert max(map(len, reads.values())) > 4  # one open file serves several rounds
    assert all(offsets == sorted(offsets) for offsets in reads.values())


def test_ranks_gather_after_shared_reads_in_the_same_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_peers, "_RANK_BYTES", 4096)
    monkeypatch.setattr(host_peers, "_LEAST_RANK_BYTES", 4096)
    directory = saved(tmp_path)
    masters = [torch.arange(5000.0) + 7 * rank for rank in range(WORLD)]

    def run(exchange: MessageExchange) -> list[torch.Tensor]:
        checkpoint = Checkpoint.open(directory)
        pairs = wanted(checkpoint, exchange.rank)
        planned = checkpoint.plan([request for request, _ in pairs])
        _, near = prepare_peers(exchange, planned.shareable, None, wanted_bytes=planned.size_bytes)
        assert near is not None
        with near() as peers:
            checkpoint.fill(planned, host_peers=peers)
            parts = [torch.zeros(5000) for _ in range(WORLD)]
            tensor = SplitTensor(tuple(range(WORLD)), exchange.rank, parts, masters[exchange.rank])
            assert gather(peers, [tensor])
            checkpoint.fill(planned, host_peers=peers)
        assert all(torch.equal(request.out.view(expected.shape), expected) for request, expected in pairs)
        return parts

    for parts in on_all_ranks(run):
        assert all(map(torch.equal, parts, masters))


@pytest.mark.parametrize("rank", range(WORLD))
def test_damage_that_one_rank_finds_ends_the_load_of_all(tmp_path: Path, rank: int) -> None:
    directory = saved(tmp_path)
    path = next((directory / "data").glob(f"rank{rank:05d}*"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)

    def run(exchange: MessageExchange) -> str:
        try:
            loaded(directory, exchange)
        except CorruptCheckpointError as err:
            return "found it" if path.name in str(err) else str(err)
        except HostPeerFailedError:
            return "refused"
        return "nothing"

    assert sorted(on_all_ranks(run, timeout_s=20.0)) == ["found it", "refused", "refused"]
    assert not left_behind()


def test_a_rank_that_fails_before_the_first_has_opened_leaves_no_folder() -> None:
    order = threading.Barrier(WORLD)

    def run(exchange: MessageExchange) -> None:
        _, near = prepare_peers(exchange, np.arange(3), None, wanted_bytes=10)
        assert near is not None
        if exchange.rank == 0:
            order.wait(20)  # the others have failed
            with near():
                return
        with near() as peers:
            peers.fail()
            order.wait(20)

    on_all_ranks(run)
    assert not left_behind()


def test_a_rank_that_cannot_open_the_memory_of_another_tells_the_others() -> None:
    def run(exchange: MessageExchange) -> str:
        _, near = prepare_peers(exchange, np.arange(3), None, wanted_bytes=10)
        assert isinstance(near, partial)
        if exchange.rank == 1:
            with pytest.raises(StorageError, match=r"rank 1 cannot open the memory .* No such file or directory"):
                HostPeers({**near.args[0], 2: host_peers.SHARED_MEMORY / "unickpt-load-absent"}, 1, timeout_s=20.0)
            return "cannot open"
        with near() as peers:
            try:
                peers.wait(host_peers.READY, 1)
            except HostPeerFailedError as err:
                return str(err)
        return "waited"

    found = on_all_ranks(run)
    assert found[1] == "cannot open"
    assert all("rank 1 of this host failed" in found[rank] for rank in (0, 2))
    assert not left_behind()


def test_no_rank_reads_if_one_cannot_plan(tmp_path: Path) -> None:
    failure = Failure(FailureKind.MISMATCH, 1, "w", text="no")

    def run(exchange: MessageExchange) -> tuple[tuple[Failure, ...], bool]:
        failures, near = prepare_peers(exchange, np.arange(3), failure if exchange.rank == 1 else None, wanted_bytes=10)
        return failures, near is None

    assert on_all_ranks(run) == [((failure,), True)] * WORLD


def test_ranks_that_opened_different_saves_under_one_name_do_not_load() -> None:
    def run(exchange: MessageExchange) -> list[int]:
        identity = "new" if exchange.rank == 2 else "old"
        failures, near = prepare_peers(exchange, np.arange(3), None, identity=identity, wanted_bytes=10)
        assert near is None
        assert "index new, on rank 0 old" in failures[0].text
        return [failure.rank for failure in failures]

    assert on_all_ranks(run) == [[2]] * WORLD


def test_without_room_in_shared_memory_every_rank_reads_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    directory = saved(tmp_path)
    stats = on_all_ranks(lambda exchange: loaded(directory, exchange))
    assert sum(each.bytes_read for each in stats) > 2.5 * sum(info.size_bytes for info in INFOS)
    assert "rank 0 cannot share memory" in caplog.text
    assert "No space left" in caplog.text
    assert not left_behind()


def test_ranks_of_other_hosts_share_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = saved(tmp_path)
    hosts = iter(["a", "b", "a"])
    monkeypatch.setattr(host_peers, "_host", lambda: next(hosts))
    total = sum(info.size_bytes for info in INFOS)
    assert (
        1.5 * total < sum(stats.bytes_read for stats in on_all_ranks(lambda exchange: loaded(directory, exchange))) <= 2 * total
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[tuple[int, int]], list[list[int]], int]:
    fragments = draw(st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 200)), min_size=1, max_size=12))
    ranks = draw(st.lists(st.lists(st.integers(0, len(fragments) - 1), unique=True), min_size=2, max_size=4))
    return fragments, ranks, draw(st.sampled_from([128, 192, 1024, 4096, 1 << 20]))


@given(cases())
def test_a_schedule_reads_every_shared_byte_once_and_in_place(
    case: tuple[list[tuple[int, int]], list[list[int]], int],
) -> None:
    fragments, ranks, slot = case
    rows, offset = [], 64
    for at, (count, gap) in enumerate(fragments):
        info = TensorInfo(f"t{at:03d}", "master", "U8", (count,), "parameter")
        rows.append(FragmentRow(info, split_flat_range(info.shape, 0, count)[0], offset, 0))
        offset += count + (gap if gap > 100 else 0)
    index = rows_module.merge([("data/rank00000.safetensors", rows_module.to_bytes(rows))])
    wanted = [np.array(sorted(rank), np.int64) for rank in ranks]
    plan = shared_read.schedule(index, wanted, slot)
    times = np.bincount(np.concatenate(wanted).astype(np.int64), minlength=len(rows))
    assert plan.rows.tolist() == np.flatnonzero(times > 1).tolist()
    seen: dict[int, int] = dict.fromkeys(plan.rows.tolist(), 0)
    for readers in plan.rounds:
        for reader, blocks in enumerate(readers):
            end = 0
            for block in blocks:
                assert block.row in ranks[reader]
                assert block.lo == seen[block.row]  # its parts come in order
                seen[block.row] = block.hi
                assert end <= block.at < block.at + block.hi - block.lo <= slot
                assert (block.at - int(index.offset_bytes[block.row]) - block.lo) % 64 == 0
                end = block.at + block.hi - block.lo
            assert len({block.row for block in blocks}) == len(blocks)
    assert seen == {row: int(index.size_bytes()[row]) for row in plan.rows.tolist()}


def test_a_part_of_a_large_shard_costs_little_more_than_the_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contribution, "FRAGMENT_BYTES", 4096)
    directory = saved(tmp_path)
    checkpoint = Checkpoint.open(directory)
    info = INFOS[5]
    out = torch.zeros(9_000)
    box = Box((6_000,), (9_000,))
    stats = checkpoint.read([Request(checkpoint.ids[info.key], box, out)])
    assert torch.equal(out, whole(info)[box.slices()])
    assert stats.bytes_needed <= stats.bytes_read < stats.bytes_needed + 2 * 4096
