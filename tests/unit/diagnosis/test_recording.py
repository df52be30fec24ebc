"""Records of collectives: every call once, as torch's own flight recorder counts them; rings that can be read at any moment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.jobs.diagnosis.calls_worker import LISTED
from tests.jobs.diagnosis.counting import ENVIRONMENT, NAMES, flown, noted
from tests.jobs.diagnosis.flights_worker import BEFORE
from tests.support.extent import in_full
from tests.support.forked_jobs import fork_ranks
from tests.support.needs import needs
from tests.support.rings import here, put
from unickpt.base.errors import FormatError
from unickpt.checkpoint.format import dtypes
from unickpt.diagnosis.recording.fast_path import available
from unickpt.diagnosis.recording.process_group_hooks import _METHODS
from unickpt.diagnosis.recording.rank_ranges import members, progressions
from unickpt.diagnosis.recording.records import DTYPES, FORMAT, ITEMSIZES, RECORD, Flag, Op, Phase
from unickpt.diagnosis.recording.ring import CLOSED, HEADER_BYTES, TABLE_BYTES, RingContents, RingReader, RingWriter
from unickpt.testing.launch import environment


@pytest.fixture(scope="module", params=[(2, "python"), (4, "extension")], ids=lambda found: found[1])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[RingContents, list[Any]]]:
    """Of every rank what we have noted, and the flight recorder's entries."""
    folder = tmp_path_factory.mktemp("calls")
    count, recorder = request.param
    assert recorder == "python" or available(), "install with a compiler: pip install --editable ."
    fork_ranks(count, "tests.jobs.diagnosis.calls_worker", str(folder), recorder, env=ENVIRONMENT)
    ranks = range(count)
    return [
        (RingReader(folder / f"calls-{r}.ring").read(), json.loads((folder / f"calls-{r}.json").read_text())) for r in ranks
    ]


def test_every_collective_is_noted_once(job: list[tuple[RingContents, list[Any]]]) -> None:
    world = len(job)
    for ring, entries in job:
        theirs = Counter(
            (NAMES[entry["profiling_name"].removeprefix("gloo:")], sum(int(np.prod(size)) for size in entry["input_sizes"]))
            for entry in entries
        )
        ours = Counter(
            call
            for op, elements in ring.records[["op", "elements_in"]].tolist()
            if op <= Op.BARRIER
            for call in as_gloo_makes_it(Op(op), elements, world)
        )
        assert ours == theirs


def as_gloo_makes_it(op: Op, elements: int, world: int) -> list[tuple[Op, int]]:
    """It scatters by reducing all: a list part by part, a tensor at once."""
    if op != Op.REDUCE_SCATTER:
        return [(op, elements)]
    return [(Op.ALL_REDUCE, LISTED)] * world if elements == LISTED * world else [(Op.ALL_REDUCE, elements)]


def test_members_of_a_communicator_have_noted_the_same(job: list[tuple[RingContents, list[Any]]]) -> None:
    calls: dict[tuple[str, int], set[tuple[int, ...]]] = {}
    for ring, _ in job:
        names = [f"{entry['name']}" for entry in ring.communicators]
        for record in ring.records[ring.records["op"] <= Op.BARRIER]:
            what = (int(record["op"]), int(record["dtype"]), int(record["shape"]))
            calls.setdefault((names[record["comm"]], int(record["seq"])), set()).add(what)
    assert all(len(found) == 1 for found in calls.values()), calls
    sequences = {}
    for name, seq in calls:
        sequences.setdefault(name, []).append(seq)
    assert all(sorted(found) == list(range(1, len(found) + 1)) for found in sequences.values())


def test_point_to_point_calls_are_matched(job: list[tuple[RingContents, list[Any]]]) -> None:
    sent, received = set(), set()
    for rank, (ring, _) in enumerate(job):
        for record in ring.records:
            if record["op"] == Op.SEND:
                sent.add((rank, int(record["peer"]), int(record["seq"])))
            elif record["op"] == Op.RECEIVE:
                received.add((int(record["peer"]), rank, int(record["seq"])))
    assert sent == received
    assert len(sent) == len(job) + 1


def test_the_fields_of_a_recorded_call(job: list[tuple[RingContents, list[Any]]]) -> None:
    world = len(job)
    for ring, _ in job:
        records = ring.records
        assert (records["end_ns"] >= records["call_ns"]).all()  # everything has ended
        assert (np.diff(records["begun"].astype(int)) == 1).all()
        native = records[(records["flags"] & int(Flag.FROM_NATIVE)) > 0]
        assert len(native) == 2 * 4 + 7  # functional ones, twice; those of the reducer, from its check of the parameters on
        assert set(native["phase"].tolist()) == {int(Phase.UNKNOWN), int(Phase.BACKWARD)}
        assert ring.closed
        labels = {entry["label"]: members(entry["ranks"]) for entry in ring.communicators}
        assert labels["every second"] in ([*range(0, world, 2)], [*range(1, world, 2)])
        rooted = records[records["op"] == Op.SCATTER]
        assert rooted["peer"].tolist() == [0]


