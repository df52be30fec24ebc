"""Hostile pickles: none reads another file, runs code, or needs more than a multiple of its own size in memory."""

from __future__ import annotations

import collections
import io
import os
import pickle
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

from tests.hostile.attacks import cases
from tests.hostile.mutation import limited_memory
from tests.hostile.source_folders import converted
from tests.hostile.streams import FLOATS, ORDERED, archive, many, mapping, number, storage, stream, tensor, text
from tests.support.repository import REPO
from unickpt.base.errors import FormatError
from unickpt.testing.launch import environment
from unickpt.transform.convert.pickles.lazy_tensor import Located, OpenFiles
from unickpt.transform.convert.pickles.plain_values import plain
from unickpt.transform.convert.pickles.safe_pickle import load, load_plain

SECRET = b"0123456789abcdef" * 2
DEADLINE_S = 5.0  # a valid pickle of this size takes a millisecond


def deepspeed(folder: Path, body: bytes, **options: Any) -> Path:
    """A folder whose only file is a DeepSpeed model state with this value as its module."""
    archive(folder / "mp_rank_00_model_states.pt", stream(mapping({"module": mapping({"w": body})})), **options)
    return folder


def posix_path(path: Path) -> bytes:
    return b"cpathlib\nPosixPath\n" + many([text(part) for part in path.parts]) + b"R"


# ---------------------------------------------------------------- item 18: what a pickle may change


@pytest.mark.parametrize("target", ["storage", "tensor"])
def test_no_state_can_be_set_on_storage_references(tmp_path: Path, target: str) -> None:
    """BUILD rewrote path, offset and size of a frozen dataclass with slots, after they were checked."""
    secret = tmp_path / "private" / "secret"
    secret.parent.mkdir()
    secret.write_bytes(SECRET)
    name = text(str(secret))
    if target == "storage":  # path, first byte, bytes, dtype
        body = tensor(8, [8], [1], after=b"](" + name + number(0) + number(32) + text("F32") + b"eb")
    else:  # files, path, first byte, dtype, shape, strides
        one = many([number(8)]), many([number(1)])
        body = tensor(8, [8], [1]) + b"](N" + name + number(0) + text("F32") + one[0] + one[1] + b"eb"
    assert SECRET not in converted(deepspeed(tmp_path / "source", body), tmp_path / "out")


def test_a_table_of_dcp_cannot_name_a_file_by_a_state(tmp_path: Path) -> None:
    """Return the archive of a DCP object with a redirected storage."""
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    folder = tmp_path / "source"
    torch_dcp.save({"w": torch.zeros(8)}, checkpoint_id=folder, no_dist=True)
    (file,) = folder.glob("*.distcp")
    hostile = stream(tensor(8, [8], [1], after=b"](" + text(str(secret)) + number(0) + number(32) + text("F32") + b"eb"))
    metadata = torch_dcp.FileSystemReader(folder).read_metadata()
    archive(file, hostile)
    for info in metadata.storage_data.values():
        info.offset, info.length = 0, file.stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert SECRET not in converted(folder, tmp_path / "out")


STATES: dict[str, bytes] = {
    "an allowed function": b"c_codecs\nencode\n",
    "a class": ORDERED,
    "a record's class": b"cargparse\nNamespace\n",
    "a function that makes tensors": b"ctorch._utils\n_rebuild_tensor_v2\n",
    "a type of storages": b"ctorch\nFloatStorage\n",
    "a dtype": b"ctorch\nfloat32\n",
    "a list": b"]",
    "a dictionary": b"}",
    "a set": b"\x8f",
    "text": text("x"),
    "a number": number(3),
    "a tuple": b")",
    "a time": b"cdatetime\ntimedelta\n" + many([number(1)] * 3) + b"R",
    "a deque": b"ccollections\ndeque\n)R",
}


@pytest.mark.parametrize("name", cases(STATES))
def test_only_records_have_a_state(tmp_path: Path, name: str) -> None:
    """BUILD on an allowed function changed its defaults for later loads."""
    state = mapping({"__defaults__": many([number(1)]), "__doc__": text("x"), "dtype": text("x")})
    with OpenFiles() as files, pytest.raises(FormatError, match="sets the state of"):
        load_plain(stream(STATES[name] + state + b"b"), tmp_path / "x", files)


