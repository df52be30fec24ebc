"""Bad input at load, each with the message that a user gets. Every rank raises; none hangs. And failures within a save."""

from __future__ import annotations

import json
import os
import resource
import shutil
import time
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm as dist

from tests.deepspeed.jobs import Layout, build, train
from tests.deepspeed.logs import Log
from tests.deepspeed.model import Model
from tests.deepspeed.scenario_worker import scenario
from tests.deepspeed.truth import consolidated, differences
from unickpt import manifest as manifest_module
from unickpt.checksums import digest
from unickpt.errors import UnickptError

TAG = "global_step1"
_saved: list[Path] = []


def here(stage: int) -> Layout:
    return Layout(stage, dist.get_world_size())


def damaged(folder: Path, damage: Callable[[Path], None]) -> Path:
    """A copy of one good checkpoint with something done to it."""
    if not _saved:
        engine = build(here(1), seed=1)
        train(engine, 1)
        engine.save_checkpoint(str(folder / "good"))
        _saved.append(folder / "good")
    copy = folder / "bad"
    if dist.get_rank() == 0:
        shutil.copytree(_saved[0], copy)
        damage(copy / TAG)
    dist.barrier()
    return copy


def untouched(_: Path) -> None:
    """No damage: the job is what does not fit."""


def fails(folder: Path, pattern: str, damage: Callable[[Path], None], *, stage: int = 3, **load: Any) -> None:
    """Loading the damaged copy raises on every rank; the message matches on the rank that saw it first."""
    place = damaged(folder, damage)
    engine = build(here(stage), seed=2)
    with pytest.raises(UnickptError, match=pattern):
        engine.load_checkpoint(str(place), tag=TAG, **load)


