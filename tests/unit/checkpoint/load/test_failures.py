"""What a failed load says of the checkpoint: which failures an older checkpoint helps against, and which it does not."""

from __future__ import annotations

import errno
import json
import time
from pathlib import Path
from typing import NoReturn

import pytest

from tests.support.rank_threads import WORLD, on_all_ranks
from tests.support.saves import saved
from unickpt.base.errors import (
    CoordinationError,
    CorruptCheckpointError,
    FormatError,
    HostPeerFailedError,
    MismatchError,
    NewerFormatError,
    NotACheckpointError,
    StorageError,
    UnickptError,
    UnsafePathError,
)
from unickpt.checkpoint.coordination.failure import Failure, FailureKind
from unickpt.checkpoint.coordination.message_exchange import MessageExchange
from unickpt.checkpoint.format import manifest as manifest_module
from unickpt.checkpoint.format.checksums import digest
from unickpt.checkpoint.load.candidates import Candidates
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.failure import DAMAGE, error_of, failure_of
from unickpt.checkpoint.load.resume import AgreedFailureError, Offer, Together, resume


def from_the_system(number: int) -> StorageError:
    """As the storages raise it."""
    try:
        raise OSError(number, "said")
    except OSError as err:
        error = StorageError("cannot be read (said)")
        error.__cause__ = err
        return error


@pytest.mark.parametrize(
    ("error", "where", "kind"),
    [
        (NewerFormatError("99"), "/disk/a", FailureKind.NEWER),
        (NotACheckpointError("none"), "/disk/a", FailureKind.ABSENT),
        (FormatError("JSON"), "/disk/a", FailureKind.DAMAGED),
        (UnsafePathError("outside"), "/disk/a", FailureKind.DAMAGED),
        (CorruptCheckpointError("checksum"), "s3://bucket/a", FailureKind.DAMAGED),
        (MismatchError("shapes"), "/disk/a", FailureKind.MISMATCH),
        (HostPeerFailedError("rank 2"), "/disk/a", FailureKind.HOST_PEER),
        (StorageError("ends at byte 7"), "/disk/a", FailureKind.DAMAGED),
        (StorageError("timed out"), "s3://bucket/a", FailureKind.STORAGE),
        (from_the_system(errno.EIO), "/disk/a", FailureKind.DAMAGED),
        (from_the_system(errno.EIO), "s3://bucket/a", FailureKind.STORAGE),
        (from_the_system(errno.ENOENT), "s3://bucket/a", FailureKind.DAMAGED),
        (from_the_system(errno.EACCES), "/disk/a", FailureKind.PERMISSION),
        (from_the_system(errno.EPERM), "s3://bucket/a", FailureKind.PERMISSION),
        (from_the_system(errno.ETIMEDOUT), "/disk/a", FailureKind.STORAGE),
        (from_the_system(errno.ESTALE), "/disk/a", FailureKind.STORAGE),
        (from_the_system(errno.EMFILE), "/disk/a", FailureKind.STORAGE),
        (from_the_system(errno.ENOMEM), "/disk/a", FailureKind.STORAGE),
        (MemoryError(), "/disk/a", FailureKind.UNEXPECTED),
        (FileNotFoundError(errno.ENOENT, "of the user's own code"), "/disk/a", FailureKind.UNEXPECTED),
    ],
    ids=lambda value: (
        getattr(value, "name", "") or (value if isinstance(value, str) else f"{type(value).__name__}({str(value)[:12]})")
    ),
)
def test_kinds_of_failures(error: Exception, where: str, kind: FailureKind) -> None:
    found = failure_of(error, rank=3, where=where)
    assert (found.kind, found.rank) == (kind, 3)
    wrapped = UnickptError("in a framework's terms")
    wrapped.__cause__ = error
    assert failure_of(wrapped, rank=3, where=where).kind == kind
    assert (kind in DAMAGE) == (kind in (FailureKind.ABSENT, FailureKind.DAMAGED))


