"""What torch.distributed.checkpoint has saved becomes a checkpoint, bit for bit; and what it cannot be is refused."""

from __future__ import annotations

import copy
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

from tests.support.forked_jobs import fork_ranks
from tests.support.llama import saved as saved_by_hand
from unickpt.checkpoint.format.manifest import ParameterGroup
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.validation import is_checkpoint
from unickpt.cli.main import main
from unickpt.transform.convert.torch_dcp import files_writer as exporting_distcp

KINDS = ("flat0", "flat1", "nested0", "nested1", "titan")
Truth = dict[tuple[str, str], torch.Tensor]


@pytest.fixture(scope="module", params=[1, 2], ids=["one", "two"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(f"dcp{request.param}")
    fork_ranks(request.param, "tests.jobs.torch_dcp.dcp_worker", str(folder))
    return folder


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """Of one process: a matrix in two chunks, an object, and a state of an optimizer."""
    folder = tmp_path / "dcp"
    tree = {"model": {"w": torch.arange(12.0).view(4, 3), "b": torch.ones(3)}, "optim": {"state.w.exp_avg": torch.zeros(4, 3)}}
    torch_dcp.save({**tree, "note": {"lr": 0.5}}, checkpoint_id=folder, no_dist=True)
    return folder


def converted(folder: Path, to: Path) -> Checkpoint:
    assert main(["convert", str(folder), str(to)]) == 0
    assert main(["verify", str(to)]) == 0
    return Checkpoint.open(to)


def check(found: Checkpoint, truth: Truth) -> None:
    assert {info.key for info in found.index.tensors if info.kind != "object"} == truth.keys()
    for (name, state), expected in truth.items():
        read = found.read_tensor(name, state)
        assert (read.dtype, read.shape) == (expected.dtype, expected.shape), (name, state)
        assert torch.equal(read.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)), (name, state)


def values_of(groups: tuple[ParameterGroup, ...], key: str) -> dict[str, Any]:
    return {name: group.hyperparameters[key] for group in groups for name in group.parameters}


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_is_the_same_bit_for_bit(saved: Path, kind: str, tmp_path: Path) -> None:
    found = converted(saved / kind, tmp_path / "out")
    truth: Truth = torch.load(saved / "truth.pt")
    check(found, truth)
    record = found.manifest.optimizer
    assert record is not None
    assert record.name == "AdamW"
    trained = {name for name, state in truth if state == "exp_avg"}
    assert values_of(record.groups, "weight_decay") == {
        name: 0.2 if truth[name, "weight"].dim() > 1 else 0.0 for name in trained
    }
    assert values_of(record.groups, "lr") == dict.fromkeys(trained, 1e-2)
    assert values_of(record.scalars, "step") == dict.fromkeys(trained, 3.0)
    assert found.manifest.step == 30
    state = found.objects().value["client_state"]
    assert state["train_state.loss"] == [1.0, 2.5]
    if kind != "titan":  # there, nothing would tell it from the model's
        assert torch.equal(state["seen"], torch.arange(3))


def test_weights_without_an_optimizer(saved: Path, tmp_path: Path) -> None:
    found = converted(saved / "weights", tmp_path / "out")
    truth: Truth = torch.load(saved / "truth.pt")
    check(found, {key: tensor for key, tensor in truth.items() if key[1] == "weight"})
    assert found.manifest.optimizer is None


def test_unknown_content_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = {
        "model": {"a": torch.ones(2, 2), "b": torch.ones(2, 2)},
        "optim": {
            "state": {0: {"exp_avg": torch.ones(2, 2)}, 1: {"exp_avg": torch.ones(2, 2)}},
            "param_groups": [{"lr": 1.0, "params": [0]}, {"lr": 2.0, "params": [1]}],
        },
        "window": slice(3),
    }
    torch_dcp.save(tree, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert main(["convert", str(tmp_path / "dcp"), str(tmp_path / "out")]) == 2  # a slice is on no list
    assert "builtins.slice, which is not on the list of allowed classes" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "dcp"), str(tmp_path / "out"), "--take", "builtins.slice"]) == 0
    message = capsys.readouterr().out
    assert "window is an object of builtins.slice, which only its own code can read" in message
    assert "have numbers instead of names, and several assignments of names fit" in message
    assert {info.key for info in Checkpoint.open(tmp_path / "out").index.tensors} == {("a", "weight"), ("b", "weight")}


