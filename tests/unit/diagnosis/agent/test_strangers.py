"""Who reaches an agent's port, or writes a ring, and is not of the job: no threads, no tracebacks, no lines in the log."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.diagnosis.agent.made import MS, S, call, hung, ring
from unickpt.base.errors import FormatError, UnickptError
from unickpt.base.limited_http import ConnectionLimits, RateLimitedLog
from unickpt.diagnosis.agent import loop, telling
from unickpt.diagnosis.agent import server as server
from unickpt.diagnosis.agent.loop import Agent
from unickpt.diagnosis.agent.server import Collector, fetch, send, serve
from unickpt.diagnosis.detectors.examine import examine
from unickpt.diagnosis.recording.records import RECORD, Phase
from unickpt.diagnosis.recording.ring import HEADER_BYTES, SUFFIX, TABLE_BYTES
from unickpt.diagnosis.recording.ring_folder import read_folder
from unickpt.diagnosis.reports.job_records import gather_records
from unickpt.diagnosis.reports.verdict_line import parse_line
from unickpt.diagnosis.reports.verdict_text import render_all
from unickpt.diagnosis.snapshot.codec import decode_snapshot, encode_snapshot
from unickpt.diagnosis.snapshot.snapshot import take_snapshot

LIMITS = ConnectionLimits(connections=16, head_s=1.0, whole_s=3.0)


@pytest.fixture
def served() -> Iterator[tuple[Collector, str, int, list[str]]]:
    """A collector, its address, its port and its warnings."""
    collector, warnings_seen = Collector(), list[str]()
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    port = listener.getsockname()[1]
    server = serve(lambda: (collector, "secret"), listener, tell=warnings_seen.append, limits=LIMITS)
    yield collector, f"http://127.0.0.1:{port}/secret", port, warnings_seen
    server.shutdown()
    server.server_close()


def until(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def is_closed(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(4096) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_half_open_clients_hold_few_threads_and_block_no_others(
    tmp_path: Path, served: tuple[Collector, str, int, list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    collector, address, port, warnings_seen = served
    hung(tmp_path)
    snapshot = take_snapshot(read_folder(tmp_path))
    before = threading.active_count()
    clients = []
    for number in range(200):
        client = socket.create_connection(("127.0.0.1", port))
        with contextlib.suppress(OSError):  # it may have given way already
            client.sendall(b"" if number % 2 else b"GET /")
        clients.append(client)
    assert threading.active_count() - before <= 2 * LIMITS.connections + 1
    for _ in range(5):
        assert send(address, "b", snapshot).ask == []
    assert len(collector.others()) == 1
    until(lambda: all(is_closed(client) for client in clients))
    until(lambda: threading.active_count() <= before)
    assert capfd.readouterr().err == ""
    assert len(warnings_seen) == 1
    assert "training is not affected" in warnings_seen[0]
    assert "127.0.0.1" in warnings_seen[0]


@pytest.mark.parametrize(
    "begin",
    [b"GET /", b"GET /secret/snapshot HTTP/1.0\r\nX: ", b"POST /secret/snapshot HTTP/1.0\r\nContent-Length: 99\r\n\r\n"],
)
def test_a_client_that_drips_is_ended(served: tuple[Collector, str, int, list[str]], begin: bytes) -> None:
    """A time-out of each read alone would wait for ever."""
    client = socket.create_connection(("127.0.0.1", served[2]))
    client.sendall(begin)
    end = time.monotonic() + 3 * LIMITS.whole_s
    with client:
        while not is_closed(client):
            assert time.monotonic() < end
            time.sleep(0.2)
            with contextlib.suppress(OSError):
                client.send(b"x")


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_errors_of_connections_are_no_tracebacks(
    served: tuple[Collector, str, int, list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    collector, _, port, warnings_seen = served
    for text in (
        b"POST /secret/snapshot HTTP/1.0\r\nContent-Length: 99\r\n\r\nx",
        b"GET /",
        b"\x16\x03\x01\x02\x00\x01",
        b"GET " + b"x" * 20_000,
    ):
        client = socket.create_connection(("127.0.0.1", port))
        with contextlib.suppress(OSError):
            client.sendall(text)
        time.sleep(0.1)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # ends with a reset
        client.close()
    time.sleep(0.3)
    assert capfd.readouterr().err == ""
    assert len(warnings_seen) <= 1
    assert collector.others() == []


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"x" * 60_000 + b" HTTP/1.0\r\n\r\n",
        b"GET / HTTP/1.0\r\n" + b"".join(b"X%d: %s\r\n" % (n, b"y" * 900) for n in range(90)) + b"\r\n",
    ],
)
def test_a_long_head_is_not_read(served: tuple[Collector, str, int, list[str]], head: bytes) -> None:
    with socket.create_connection(("127.0.0.1", served[2])) as client:
        with contextlib.suppress(OSError):
            client.sendall(head)
        client.settimeout(LIMITS.head_s / 2)
        with contextlib.suppress(ConnectionError):
            assert client.recv(4096) == b""


def test_a_line_a_minute() -> None:
    warnings_seen: list[str] = []
    seldom = RateLimitedLog(warnings_seen.append, "odd things", every_s=0.2)
    for _ in range(10):
        seldom.note("first")
    time.sleep(0.25)
    seldom.note("last")
    assert warnings_seen == [
        "odd things: 1 since the last such line, the last one: first",
        "odd things: 10 since the last such line, the last one: last",
    ]


def answering(*parts: bytes, pause_s: float = 0.0) -> str:
    """Address of something that answers this to whoever asks first."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        client, _ = listener.accept()
        with listener, client, contextlib.suppress(OSError):
            request = client.makefile("rb")
            head = list(iter(request.readline, b"\r\n"))
            request.read(sum(int(line.split()[1]) for line in head if line.startswith(b"Content-Length")))
            for part in parts:
                client.sendall(part)
                time.sleep(pause_s)

    threading.Thread(target=answer, daemon=True).start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}/secret"


