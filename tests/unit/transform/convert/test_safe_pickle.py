"""Pickles of others: what they may hold, and that nothing of them runs."""

from __future__ import annotations

import argparse
import contextlib
import enum
import io
import os
import pickle
import zipfile
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from unickpt.base.errors import FormatError
from unickpt.cli.main import main
from unickpt.transform.convert.pickles.lazy_tensor import Located, OpenFiles
from unickpt.transform.convert.pickles.safe_pickle import Record, UnsafePickleError, load, load_plain


class Calls:
    """What a hostile file is made of."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._what = function, arguments

    def __reduce__(self) -> Any:
        return self._what


class Kind(enum.Enum):
    ONE = 1


class Custom:
    def __init__(self) -> None:
        self.value = 5


def stored(path: Path, value: Any, **options: Any) -> Path:
    torch.save(value, path, **options)
    return path


def read(value: Any, path: Path, *also: str) -> Any:
    with OpenFiles() as files:
        return filled(load(stored(path, value), files, also=also))


def filled(value: Any) -> Any:
    """The same with tensors."""
    if isinstance(value, Located):
        return value.read().view(value.shape)
    if isinstance(value, dict):
        return {key: filled(each) for key, each in value.items()}
    return type(value)(filled(each) for each in value) if type(value) in (list, tuple) else value


def test_tensors_of_every_type_and_layout_are_where_torch_finds_them(tmp_path: Path) -> None:
    base = torch.arange(60, dtype=torch.float32).reshape(3, 4, 5)
    dtypes = (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
              torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16)  # fmt: skip
    values = {
        "whole": base, "part": base[1:, 2], "turned": base.transpose(0, 2), "steps": base[:, ::2], "flat": base.view(-1)[7:20],
        "scalar": torch.tensor(3.5), "none": torch.empty(0, 3), "parameter": torch.nn.Parameter(base[0]),
        "expanded": torch.ones(1, 4).expand(3, 4), **{str(dtype): base.to(dtype) for dtype in dtypes},
    }  # fmt: skip
    found = read(values, tmp_path / "a.pt")
    for name, value in values.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].shape == value.shape, name
        assert torch.equal(found[name].view(torch.uint8) if "float8" in name else found[name],
                           value.detach().view(torch.uint8) if "float8" in name else value.detach()), name  # fmt: skip


def test_boxes_of_a_tensor(tmp_path: Path) -> None:
    from unickpt.checkpoint.format.boxes import Box

    base = torch.arange(60.0).reshape(3, 4, 5)
    with OpenFiles() as files:
        for value in (base, base.transpose(0, 2), base[:, ::2]):
            found = load(stored(tmp_path / "a.pt", {"t": value}), files)["t"]
            files.close()
            box = Box((1, 0, 2), (2, 2, 1))
            assert torch.equal(found.read(box), value[box.slices()].reshape(-1))
            assert torch.equal(found.at(box).read(), value[box.slices()].reshape(-1))
            files.close()


def test_plain_containers(tmp_path: Path) -> None:
    values = {
        "a": [1, 2.5, None, True, "ä", b"\xff\x00", (1, (2,))], "b": OrderedDict(x=1), "c": {1, 2}, "d": frozenset("x"),
        "e": defaultdict(list, {"k": [1]}), "f": torch.Size([2, 3]), "g": torch.bfloat16, "h": 10**30, "i": bytearray(b"ab"),
    }  # fmt: skip
    found = read(values, tmp_path / "a.pt")
    assert {**found, "f": torch.Size(found["f"]), "e": dict(found["e"])} == {**values, "e": {"k": [1]}}


def test_objects_of_frameworks_are_records(tmp_path: Path) -> None:
    found = read({"args": argparse.Namespace(layers=2, nested={"x": 1}), "array": np.arange(3)}, tmp_path / "a.pt", "numpy.")
    assert isinstance(found["args"], Record)
    assert (found["args"].kind, found["args"].state) == ("argparse.Namespace", {"layers": 2, "nested": {"x": 1}})


def test_classes_that_a_person_allows_are_read_without_being_run(tmp_path: Path) -> None:
    name = f"{__name__}.Custom"
    with pytest.raises(UnsafePickleError, match=f"names {name}, which is not on the list .* --take {name} reads"):
        read({"x": Custom()}, tmp_path / "a.pt")
    found = read({"x": Custom(), "y": Kind.ONE}, tmp_path / "a.pt", f"{__name__}.")
    assert (found["x"].kind, found["x"].state) == (name, {"value": 5})
    assert found["y"].arguments in ((1,), ("ONE",))  # by value, or by name


def test_members_of_enumerations_of_every_python_are_records(tmp_path: Path) -> None:
    """Python 3.11.2 pickles them by their names."""
    found = read({"x": Calls(getattr, Kind, "ONE")}, tmp_path / "a.pt", f"{__name__}.")
    assert (found["x"].kind, found["x"].arguments) == (f"{__name__}.Kind", ("ONE",))
    for owner, name in ((Kind, "__class__"), ("x", "upper"), (Kind, 1), (list, "append"), (getattr, "x")):
        with pytest.raises(UnsafePickleError, match=r"calls builtins\.getattr for something else"):
            read({"x": Calls(getattr, owner, name)}, tmp_path / "a.pt", f"{__name__}.")


@pytest.mark.parametrize(
    "what",
    [
        Calls(os.system, "touch ran"), Calls(exec, "open('ran', 'w')"), Calls(eval, "open('ran', 'w')"),
        Calls(open, "ran", "w"),
        Calls(getattr, "x", "upper"), Calls(__import__, "os"), Calls(pickle.loads, b"."), Calls(torch.load, "ran"),
        Calls(torch.hub.load, "x", "y"), Calls(type, "X", (), {}), Calls(map, os.system, ["touch ran"]),
        Calls(io.FileIO, "ran", "w"), Calls(torch.storage._load_from_bytes, b"x"), Calls(torch._utils._rebuild_qtensor),
        Calls(np.fromfile, "ran"),
    ],
    ids=lambda what: f"{what._what[0].__module__}.{what._what[0].__name__}",
)  # fmt: skip
def test_a_pickle_that_would_run_code_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "ck"
    folder.mkdir()
    stored(folder / "mp_rank_00_model_states.pt", {"module": {"w": torch.ones(2)}, "x": what})
    assert main(["convert", str(folder), str(tmp_path / "out")]) == 2
    assert "which is not on the list of allowed classes; no code of the file was run" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out").exists()


def test_records_do_not_run_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class of an allowed module that would do something when it is made, filled or called."""
    monkeypatch.chdir(tmp_path)
    text = b"cdeepspeed.utils.os\nsystem\n(Vtouch ran\ntR."
    with OpenFiles() as files:
        found = load_plain(text, tmp_path / "x", files)
    assert isinstance(found, Record)
    assert found.arguments == ("touch ran",)
    assert not (tmp_path / "ran").exists()


