"""Several models of one process that save into one folder: none takes the place of another, on any way to the folder."""

from __future__ import annotations

import datetime
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.memory_jobs import HOSTS, Job
from tests.support.memory_jobs import request as memory_request
from tests.support.rank_threads import alone, on_all_ranks
from tests.support.saves import large, request
from unickpt.checkpoint.checkpoint_folder import read_manifest
from unickpt.checkpoint.coordination.message_exchange import MessageExchange
from unickpt.checkpoint.coordination.owners import Claim, Origin, Owner, Owners
from unickpt.checkpoint.memory.tier import MemoryTier
from unickpt.checkpoint.save.requests import PendingSave, SaveOptions
from unickpt.checkpoint.save.retention import Retention
from unickpt.checkpoint.save.saver import Saver
from unickpt.checkpoint.save.upload import UploadResult
from unickpt.checkpoint.storage.open import open_storage


class Model:
    """A model of a process, with the parts of its checkpoints."""

    def __init__(self, owners: Owners, name: str = "", *, tensors: int = 1) -> None:
        self.owners, self.owner, self.tensors = owners, owners.add("an engine", name), tensors

    @property
    def claim(self) -> Claim:
        return self.owners.claim(self.owner, replaces=True)

    def save(
        self,
        folder: Path,
        tag: str,
        step: int = 1,
        *,
        exchange: MessageExchange | None = None,
        excluded: Any = (),
        **options: Any,
    ) -> PendingSave:
        claim = self.claim
        wanted = request(folder, tag, large(self.tensors), claim=claim)
        made = wanted.contribute({})
        writer = replace(made.writer, origin=asdict(self.owners.origin(self.owner)))
        part = replace(made, step=step, writer=writer, excluded=excluded)
        if exchange is not None and exchange.rank:
            part = replace(part, shards=[])
        wanted.contribute = lambda _: part
        save = Saver(SaveOptions(**options)).save(wanted, exchange or alone())
        assert save.wait(30)
        return save


def model_of(directory: Path) -> str:
    return Origin.of(read_manifest(open_storage(str(directory)))).lineage


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("names", [("", ""), ("actor", "critic")])
def test_retention_counts_the_checkpoints_of_each_model(tmp_path: Path, names: tuple[str, str]) -> None:
    owners, policy = Owners(), Retention(keep_last=1)
    actor = Model(owners, names[0])
    assert actor.save(tmp_path, "actor-1", 1, retention=policy).committed  # the only model yet
    critic = Model(owners, names[1])
    for step in (2, 3):
        assert critic.save(tmp_path, f"critic-{step}", step, retention=policy).committed
    assert names_in(tmp_path) == ["actor-1", "critic-3", "latest"]
    assert actor.save(tmp_path, "actor-4", 4, retention=policy).committed
    assert names_in(tmp_path) == ["actor-4", "critic-3", "latest"]
    del critic
    resumed = Model(Owners(), names[0])  # a job of one of them
    resumed.owners.adopt(resumed.owner, Origin.of(read_manifest(open_storage(str(tmp_path / "actor-4")))))
    assert resumed.save(tmp_path, "actor-5", 5, retention=policy).committed
    assert names_in(tmp_path) == ["actor-5", "critic-3", "latest"]


def test_a_later_run_of_a_single_model_removes_the_checkpoints_of_earlier_ones(tmp_path: Path) -> None:
    for step in (1, 2):
        assert Model(Owners()).save(tmp_path, f"s{step}", step, retention=Retention(keep_last=1)).committed
    assert names_in(tmp_path) == ["latest", "s2"]