def test_an_agent_waits_for_no_answer_that_drips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_SEND_S", 1.0)
    hung(tmp_path)
    snapshot = take_snapshot(read_folder(tmp_path))
    for first in (b"HTTP/1.0 200 OK\r\n", b"HTTP/1.0 200 OK\r\n\r\n"):
        begin = time.monotonic()
        with pytest.raises((OSError, UnickptError)):
            send(answering(first, *[b"x"] * 100, pause_s=0.1), "b", snapshot)
        assert time.monotonic() - begin < 5


def test_an_agent_follows_no_redirection(tmp_path: Path) -> None:
    hung(tmp_path)
    target = answering(b"HTTP/1.0 200 OK\r\n\r\n" + encode_snapshot(take_snapshot(read_folder(tmp_path))))
    with pytest.raises(OSError, match="302"):
        fetch(answering(f"HTTP/1.0 302 Found\r\nLocation: {target}/snapshot\r\n\r\n".encode()))


@pytest.mark.parametrize(
    "body", [b"[]", b'{"ask": 1}', b'{"ask": [], "lines": {}}', b"[" * 100_000, b'{"ask": [1e999], "lines": []}']
)
def test_an_answer_that_is_none_is_refused(tmp_path: Path, body: bytes) -> None:
    hung(tmp_path)
    with pytest.raises(FormatError, match="not the answer of an agent") as refused:
        send(answering(b"HTTP/1.0 200 OK\r\n\r\n" + body), "b", take_snapshot(read_folder(tmp_path)))
    assert "secret" not in str(refused.value)


# ---------------------------------------------------------------- the log

ODD = "\x1b[2J\r\nunickpt: rank 3 has not entered\u202e" + "x" * 100_000


def is_plain(line: str) -> bool:
    return line.isprintable() and len(line) < 6000