def nested(depth: int) -> Any:
    return (nested(depth - 1),) if depth else 1


def test_tuples_as_keys_have_few_members_and_little_depth(tmp_path: Path) -> None:
    for allowed in (nested(4), (0,) * 63, ((0,) * 31, (0,) * 30)):
        with OpenFiles() as files:
            assert load_plain(pickle.dumps({allowed: 0}), tmp_path / "x", files) == {allowed: 0}
    for refused in (nested(5), (0,) * 64, ((0,) * 31, (0,) * 31)):
        with OpenFiles() as files, pytest.raises(FormatError, match="too long or nested too deeply"):
            load_plain(pickle.dumps({refused: 0}), tmp_path / "x", files)


def test_a_chain_from_an_allowed_name_leads_nowhere(tmp_path: Path) -> None:
    """Protocol 4 looks up dotted names: ``collections`` -> ``OrderedDict.__init__.__globals__``."""
    for dotted in ("OrderedDict.__init__", "OrderedDict.fromkeys", "abc.sys"):
        text = b"\x80\x04\x8c\x0bcollections\x8c" + bytes([len(dotted)]) + dotted.encode() + b"\x93."
        with OpenFiles() as files, pytest.raises(UnsafePickleError):
            load_plain(text, tmp_path / "x", files)