def test_a_model_takes_the_place_of_one_that_was_discarded_but_is_kept_alive(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    owners = Owners()
    first = Model(owners)
    assert first.save(tmp_path, "last").committed
    second = Model(owners)
    assert second.save(tmp_path, "last").committed
    (told,) = [text for text in caplog.messages if "is replaced by one of" in text]
    assert "number 1 of" not in told.partition("is replaced")[0], "it was the only one when it saved"
    refused = first.save(tmp_path, "last")
    assert not refused.committed, "the second one is in use"
    assert "another model" in refused.cause()
    assert not Model(owners, tensors=2).save(tmp_path, "last").committed, "other parameters"
    assert model_of(tmp_path / "last") == second.owner.lineage


def test_a_refusal_names_a_clock_that_was_set_back(tmp_path: Path) -> None:
    assert Model(Owners()).save(tmp_path, "last").committed
    found, claim = read_manifest(open_storage(str(tmp_path / "last"))), Model(Owners()).claim
    assert claim.refusal(found) == "", "a new process may save the same model again"
    for seconds, told in ((30, False), (3600, True)):
        later = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=seconds)
        refused = claim.refusal(replace(found, created=later.isoformat(timespec="seconds")))
        assert "another model" in refused
        assert ("in the future by the clock of this host" in refused) == told


def test_a_model_in_use_keeps_its_checkpoint(tmp_path: Path) -> None:
    owners = Owners()
    actor, critic = Model(owners), Model(owners)
    assert actor.save(tmp_path, "last").committed
    assert not critic.save(tmp_path, "last").committed
    assert model_of(tmp_path / "last") == actor.owner.lineage


def test_a_checkpoint_without_frozen_parameters_is_replaced_by_one_of_the_same_model(tmp_path: Path) -> None:
    assert Model(Owners(), tensors=2).save(tmp_path, "last").committed
    assert Model(Owners()).save(tmp_path, "last", excluded=("frozen",)).committed
    assert Model(Owners(), tensors=2).save(tmp_path, "last").committed
    assert not Model(Owners(), tensors=3).save(tmp_path, "last").committed


def test_an_upload_does_not_replace_the_checkpoint_of_another_model(tmp_path: Path) -> None:
    owners = Owners()
    actor, critic = Model(owners), Model(owners)
    uploaded = tmp_path / "there"
    assert critic.save(uploaded, "last").committed

    def run(exchange: MessageExchange) -> UploadResult | None:
        save = actor.save(tmp_path / "here", "last", exchange=exchange, upload_to=str(uploaded))
        assert save.committed
        assert save.upload is not None
        assert save.upload.wait(30)
        return save.upload.result

    results = on_all_ranks(run, world=2, timeout_s=10)
    for result in results:
        assert isinstance(result, UploadResult), result
        assert not result.committed
        assert "another model" in result.failures[0].text
    assert model_of(uploaded / "last") == critic.owner.lineage


def test_what_goes_from_memory_to_disk_does_not_replace_the_checkpoint_of_another_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    owners = Owners()
    actor, critic = Model(owners), Model(owners)
    running = Job(tmp_path)
    place = Path(running.checkpoints)
    assert critic.save(place, "step1").committed

    def save_and_end(tier: MemoryTier, exchange: MessageExchange) -> bool:
        wanted = replace(memory_request(str(place), 1, exchange.rank, len(HOSTS)), claim=actor.claim)
        save = tier.save(wanted, exchange)
        assert save is not None
        assert save.wait(30)
        assert save.committed, save.cause()
        saver = next(iter(tier._folders.values())).saver
        assert saver is not None
        saver.closing(signalled=True)
        return saver.leave(30)

    try:
        assert all(running.everywhere(save_and_end))
    finally:
        running.end()
    assert model_of(place / "step1") == critic.owner.lineage
    assert "another model" in next(text for text in caplog.messages if "NOT uploaded" in text)


def test_owner_is_used_by_saves_and_loads() -> None:
    owners = Owners()
    owner = owners.add("an engine")
    assert isinstance(owner, Owner)
    assert owner.used_s == 0
    owners.adopt(owner, Origin())
    loaded = owner.used_s
    assert loaded >= owner.made_s
    owners.claim(owner)
    assert owner.used_s >= loaded
