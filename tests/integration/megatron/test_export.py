"""``unickpt export --to torch-dist``: Megatron without unickpt loads checkpoints of unickpt in Megatron or DeepSpeed.

Every target is loaded twice: by Megatron's own ``dist_checkpointing`` from the exported folder, in processes that have never
imported the adapter, and by the adapter from the checkpoint itself. Then both jobs train on.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

from tests.jobs.journeys.families import huggingface_model
from tests.support.extent import FULL
from tests.support.forked_jobs import fork_ranks
from tests.support.llama import saved as saved_by_hand
from unickpt.cli.main import main
from unickpt.base.errors import MismatchError
from unickpt.transform.convert.torch_dcp import files_writer
from unickpt.transform.convert.megatron import dist_writer
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.format.manifest import OptimizerRecord, ParameterGroup

dist_checkpointing = pytest.importorskip("megatron.core.dist_checkpointing")

GPT, MOE, FP32 = "gpt-tp2pp2-dist", "moe-tp2ep2dp2-plain", "gpt-tp2dp2-fp32"
DEEPSPEED = {"llama": "zero1", "qwen3_moe": "zero2"}
OPTIONS = {
    "gpt": (GPT, []),
    "apart": (MOE, []),
    "together": (MOE, ["--expert-parallel", "no"]),
    "fp32": (FP32, []),
    "of_llama": ("llama", []),
    "of_qwen3_moe": ("qwen3_moe", ["--expert-parallel", "yes"]),
}
LOADS = {
    4: [
        ("apart", "moe-ep2dp4-dist"), ("fp32", "gpt-tp4-dist"),
        *([("gpt", "gpt-dp4-plain"), ("fp32", "gpt-pp2dp2-fp32"), ("gpt", "gpt-pp2dp2-dist"), ("together", "moe-pp2dp2-plain")]
          if FULL else []),
    ],
    2: [
        ("gpt", "gpt-dp2-dist"), ("of_qwen3_moe", "qwen3_moe:moe-ep2dp2-dist"),
        *([("of_llama", "llama:gpt-tp2-dist"), ("of_llama", "llama:gpt-pp2-plain")] if FULL else []),
    ],
}  # fmt: skip
EVERY = [pair for pairs in LOADS.values() for pair in pairs]
EXPORTED = {name: OPTIONS[name] for name in dict.fromkeys(name for name, _ in EVERY)}
OWN = [pair for pair in EVERY if ":" not in pair[1]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save, export and load the jobs."""
    folder = tmp_path_factory.mktemp("export")
    fork_ranks(4, "tests.jobs.megatron.export_worker", "save", str(folder), GPT, MOE, FP32)
    for family in sorted(DEEPSPEED.keys() & {source for source, _ in EXPORTED.values()}):
        (folder / family).mkdir()
        job = ("deepspeed", DEEPSPEED[family], family, "bf16", "-", str(folder / family), "3", "0")
        fork_ranks(2, "tests.jobs.journeys.station", *job, framework="deepspeed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files_writer, "BLOCK_ELEMENTS", 500)  # so that blocks span the parts of several ranks
        for name, (source, options) in EXPORTED.items():
            assert main(["export", str(where(folder, source)), str(folder / name), "--to", "torch-dist", *options,
                         "--shard-gigabytes", "1e-4"]) == 0  # fmt: skip
    for world, pairs in LOADS.items():
        asked = [word for name, target in pairs for word in (OPTIONS[name][0], target, name)]
        fork_ranks(world, "tests.jobs.megatron.export_worker", "load", str(folder), *asked, env={"UNICKPT_AUTOLOAD": "0"})
    return folder


def where(folder: Path, source: str) -> Path:
    return folder / source / ("trained" if source in DEEPSPEED else "iter_0000002")


@pytest.mark.parametrize(("name", "target"), EVERY)
def test_megatron_loads_it_without_unickpt(folder: Path, name: str, target: str) -> None:
    found: dict[str, Any] = json.loads((folder / f"{name}-{target}.json").read_text())
    assert found["problems"] == []
    assert found["compared"] > 20
    alone, adapted = found["native"], found["adapted"]
    assert alone["losses"] == adapted["losses"]
    for key in ("iteration", "scheduled"):
        assert alone[key] == adapted[key]


@pytest.mark.parametrize(("name", "target"), OWN)
def test_groups_are_those_that_the_adapter_loads(folder: Path, name: str, target: str) -> None:
    found = json.loads((folder / f"{name}-{target}.json").read_text())
    assert found["native"]["groups"] == found["adapted"]["groups"]
    assert {(group["lr"], group["step"]) for group in found["native"]["groups"]} == {(0.005, 2)}


@pytest.mark.parametrize(("name", "target"), sorted(set(EVERY) - set(OWN)))
def test_groups_of_another_framework_are_megatrons(folder: Path, name: str, target: str) -> None:
    found = json.loads((folder / f"{name}-{target}.json").read_text())
    assert len(found["native"]["groups"]) == len(found["adapted"]["groups"])
    for alone, adapted in zip(found["native"]["groups"], found["adapted"]["groups"], strict=True):
        assert adapted.keys() - alone.keys() <= {"max_lr", "min_lr"}  # they belong to the schedule, which is the job's own
        assert {key: alone[key] for key in adapted.keys() & alone.keys()}.items() <= adapted.items()


@pytest.mark.parametrize("name", ["gpt", "apart", "fp32"])
def test_converted_again_it_is_the_same(folder: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = where(folder, OPTIONS[name][0])
    assert main(["convert", str(folder / name), str(tmp_path / "again")]) == 0
    assert main(["diff", str(tmp_path / "again"), str(source)]) == 0
    assert "bit for bit" in capsys.readouterr().out
    again, first = Checkpoint.open(tmp_path / "again"), Checkpoint.open(source)
    assert again.manifest.step == first.manifest.step
    assert {info for info in again.index.tensors if info.kind != "object"} == {
        info for info in first.index.tensors if info.kind != "object"
    }
    shared = {each for each in first.shared_names() if not each.startswith("unickpt_rng/")}
    assert set(again.shared_names()) == shared
    assert shared


def test_equal_values_are_written_once(folder: Path) -> None:
    """The key of a master has two forms. Weights in fp32 are their own masters."""
    size = sum(path.stat().st_size for path in (folder / "fp32").rglob("*.distcp"))
    elements = sum(info.numel for info in Checkpoint.open(where(folder, FP32)).index.tensors if info.state == "weight")
    blocks = sum(path.read_bytes().count(b"PK\x05\x06") for path in (folder / "fp32").rglob("*.distcp"))
    assert size < 3 * 4 * elements + 2500 * blocks


def test_a_cut_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    def cut(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dist_writer.export(Checkpoint.open(where(folder, GPT)), tmp_path / "x", progress=cut)
    assert not list((tmp_path / "x").iterdir())
    assert main(["export", str(where(folder, GPT)), str(tmp_path / "x"), "--to", "torch-dist"]) == 0
    assert (tmp_path / "x" / "latest_checkpointed_iteration.txt").read_text() == "2"


def test_existing_files_are_kept(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(where(folder, GPT)), str(folder / "gpt"), "--to", "torch-dist"]) == 2
    assert "iter_0000002: exists already" in capsys.readouterr().err
    assert main(["export", str(where(folder, GPT)), str(folder / "y"), "--to", "dcp", "--expert-parallel", "no"]) == 2


def test_weights_alone_are_exported(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["edit", str(where(folder, GPT)), str(tmp_path / "weights"), "--no-optimizer"]) == 0
    assert main(["export", str(tmp_path / "weights"), str(tmp_path / "x"), "--to", "torch-dist"]) == 0
    assert "--no-load-optim or --finetune" in capsys.readouterr().out
    directory = str(tmp_path / "x" / "iter_0000002")
    truth = torch.load(folder / f"{GPT}.truth")
    weights = {key.removeprefix("weight/"): tensor for key, tensor in truth.items() if key.startswith("weight/")}
    assert dist_checkpointing.load_tensors_metadata(directory).keys() == weights.keys()
    found = {key: torch.empty_like(tensor) for key, tensor in weights.items()}
    torch_dcp.load(found, checkpoint_id=directory, no_dist=True)
    assert all(torch.equal(found[key], weights[key]) for key in weights)
    assert "optimizer" not in dist_checkpointing.load_common_state_dict(directory)


def test_a_model_of_transformers_is_a_release(tmp_path: Path) -> None:
    """Megatron starts at iteration 0, and reads no optimizer state."""
    huggingface_model("llama", seed=7).save_pretrained(tmp_path / "model")
    assert main(["convert", str(tmp_path / "model"), str(tmp_path / "a")]) == 0
    assert main(["export", str(tmp_path / "a"), str(tmp_path / "x"), "--to", "torch-dist"]) == 0
    assert (tmp_path / "x" / "latest_checkpointed_iteration.txt").read_text() == "release"
    common = dist_checkpointing.load_common_state_dict(str(tmp_path / "x" / "release"))
    assert (common["args"].num_layers, common["args"].no_save_optim, common["args"].no_save_rng) == (4, True, True)
    assert "optimizer" not in common


def by_hand(folder: Path, groups: Sequence[Mapping[str, Any]], steps: Sequence[float]) -> Checkpoint:
    """Two matrices in separate groups, with different steps."""
    names = [f"decoder.layers.mlp.linear_fc{at}.weight" for at in (1, 2)]
    values = {(name, state): torch.arange(6.0).view(1, 2, 3) / 7 for name in names for state in ("master", "exp_avg")}
    checkpoint = saved_by_hand(folder, values, aliases={}, dialect="megatron-core")
    record = OptimizerRecord(
        "AdamW",
        tuple(ParameterGroup(dict(group), (name,)) for group, name in zip(groups, names, strict=True)),
        tuple(ParameterGroup({"step": step}, (name,)) for step, name in zip(steps, names, strict=False)),
    )
    return dataclasses.replace(checkpoint, manifest=dataclasses.replace(checkpoint.manifest, optimizer=record))


ONE, OTHER = {"lr": 1e-3, "wd_mult": 1.0}, {"lr": 1e-4, "wd_mult": 1.0}


@pytest.mark.parametrize(
    ("groups", "steps", "message"),
    [
        ((ONE, OTHER), (3.0, 3.0), "differ in lr, but torch_dist identifies a group only by wd_mult"),
        (({"lr": 1e-3}, {"lr": 1e-4}), (3.0, 3.0), "have different hyperparameters"),
        ((ONE, ONE), (3.0, 4.0), "is at step 3, decoder.layers.mlp.linear_fc2.weight at step 4"),
        ((ONE, ONE), (3.0,), "linear_fc2.weight has no step"),
    ],
)  # fmt: skip
def test_state_that_megatron_cannot_distinguish_is_refused(
    tmp_path: Path, groups: Sequence[Mapping[str, Any]], steps: Sequence[float], message: str
) -> None:
    checkpoint = by_hand(tmp_path / "a", groups, steps)
    with pytest.raises(MismatchError, match=message):
        dist_writer.export(checkpoint, tmp_path / "x")
    assert not (tmp_path / "x").exists()
    fine = by_hand(tmp_path / "b", (ONE, ONE), (3.0, 3.0))
    assert dist_writer.export(fine, tmp_path / "x").tensors == 4