def test_members_with_lists_of_different_shapes_make_the_same_call() -> None:
    """NCCL gathers and reduces tensors of different shapes, if all members list them all."""
    sizes = [3, 5, 4]
    listed = [torch.empty(size) for size in sizes]
    gathers = [_METHODS["allgather"]([listed], [own]) for own in listed]
    reduces = [_METHODS["reduce_scatter"]([own], [listed]) for own in listed]
    assert {call[-1] for call in gathers + reduces} == {
        hash(((torch.Size([3]), torch.Size([5]), torch.Size([4])),)) & 0xFFFFFFFF
    }
    assert [call[2] for call in gathers] == [call[3] for call in reduces] == sizes
    other = _METHODS["allgather"]([[torch.empty(6)] * 3], [torch.empty(6)])
    assert other[-1] != gathers[0][-1]


def test_a_gather_into_one_tensor_is_described_as_one_into_a_list() -> None:
    """Torch has it since 2.15, for backends of devices. Ranks other than the root give a tensor without elements."""
    options, own = SimpleNamespace(rootRank=1, asyncOp=True), torch.ones(6)
    listed = _METHODS["gather"]([[torch.empty(6)] * 2], [own], options)
    for name in ("gather_single", "gather_into_tensor"):
        assert _METHODS[name](torch.empty(12), own, options) == listed
        assert _METHODS[name](torch.empty(0), own, options) == _METHODS["gather"]([], [own], options)


@pytest.mark.parametrize("extension", ["yes", pytest.param("no", marks=in_full)])
def test_the_flight_recorder_gives_the_state_of_device_calls(extension: str, tmp_path: Path) -> None:
    """Of calls that are only seen to begin: while a rank stands, which have ended, and which of the others came first."""
    fork_ranks(2, "tests.jobs.diagnosis.flights_worker", str(tmp_path), extension, env=ENVIRONMENT)
    first, half = [""] * BEFORE, ["", ""]
    moments = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert moments["at once"] == [*first, *half, "", ""]
    assert moments["late"] == [*first[1:], "ended", "", "ended", "waits", ""]
    assert moments["over"] == [*first[1:], "ended", "", "ended", "ended", "ended"]
    assert moments["next"] == [*moments["over"], ""]
    assert moments["first of a group"] == [*moments["over"], "ended", "waits"]


# ---------------------------------------------------------------- frameworks

DEEPSPEED = ("zero0", "zero1", "zero2", "zero3", "moe", "pipeline")
MEGATRON = (
    "gpt-tp2-dist",
    "gpt-pp2-dist",
    "gpt-dp2-dist",
    "gpt-dp2-plain",
    "gpt-cp2-dist",
    "gpt-pp2vpp2-dist",
    "moe-ep2dp2-dist",
)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        pytest.param("deepspeed", DEEPSPEED, marks=needs("deepspeed")),
        pytest.param("megatron", MEGATRON, marks=needs("megatron")),
    ],
)
def test_every_collective_of_a_framework_is_noted_once(kind: str, names: tuple[str, ...], tmp_path: Path) -> None:
    fork_ranks(2, "tests.jobs.diagnosis.frameworks_worker", str(tmp_path), kind, *names, env=ENVIRONMENT, framework=kind)
    for name in names:
        for rank in range(2):
            ours, theirs = noted(tmp_path / f"{name}-{rank}.ring"), flown(tmp_path / f"{name}-{rank}.json")
            assert sum(theirs.values()) > 2, name
            assert ours == theirs, (name, rank, ours - theirs, theirs - ours)


# ---------------------------------------------------------------- the ring


def test_a_ring_keeps_the_newest(tmp_path: Path) -> None:
    ring = RingWriter(tmp_path / "r.ring", here(), capacity=10)
    for number in range(1, 26):
        put(ring, number)
    ring.end(25, 777)
    ring.state(heartbeat_ns=1234, step=9, newest=25, phase=2)
    found = RingReader(tmp_path / "r.ring").read()
    assert found.records["begun"].tolist() == list(range(16, 26))
    assert found.records["end_ns"].tolist() == [0] * 9 + [777]
    assert found.records["step"].tolist() == [7] * 10
    assert (found.step, found.phase, found.heartbeat_ns, found.closed) == (9, 2, 1234, False)
    assert found.identity == here()
    assert RingReader(tmp_path / "r.ring").read(last=3).records["begun"].tolist() == [23, 24, 25]
    ring.state(heartbeat_ns=1235, step=9, newest=25, phase=2, state=CLOSED)
    assert RingReader(tmp_path / "r.ring").read().closed


