"""Hostile folders of other frameworks: links, pipes, false names, values of other types."""

from __future__ import annotations

import argparse
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
from torch.distributed.checkpoint.metadata import Metadata

from tests.hostile.attacks import cases
from tests.hostile.mutation import limited_memory
from tests.hostile.source_folders import (
    converted,
    dcp,
    deepspeed,
    deepspeed_state,
    everything,
    megatron,
    megatron_state,
    transformers,
)
from unickpt.base.errors import FormatError, UnickptError
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.cli.main import main
from unickpt.transform.convert.detect import open_source
from unickpt.transform.convert.pickles.lazy_tensor import OpenFiles
from unickpt.transform.convert.pickles.plain_values import plain

WRONG = [None, True, -1, 2**63, 0.5, "x", "../x", b"x", [], [[]], {}, {"": None}, (), {1: 2}, torch.ones(3), torch.float32]


# ---------------------------------------------------------------- links and pipes


def test_a_path_that_a_table_names_stays_below_the_folder(tmp_path: Path) -> None:
    """Links point to another checkpoint of the victim. Only files below the folder are read."""
    private, folder = dcp(tmp_path / "private"), dcp(tmp_path / "source")
    (file,), (secret,) = folder.glob("*.distcp"), private.glob("*.distcp")
    sound = converted(folder, tmp_path / "sound")
    assert sound
    (folder / "real").mkdir()
    shutil.move(file, folder / "real" / "file")
    file.symlink_to(Path("real", "file"))
    assert converted(folder, tmp_path / "inside")
    file.unlink()
    file.symlink_to(secret)
    with OpenFiles() as files, pytest.raises(FormatError, match=r"leads to .*, outside of"):
        open_source(folder, files)
    file.unlink()
    (folder / "linked").symlink_to(private)
    metadata = torch_dcp.FileSystemReader(folder).read_metadata()
    for info in metadata.storage_data.values():
        info.relative_path = f"linked/{secret.name}"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert not converted(folder, tmp_path / "out")


def test_a_snapshot_in_the_cache_of_the_hub_is_read(tmp_path: Path) -> None:
    """Its files are links to its own blobs. A link to the blobs of another repository is refused."""
    for name in ("mine", "other"):
        (tmp_path / name / "blobs").mkdir(parents=True)
        snapshot = dcp(tmp_path / name / "snapshots" / "abc")
        for number, path in enumerate(sorted(path for path in snapshot.iterdir() if path.is_file())):
            shutil.move(path, tmp_path / name / "blobs" / str(number))
            path.symlink_to(Path("..", "..", "blobs", str(number)))
    snapshot = tmp_path / "mine" / "snapshots" / "abc"
    assert converted(snapshot, tmp_path / "out")
    (file,) = snapshot.glob("*.distcp")
    other = (tmp_path / "other" / "snapshots" / "abc" / file.name).resolve()
    file.unlink()
    file.symlink_to(other)
    assert not converted(snapshot, tmp_path / "again")
    model = transformers(tmp_path / "mine" / "snapshots" / "def")
    shutil.move(model / "model-00001-of-00001.safetensors", tmp_path / "mine" / "blobs" / "model")
    (model / "model-00001-of-00001.safetensors").symlink_to(Path("..", "..", "blobs", "model"))
    assert converted(model, tmp_path / "model")


PIPES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "table of DCP": (dcp, ".metadata"),
    "chunk of DCP": (dcp, "__0_0.distcp"),
    "states of DeepSpeed": (deepspeed, "mp_rank_00_model_states.pt"),
    "states of Megatron": (megatron, "mp_rank_00/model_optim_rng.pt"),
    "model of transformers": (transformers, "model-00001-of-00001.safetensors"),
    "index of transformers": (transformers, "model.safetensors.index.json"),
}


