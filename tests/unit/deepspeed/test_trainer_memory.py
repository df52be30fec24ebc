"""Trainer's files in generations in memory: stored by each rank, copied, checked, and written back where Trainer reads them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")

from ds_unickpt.loading.sources import Noted
from ds_unickpt.loops.memory_note import MemoryNote, noted_in
from ds_unickpt.trainer import trainer_memory, trainer_resume
from ds_unickpt.trainer.trainer_memory import FILES, Files
from tests.support.memory_jobs import Job, jobs_in, request
from unickpt.base.errors import CorruptCheckpointError, FormatError
from unickpt.base.options.job import MemoryOptions
from unickpt.checkpoint.coordination.message_exchange import Message, MessageExchange
from unickpt.checkpoint.load.folders import TRAINER_STATE
from unickpt.checkpoint.memory.finding import FoundGeneration
from unickpt.checkpoint.memory.tier import MemoryLoad, MemoryTier
from unickpt.checkpoint.save.requests import SaveOptions, SaveRequest
from unickpt.checkpoint.save.shards import Contribution

CONFIG = b'{"model_type": "llama"}' * 50


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    yield from jobs_in(tmp_path)


def files(step: int, rank: int) -> Files:
    own = {f"rng_state_{rank}.pth": b"generators %d %d" % (step, rank)}
    state = {TRAINER_STATE: json.dumps({"global_step": step}).encode(), "config.json": CONFIG, "adapter/empty": b""}
    return own | (state if rank == 0 else {})


def trainer_request(job: Job, step: int, rank: int, found: Files) -> SaveRequest:
    plain = request(f"{job.checkpoints}/checkpoint-{step}", step, rank, len(job.hosts))

    def contribute(announced: Message) -> Contribution:
        return replace(plain.contribute(announced), rank_objects={FILES: trainer_memory.encoded(found)})

    return replace(plain, contribute=contribute, tag=f"global_step{step}")


def save(job: Job, *steps: int, made: Callable[[int, int], Files] = files) -> None:
    def one(tier: MemoryTier, exchange: MessageExchange) -> None:
        for step in steps:
            turn = tier.turn(job.checkpoints, exchange)
            assert turn is not None
            pending = turn.save(trainer_request(job, step, exchange.rank, made(step, exchange.rank)))
            assert pending.wait(30)
            assert pending.committed, pending.cause()

    job.everywhere(one)


def bring(job: Job, on_disk: int | None = None) -> list[str]:
    disk = None if on_disk is None else f"checkpoint-{on_disk}"

    def one(tier: MemoryTier, exchange: MessageExchange) -> str:
        return trainer_resume.newer_in_memory(tier, exchange, job.checkpoints, disk, lambda _: on_disk)

    return job.everywhere(one)


def test_each_host_gets_the_files_of_the_job_and_of_its_ranks(job: Callable[..., Job]) -> None:
    save(job(), 4, 6)
    folders = bring(job(), on_disk=2)
    assert [Path(folder).name for folder in folders] == ["checkpoint-6"] * 3
    assert folders[0] == folders[1] != folders[2]
    for host, ranks in (folders[0], (0, 1)), (folders[2], (0, 2)):
        found = trainer_memory.read_files(Path(host))
        note = json.loads(found.pop("unickpt-memory.json"))
        assert found == {name: data for rank in ranks for name, data in files(6, rank).items()}
        assert (Path(host) / "global_step6").is_dir()
        assert noted_in(host) == MemoryNote(note["run"], note["generation"])


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_host_and_another_number_of_ranks_lose_no_file(job: Callable[..., Job], tmp_path: Path, lost: int) -> None:
    save(job(), 4)
    shutil.rmtree(tmp_path / f"host{lost}")
    (folder,) = bring(job([1 - lost]))
    found = trainer_memory.read_files(Path(folder))
    assert {name: found[name] for name in files(4, 0)} == files(4, 0)


def test_a_flipped_bit_is_found_and_the_copy_is_read(job: Callable[..., Job], tmp_path: Path) -> None:
    save(job(), 4)
    (path,) = (tmp_path / "host0").glob("*/g*/data/rank00000.safetensors")
    data = bytearray(path.read_bytes())
    data[data.index(CONFIG) + 7] ^= 1
    path.write_bytes(data)
    folders = bring(job())
    assert all((Path(folder) / "config.json").read_bytes() == CONFIG for folder in folders)


def test_a_checkpoint_on_disk_of_the_same_step_is_preferred(job: Callable[..., Job]) -> None:
    save(job(), 4)
    assert bring(job(), on_disk=4) == [""] * 3


def test_a_generation_that_trainer_did_not_make_is_skipped_for_an_older_one(job: Callable[..., Job]) -> None:
    save(job(), 4, 6, made=lambda step, rank: {} if step == 6 else files(step, rank))
    assert {Path(folder).name for folder in bring(job())} == {"checkpoint-4"}


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "a/../../evil", ""])
def test_a_name_outside_of_the_folder_is_refused(
    job: Callable[..., Job], tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(job(), 4, made=lambda step, rank: files(step, rank) | {name: b"evil"})
    with caplog.at_level("WARNING", "unickpt"):
        assert bring(job()) == [""] * 3
    assert any(f"{name!r} is no file of Trainer" in line for line in caplog.messages), caplog.messages
    assert not list(tmp_path.rglob("evil"))


def test_the_files_of_an_older_resume_are_removed(job: Callable[..., Job], tmp_path: Path) -> None:
    save(job(), 4)
    bring(job())
    save(job(), 6)
    bring(job())
    assert [path.name for path in (tmp_path / "host0").glob("*/resume/*/*")] == ["checkpoint-6"]


def test_a_checkpoint_that_belongs_on_disk_does_not_go_into_memory(job: Callable[..., Job]) -> None:
    running = job()
    turns = running.everywhere(lambda tier, exchange: tier.turn(running.checkpoints, exchange, never=exchange.rank == 0))
    assert turns == [None] * 3


def test_a_generation_is_offered_twice_and_then_an_error_names_the_run() -> None:
    load = MemoryLoad([FoundGeneration(9, 8, "global_step8"), FoundGeneration(7, 6, "global_step6")])
    tier, exchange = MemoryTier(MemoryOptions(), SaveOptions()), MessageExchange(None, rank=0, world=1, prefix="noted")
    noted = Noted(tier, MemoryNote("/run", 7), "/resume/checkpoint-6", exchange)
    noted.load = load
    offers = [noted.offer() for _ in range(2)]
    assert [(offer.generation, offer.checked, offer.name) for offer in offers] == [
        (7, False, "global_step6"), (7, True, "global_step6"),
    ]  # fmt: skip
    with pytest.raises(CorruptCheckpointError, match="another one of /run"):
        noted.offer()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"run": "/run", "generation": "x"}'])
def test_a_malformed_note_is_an_error(tmp_path: Path, text: str) -> None:
    assert noted_in(str(tmp_path)) is None
    (tmp_path / "unickpt-memory.json").write_text(text)
    with pytest.raises(FormatError, match="malformed"):
        noted_in(str(tmp_path))


def test_the_state_of_trainer_is_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    storage = trainer_memory.PosixStorage

    class Noting(storage):  # type: ignore[misc, valid-type]
        def write_atomic(self, name: str, data: bytes) -> None:
            order.append(name)
            super().write_atomic(name, data)

    monkeypatch.setattr(trainer_memory, "PosixStorage", Noting)
    trainer_memory.write_files(tmp_path, {TRAINER_STATE: b"{}", "z": b"", "a/b": b"1"})
    assert order == ["a/b", "z", TRAINER_STATE]
    assert trainer_memory.read_files(tmp_path) == {TRAINER_STATE: b"{}", "z": b"", "a/b": b"1"}
