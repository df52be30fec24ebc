"""docs/reference/format.md is normative, so it is held against the code: its reader reads, its tables are complete."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import handmade
from tests.support.repository import REPO
from unickpt.checkpoint.format import dtypes, index_codec, manifest, objects
from unickpt.checkpoint.format import index as index_module
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.format.safetensors_header import MAX_HEADER_BYTES
from unickpt.checkpoint.format.witnessed import Passed
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.save.shards import Shard

DOCUMENT = (REPO / "docs/reference/format.md").read_text()


def section(number: int) -> str:
    """The text of one numbered section."""
    return re.split(r"^## \d+\. ", DOCUMENT, flags=re.M)[number]


def first_cells(text: str) -> list[str]:
    """What stands in code quotes in the first column of the tables of a text."""
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


@pytest.fixture(scope="module")
def reader_class() -> Any:
    """The class that the document's code block defines."""
    (block,) = re.findall(r"```python\n(.*?)```", DOCUMENT, flags=re.S)
    assert len([line for line in block.splitlines() if line.strip()]) <= 32
    assert set(re.findall(r"^(?:import|from) (\w+)", block, flags=re.M)) == {"json", "pathlib", "numpy", "safetensors"}
    namespace: dict[str, Any] = {}
    exec(compile(block, "docs/reference/format.md", "exec"), namespace)
    return namespace["Reader"]


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_the_reader_of_the_document_reads_every_tensor(reader_class: Any, tmp_path: Path, world: int) -> None:
    directory = handmade.save_ranks(tmp_path, world)
    checkpoint, reader = Checkpoint.open(directory), reader_class(directory)
    assert {info.key for info in checkpoint.index.tensors} == set(reader.tensors)
    for name, state in reader.tensors:
        expected = checkpoint.read_tensor(name, state)
        found = torch.from_numpy(reader.read(name, state))
        assert found.shape == expected.shape
        assert torch.equal(found.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)), (name, state)
    assert torch.equal(torch.from_numpy(reader.read("head.weight", "weight")), handmade.embed())
    assert torch.equal(torch.from_numpy(reader.read("layer.weight", "weight")).view(torch.bfloat16), handmade.weight())


def test_the_cast_of_the_document_is_the_one_of_torch(reader_class: Any, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (4096,), generator=generator).to(torch.int32)
    special = [float("inf"), float("-inf"), float("nan"), 0.0, -0.0, 3.4028235e38, 1e-45, 1.00390625, 1.01171875]
    values = torch.cat([bits.view(torch.float32), torch.tensor(special)])
    shape = tuple(values.shape)
    stored = TensorInfo("zz", "master", "F32", shape, "parameter")
    derived = TensorInfo("zz", "weight", "BF16", shape, "parameter", derived_from="master")
    directory = handmade.save_single(tmp_path, extra=[Shard(stored, Box.whole(shape), values)], listed=[derived])
    found = torch.from_numpy(reader_class(directory).read("zz", "weight")).view(torch.bfloat16)
    expected = values.to(torch.bfloat16)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found[~found.isnan()].view(torch.int16), expected[~expected.isnan()].view(torch.int16))


def test_the_document_names_every_member_of_the_manifest(tmp_path: Path) -> None:
    directory = handmade.save_single(tmp_path, witness=Passed(2, ("rest",)))
    body = json.loads((directory / "manifest.json").read_text())
    text = section(4)
    named = first_cells(text)
    assert set(body) | set(body["files"][0]) == set(named)
    for part in (body["writer"], body["witness"], body["optimizer"], body["optimizer"]["groups"][0]):
        assert all(f"`{member}`" in text for member in part)
    assert f"2^{manifest.MAX_MANIFEST_BYTES.bit_length() - 1} bytes" in text


def test_the_checksum_of_the_manifest_follows_the_document(tmp_path: Path) -> None:
    """The canonical form in code that follows the document; the package has to agree on every kind of value."""
    directory = handmade.save_single(tmp_path)
    body = handmade.read_manifest(directory)
    del body["checksum"]
    numbers = [1e-8, 1.5e-5, 1e-4, 1e15, 1e16, 1.25e22, -0.0, 5e-324, 1.7976931348623157e308, 0.1 + 0.2, 2**63, -(2**70)]
    text = '\x00\x1f\x20\x7e\x7f\x80"\\/\b\f\n\r\té😀\uffff'
    body["objects"]["strange"] = [numbers, text, [True, False, None], {"b": 1, "a": {}, "é": [], "😀": 3, "\uffff": 4}]
    body["checksum"] = handmade.digest(_canonical(body).encode("ascii"))
    (directory / "manifest.json").write_text(json.dumps(body, ensure_ascii=False, indent=3))
    found = Checkpoint.open(directory).manifest
    assert found.objects == body["objects"]
    assert json.loads(manifest.to_bytes(found))["checksum"] == body["checksum"]


