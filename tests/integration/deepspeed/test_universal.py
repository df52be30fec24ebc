"""DeepSpeed's universal checkpoints: conversion of those of its script, and exports that its engines load."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.jobs.deepspeed.jobs import STEPS_BEFORE
from tests.support.forked_jobs import fork_ranks
from tests.support.rounding import limit_of
from unickpt.base.errors import FormatError, MismatchError
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.cli.main import main
from unickpt.transform.convert.deepspeed.universal_writer import export
from unickpt.transform.convert.detect import open_source
from unickpt.transform.convert.pickles.lazy_tensor import MAX_OPEN, Located, OpenFiles
from unickpt.transform.convert.pickles.safe_pickle import UnsafePickleError
from unickpt.transform.convert.pipeline import convert

SOURCES = ("z1w2bf16o", "z2w2fp32", "z3w2bf16")
WORLDS = (1, 2, 3)
WORKER = "tests.jobs.deepspeed.universal_worker"
UNTRAINED = ["buffer/scale", "buffer/seen", "weight/positions.weight"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Jobs saved natively, by unickpt with an export, and converted by DeepSpeed's script."""
    folder = tmp_path_factory.mktemp("universal")
    fork_ranks(2, WORKER, "save", str(folder))
    for name in SOURCES:
        assert main(["export", str(own(folder, name)), str(folder / name / "exported"), "--to", "deepspeed-universal"]) == 0
    return folder


def own(folder: Path, name: str) -> Path:
    return folder / name / "own" / f"global_step{STEPS_BEFORE}"


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("kind", ["universal", "exported"])
def test_a_universal_checkpoint_becomes_one_that_equals_ours(folder: Path, tmp_path: Path, name: str, kind: str) -> None:
    assert main(["convert", str(folder / name / kind), str(tmp_path / "made")]) == 0
    assert main(["diff", str(tmp_path / "made"), str(own(folder, name))]) == 0
    made, saved = Checkpoint.open(tmp_path / "made"), Checkpoint.open(own(folder, name))
    assert [i.key for i in made.index.tensors if i.kind != "object"] == [
        i.key for i in saved.index.tensors if i.kind != "object"
    ]
    assert made.manifest.aliases == saved.manifest.aliases == {"head.weight": "embed.weight"}
    assert made.manifest.step == saved.manifest.step
    assert described(made) == described(saved)
    for key in ("client_state", "engine", "lr_scheduler"):
        assert made.objects().value[key] == saved.objects().value[key]