def test_a_failure_travels_as_a_value() -> None:
    error = CorruptCheckpointError("NewerFormatError: MismatchError: StorageError").about(file="data/rank00000", tensor="w")
    found = failure_of(error, rank=1, where="/disk/a")
    assert found == Failure(FailureKind.DAMAGED, 1, "w", "data/rank00000", "NewerFormatError: MismatchError: StorageError")
    assert Failure.from_json(json.loads(json.dumps(found.to_json()))) == found
    offer = Offer("/disk/a", "a", 3, ("note",), True, False, ("b",), "", "", found)
    assert Offer.from_message(json.loads(json.dumps(offer.to_message()))) == offer


def test_the_failure_that_an_older_checkpoint_does_not_help_against_is_the_one_to_show() -> None:
    damaged, other = Failure(FailureKind.DAMAGED, 0, text="a checksum"), Failure(FailureKind.MISMATCH, 2, text="a shape")
    error = error_of([damaged, other], where="/disk/a")
    assert isinstance(error, MismatchError)
    assert str(error) == "/disk/a: rank 2 could not load it: a shape (1 more failed: rank 0)"


def test_a_rank_that_only_waited_in_vain_ends_the_load_on_all() -> None:
    def run(exchange: MessageExchange) -> str:
        exchange.begin("load")
        together = Together(exchange, "/disk/a")
        with pytest.raises(AgreedFailureError) as caught:
            together.agree("read", HostPeerFailedError("waited 20 s for rank 0") if exchange.rank == 1 else None)
        return f"{type(caught.value.error).__name__}: {caught.value.error}"

    said = on_all_ranks(run)
    assert all("waited 20 s for rank 0" in text for text in said)
    assert len(said) == WORLD


STEPS = ("open", "plan", "read")


@pytest.mark.parametrize("failing", range(WORLD))
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("error", [CorruptCheckpointError("broken"), MismatchError("shape"), MemoryError("full")], ids=repr)
def test_a_rank_that_fails_at_any_step_takes_part(tmp_path: Path, failing: int, step: str, error: Exception) -> None:
    """All ranks fall back to the same checkpoint, or all raise; in no case does one wait for another."""
    saved(tmp_path, "old", "new")

    def run(exchange: MessageExchange) -> str:
        exchange.begin("load")
        candidates = Candidates(tmp_path)

        def offer() -> Offer:
            tag = candidates.next().tag
            return Offer() if tag is None else Offer(str(tmp_path / tag), tag)

        def attempt(found: Offer, skipped: tuple[str, ...]) -> str:
            def part(name: str) -> None:
                if (name, exchange.rank, found.name) == (step, failing, "new"):
                    raise error

            def opened() -> Checkpoint:
                part("open")
                return Checkpoint.open(found.directory)

            together = Together(exchange, found.directory)
            checkpoint = together.step("open", opened)

            def planned() -> object:
                part("plan")
                return checkpoint.plan([])

            _, opener = together.plan(planned, identity=lambda: checkpoint.identity, share=True)  # type: ignore[arg-type]
            together.read(lambda _: part("read"), opener)
            assert len(skipped) == (found.name == "old")
            return found.name

        try:
            return resume(exchange, offer, attempt, lambda _: "nothing", where=str(tmp_path))
        except (UnickptError, MemoryError) as err:
            return f"{type(err).__name__}: {err}"

    found = on_all_ranks(run, timeout_s=20.0)
    if isinstance(error, CorruptCheckpointError):
        assert found == ["old"] * WORLD
        return
    others = CoordinationError if isinstance(error, MemoryError) else type(error)
    for rank, said in enumerate(found):
        assert said.startswith(type(error).__name__ if rank == failing else others.__name__)
        assert rank == failing or f"rank {failing} could not load it" in said