def test_an_optimizer_that_knows_parameters_by_number(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    torch_dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path / "dcp",
                   no_dist=True)  # fmt: skip
    found = converted(tmp_path / "dcp", tmp_path / "out")
    for name, parameter in model.named_parameters():
        assert torch.equal(found.read_tensor(name, "exp_avg_sq"), optimizer.state[parameter]["exp_avg_sq"])
    assert found.manifest.optimizer is not None
    assert values_of(found.manifest.optimizer.groups, "lr") == dict.fromkeys(dict(model.named_parameters()), 0.25)


def test_unused_files_are_not_opened(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are opened as they are read, not all at the start."""
    from unickpt.transform.convert.detect import open_source
    from unickpt.transform.convert.pickles.lazy_tensor import OpenFiles
    from unickpt.transform.convert.pickles.torch_archive import Archive

    opened: list[int] = []
    make = Archive.__init__

    def counting(self: Archive, *arguments: Any) -> None:
        opened.append(1)
        make(self, *arguments)

    monkeypatch.setattr(Archive, "__init__", counting)
    with OpenFiles() as files:
        source = open_source(plain, files)
        assert len(opened) == 1  # the object
        part = source.portions[0].parts[0]
        part.read(part.box)
        part.read(part.box)
        assert len(opened) == 2


def test_out_and_in_again(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own reader finds the same tensors, in whatever blocks; and so does a conversion of that."""
    monkeypatch.setattr(exporting_distcp, "BLOCK_ELEMENTS", 16)
    first = converted(saved / "flat0", tmp_path / "first")
    assert main(["export", str(tmp_path / "first"), str(tmp_path / "dcp"), "--to", "dcp", "--shard-gigabytes", "1e-5"]) == 0
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) > 3
    truth: Truth = torch.load(saved / "truth.pt")
    keys = {key: key[0] if key[1] == "weight" else f"optim.state.{key[0]}.{key[1]}" for key in truth}
    state = {keys[key]: torch.zeros_like(tensor) for key, tensor in truth.items()}
    torch_dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for key, expected in truth.items():
        assert torch.equal(state[keys[key]], expected), key
    again = converted(tmp_path / "dcp", tmp_path / "again")
    check(again, truth)
    for here, there in zip(_optimizer(again), _optimizer(first), strict=True):
        assert here == there
    assert main(["export", str(tmp_path / "first"), str(tmp_path / "dcp"), "--to", "dcp"]) == 2  # it is there


def test_tied_weights_have_both_names(tmp_path: Path) -> None:
    master = torch.arange(6.0).view(2, 3) / 7
    values = {("embed.weight", "weight"): master.bfloat16(), ("embed.weight", "master"): master}
    saved_by_hand(tmp_path / "a", values, aliases={"head.weight": "embed.weight"})
    assert main(["export", str(tmp_path / "a"), str(tmp_path / "dcp"), "--to", "dcp"]) == 0
    weights = {name: torch.zeros(2, 3, dtype=torch.bfloat16) for name in ("embed.weight", "head.weight")}
    state = {**weights, "optim.state.embed.weight.master": torch.zeros(2, 3)}
    torch_dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert torch.equal(state["head.weight"], master.bfloat16())
    assert torch.equal(state["embed.weight"], master.bfloat16())
    assert torch.equal(state["optim.state.embed.weight.master"], master)