def broken(path: Path, change: Any) -> Path:
    """A file of torch.save with some of its entries changed."""
    whole = io.BytesIO()
    torch.save({"w": torch.arange(100.0)}, whole)
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(path, "w") as new:
        for info in old.infolist():
            data = change(info.filename.split("/", 1)[1], old.read(info))
            if data is not None:
                new.writestr(info.filename, data, *([zipfile.ZIP_DEFLATED] if data == b"deflate" * 100 else []))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda name, data: data[:-8] if name.startswith("data/") else data,
            "storage 0 has 392 bytes, too few for its 100 elements",
        ),
        (lambda name, data: None if name.startswith("data/") else data, "storage 0 is missing"),
        (lambda name, data: b"big" if name == "byteorder" else data, "big-endian"),
        (lambda name, data: None if name == "data.pkl" else data, "has 0 pickles"),
        (lambda name, data: data[:20] if name == "data.pkl" else data, "its pickle cannot be read"),
        (lambda name, data: b"deflate" * 100 if name.startswith("data/") else data, "compressed"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    with OpenFiles() as files, pytest.raises(FormatError, match=message):
        load(broken(tmp_path / "a.pt", change), files)


def test_files_that_are_none(tmp_path: Path) -> None:
    whole = stored(tmp_path / "a.pt", {"w": torch.arange(1000.0)}).read_bytes()
    for data in (b"", b"PK", whole[: len(whole) // 2], os.urandom(500)):
        (tmp_path / "b.pt").write_bytes(data)
        with OpenFiles() as files, pytest.raises(FormatError, match=r"b\.pt"):
            load(tmp_path / "b.pt", files)
    stored(tmp_path / "old.pt", {"w": torch.ones(2)}, _use_new_zipfile_serialization=False)
    with OpenFiles() as files, pytest.raises(FormatError, match="save them again"):
        load(tmp_path / "old.pt", files)


def test_random_damage_is_refused_or_harmless(tmp_path: Path) -> None:
    whole = bytearray(stored(tmp_path / "a.pt", {"w": torch.arange(64.0).reshape(8, 8), "n": {"x": [1, 2, 3]}}).read_bytes())
    random = np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(int(random.integers(1, 4))):
            damaged[int(random.integers(len(damaged)))] = int(random.integers(256))
        (tmp_path / "b.pt").write_bytes(damaged)
        with OpenFiles() as files, contextlib.suppress(FormatError, OSError):
            filled(load(tmp_path / "b.pt", files))


def test_tensors_beyond_their_storage_are_refused(tmp_path: Path) -> None:
    for shape, strides, offset in (
        ((9,), (1,), 0),
        ((4,), (1,), 5),
        ((2,), (8,), 0),
        ((2, 1 << 61), (0, 0), 0),
        ((-1,), (1,), 0),
    ):
        text = io.BytesIO()

        class StoragePickler(pickle.Pickler):
            def persistent_id(self, value: Any) -> Any:
                return ("storage", torch.FloatStorage, "0", "cpu", 8) if value == "STORAGE" else None

        class RebuiltTensor:
            def __init__(self, *arguments: Any) -> None:
                self._arguments = arguments

            def __reduce__(self) -> Any:
                return torch._utils._rebuild_tensor_v2, ("STORAGE", *self._arguments, False, OrderedDict())

        StoragePickler(text, 2).dump({"w": RebuiltTensor(offset, shape, strides)})
        with zipfile.ZipFile(tmp_path / "a.pt", "w") as new:
            new.writestr("x/data.pkl", text.getvalue())
            new.writestr("x/data/0", bytes(32))
        with OpenFiles() as files, pytest.raises(FormatError, match="tensor of shape"):
            load(tmp_path / "a.pt", files)