def test_nothing_stays_changed_for_later_loads(tmp_path: Path) -> None:
    hostile = stream(b"c_codecs\nencode\n" + mapping({"__defaults__": many([text("rot13")])}) + b"b")
    sound = stream(b"c_codecs\nencode\n" + many([text("ab")]) + b"R")
    with OpenFiles() as files:
        with pytest.raises(FormatError):
            load_plain(hostile, tmp_path / "x", files)
        assert load_plain(sound, tmp_path / "x", files) == b"ab"


CALLS: dict[str, bytes] = {
    "a dtype": b"ctorch\nfloat32\n)R",
    "text": text("os.system") + many([text("x")]) + b"R",
    "a record": b"cargparse\nNamespace\n)R)R",
    "a storage": storage(8) + b")R",
    "arguments that are a list": ORDERED + b"]R",
    "a class with named arguments": ORDERED + b")" + mapping({"x": number(1)}) + b"\x92",
    "an extension": b"\x82\x01",
    "an instance": b"(ios\nsystem\n",
    "an object": b"(cos\nsystem\no",
    "a text id": b"P../secret\n",
    "an id that is no tuple": text("x") + b"Q",
    "an id of another kind": many([text("storage"), text("os"), text("0"), text("cpu"), number(1)]) + b"Q",
    "an id of a path": many([text("storage"), FLOATS, posix_path(Path("/x")), text("cpu"), number(1)]) + b"Q",
    "a buffer": b"\x97",
    "a value twice": number(1) + b"2\x86",
    "a name that is a number": number(1) + number(2) + b"\x93",
}


@pytest.mark.parametrize("name", cases(CALLS))
def test_opcodes_that_no_checkpoint_needs_are_refused(tmp_path: Path, name: str) -> None:
    path = archive(tmp_path / "a.pt", stream(CALLS[name]))
    with OpenFiles() as files, pytest.raises(FormatError):
        load(path, files)


# ---------------------------------------------------------------- item 21: what a pickle may cost


def doubled(levels: int) -> bytes:
    """A list that contains the previous list twice, and so on."""
    body = b"]q\0"
    for level in range(levels):
        before = b"h" + bytes([level])
        body += b"](" + before + before + b"eq" + bytes([level + 1])
    return body


def colliding(count: int) -> list[bytes]:
    """Integers that all hash to 0."""
    return [number(n * ((1 << 61) - 1)) for n in range(1, count)]


BOMBS: dict[str, bytes] = {
    "memo index 2^27": b"Nr" + (1 << 27).to_bytes(4, "little"),
    "memo index 2^32 - 1": b"Nr" + b"\xff" * 4,
    "memo index as text": b"Np99999999999999\n",
    "a list doubled 60 times": doubled(60),
    "a key doubled 60 times": b"})q\0" + b"".join(b"h%ch%c\x86q%c" % (n, n, n + 1) for n in range(60)) + b"Ns",
    "a list in itself": b"]q\0h\0a",
    "a dictionary in itself": b"}q\0" + text("x") + b"h\0s",
    "a record in its own state": b"cargparse\nNamespace\n)R q\0".replace(b" ", b"") + mapping({"x": b"h\0"}) + b"b",
    "tuples 100,000 deep": b")" + b"\x85" * 100_000,
    "tuples 100,000 deep as a key": b"})" + b"\x85" * 100_000 + b"Ns",
    "lists 100,000 deep": b"]" * 100_000 + b"a" * 99_999,
    "records 100,000 deep": b"cargparse\nNamespace\n" * 10_000 + b")" + b"R\x85" * 10_000,
    "text of 4 GiB": b"X\xff\xff\xff\xff",
    "bytes of 2^63": b"\x8e" + b"\xff" * 7 + b"\x7f",
    "an integer of 2 GiB": b"\x8b\xff\xff\xff\x7f",
    "an integer of 1 MiB": b"\x8b\0\0\x10\0" + b"\x01" * (1 << 20),
    "500,000 sets": b"\x8f" * 500_000,
    "a text 10,000 times": b"(" + text("x" * 100_000) + b"q\0" + b"h\0" * 10_000 + b"t",
    "keys that collide": b"}(" + b"".join(each + b"N" for each in colliding(200_000)) + b"u",
    "a set of keys that collide": b"c__builtin__\nset\n((" + b"".join(colliding(200_000)) + b"ltR",
    "an element 2^29 times": tensor(8, [1 << 29], [0]),
    "overlapping windows": tensor(8, [1 << 20, 4], [0, 1]),
    "a matrix of one row": tensor(8, [1 << 27, 8], [0, 1]),
    "300 expanded tensors": b"(" + tensor(8, [1 << 18], [0]) * 300 + b"t",
    "marks": b"(" * 1_000_000,
}  # fmt: skip