def _canonical(value: Any) -> str:
    """Section 4, word for word; nothing of a JSON library."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str):
        return '"' + "".join(map(_escaped, value)) + '"'
    if isinstance(value, list):
        return "[" + ",".join(map(_canonical, value)) + "]"
    return "{" + ",".join(f"{_canonical(key)}:{_canonical(value[key])}" for key in sorted(value)) + "}"


def _escaped(character: str) -> str:
    short = {'"': r"\"", "\\": r"\\", "\n": r"\n", "\r": r"\r", "\t": r"\t", "\f": r"\f", "\b": r"\b"}
    if character in short:
        return short[character]
    if "\x20" <= character <= "\x7e":
        return character
    units = character.encode("utf-16-be").hex()
    return "".join(rf"\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def test_the_document_names_every_column_of_the_index(tmp_path: Path) -> None:
    parts = handmade.IndexParts(handmade.save_single(tmp_path))
    ranges = {name for name in parts.columns if name.startswith(("start.", "shape."))}
    assert ranges == {f"{part}.{dim}" for part in ("start", "shape") for dim in range(len(ranges) // 2)}
    named = {"start.0", "start.", "shape.0", "shape."}
    assert set(first_cells(section(5))) - named == set(parts.columns) - ranges
    assert all(f"`{key}`" in section(5) for key in parts.metadata)
    assert all(f"`{kind}`" in section(5) for kind in index_module.KINDS)
    assert f"at most {index_module.MAX_NDIM} integers" in " ".join(section(5).split())
    assert f"2^{index_codec.MAX_UNPACKED_BYTES.bit_length() - 1} bytes" in section(5)
    assert f"{MAX_HEADER_BYTES:,}" in section(2)


def test_the_document_names_every_dtype_with_its_size() -> None:
    sizes = {}
    for line in section(2).splitlines():
        if line.startswith("| `"):
            _, names, bytes_each, *_ = line.split("|")
            found = re.findall(r"`([^`]+)`", names)
            numbers = [int(word) for word in bytes_each.split()]
            sizes |= dict(zip(found, numbers if len(numbers) > 1 else numbers * len(found), strict=True))
    assert sizes == {name: dtype.itemsize for name, dtype in dtypes._TORCH_BY_NAME.items()}


def test_the_document_names_every_tag_of_the_object_codec() -> None:
    assert set(first_cells(section(8))) == objects.TAGS


def test_fragments_have_the_keys_and_places_of_the_document(tmp_path: Path) -> None:
    directory = handmade.save_ranks(tmp_path, world=3)
    checkpoint = Checkpoint.open(directory)
    slots = {}
    for file in checkpoint.index.files:
        content = (directory / file).read_bytes()
        header, data = handmade.split_safetensors(content)
        assert header.pop("__metadata__")["format"] == "unickpt-data"
        for key, slot in header.items():
            slots[file, len(content) - len(data) + slot["data_offsets"][0]] = (key, slot["dtype"], slot["shape"])
    for row in range(len(checkpoint.index)):
        info, box = checkpoint.index.tensors[checkpoint.index.tensor[row]], checkpoint.index.box(row)
        ends = ",".join(f"{a}:{a + n}" for a, n in zip(box.start, box.shape, strict=True))
        key = f"{info.name}:{info.state}" + ("" if box.shape == info.shape else f"[{ends}]")
        place = checkpoint.index.files[checkpoint.index.file[row]], int(checkpoint.index.offset_bytes[row])
        assert slots.pop(place) == (key, info.dtype, list(box.shape))
    assert not slots


def test_file_names_of_generations_follow_the_document(tmp_path: Path) -> None:
    directory = handmade.save_single(tmp_path)
    handmade.save_single(tmp_path)
    names = sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
    assert names == ["data/rank00000.1.safetensors", "index.1.safetensors", "manifest.json"]
    assert handmade.read_manifest(directory)["generation"] == 1
    assert (tmp_path / "latest").read_text() == "global_step3"