def test_text_from_a_ring_is_escaped_in_the_log(tmp_path: Path) -> None:
    now = time.monotonic_ns()
    for rank in range(4):
        made = ring(tmp_path, rank, label=ODD)
        call(made, 1, now - 150 * S, now - 149 * S)
        if rank != 2:
            call(made, 2, now - 130 * S, 0)
        made.state(heartbeat_ns=now, step=20, newest=2, phase=int(Phase.BACKWARD))
    lines: list[str] = []
    agent = Agent(tmp_path, lines.append)
    agent.look(read_folder(tmp_path))
    line, sentence, advice = lines
    assert parse_line(line).group == ODD[:96]
    assert sentence.startswith("unickpt: rank 2 has not entered all_reduce #2")
    assert is_plain(line + sentence + advice)


def test_text_from_another_agent_is_escaped_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telling, "PLACE_S", 0.0)
    hung(tmp_path)
    lines: list[str] = []
    said = json.dumps({"ask": [], "notices": [["a", "unickpt HANG rank=3", ODD]] * 3}).encode()
    address = answering(b"HTTP/1.0 200 OK\r\n\r\n" + said)
    Agent(tmp_path, lines.append, address=lambda: address).look(read_folder(tmp_path))
    line, sentence = lines
    assert line == "unickpt HANG rank=3"
    assert sentence.startswith("unickpt: \\x1b[2J\\r\\nunickpt: rank 3")
    assert is_plain(sentence)


def test_the_verdict_line_of_another_agent_must_be_valid(tmp_path: Path) -> None:
    hung(tmp_path)
    address = answering(b"HTTP/1.0 200 OK\r\n\r\n" + json.dumps({"ask": [], "notices": [["a", ODD, "b"]]}).encode())
    with pytest.raises(FormatError):
        send(address, "b", take_snapshot(read_folder(tmp_path)))


# ---------------------------------------------------------------- rings


def claims(folder: Path, groups: int, ranks: list[list[int]], world: int = 4) -> None:
    now = time.monotonic_ns()
    for rank in range(4):
        made = ring(folder, rank, world)
        for number in range(groups):
            if not made.list_communicator({"name": f"{number}", "label": "tensor parallel", "ranks": ranks}):
                break
        call(made, 1, now - 20 * MS, now - 10 * MS)
        made.state(heartbeat_ns=now, step=20, newest=1, phase=int(Phase.BACKWARD))


@pytest.mark.parametrize("world", [4, 1 << 20])
def test_groups_with_more_members_than_a_job_has_cost_nothing(tmp_path: Path, world: int) -> None:
    """Beyond the ring's world, and of a ring that claims to be of a job of a million ranks."""
    claims(tmp_path, 5000, [[0, 1, 1 << 20]], world)
    begin = time.monotonic()
    snapshot = take_snapshot(read_folder(tmp_path))
    examine(snapshot, after_s=5)
    assert time.monotonic() - begin < 20
    assert sum(group.count for group in snapshot.groups) <= (4 if world == 4 else 1 << 24)