def tensors(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    """Return everything that ``diff`` compares."""
    return [info.key for info in checkpoint.index.tensors if info.kind != "object"]


def described(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return hyperparameters and scalars by name."""
    record = checkpoint.manifest.optimizer
    assert record is not None
    return {
        name: (values, [g.hyperparameters for g in record.scalars if name in g.parameters])
        for group in record.groups for values in [group.hyperparameters] for name in group.parameters
    }  # fmt: skip


@pytest.fixture(scope="module")
def loaded(folder: Path) -> list[dict[str, Any]]:
    fork_ranks(WORLDS[-1], WORKER, "load", str(folder), timeout_s=600)
    return [each for world in WORLDS for each in json.loads((folder / f"loaded-w{world}.json").read_text())]


def test_deepspeed_loads_every_state_bit_for_bit(loaded: list[dict[str, Any]]) -> None:
    assert len(loaded) == 7 * len(WORLDS)
    assert {f"{each['source']} -> {each['target']}": each["problems"] for each in loaded if each["problems"]} == {}


def test_deepspeed_does_not_change_frozen_parameters(loaded: list[dict[str, Any]]) -> None:
    """The report of an export and docs/guides/conversion-deepspeed.md mention it."""
    assert {tuple(sorted(each["left"])) for each in loaded} == {tuple(UNTRAINED)}


def test_losses_continue(folder: Path, loaded: list[dict[str, Any]]) -> None:
    """Rounding is measured over all loads of one precision, because a load of three steps is a small sample."""
    kept = {name: json.loads((folder / f"{name}.json").read_text()) for name in SOURCES}
    dtypes = max(abs(a - b) for a, b in zip(kept["z1w2bf16o"], kept["z2w2fp32"], strict=True))  # of the same beginning
    noise: dict[bool, float] = {True: dtypes, False: 0.0}
    for each in loaded:
        found = max(abs(a - b) for a, b in zip(*each["moved"], strict=True))
        noise[_is_low(each)] = max(noise[_is_low(each)], found)
    apart = {}
    for each in loaded:
        expected = kept[each["source"]][STEPS_BEFORE:]
        far, limit = (
            max(abs(a - b) for a, b in zip(each["losses"], expected, strict=True)),
            limit_of(noise[_is_low(each)], max(expected)),
        )
        if far > limit:
            apart[f"{each['source']} -> {each['target']}"] = (far, limit)
    assert apart == {}


def _is_low(each: dict[str, Any]) -> bool:
    return "bf16" in each["source"] + each["target"]


@pytest.fixture(scope="module")
def details(folder: Path, loaded: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "details.json").read_text())
    return found


def test_deepspeed_counts_in_one_tensor_for_all_sub_groups(details: dict[str, Any]) -> None:
    """This also holds for its own universal checkpoints, so the report says what to do after a load."""
    assert details["steps"]["exported"] == details["steps"]["universal"] == [STEPS_BEFORE + 2.0]  # of two sub-groups
    assert details["steps"]["cloned"] == [STEPS_BEFORE + 1.0]


@pytest.mark.parametrize("job", ["same", "more", "zero3"])
def test_every_group_of_parameters_is_loaded(details: dict[str, Any], job: str) -> None:
    """This also holds if a job has more groups than the checkpoint, for which DeepSpeed raises."""
    assert details[job] == []
    assert [decay for decay, _ in details[f"{job}: decay"]] == [0.1, 0.0, 0.0][: 3 if job == "more" else 2]
    assert {rate for _, rate in details[f"{job}: decay"]} == {rate for _, rate in details["decay"]}
    assert any("weight_decay of 2 groups" in note for note in details["notes"])


def test_a_weight_that_is_not_the_cast_of_its_master(folder: Path, tmp_path: Path) -> None:
    source = copied(folder, tmp_path, "z1w2bf16o")
    path = source / "mp_rank_00_model_states.pt"
    content = torch.load(path, weights_only=False)
    content["module"]["gain"] += 1
    torch.save(content, path)
    assert main(["convert", str(source), str(tmp_path / "made")]) == 0
    made = Checkpoint.open(tmp_path / "made")
    assert torch.equal(made.read_tensor("gain", "weight"), content["module"]["gain"])
    assert torch.equal(made.read_tensor("gain", "master"), torch.load(source / "zero" / "gain" / "fp32.pt")["param"])
    assert any("gain" in note for note in export(made, tmp_path / "out").notes)


# -------------------------------------------------------------------- what is refused


def tag(folder: Path, name: str, kind: str = "universal") -> Path:
    return folder / name / kind / f"global_step{STEPS_BEFORE}_universal"


def copied(folder: Path, tmp_path: Path, name: str = "z2w2fp32") -> Path:
    return Path(shutil.copytree(tag(folder, name), tmp_path / "copy"))


def refused(source: Path, tmp_path: Path) -> str:
    with OpenFiles() as files, pytest.raises(FormatError) as caught:
        convert(open_source(source, files), tmp_path / "made")
    assert not (tmp_path / "made" / "manifest.json").exists()
    return str(caught.value)


def test_a_parameter_that_is_missing(folder: Path, tmp_path: Path) -> None:
    source = copied(folder, tmp_path)
    shutil.rmtree(source / "zero" / "gain")
    assert "the first is gain" in refused(source, tmp_path)


def test_a_master_that_is_missing(folder: Path, tmp_path: Path) -> None:
    source = copied(folder, tmp_path)
    (source / "zero" / "gain" / "fp32.pt").unlink()
    assert "fp32.pt is missing" in refused(source, tmp_path)


@pytest.mark.parametrize("name", ["z2w2fp32", "z3w2bf16"])
def test_a_tensor_of_another_shape(folder: Path, tmp_path: Path, name: str) -> None:
    source = copied(folder, tmp_path, name)
    path = source / "zero" / "blocks.0.qkv.weight" / "exp_avg.pt"
    found = torch.load(path)
    torch.save({**found, "param": found["param"].T.contiguous()} if name == "z2w2fp32" else found[:-1], path)
    assert "(15, 45), " in (message := refused(source, tmp_path)) or "674 elements" in message


def test_pickles_may_not_name_other_classes(folder: Path, tmp_path: Path) -> None:
    source = copied(folder, tmp_path)
    torch.save({"param": torch.zeros(1), "run": print}, source / "zero" / "gain" / "fp32.pt")
    with OpenFiles() as files, pytest.raises(UnsafePickleError, match=r"builtins\.print"):
        open_source(source, files)


def test_parts_of_frozen_parameters_that_are_missing(folder: Path, tmp_path: Path) -> None:
    source = copied(folder, tmp_path, "z3w2bf16")
    (source / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    assert "has 1 model state files, expected 2" in refused(source, tmp_path)


def test_files_of_two_checkpoints(folder: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tag(folder, "z2w2fp32", "exported"), tmp_path / "copy"))
    path = source / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    torch.save({**torch.load(path, weights_only=False), "global_steps": 2}, path)
    assert "files of two checkpoints" in refused(source, tmp_path)


def test_tensor_parallel_ranks_with_frozen_parameters(folder: Path, tmp_path: Path) -> None:
    source = copied(folder, tmp_path)
    shutil.copy(source / "mp_rank_00_model_states.pt", source / "mp_rank_01_model_states.pt")
    assert "positions.weight is not trained on model parallel rank 0" in refused(source, tmp_path)


def test_an_export_does_not_overwrite(folder: Path) -> None:
    with pytest.raises(MismatchError, match="exists already"):
        export(Checkpoint.open(own(folder, "z2w2fp32")), folder / "z2w2fp32" / "exported")


def test_a_checkpoint_without_an_optimizer_is_no_universal_one(folder: Path, tmp_path: Path) -> None:
    assert main(["export", str(own(folder, "z2w2fp32")), str(tmp_path / "hf")]) == 0
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "weights")]) == 0
    with pytest.raises(MismatchError, match="has no optimizer"):
        export(Checkpoint.open(tmp_path / "weights"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_more_files_than_may_be_open(tmp_path: Path) -> None:
    for at in range(MAX_OPEN + 20):
        (tmp_path / str(at)).write_bytes(at.to_bytes(8, "little"))
    before = len(list(Path("/proc/self/fd").iterdir()))
    with OpenFiles() as files:
        found = [Located(files, tmp_path / str(at), 0, "I64", (1,), (1,)).read().item() for at in range(MAX_OPEN + 20)]
        again = Located(files, tmp_path / "0", 0, "I64", (1,), (1,)).read().item()
        assert len(list(Path("/proc/self/fd").iterdir())) <= before + MAX_OPEN
    assert found == list(range(MAX_OPEN + 20))
    assert again == 0