@pytest.mark.parametrize("target", ["pipe", "/dev/zero", "/dev/tty", "socket"])
@pytest.mark.parametrize("name", cases(PIPES))
def test_only_regular_files_are_read(tmp_path: Path, name: str, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    make, file = PIPES[name]
    path = make(tmp_path / "source") / file
    path.unlink()
    if target == "pipe":
        os.mkfifo(path)
    elif target == "socket":
        os.mknod(path, 0o140600)
    else:
        path.symlink_to(target)
    code = main(["convert", str(tmp_path / "source"), str(tmp_path / "out")])
    if name == "index of transformers":  # it is optional
        assert code in (0, 2)
    else:
        assert code == 2
        assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("make", [dcp, deepspeed, transformers])
def test_a_configuration_that_is_a_pipe_is_passed_over(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    folder = make(tmp_path / "source")
    (folder / "config.json").unlink(missing_ok=True)
    os.mkfifo(folder / "config.json")
    assert converted(folder, tmp_path / "out")
    os.mkfifo(folder / "metadata.json")
    with OpenFiles() as files:
        open_source(folder, files)


# ---------------------------------------------------------------- numbers and sizes that lie


def test_a_large_number_in_a_file_name_needs_no_memory(tmp_path: Path) -> None:
    folder = deepspeed(tmp_path / "source")
    shutil.copy(folder / "mp_rank_00_model_states.pt", folder / "mp_rank_99999999999_model_states.pt")
    with limited_memory(), OpenFiles() as files, pytest.raises(FormatError, match=r"mp_rank_01_model_states\.pt is missing"):
        open_source(folder, files)
    (folder / "mp_rank_99999999999_model_states.pt").unlink()
    state = {"optimizer_state_dict": {"zero_stage": 1}}
    torch.save(state, folder / "zero_pp_rank_99999999999_mp_rank_00_optim_states.pt")
    with limited_memory(), OpenFiles() as files, pytest.raises(FormatError, match="optimizer states"):
        open_source(folder, files)


def test_false_parallel_sizes_need_no_time(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    (folder / "mp_rank_00").mkdir(parents=True)
    state = megatron_state()
    state["args"].tensor_model_parallel_size = state["args"].expert_model_parallel_size = (1 << 20) - 1
    torch.save(state, folder / "mp_rank_00" / "model_optim_rng.pt")
    with limited_memory(), OpenFiles() as files, pytest.raises(FormatError, match="more than 1,048,576 files"):
        open_source(folder, files)


def test_a_table_that_names_the_same_bytes_again_and_again_is_refused(tmp_path: Path) -> None:
    """1 MiB on disk; 2 GiB if every name becomes a tensor."""
    torch_dcp.save({"model": {"w": torch.ones(1 << 18)}}, checkpoint_id=tmp_path / "source", no_dist=True)
    metadata = torch_dcp.FileSystemReader(tmp_path / "source").read_metadata()
    (index,) = metadata.storage_data
    for number in range(2000):
        name = f"model.w{number}"
        metadata.state_dict_metadata[name] = metadata.state_dict_metadata["model.w"]
        metadata.storage_data[type(index)(name, index.offset, index.index)] = metadata.storage_data[index]
        metadata.planner_data[name] = ("model", f"w{number}")
    (tmp_path / "source" / ".metadata").write_bytes(pickle.dumps(metadata))
    with OpenFiles() as files, pytest.raises(FormatError, match="share the same bytes"):
        open_source(tmp_path / "source", files)


def test_a_configuration_of_any_size_or_depth_is_harmless(tmp_path: Path) -> None:
    folder = transformers(tmp_path / "source")
    for data in (b"[" * 100_000, b'{"a":' * 50_000 + b"1" + b"}" * 50_000, b"[1]", b"\xff", b'{"n": ' + b"9" * 10_000 + b"}"):
        for name in ("config.json", "metadata.json"):
            (folder / name).write_bytes(data)
        with OpenFiles() as files:
            open_source(folder, files)
    os.truncate(folder / "config.json", 1 << 31)
    with limited_memory(), OpenFiles() as files:
        open_source(folder, files)
    (folder / "model.safetensors.index.json").write_bytes(b"[" * 100_000)
    with OpenFiles() as files, pytest.raises(FormatError, match="not a valid safetensors index"):
        open_source(folder, files)


# ---------------------------------------------------------------- values of other types


def paths_of(value: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [prefix] if prefix else []
    members = list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    if isinstance(value, argparse.Namespace):
        members = list(vars(value).items())
    for key, each in members:
        found += paths_of(each, (*prefix, key))
    return found


def replaced(value: Any, path: tuple[Any, ...], by: Any) -> Any:
    made = copy.deepcopy(value)
    holder = made
    for key in path[:-1]:
        holder = vars(holder)[key] if isinstance(holder, argparse.Namespace) else holder[key]
    if isinstance(holder, argparse.Namespace):
        setattr(holder, path[-1], by)
    else:
        holder[path[-1]] = by
    return made


@pytest.mark.parametrize(
    ("state", "file"),
    [(deepspeed_state, "mp_rank_00_model_states.pt"), (megatron_state, "mp_rank_00/model_optim_rng.pt")],
    ids=["deepspeed", "megatron"],
)
def test_every_member_of_a_state_is_validated(tmp_path: Path, state: Callable[[], dict[str, Any]], file: str) -> None:
    """Every member, replaced by values of every type."""
    sound = state()
    path = tmp_path / "source" / file
    path.parent.mkdir(parents=True)
    torch.save(sound, path)
    everything(tmp_path / "source")
    refused = 0
    for place in paths_of(sound):
        for value in WRONG:
            torch.save(replaced(sound, place, value), path)
            try:
                everything(tmp_path / "source")
            except UnickptError:
                refused += 1
    assert refused > len(paths_of(sound))


def test_every_member_of_a_table_is_validated(tmp_path: Path) -> None:
    folder = dcp(tmp_path / "source")
    metadata: Metadata = torch_dcp.FileSystemReader(folder).read_metadata()
    sound = {**vars(metadata)}
    tensor, (index, info) = metadata.state_dict_metadata["model.w"], next(iter(metadata.storage_data.items()))
    holders = {"": metadata, "tensor": tensor, "chunk": tensor.chunks[0], "index": index, "info": info}
    assert sound
    refused = 0
    for name, holder in holders.items():
        for key, before in list(vars(holder).items()):
            for value in WRONG:
                object.__setattr__(holder, key, value)
                try:
                    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
                except Exception:  # a MetadataIndex that cannot be hashed, for one
                    continue
                finally:
                    object.__setattr__(holder, key, before)
                try:
                    everything(folder)
                except UnickptError:
                    refused += 1
        assert name == "" or refused > 10


def test_a_false_array_is_refused() -> None:
    from unickpt.transform.convert.pickles.pickle_records import Record
    from unickpt.transform.convert.pickles.plain_values import NotPlainError

    dtype = Record("numpy.dtype", ("f8", False, True))
    for state in ((1, (1 << 40,), dtype, False, b"\0" * 8), (1, "x", dtype, False, b""), (1, (-1, 0), dtype, False, b"")):
        array = Record("numpy.array", ())
        array.set_state(state)
        with limited_memory(), pytest.raises(NotPlainError):
            plain(array)


def test_a_conversion_of_unusual_names_is_valid(tmp_path: Path) -> None:
    """Names that a file system or JSON cannot represent. A checkpoint is refused, or complete."""
    for at, name in enumerate(["", "\ud800", "a\0b", "x" * 100_000, "\n\x1b[2J", "objects/job/0", "../x", "."]):
        folder = tmp_path / f"source{at}"
        folder.mkdir()
        torch.save(
            {**deepspeed_state(), "module": {name: torch.ones(2)}, "optimizer": None}, folder / "mp_rank_00_model_states.pt"
        )
        if main(["convert", str(folder), str(tmp_path / f"out{at}")]) == 0:
            assert main(["verify", str(tmp_path / f"out{at}")]) == 0
            Checkpoint.open(tmp_path / f"out{at}").read_tensor(name, "weight")