def _optimizer(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    record = checkpoint.manifest.optimizer
    assert record is not None
    return [values_of(record.groups, "weight_decay"), values_of(record.groups, "betas"), values_of(record.scalars, "step")]


# ---------------------------------------------------------------- what is damaged, or hostile


def refused(folder: Path, to: Path, capsys: pytest.CaptureFixture[str], *words: str) -> None:
    assert main(["convert", str(folder), str(to)]) == 2
    message = capsys.readouterr().err
    assert all(word in message for word in words), message
    assert not is_checkpoint(to)


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.mark),))


def test_a_pickle_that_would_run_code_is_refused(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark = tmp_path / "ran"
    metadata = torch_dcp.FileSystemReader(plain).read_metadata()
    metadata.planner_data = Evil(mark)
    (plain / ".metadata").write_bytes(pickle.dumps(metadata))
    refused(plain, tmp_path / "out", capsys, "which is not on the list of allowed classes")
    assert not mark.exists()
    torch_dcp.save({"w": torch.ones(2), "evil": Evil(mark)}, checkpoint_id=tmp_path / "other", no_dist=True)
    refused(tmp_path / "other", tmp_path / "out", capsys, "which is not on the list of allowed classes")
    assert not mark.exists()


def test_a_file_that_ends_early_is_refused(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file,) = plain.glob("*.distcp")
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    refused(plain, tmp_path / "out", capsys, file.name, "is at bytes")
    file.write_bytes(whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2))
    refused(plain, tmp_path / "out", capsys, file.name)
    file.unlink()
    refused(plain, tmp_path / "out", capsys, "does not exist")
    (plain / ".metadata").write_bytes((plain / ".metadata").read_bytes()[:-20])
    refused(plain, tmp_path / "out", capsys, ".metadata: its pickle cannot be read")


def _half(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.w"].chunks[0].sizes = torch.Size([2, 3])


def _twice(metadata: Metadata) -> None:
    tensor = metadata.state_dict_metadata["model.w"]
    tensor.chunks.append(copy.copy(tensor.chunks[0]))


def _beyond(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.w"].chunks = [ChunkStorageMetadata(torch.Size([1, 0]), torch.Size([4, 3]))]


def _elsewhere(metadata: Metadata) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = "../secret.distcp"


def _transformed(metadata: Metadata) -> None:
    for info in metadata.storage_data.values():
        info.transform_descriptors = ["stream.zstd"]


def _nowhere(metadata: Metadata) -> None:
    metadata.storage_data = {key: value for key, value in metadata.storage_data.items() if key.fqn != "model.w"}


def _of_another_shape(metadata: Metadata) -> None:
    tensor = metadata.state_dict_metadata["model.w"]
    tensor.size, tensor.chunks[0].sizes = torch.Size([3, 4]), torch.Size([3, 4])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_half, "have 6 of 12 elements"), (_twice, "overlap"), (_beyond, "has a chunk of [4, 3] at [1, 0]"),
        (_elsewhere, "is not a plain path inside"), (_transformed, "which is not supported"),
        (_nowhere, "has no storage entry of model.w"),
        (_of_another_shape, "F32 [4, 3]"),
    ],
)  # fmt: skip
def test_a_table_that_is_wrong_is_refused(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Callable[[Metadata], None], words: str
) -> None:
    metadata = torch_dcp.FileSystemReader(plain).read_metadata()
    change(metadata)
    (plain / ".metadata").write_bytes(pickle.dumps(metadata))
    refused(plain, tmp_path / "out", capsys, words)


def test_another_serialization_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    writer = torch_dcp.FileSystemWriter(tmp_path / "dcp", serialization_format=SerializationFormat.SAFETENSORS)
    torch_dcp.save({"w": torch.ones(64, 64)}, storage_writer=writer, no_dist=True)
    refused(tmp_path / "dcp", tmp_path / "out", capsys, "safetensors")


def test_without_collectives_is_refused(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.move(plain / ".metadata", plain / "__0.metadata")
    refused(plain, tmp_path / "out", capsys, "without collectives")
