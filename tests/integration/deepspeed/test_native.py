"""Converted checkpoints of DeepSpeed equal the state from its own accessors, bit for bit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.jobs.deepspeed.zero_names import layouts
from tests.support.extent import some
from tests.support.forked_jobs import fork_ranks
from tests.support.rounding import assert_continues
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.cli.main import main

WORLD = 3  # divides no dimension of the model
WORKER = "tests.jobs.deepspeed.native_worker"
LOADS = (("z3w3bf16", "1-bf16"), ("z1w3fp32", "3-fp32"))
JOBS = some((
    ("pipe", 2, "stage=0", "bf16=1"), ("moe", 4, "stage=2", "bf16=1"), ("moe", 2, "stage=0"),
    ("pipe", 4, "stage=1", "bf16=1", "slices=2"), ("tensor", 4, "stage=1", "bf16=1"),
    ("pipe", 4, "stage=1", "bf16=1"), ("pipe", 2, "stage=1"), ("moe", 4, "stage=1"), ("tensor", 2, "stage=0"),
), 5)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("native")
    jobs = [":".join([kind, str(world), named(job), *options]) for job in JOBS for kind, world, *options in [job]]
    fork_ranks(4, WORKER, str(folder), f"plain:{WORLD}:plain", *jobs)
    for layout in layouts(WORLD):
        source = folder / f"plain-{layout.name}"
        assert main(["convert", str(source), str(source / "converted")]) == 0
    return folder


def named(job: Any) -> str:
    return "-".join(map(str, job))


@pytest.mark.parametrize("layout", [layout.name for layout in layouts(WORLD)])
def test_every_stage_and_precision(folder: Path, layout: str) -> None:
    found = Checkpoint.open(folder / f"plain-{layout}" / "converted")
    truth = torch.load(folder / f"plain-{layout}.truth", weights_only=False)
    seen = set()
    for key, expected in truth.items():
        state, _, name = key.partition("/")
        if state in ("weight", "master", "exp_avg", "exp_avg_sq", "buffer"):
            name = found.manifest.aliases.get(name, name)
            info = found.info(name, "weight" if state == "buffer" else state)
            assert info is not None, key
            value = found.read_tensor(*info.key)
            assert value.dtype == expected.dtype
            assert torch.equal(value, expected), key
            seen.add(info.key)
    assert seen == {info.key for info in found.index.tensors if info.kind != "object"}
    record = found.manifest.optimizer
    assert record is not None
    assert record.name == "AdamW"
    assert [group.hyperparameters["step"] for group in record.scalars] == truth["step"]
    (group,) = record.groups
    assert group.hyperparameters["lr"] == truth["groups"][0]["lr"]
    assert set(group.parameters) == {info.name for info in found.index.tensors if info.state == "exp_avg"}
    value = found.objects().value
    assert value["client_state"] == {"note": layout}
    assert list(value["engine"].values()) == truth["counters"]
    assert value["lr_scheduler"] == {"class": "WarmupLR", "state": truth["scheduler"]}


@pytest.fixture(scope="module")
def loaded(folder: Path) -> None:
    fork_ranks(2, WORKER, str(folder), *(f"load:2:plain-{source}:target={target}" for source, target in LOADS))


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("source", [source for source, _ in LOADS])
def test_training_continues_under_another_layout(folder: Path, source: str) -> None:
    found = json.loads((folder / f"plain-{source}.loaded").read_text())
    assert found["note"] == source
    assert found["problems"] == []
    expected = json.loads((folder / "plain.losses").read_text())[source][3:]
    assert_continues(found["losses"], expected, *found["moved"])


@pytest.mark.parametrize("job", JOBS, ids=named)
def test_pipelines_experts_and_tensor_parallel_ranks(folder: Path, tmp_path: Path, job: Any) -> None:
    kind, world, *options = job
    assert main(["convert", str(folder / named(job)), str(tmp_path / "converted")]) == 0
    assert main(["verify", str(tmp_path / "converted")]) == 0
    found = Checkpoint.open(tmp_path / "converted")
    seen: set[tuple[str, str]] = set()
    for rank in range(world):
        tensor_rank = rank % 2 if kind == "tensor" or "slices=2" in options else None
        for (name, state), (at, values, local) in torch.load(folder / f"{named(job)}.rank{rank}", weights_only=False).items():
            whole = found.read_tensor(name, state)
            if tensor_rank and whole.shape == local and "slices=2" in options:
                continue  # both have it; the first one counts
            mine = whole if tensor_rank is None else slice_of(whole, local, tensor_rank)
            assert torch.equal(mine.reshape(-1)[at : at + len(values)], values), (rank, name, state)
            seen.add((name, state))
    stored = {info.key for info in found.index.tensors if info.kind != "object"}
    assert {key for key in stored if key[1] != "master"} == {key for key in seen if key[1] != "master"}
    assert {name for name, state in stored if state == "master"} == {name for name, state in stored if state == "exp_avg"}


def slice_of(whole: torch.Tensor, local: tuple[int, ...], rank: int) -> torch.Tensor:
    """Return one rank's part of two, for a model without fused parameters."""
    dims = [d for d, (a, b) in enumerate(zip(whole.shape, local, strict=True)) if a != b]
    return whole.narrow(dims[0], rank * local[dims[0]], local[dims[0]]) if dims else whole


def test_a_file_that_is_missing(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = folder / "plain-z2w3bf16" / "global_step3"
    for rank in (1, 2):
        copy = tmp_path / str(rank)
        copy.mkdir()
        for path in source.iterdir():
            if not re.fullmatch(f"bf16_zero_pp_rank_{rank}.*", path.name):
                (copy / path.name).symlink_to(path)
        assert main(["convert", str(copy), str(tmp_path / "out")]) == 2
        assert "has 2 files of optimizer states, expected 3" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
