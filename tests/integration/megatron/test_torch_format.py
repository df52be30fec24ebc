"""Converted ``torch`` checkpoints of Megatron equal unickpt's own of the same job, or are refused with a reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.converted import (
    ITERATION, assert_loaded, assert_same_hyperparameters_and_steps, assert_same_tensors, fixtures, opened,
)  # fmt: skip
from unickpt.cli.main import main
from unickpt.transform.convert.megatron.flat_buffers import Member, layout
from unickpt.checkpoint.load.checkpoint import Checkpoint

pytest.importorskip("megatron.core")

PLAIN, FLAT, EXPERTS = "gpt-tp2pp2-plain", "gpt-tp2pp2-dist", "moe-ep2dp4-dist"
SOURCES = {
    PLAIN: "", FLAT: "gpt-pp2vpp2-plain", "gpt-pp2vpp2dp2-dist": "", "moe-tp2ep2dp2-plain": "", EXPERTS: "moe-tp2-plain",
    "gpt-tp2dp2-fp32": "",
}  # fmt: skip
RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"


folder, name = fixtures("tests.jobs.megatron.torch_format_worker", SOURCES)


def test_tensors_equal_those_that_unickpt_saves(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_same_tensors(folder, name, capsys)


def test_hyperparameters_and_steps_equal_those_that_unickpt_saves(folder: Path, name: str) -> None:
    assert_same_hyperparameters_and_steps(folder, name)


def test_extra_states_of_modules_equal_those_that_unickpt_saves(folder: Path, name: str) -> None:
    found, ours = opened(folder, name)
    names = [[each for each in one.shared_names() if "rng" not in each] for one in (found, ours)]
    assert names[0] == names[1] != []
    assert all(found.shared_object(each).value is None is ours.shared_object(each).value for each in names[0])


def test_objects_are_kept(folder: Path) -> None:
    found, _ = opened(folder, PLAIN)
    common = found.objects().value["common"]
    assert common["opt_param_scheduler"] == {"max_lr": 0.01, "num_steps": 8}
    assert common["num_floating_point_operations_so_far"] == 17.0
    assert common["args"].num_layers == 4
    assert not {"optimizer", "model", "rng_state"} & common.keys()
    writer = found.manifest.writer
    assert (writer.framework, writer.dialect, writer.topology["tensor"]) == ("megatron", "megatron-core", 2)
    assert found.manifest.step == 2
    (state,) = found.shared_object("rng_state/shard_1.0_2.2").value
    assert state["torch_rng_state"].dtype == torch.uint8
    assert state["np_rng_state"][0] == "MT19937"


@pytest.mark.parametrize(("source", "target"), [pair for pair in SOURCES.items() if pair[1]])
def test_the_converted_checkpoint_loads_under_another_shape(folder: Path, source: str, target: str) -> None:
    assert_loaded(folder, source, target)


def test_buffers_have_megatrons_layout(folder: Path) -> None:
    recorded = json.loads((folder / "buffers.json").read_text())
    assert len(recorded["found"]) == 25
    for case in recorded["found"]:
        members = [Member(numel, at in case["shared"]) for at, numel in enumerate(recorded["sizes"])]
        assert layout(members, case["bucket_size"]) == (case["places"], case["total"]), case


# ---------------------------------------------------------------- what is refused


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Callable[[str], Path]:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(folder / name / ITERATION, tmp_path / name))

    return copy


def refusal(source: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the error message for a folder that cannot be converted."""
    target = source.with_name("out")
    assert main(["convert", str(source), str(target)]) == 2
    assert not (target / "manifest.json").exists()
    return capsys.readouterr().err


def changed(path: Path, change: Callable[[Any], None]) -> None:
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