@pytest.mark.parametrize("name", cases(BOMBS))
def test_a_bomb_is_refused_in_time_and_memory(tmp_path: Path, name: str) -> None:
    path = archive(tmp_path / "a.pt", stream(BOMBS[name]))
    begin = time.process_time()
    with limited_memory(), OpenFiles() as files, pytest.raises(FormatError):
        load(path, files)
    assert time.process_time() - begin < DEADLINE_S


def test_a_bomb_that_kills_the_reader_ends_in_one_line(tmp_path: Path) -> None:
    """Runs in a separate process, because deep values can overflow CPython's C stack."""
    names = ("tuples 100,000 deep as a key", "tuples 100,000 deep", "a list in itself", "lists 100,000 deep")
    folders = [str(deepspeed(tmp_path / str(at), BOMBS[name])) for at, name in enumerate(names)]
    code = (
        "import sys; from unickpt.cli.main import main; "
        "print([main(['convert', folder, sys.argv[1]]) for folder in sys.argv[2:]])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "out"), *folders], capture_output=True, text=True, env=environment(),
        cwd=REPO, timeout=300,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, "[2, 2, 2, 2]"), done.stderr[-500:]
    assert done.stderr.count("its pickle cannot be read") == 4
    assert "Traceback" not in done.stderr


def test_a_large_tensor_many_times_is_refused(tmp_path: Path) -> None:
    """1 MiB on disk; 20 GiB if every reference becomes a tensor."""
    body = b"(" + tensor(1 << 18, [1 << 18], [1]) + b"q\0" + b"h\0" * 20_000 + b"t"
    path = archive(tmp_path / "a.pt", stream(body), [bytes(1 << 20)])
    with OpenFiles() as files, pytest.raises(FormatError, match="its tensors would take"):
        load(path, files)