@pytest.mark.parametrize("newest", [3, 900, 19_990, 20_000, 20_010, 61_234])
@pytest.mark.parametrize("unpublished", [0, 5, 700])
def test_the_newest_are_found_without_reading_all(tmp_path: Path, newest: int, unpublished: int) -> None:
    """A record far from the count of the header stands for all that need not be read: it would be the newest."""
    ring = RingWriter(tmp_path / "r.ring", here(), capacity=20_000)
    for number in range(1, newest + 1):
        put(ring, number)
    put(ring, newest + 10_000)
    ring.state(heartbeat_ns=0, step=0, newest=max(newest - unpublished, 0), phase=0)  # it does not count the last ones
    found = RingReader(tmp_path / "r.ring").read(last=100).records["begun"].tolist()
    assert found == list(range(max(newest - 99, 1), newest + 1))


def test_both_spellings_of_a_record_are_the_same() -> None:
    import struct

    assert struct.calcsize(FORMAT) == RECORD.itemsize
    values = tuple(range(1, len(RECORD.names or ()) + 1))
    assert np.frombuffer(struct.pack(FORMAT, *values), RECORD)[0].tolist() == values


def test_types_are_those_of_the_format() -> None:
    assert list(DTYPES) == list(dtypes._TORCH_BY_NAME)
    assert ITEMSIZES[1:].tolist() == [dtypes.torch_dtype(name).itemsize for name in DTYPES]


def test_reading_rings_does_not_import_torch() -> None:
    code = "import sys, unickpt.diagnosis.agent.loop; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=environment(UNICKPT_AUTOLOAD="0")).returncode == 0


@pytest.mark.skipif(os.getuid() != 0, reason="a small shared memory has to be mounted")
@pytest.mark.parametrize(("size", "what"), [("512k", "collectives are not timed"), ("2m", " records each instead of 65,536")])
def test_training_continues_if_shared_memory_is_small(tmp_path: Path, size: str, what: str) -> None:
    """Rings that do not fit are smaller, or there are none. The warning says how much is needed, where, and what to do."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(tmp_path)], check=True)
    try:
        code = (
            "import torch, torch.distributed as dist\n"
            "from unickpt.diagnosis import session; from unickpt.base.options.job import TimingOptions\n"
            f"dist.init_process_group('gloo', init_method='file://{tmp_path}/store', rank=0, world_size=1)\n"
            f"options = TimingOptions(enabled=True, folder={str(tmp_path / 'rings')!r})\n"
            "session.start(options, dict)\n"
            "data = torch.ones(3); dist.all_reduce(data); print('trained', data.sum().item())"
        )
        done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
        assert done.stdout == "trained 3.0\n", done.stderr
        assert f"{what}" in done.stderr
        assert "the rings of 1 ranks need 6,557,696 bytes" in done.stderr
        assert "timing.records or timing.folder" in done.stderr
        assert done.stderr.count("unickpt: ") == 1
        assert bool(list(tmp_path.glob("rings/*.ring"))) == (size == "2m")
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_record_that_changes_meanwhile_is_left_out(tmp_path: Path) -> None:
    ring = RingWriter(tmp_path / "r.ring", here(), capacity=4)
    for number in range(1, 5):
        put(ring, number)
    at = HEADER_BYTES + TABLE_BYTES + RECORD.itemsize
    ring.map[at : at + 8] = (6).to_bytes(8, "little")  # as if number 6 were being written over number 2
    assert RingReader(tmp_path / "r.ring").read().records["begun"].tolist() == [1, 3, 4]


def test_a_ring_is_read_while_it_is_written_and_after_its_process_was_killed(tmp_path: Path) -> None:
    code = (
        "import sys, itertools; from pathlib import Path; from tests.support.rings import here, put\n"
        "from unickpt.diagnosis.recording.ring import RingWriter\n"
        f"ring = RingWriter(Path({str(tmp_path / 'r.ring')!r}), here(), capacity=64)\n"
        "for number in itertools.count(1): put(ring, number)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], env=environment())
    try:
        while not (tmp_path / "r.ring").exists():
            assert process.poll() is None
            time.sleep(0.01)
        reader = RingReader(tmp_path / "r.ring")
        while not len(reader.read().records):
            pass
        newest = 0
        for _ in range(2000):
            records = reader.read().records
            assert (records["call_ns"] == records["begun"].astype(np.int64) * 10).all()
            assert (records["seq"] == records["begun"]).all()
            newest = max([newest, *records["begun"].tolist()])
        assert newest > 1000
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    records = RingReader(tmp_path / "r.ring").read().records
    assert len(records) >= 63


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:100],
        lambda data: b"X" + data[1:],
        lambda data: data[:-1],
        lambda _: b"",
        lambda data: data[:8] + b"\xff" + data[9:],
    ],
)
def test_an_invalid_ring_is_refused(tmp_path: Path, change: Any) -> None:
    path = tmp_path / "r.ring"
    RingWriter(path, here(), capacity=4)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(FormatError, match=r"r\.ring"):
        RingReader(path)


def test_ranks_of_groups_are_short_in_the_table() -> None:
    for ranks in ([0], [0, 1, 2, 3], [0, 8, 16], [5, 3, 1], [0, 1, 8, 9, 16, 17], [4, 4], []):
        assert members(progressions(ranks)) == ranks
    assert progressions(range(0, 16384, 8)) == [[0, 8, 2048]]