def rewrite(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest and make its checksum right again: a lie, not damage."""
    path = directory / "manifest.json"
    body = json.loads(path.read_text())
    change(body)
    body["checksum"] = digest(manifest_module._canonical(body))
    path.write_text(json.dumps(body))


def data(directory: Path, rank: int = 0) -> Path:
    return directory / "data" / f"rank{rank:05d}.safetensors"


@scenario(2)
def no_manifest(folder: Path) -> None:
    fails(folder, "no manifest.json, so there is no checkpoint here", lambda d: (d / "manifest.json").unlink())


@scenario(2)
def manifest_of_a_newer_format(folder: Path) -> None:
    fails(
        folder,
        "format version 99, this release reads up to 2; upgrade unickpt",
        lambda d: rewrite(d, lambda m: m.update(version=99)),
    )


@scenario(2)
def a_flipped_bit_in_the_manifest(folder: Path) -> None:
    def damage(directory: Path) -> None:
        path = directory / "manifest.json"
        path.write_text(path.read_text().replace('"step": 1', '"step": 3'))

    fails(folder, "its checksum does not match its content", damage)


@scenario(2)
def a_truncated_data_file(folder: Path) -> None:
    def damage(directory: Path) -> None:
        data(directory).write_bytes(data(directory).read_bytes()[:-64])

    fails(folder, r"rank00000.safetensors has [\d,]+ bytes, expected [\d,]+", damage)


@scenario(2)
def a_missing_data_file(folder: Path) -> None:
    fails(folder, "rank00001.safetensors is missing.*Resume from an older checkpoint", lambda d: data(d, 1).unlink())


@scenario(2)
def a_flipped_bit_in_a_data_file(folder: Path) -> None:
    def damage(directory: Path) -> None:
        content = bytearray(data(directory).read_bytes())
        content[len(content) // 2] ^= 16
        data(directory).write_bytes(content)

    fails(
        folder, r"rank00000.safetensors: checksum of \S+ \(\w+\) \[.*differs from the one written|rank . could not load", damage
    )


@scenario(2)
def a_flipped_bit_in_the_index(folder: Path) -> None:
    def damage(directory: Path) -> None:
        path = directory / "index.safetensors"
        content = bytearray(path.read_bytes())
        content[-9] ^= 1
        path.write_bytes(content)

    fails(folder, "index.safetensors: checksum differs", damage)


@scenario(2)
def a_manifest_that_names_a_file_outside_its_directory(folder: Path) -> None:
    def damage(directory: Path) -> None:
        rewrite(directory, lambda m: m["files"][0].update(path="../../good/secret"))

    fails(folder, r"file path '../../good/secret' is not a plain path inside the checkpoint directory", damage)


@scenario(2)
def a_link_that_leads_outside(folder: Path) -> None:
    def damage(directory: Path) -> None:
        elsewhere = directory.parent.parent / "elsewhere"
        shutil.move(data(directory), elsewhere)
        data(directory).symlink_to(elsewhere)

    fails(folder, "leads outside", damage)


@scenario(2)
def a_header_that_lies_about_sizes(folder: Path) -> None:
    def damage(directory: Path) -> None:
        content = data(directory).read_bytes()
        header = content[8 : 8 + int.from_bytes(content[:8], "little")]
        lie = header.replace(b'"shape":[', b'"shape":[9', 1)[: len(header)]
        data(directory).write_bytes(content[:8] + lie + content[8 + len(header) :])

    fails(folder, "safetensors header differs from the one that was written|rank . could not load", damage)


# ---------------------------------------------------------------- what one rank alone meets


def two_views(folder: Path, change: Callable[[Path], None]) -> Path:
    """A folder of two checkpoints as this rank sees it: the last rank sees the newest one changed, as on a mount of its own."""
    rank, world = dist.get_rank(), dist.get_world_size()
    engine = build(here(1), seed=1)
    for _ in range(2):
        train(engine, 1)
        engine.save_checkpoint(str(folder / "seen"))
    dist.barrier()
    if rank == world - 1:
        shutil.copytree(folder / "seen", folder / "otherwise")
        change(folder / "otherwise" / "global_step2")
    dist.barrier()
    return folder / ("otherwise" if rank == world - 1 else "seen")


def outcome_of(view: Path, **options: Any) -> tuple[str, str]:
    """What a load did on this rank: the directory, or the class of the error; and what it said."""
    engine = build(here(2), seed=2, unickpt={"enabled": True, "timeout_seconds": 20, **options})
    with Log() as log:
        try:
            path, _ = engine.load_checkpoint(str(view))
        except UnickptError as err:
            return type(err).__name__, str(err)
    return Path(path).parent.name, "\n".join(log.lines)


def same_on_all_ranks(value: Any) -> Any:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    assert len(set(found)) == 1, found
    return value


DAMAGES: dict[str, Callable[[Path], None]] = {
    "no manifest": lambda d: (d / "manifest.json").unlink(),
    "damaged manifest": lambda d: (d / "manifest.json").write_text("{"),
    "damaged index": lambda d: (d / "index.safetensors").write_bytes(b"\0" * (d / "index.safetensors").stat().st_size),
    "missing file": lambda d: data(d).unlink(),
    "damaged data": lambda d: data(d).write_bytes(data(d).read_bytes()[:-64] + b"\xaa" * 64),
}


@scenario(2)
def what_one_rank_alone_finds_damaged_takes_all_to_the_same_older_checkpoint(folder: Path) -> None:
    for name, damage in DAMAGES.items():
        view = two_views(folder / name, damage)
        tag, said = outcome_of(view, read_once_per_host=False)
        assert same_on_all_ranks(tag) == TAG, (name, said)
        assert dist.get_rank() or "cannot be used" in said, (name, said)


@scenario(2)
def a_newer_format_that_one_rank_alone_meets_ends_the_load_on_all(folder: Path) -> None:
    view = two_views(folder, lambda d: rewrite(d, lambda m: m.update(version=99)))
    kind, said = outcome_of(view)
    assert same_on_all_ranks(kind) == "NewerFormatError", said
    assert "upgrade unickpt" in said
    assert dist.get_rank() or "rank 1 could not load it" in said


@scenario(2)
def a_newer_format_is_not_passed_over_where_the_latest_is_damaged(folder: Path) -> None:
    engine = build(here(1), seed=1)
    for _ in range(3):
        train(engine, 1)
        engine.save_checkpoint(str(folder / "seen"))
    dist.barrier()
    if dist.get_rank() == 0:
        rewrite(folder / "seen/global_step2", lambda m: m.update(version=99))
        data(folder / "seen/global_step3").unlink()
    dist.barrier()
    assert same_on_all_ranks(outcome_of(folder / "seen")[0]) == "NewerFormatError"


@scenario(2)
def a_rank_that_may_not_read_is_no_reason_to_resume_from_an_older_checkpoint(folder: Path) -> None:
    if os.geteuid():
        raise unittest.SkipTest("only root can become another user")
    view = two_views(folder, untouched)
    if dist.get_rank() == 1:
        os.chmod(view / "global_step2" / "data", 0o700)
        os.seteuid(65534)
    try:
        kind, said = outcome_of(view)
    finally:
        os.seteuid(0)
    assert same_on_all_ranks(kind) == "StorageError", said
    assert "ermission denied" in said


@scenario(2)
def a_rank_without_file_descriptors_is_no_reason_to_resume_from_an_older_checkpoint(folder: Path) -> None:
    """What a machine lacks for a moment says nothing of the checkpoint."""
    view = two_views(folder, untouched)
    engine = build(here(2), seed=2, unickpt={"enabled": True, "timeout_seconds": 20})
    limits, kind, said = resource.getrlimit(resource.RLIMIT_NOFILE), "loaded", ""
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, limits[1]))
    try:
        engine.load_checkpoint(str(view))
    except UnickptError as err:
        kind, said = type(err).__name__, str(err)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert same_on_all_ranks(kind) == "StorageError", said
    assert "Too many open files" in said


@scenario(2)
def an_unexpected_exception_on_one_rank_ends_the_load_on_all(folder: Path) -> None:
    """A model whose own code raises when it is asked for its parameters."""
    view = two_views(folder, untouched)
    engine = build(here(2), seed=2, unickpt={"enabled": True, "timeout_seconds": 20})
    if dist.get_rank() == 1:
        engine.module.named_parameters = None
    kind, said = "loaded", ""
    try:
        engine.load_checkpoint(str(view))
    except Exception as err:
        kind, said = type(err).__name__, str(err)
    found: list[Any] = [None, None]
    dist.all_gather_object(found, (kind, said))
    assert found[0][0] == "CoordinationError", found
    assert "rank 1 could not load it: TypeError" in found[0][1], found
    assert found[1][0] == "TypeError", found


@scenario(2)
def a_damaged_checkpoint_asked_for_by_name_is_an_error_that_names_those_that_are_whole(folder: Path) -> None:
    two_views(folder, untouched)
    if dist.get_rank() == 0:
        data(folder / "seen/global_step2").unlink()
    dist.barrier()
    with pytest.raises(UnickptError, match=r"is missing.*Whole checkpoints in .*seen, newest first: global_step1"):
        build(here(2), seed=2).load_checkpoint(str(folder / "seen"), tag="global_step2")


# ---------------------------------------------------------------- where DeepSpeed alone meets a checkpoint


@scenario(2)
def without_the_key_a_load_says_what_the_folder_is_and_what_to_do(folder: Path) -> None:
    place = damaged(folder, untouched)
    remedy = r'is a unickpt checkpoint, and this job\'s DeepSpeed config does not switch.*Add "unickpt": \{"enabled": true\}'
    for stage, section in ((1, {"enabled": False}), (3, {"enabled": False})):
        engine = build(here(stage), seed=2, unickpt=section)
        with pytest.raises(UnickptError, match=remedy):
            engine.load_checkpoint(str(place))
        assert engine.load_checkpoint(str(folder / "nowhere")) == (None, None)
        with pytest.raises(AssertionError):  # DeepSpeed's own errors stay
            engine.load_checkpoint(str(folder), tag="nothing")


@scenario(2)
def converters_of_deepspeed_say_what_the_folder_is_and_what_to_use(folder: Path) -> None:
    from deepspeed.checkpoint import ds_to_universal
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    place = damaged(folder, untouched)
    with pytest.raises(
        FileNotFoundError, match=r"it is a unickpt checkpoint. For weights use: unickpt export .*bad/global_step1"
    ):
        get_fp32_state_dict_from_zero_checkpoint(str(place))
    with pytest.raises(FileNotFoundError, match=r"unickpt export .* --to deepspeed-universal"):
        ds_to_universal._get_optim_files(str(place / TAG))
    assert "unickpt export THIS_FOLDER OUT" in (place / TAG / "README-unickpt.txt").read_text()
    (folder / "empty").mkdir(exist_ok=True)
    with pytest.raises(FileNotFoundError, match=r"empty'$"):
        ds_to_universal._get_optim_files(str(folder / "empty"))


@scenario(2)
def another_global_batch_is_said_with_the_setting_that_keeps_it(folder: Path) -> None:
    place = damaged(folder, untouched)
    with Log() as log:
        build(here(2), seed=2).load_checkpoint(str(place))
        assert not [line for line in log.lines if "global batch" in line]
        build(here(2), seed=2, train_batch_size=24).load_checkpoint(str(place))
    told = [line for line in log.lines if "global batch" in line]
    assert len(told) == (dist.get_rank() == 0), told
    if told:
        assert "changes from 12 to 24 (12 per device x 1 accumulated x 2 ranks)" in told[0], told
        assert '"train_micro_batch_size_per_gpu": 6, and "train_batch_size": 12' in told[0], told


def _other(change: Callable[[Model], None]) -> Any:
    torch.manual_seed(3)
    model = Model()
    change(model)
    return build(here(1), seed=3, model=model)


def _mismatch(folder: Path, pattern: str, change: Callable[[Model], None]) -> Any:
    place = damaged(folder, untouched)
    engine = _other(change)
    before = [p.detach().clone() for p in engine.module.parameters()]
    with pytest.raises(UnickptError, match=pattern):
        engine.load_checkpoint(str(place))
    assert all(torch.equal(a, b) for a, b in zip(before, engine.module.parameters(), strict=True)), "something was loaded"
    return engine


@scenario(2)
def a_parameter_that_the_checkpoint_lacks(folder: Path) -> None:
    def change(model: Model) -> None:
        model.extra = torch.nn.Parameter(torch.ones(4))

    engine = _mismatch(folder, r"in this job but not in the checkpoint \(1\): extra\..*Nothing is loaded", change)
    path, _ = engine.load_checkpoint(str(folder / "bad"), load_module_strict=False, load_optimizer_states=False)
    assert path is not None
    assert [e.outcome for e in engine.checkpoint_engine.last_report.entries if e.name == "extra"] == ["left out"]


@scenario(2)
def a_parameter_that_the_job_lacks(folder: Path) -> None:
    def change(model: Model) -> None:
        model.blocks[0].mlp[2].bias = None

    _mismatch(folder, r"in the checkpoint but not in this job \(1\): blocks.0.mlp.2.bias", change)


@scenario(2)
def a_parameter_of_another_shape(folder: Path) -> None:
    def change(model: Model) -> None:
        model.positions = torch.nn.Embedding(40, 15)

    _mismatch(folder, r"of another shape \(1\): positions.weight: \(12, 15\) in the checkpoint, \(40, 15\) in this job", change)


@scenario(2)
def another_optimizer(folder: Path) -> None:
    place = damaged(folder, untouched)
    torch.manual_seed(3)
    model = Model()
    sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    engine = build(here(1), seed=3, model=model, client_optimizer=sgd, scheduler={})
    pattern = r"trained with AdamW \(states exp_avg, exp_avg_sq\), this job uses SGD.*load_optimizer_states=False"
    with pytest.raises(UnickptError, match=pattern):
        engine.load_checkpoint(str(place))
    assert engine.load_checkpoint(str(place), load_optimizer_states=False)[0] is not None


@scenario(2)
def parameters_that_were_frozen_where_it_was_saved(folder: Path) -> None:
    place = damaged(folder, untouched)
    torch.manual_seed(3)
    engine = build(here(2), seed=3, model=Model(frozen=False))
    with pytest.raises(UnickptError, match=r"1 parameters that this job trains were not trained there.*positions.weight"):
        engine.load_checkpoint(str(place))


@scenario(2)
def a_wrong_option(folder: Path) -> None:
    for section, pattern in (
        ({"enabeld": True}, 'unickpt.enabeld" is not an option; did you mean "unickpt.enabled"'),
        ({"enabled": "yes"}, 'unickpt.enabled" must be true or false'),
        ({"enabled": True, "verify": "alway"}, 'did you mean "always"'),
        ({"enabled": True, "timeout_seconds": -1}, "must be a positive number"),
        (True, "must be an object such as"),
    ):
        with pytest.raises(UnickptError, match=pattern):
            build(here(1), seed=1, unickpt=section)


class Flavoured(Model):
    """A module of a user with an attribute that is read while a save describes the model, and nowhere else."""

    broken = False

    @property
    def config(self) -> Any:
        if self.broken:
            raise KeyError("flavour")
        return None


@scenario(2)
def an_exception_on_one_rank_while_it_describes_the_job_makes_deepspeed_save(folder: Path) -> None:
    for behind in (False, True):
        place = folder / str(behind)
        torch.manual_seed(1)
        model = Flavoured()
        engine = build(here(1), seed=1, model=model, unickpt={"enabled": True, "async_save": behind})
        train(engine, 1)
        model.broken = dist.get_rank() == 1
        for _ in range(2):
            with Log() as log:
                assert engine.save_checkpoint(str(place), client_state={"at": engine.global_steps}) is True
            dist.barrier()
            tag = place / f"global_step{engine.global_steps}"
            assert (tag / "mp_rank_00_model_states.pt").is_file()
            assert not (tag / "manifest.json").exists()
            if dist.get_rank() == 0:
                said = [line for line in log.lines if "KeyError: 'flavour'" in line]
                assert len(said) == 1, log.lines
                assert "rank 1" in said[0]
                assert "scenarios_errors.py" in said[0]
            other = build(here(1), seed=2)
            assert other.load_checkpoint(str(place))[1]["at"] == engine.global_steps
            assert train(engine, 1) == train(other, 1)
            expected, found = (consolidated(one, ("exp_avg", "exp_avg_sq")) for one in (engine, other))
            assert differences(expected, found, ignore=("groups",)) == []
        model.broken = False
        assert engine.save_checkpoint(str(place)) is True
        other.load_checkpoint(str(place))
        assert (place / f"global_step{other.global_steps}" / "manifest.json").is_file()


@scenario(2)
def ranks_that_name_different_tags_are_saved_by_deepspeed_at_once(folder: Path) -> None:
    rank = dist.get_rank()
    engine = build(here(1), seed=1, checkpoint={"tag_validation": "Ignore"})
    train(engine, 1)
    begin = time.monotonic()
    with Log() as log:
        assert engine.save_checkpoint(str(folder), tag=f"of-rank{rank}") is True
    assert time.monotonic() - begin < 60
    dist.barrier()
    stock = build(here(1), seed=1, checkpoint={"tag_validation": "Ignore"}, unickpt={"enabled": False})
    train(stock, 1)
    assert stock.save_checkpoint(str(folder / "stock"), tag=f"of-rank{rank}") is True
    dist.barrier()
    for tag in ("of-rank0", "of-rank1"):
        assert sorted(os.listdir(folder / tag)) == sorted(os.listdir(folder / "stock" / tag))
    if rank == 0:
        assert any("of-rank0" in line and "of-rank1" in line for line in log.lines), log.lines
    assert engine.save_checkpoint(str(folder), tag="together") is True
    assert (folder / "together" / "manifest.json").is_file()


@scenario(2)
def by_default_what_save_checkpoint_has_returned_from_is_there(folder: Path) -> None:
    for stage in (0, 2):
        engine = build(here(stage), seed=1, unickpt={"enabled": True})
        train(engine, 1)
        assert engine.save_checkpoint(str(folder / str(stage))) is True
        copy = folder / f"copy{stage}-{dist.get_rank()}"  # what every rank sees, at once
        shutil.copytree(folder / str(stage), copy)
        truth = consolidated(engine, ("exp_avg", "exp_avg_sq"))
        dist.barrier()
        target = build(here(3), seed=2)
        target.load_checkpoint(str(folder / f"copy{stage}-1"))
        assert differences(truth, consolidated(target, ("exp_avg", "exp_avg_sq"))) == []