def test_a_compressed_pickle_is_refused_before_it_is_inflated(tmp_path: Path) -> None:
    big = stream(b"N0" * (30 << 20) + b"N")
    path = archive(tmp_path / "a.pt", big, method=zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 200_000
    with limited_memory(), OpenFiles() as files, pytest.raises(FormatError, match="compressed or encrypted"):
        load(path, files)


def test_a_pickle_that_claims_to_be_huge_is_not_read(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.pt", stream(b"N"))
    data = bytearray(path.read_bytes())
    at = data.index(b"PK\1\2")
    data[at + 20 : at + 28] = (0x7FFFFFFF).to_bytes(4, "little") * 2
    path.write_bytes(data)
    with limited_memory(), OpenFiles() as files, pytest.raises(FormatError):
        load(path, files)


def entries(path: Path, members: list[tuple[str, bytes]]) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        for name, data in members:
            file.writestr(name, data)
    return path


SOUND = stream(mapping({"a": tensor(8, [8], [1])}))


def shifted(path: Path, entry: int, header: int) -> None:
    """Make two entries of the directory begin at the same offset."""
    data = bytearray(path.read_bytes())
    places = [at for at in range(len(data)) if data[at : at + 4] == b"PK\1\2"]
    data[places[entry] + 42 : places[entry] + 46] = data[places[header] + 42 : places[header] + 46]
    path.write_bytes(data)


ARCHIVES: dict[str, tuple[list[tuple[str, bytes]], str]] = {
    "a storage twice": ([("x/data.pkl", SOUND), ("x/data/0", bytes(32)), ("x/data/0", b"\1" * 32)], "has two entries"),
    "two pickles": ([("x/data.pkl", SOUND), ("y/data.pkl", SOUND), ("x/data/0", bytes(32))], "has 2 pickles"),
    "a name that leaves": ([("../x/data.pkl", SOUND), ("x/data/0", bytes(32))], "which torch.save never writes"),
    "an absolute name": ([("/x/data.pkl", SOUND), ("x/data/0", bytes(32))], "which torch.save never writes"),
}


@pytest.mark.parametrize("name", cases(ARCHIVES))
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_archive_that_torch_does_not_write_is_refused(tmp_path: Path, name: str) -> None:
    members, words = ARCHIVES[name]
    with OpenFiles() as files, pytest.raises(FormatError, match=words):
        load(entries(tmp_path / "a.pt", members), files)


def test_entries_that_share_bytes_are_refused(tmp_path: Path) -> None:
    members = [("x/data.pkl", SOUND), ("x/data/0", bytes(32)), ("x/data/1", bytes(32))]
    path = entries(tmp_path / "a.pt", members)
    shifted(path, 1, 2)
    with OpenFiles() as files, pytest.raises(FormatError, match="is not at the offset in the central directory"):
        load(path, files)
    path = entries(tmp_path / "b.pt", members)
    data = path.read_bytes()
    at = [at for at in range(len(data)) if data[at : at + 4] == b"PK\1\2"][1]
    larger = (300).to_bytes(4, "little")
    path.write_bytes(data[: at + 20] + larger + larger + data[at + 28 :])
    with OpenFiles() as files, pytest.raises(FormatError, match="overlaps the next entry"):
        load(path, files)


def test_bytes_around_an_archive_are_refused(tmp_path: Path) -> None:
    whole = archive(tmp_path / "a.pt", SOUND).read_bytes()
    for data in (b"x" + whole, whole + b"x", whole[:-2] + b"\1\0x"):
        (tmp_path / "b.pt").write_bytes(data)
        with OpenFiles() as files, pytest.raises(FormatError, match=r"b\.pt"):
            load(tmp_path / "b.pt", files)


# ---------------------------------------------------------------- what is sound stays readable


def sample() -> dict[str, Any]:
    weight = torch.arange(24.0).reshape(4, 6)
    state = collections.OrderedDict(w=weight, tied=weight, part=weight[1:3, ::2], turned=weight.t())
    state._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    return {
        "module": state, "small": torch.zeros(1).expand(1000), "numbers": [1, -1, 2**40, 10**30, 0.5, float("inf"), True, None],
        "texts": ["", "ä\ud800", b"", b"\xff" * 300, bytearray(b"x")], "sets": [{1, "a"}, frozenset({(1, 2)})],
        "nested": {"a": {1: [(2, (3, [4]))]}}, "dtype": torch.bfloat16, "size": torch.Size([2, 3]),
        "many": list(range(5000)), "map": {n: str(n) for n in range(3000)}, "deque": collections.deque([1, 2], 3),
        "default": collections.defaultdict(list, {"k": [1]}), "complex": 1 + 2j,
    }  # fmt: skip


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_the_reader_returns_the_same_values_as_python(tmp_path: Path, protocol: int) -> None:
    value = sample()
    torch.save(value, tmp_path / "a.pt", pickle_protocol=protocol)
    with OpenFiles() as files:
        found = plain(load(tmp_path / "a.pt", files))
        assert found.keys() == value.keys()
        for key, tensor_ in value["module"].items():
            assert torch.equal(found["module"][key], tensor_)
        assert torch.equal(found["small"], value["small"])
        rest = [key for key in value if key not in ("module", "small", "size", "default")]
        assert {key: found[key] for key in rest} == {key: value[key] for key in rest}
        assert [type(each) for each in found["numbers"]] == [type(each) for each in value["numbers"]]
        assert tuple(found["size"]) == (2, 3)
        assert found["default"] == {"k": [1]}


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_plain_values_of_every_protocol(tmp_path: Path, protocol: int) -> None:
    value = {key: each for key, each in sample().items() if key not in ("module", "small", "dtype", "size", "default")}
    value["texts"] = [each for each in value["texts"] if isinstance(each, str)] if protocol < 3 else value["texts"]
    with OpenFiles() as files:
        assert load_plain(pickle.dumps(value, protocol), tmp_path / "x", files) == value
        unframed = io.BytesIO()
        pickle._Pickler(unframed, protocol).dump(value)  # type: ignore[attr-defined]
        assert load_plain(unframed.getvalue(), tmp_path / "x", files) == value


def test_views_far_apart_are_read_in_pieces(tmp_path: Path) -> None:
    """Two elements of a sparse storage of 2 GiB."""
    size = 2 << 30
    path = tmp_path / "a.bin"
    with path.open("wb") as file:
        os.truncate(file.fileno(), size)
        os.pwrite(file.fileno(), b"\0\0\x80?", size - 4)
    with limited_memory(), OpenFiles() as files:
        found = Located(files, path, 0, "F32", (2, 2), (size // 4 - 1, 0))
        assert found.read().tolist() == [0.0, 0.0, 1.0, 1.0]