def test_ctrl_c_on_one_rank_ends_the_load_on_the_others_at_once(tmp_path: Path) -> None:
    saved(tmp_path, "a")

    def run(exchange: MessageExchange) -> str:
        exchange.begin("load")

        def attempt(found: Offer, _: tuple[str, ...]) -> None:
            together = Together(exchange, found.directory)
            together.step("open", lambda: None)
            if exchange.rank == 1:
                raise KeyboardInterrupt
            together.step("read", lambda: None)

        try:
            resume(exchange, lambda: Offer(str(tmp_path / "a"), "a"), attempt, lambda _: None, where=str(tmp_path))
        except (CoordinationError, KeyboardInterrupt) as err:
            return f"{type(err).__name__}: {err}"
        return "loaded"

    begin = time.monotonic()
    found = on_all_ranks(run, timeout_s=60.0)
    assert time.monotonic() - begin < 20
    for rank, said in enumerate(found):
        assert said.startswith("KeyboardInterrupt") if rank == 1 else "was notified: rank 1: KeyboardInterrupt" in said


@pytest.mark.parametrize("where", ["step", "plan"])
def test_ctrl_c_in_a_load_of_one_checkpoint_ends_it_on_the_others(tmp_path: Path, where: str) -> None:
    """As of torch's DCP and of Megatron's library, which do not look for an older one."""

    def interrupted() -> NoReturn:
        raise KeyboardInterrupt

    def run(exchange: MessageExchange) -> str:
        exchange.begin("load")
        together = Together(exchange, str(tmp_path))
        part = interrupted if exchange.rank == 1 else lambda: None
        try:
            if where == "step":
                together.step("open", part)
            else:
                together.plan(part, identity=str, share=False)
        except (CoordinationError, KeyboardInterrupt) as err:
            return f"{type(err).__name__}: {err}"
        return "loaded"

    for rank, said in enumerate(on_all_ranks(run, timeout_s=60.0)):
        assert said.startswith("KeyboardInterrupt") if rank == 1 else "was notified: rank 1: KeyboardInterrupt" in said


def test_a_storage_that_only_the_coordinator_cannot_list_ends_the_load_on_all(tmp_path: Path) -> None:
    def run(exchange: MessageExchange) -> str:
        exchange.begin("load")

        def offer() -> Offer:
            raise from_the_system(errno.ETIMEDOUT)

        with pytest.raises(StorageError, match="rank 0 cannot see what is there: cannot be read") as caught:
            resume(exchange, offer, lambda *_: "loaded", lambda _: "nothing", where=str(tmp_path))
        return type(caught.value).__name__

    assert on_all_ranks(run) == ["StorageError"] * WORLD


def test_a_checkpoint_of_a_newer_release_is_not_skipped(tmp_path: Path) -> None:
    saved(tmp_path, "a", "b", "c")
    path = tmp_path / "b" / "manifest.json"
    body = {**json.loads(path.read_text()), "version": 99}
    path.write_text(json.dumps({**body, "checksum": digest(manifest_module._canonical(body))}))
    candidates = Candidates(tmp_path)
    assert [candidates.next().tag for _ in range(4)] == ["c", "b", "a", None]
    with pytest.raises(NewerFormatError):
        Checkpoint.open(tmp_path / "b")


def test_a_flipped_bit_in_the_version_is_damage_and_no_newer_format(tmp_path: Path) -> None:
    saved(tmp_path, "a", "b")
    path = tmp_path / "b" / "manifest.json"
    version = json.loads(path.read_text())["version"]
    path.write_text(path.read_text().replace(f'"version": {version}', f'"version": {version ^ 4}'))
    assert json.loads(path.read_text())["version"] > version
    with pytest.raises(FormatError, match="the file is damaged") as caught:
        Checkpoint.open(tmp_path / "b")
    assert failure_of(caught.value, rank=0, where=str(tmp_path)).kind is FailureKind.DAMAGED
    candidates = Candidates(tmp_path)
    assert [candidates.next().tag for _ in range(3)] == ["b", "a", None]