@pytest.mark.parametrize(
    ("at", "form", "values"),
    [
        (32, "<II", (4, 4)),  # a rank that the job does not have
        (32, "<II", (0, 1 << 30)),
        (40, "<Q", (0,)),  # no process
        (40, "<Q", (1 << 60,)),
        (48, "<q", (-(1 << 63),)),  # clocks
        (16, "<Q", (1 << 60,)),  # records that the file does not have
        (16, "<Q", (0,)),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(tmp_path: Path, at: int, form: str, values: tuple[int, ...]) -> None:
    hung(tmp_path)
    path = tmp_path / f"00003{SUFFIX}"
    with path.open("r+b") as file:
        file.seek(at)
        file.write(struct.pack(form, *values))
    job = read_folder(tmp_path)
    assert sorted(job.ranks) == [0, 1, 2]
    assert path.name in job.unreadable[0]


@pytest.mark.parametrize(("field", "value"), [("op", 12), ("op", 0), ("op", 255), ("dtype", 200)])
def test_invalid_records_are_ignored(tmp_path: Path, field: str, value: int) -> None:
    hung(tmp_path)
    odd = ring(tmp_path, 3)
    now = time.monotonic_ns()
    for number in (1, 2, 3):
        op, dtype = (value if field == "op" and number == 3 else 1), (value if field == "dtype" and number == 3 else 2)
        odd.put(number, now - 30 * S, 0, now - 30 * S, now - 29 * S, number, 8, 8, 0, op, dtype, 0, 0, 0, -1, 0, 20, 7)
    odd.state(heartbeat_ns=now, step=20, newest=3, phase=int(Phase.BACKWARD))
    job = read_folder(tmp_path)
    assert job.ranks[3].records["begun"].tolist() == [1, 2]
    examine(take_snapshot(job), after_s=5)


@pytest.mark.parametrize(
    "line", [b"[" * 200_000, b'{"name": ' * 20_000, b"1" * 10_000, b'{"ranks": [[0, 1e999, 1]]}', b'{"label": {}}']
)
def test_a_table_that_is_none_is_read(tmp_path: Path, line: bytes) -> None:
    hung(tmp_path)
    odd = ring(tmp_path, 3)
    table = line + b"\n"
    odd.map[4096 : 4096 + len(table)] = table
    odd.map[512:520] = struct.pack("<Q", len(table))
    call(odd, 1, time.monotonic_ns() - 30 * S, 0)
    examine(take_snapshot(read_folder(tmp_path)), after_s=5)


def test_times_beyond_the_calendar_are_shown(tmp_path: Path) -> None:
    hung(tmp_path)
    snapshot = take_snapshot(read_folder(tmp_path))
    rows = snapshot.rows.copy()
    rows["call_ns"] = 1 << 62
    far = dataclasses.replace(snapshot, rows=rows, now_ns=(1 << 63) - 1)
    assert render_all(examine(far, after_s=5).verdicts, far)


def test_rings_changed_by_chance_are_read_or_refused(tmp_path: Path) -> None:
    """Headers, tables and records; by the agent, by the reports, and by the first agent when they are sent there."""
    hung(tmp_path / "a")
    sound = {path.name: path.read_bytes() for path in (tmp_path / "a").glob(f"*{SUFFIX}")}
    areas = [(0, 300), (512, 40), (HEADER_BYTES, 150), (HEADER_BYTES + TABLE_BYTES, 3 * RECORD.itemsize)]
    folder = tmp_path / "b"
    folder.mkdir()
    for seed in range(60):
        chance = np.random.default_rng(seed)
        for name, data in sound.items():
            bad = bytearray(data)
            for _ in range(int(chance.integers(0, 30))):
                begin, length = areas[chance.integers(0, len(areas))]
                bad[begin + int(chance.integers(0, length))] = int(
                    chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.integers(256)])
                )
            (folder / name).write_bytes(bad)
        job = read_folder(folder)
        gather_records([job])
        snapshot = take_snapshot(job)
        examine(snapshot, after_s=5)
        with contextlib.suppress(FormatError):
            examine(decode_snapshot(encode_snapshot(snapshot)), after_s=5)


def test_an_agent_continues_after_a_failed_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it reads is not trusted: whatever that leads to is one line a minute."""
    hung(tmp_path, since_s=130)
    looks: list[int] = []

    def fails_twice(*args: Any, **options: Any) -> Any:
        looks.append(1)
        if len(looks) < 3:
            raise ZeroDivisionError("\x1b[2J")
        return examine(*args, **options)

    monkeypatch.setattr(loop, "examine", fails_twice)
    lines: list[str] = []
    options: dict[str, Any] = {"every_s": 0.05, "gives_way": True}
    thread = threading.Thread(target=loop.watch, args=(tmp_path, lines.append), kwargs=options, daemon=True)
    thread.start()
    until(lambda: len(lines) == 4)
    assert "the last one: ZeroDivisionError: \\x1b[2J" in lines[0]
    assert lines[1].startswith("unickpt HANG rank=2 ")
    assert lines[2].startswith("unickpt: rank 2 has not entered")
    assert lines[3].startswith("unickpt: next: ")
    next(tmp_path.glob(f"{loop.STARTED}-*")).write_text("another one")
    thread.join(10)
    assert not thread.is_alive()