@pytest.mark.parametrize(
    ("name", "file"), [(PLAIN, "mp_rank_01_000/model_optim_rng.pt"), (EXPERTS, "mp_rank_00_001/distrib_optim.pt")]
)
def test_missing_and_damaged_files_are_named(
    copied: Callable[[str], Path], capsys: pytest.CaptureFixture[str], name: str, file: str
) -> None:
    source = copied(name)
    data = (source / file).read_bytes()
    (source / file).write_bytes(data[: len(data) // 2])
    assert str(source / file) in refusal(source, capsys)
    (source / file).unlink()
    assert f"{source / file}: is missing" in refusal(source, capsys)


def test_a_file_of_another_iteration_is_named(copied: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    source = copied(PLAIN)
    changed(source / "mp_rank_01_001" / "model_optim_rng.pt", lambda content: content.update(iteration=1))
    assert f"{source / 'mp_rank_01_001' / 'model_optim_rng.pt'}: has iteration 1" in refusal(source, capsys)


def test_masters_in_another_order_are_refused(copied: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    source = copied(PLAIN)

    def swap(content: Any) -> None:
        masters = next(group for group in content["optimizer"]["fp32_from_fp16_params"] if group[0].dim() == 2)
        alike = [at for at, each in enumerate(masters) if each.shape == masters[-1].shape]
        masters[alike[0]], masters[alike[1]] = masters[alike[1]], masters[alike[0]]

    changed(source / "mp_rank_00_001" / "model_optim_rng.pt", swap)
    said = refusal(source, capsys)
    assert str(source / "mp_rank_00_001" / "model_optim_rng.pt") in said
    assert RESHARDABLE in said


def test_frozen_parameters_have_no_states(folder: Path, copied: Callable[[str], Path], tmp_path: Path) -> None:
    """The first parameter is frozen, so the optimizer does not number it."""
    source = copied(PLAIN)

    def freeze(content: Any) -> None:
        tree = content["optimizer"]
        at = next(at for at, group in enumerate(tree["fp32_from_fp16_params"]) if group[0].dim() == 2)
        assert tree["fp32_from_fp16_params"][at].pop(0).shape == content["model"]["embedding.word_embeddings.weight"].shape
        del tree["optimizer"]["state"][tree["optimizer"]["param_groups"][at]["params"].pop(0)]

    for rank in (0, 1):
        changed(source / f"mp_rank_{rank:02d}_000" / "model_optim_rng.pt", freeze)
    assert main(["convert", str(source), str(tmp_path / "out")]) == 0
    found, whole = Checkpoint.open(tmp_path / "out"), opened(folder, PLAIN)[0]
    name = "embedding.word_embeddings.weight"
    assert [info.state for info in found.index.tensors if info.name == name] == ["weight"]
    for info in whole.index.tensors:
        if info.kind != "object" and info.name != name:
            assert torch.equal(found.read_tensor(*info.key), whole.read_tensor(*info.key)), info


@pytest.mark.parametrize("where", ["parameter", "padding", "length"])
def test_buffers_that_do_not_fit_are_refused(
    copied: Callable[[str], Path], capsys: pytest.CaptureFixture[str], where: str
) -> None:
    source = copied(FLAT)
    path = source / "mp_rank_01_001" / "distrib_optim.pt"

    def spoil(content: Any) -> None:
        (tensors,) = content[0].values()
        if where == "length":
            for name in ("param", "exp_avg", "exp_avg_sq"):
                tensors[name] = torch.cat([tensors[name], torch.zeros(64)])
        elif where == "parameter":
            tensors["param"][: 32 * 48] = tensors["param"][: 32 * 48].flip(0)  # the embedding, which is last in the model
        else:
            gap = (tensors["param"] == 0).nonzero().flatten()
            tensors["param"][gap[-1]] = 1.0

    changed(path, spoil)
    said = refusal(source, capsys)
    assert str(path) in said
    assert RESHARDABLE in said


def test_unknown_parameters_are_refused(copied: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    source = copied(PLAIN)
    changed(
        source / "mp_rank_00_000" / "model_optim_rng.pt",
        lambda content: content["model"].update({"decoder.layers.0.mixer.in_proj.weight": torch.zeros(2, 2)}),
    )
    said = refusal(source, capsys)
    assert str(source / "mp_rank_00_000" / "model_optim_rng.pt") in said
    assert "decoder.layers.0.mixer.in_proj.weight" in said


def test_nothing_in_a_file_is_run(copied: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    source = copied(PLAIN)
    changed(source / "mp_rank_00_000" / "model_optim_rng.pt", lambda content: content.update(more=print))
    assert "builtins.print" in refusal(source, capsys)
