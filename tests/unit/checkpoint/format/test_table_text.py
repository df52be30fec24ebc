"""Tables of tensors as text: the parser without objects accepts and refuses what the parser of JSON does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.handmade import index_of
from unickpt.base.errors import CoverageError, FormatError
from unickpt.checkpoint.format import index_codec, rank_rows, table_text, tensor_table
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.index import FragmentRow, TensorInfo, check_coverage
from unickpt.checkpoint.format.row_columns import GrowingColumn
from unickpt.checkpoint.format.safetensors_header import parse_header
from unickpt.checkpoint.format.tensor_table import TensorTable

USUAL = st.text("abz09._/#", max_size=6)
UNUSUAL = st.text('a" \\!é\n\x7f,]["', max_size=4)


def infos_of(names: st.SearchStrategy[str]) -> st.SearchStrategy[list[TensorInfo]]:
    """Sorted tables."""
    state = st.sampled_from(["weight", "master", "object", "exp"])
    shape = st.sampled_from([(), (3,), (4, 2)])
    one = st.builds(TensorInfo, names, state, st.sampled_from(["F32", "U8"]), shape, st.just("object"), st.none() | state)
    return st.lists(one, max_size=8, unique_by=lambda info: info.key).map(
        lambda found: sorted(found, key=lambda info: info.key)
    )


def parsed_as_json(text: bytes) -> list[TensorInfo] | None:
    try:
        return tensor_table.infos_of_text(text, where="x")
    except FormatError:
        return None


def parsed(text: bytes) -> list[TensorInfo] | None:
    try:
        return list(tensor_table.from_text(text, where="x"))
    except FormatError:
        return None


@given(infos_of(USUAL | UNUSUAL))
@settings(deadline=None)
def test_a_table_comes_back_from_its_text(infos: list[TensorInfo]) -> None:
    text = tensor_table.to_text(infos).encode()
    table = tensor_table.from_text(text, where="x")
    assert table == infos
    assert list(table) == infos
    assert [table[at] for at in range(len(table))] == infos
    assert dict(table.ids) == {info.key: at for at, info in enumerate(infos)}
    assert table.ids.get(("no such", "weight")) is None
    assert table.numel().tolist() == [info.numel for info in infos]


@given(infos_of(USUAL), st.data())
@settings(deadline=None)
def test_usual_tables_are_read_without_an_object_per_tensor(infos: list[TensorInfo], data: st.DataObject) -> None:
    """So are texts with a change, if JSON has the same opinion of them."""
    text = tensor_table.to_text(infos).encode()
    assert table_text.scan(text[1:-1], table_text.Forms()) is not None
    at = data.draw(st.integers(0, len(text)))
    changed = (
        text[:at] + data.draw(st.sampled_from([b"", b'"', b",", b"]", b'],["', b"\\", b" ", b"\n", b"a"])) + text[at + 1 :]
    )
    assert parsed(changed) == parsed_as_json(changed)


@pytest.mark.parametrize("letters", ["a!", "a b", "a#", 'a"b', "a\\b", "aé"])
def test_letters_that_are_smaller_than_a_quote_are_sorted_as_json_is(letters: str) -> None:
    infos = [TensorInfo(name, state, "U8", (), "object") for name in sorted({"a", letters}) for state in ("x", "y")]
    text = tensor_table.to_text(infos).encode()
    assert tensor_table.from_text(text, where="x") == infos
    with pytest.raises(FormatError, match="not JSON"):
        tensor_table.from_text(text.replace(b'"a"', b'"a\n"'), where="x")


def test_objects_of_a_rank_that_are_not_sorted_are_refused() -> None:
    own = [TensorInfo(f"objects/rank00000/{k}", "object", "U8", (0,), "object") for k in (1, 0, 0)]
    none = np.zeros((0, 3), np.int64)
    for wrong in (own[:2], own[1:]):
        parts = [("data/a", rank_rows.pack(none, rank_rows.packed_table([]), each)) for each in ([], wrong)]
        with pytest.raises(FormatError, match="rows of data/b: the tensor table is not sorted or lists a tensor twice"):
            rank_rows.merge([parts[0], ("data/b", parts[1][1])])


@pytest.mark.parametrize("chunk", [1, 40, 1 << 20])
def test_the_order_of_a_table_is_checked_across_chunks(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_text, "_CHUNK_BYTES", chunk)
    infos = [TensorInfo(f"t{n:03d}", "weight", "F32", (n % 3,), "parameter") for n in range(50)]
    assert parsed(tensor_table.to_text(infos).encode()) == infos
    for wrong in ([*infos[:20], infos[21], infos[20], *infos[22:]], [*infos[:30], *infos[29:]]):
        assert parsed(tensor_table.to_text(wrong).encode()) is None


@given(st.lists(infos_of(USUAL | UNUSUAL) | infos_of(USUAL), max_size=5))
@settings(deadline=None)
def test_the_tables_of_ranks_are_merged_like_sets(tables: list[list[TensorInfo]]) -> None:
    known: dict[tuple[str, str], TensorInfo] = {}
    agree = all(known.setdefault(info.key, info) == info for infos in tables for info in infos)
    parts = [(f"data/{rank}", rank_rows.to_bytes([], infos)) for rank, infos in enumerate(tables)]
    if not agree:
        with pytest.raises(CoverageError, match="ranks disagree on tensor"):
            rank_rows.merge(parts)
        return
    merged = rank_rows.merge(parts)
    expected = sorted(known.values(), key=lambda info: info.key)
    assert merged.tensors == expected
    assert index_codec.from_bytes(index_codec.to_bytes(merged), where="x").tensors == expected


@pytest.mark.parametrize("unusual", ["", "objects/rank99998/é"])
def test_objects_of_ranks_with_more_digits_are_sorted_by_name(unusual: str) -> None:
    """rank100000 is between rank10000 and rank10001, so the ranks' tables do not follow each other."""
    parts, infos = [], []
    for rank in (10000, 10001, 99998, 99999, 100000, 100001):
        own = [TensorInfo(f"objects/rank{rank:05d}{k}", "object", "U8", (3,), "object") for k in ("", "/0", "/1")]
        if unusual and rank == 99998:
            own.append(TensorInfo(unusual, "object", "U8", (3,), "object"))
        rows = [FragmentRow(info, Box((0,), (3,)), 8 * at, rank + at) for at, info in enumerate(own)]
        parts.append((f"data/rank{rank:05d}", rank_rows.to_bytes(rows)))
        infos += own
    merged = rank_rows.merge(parts)
    check_coverage(merged)
    assert merged.tensors == sorted(infos, key=lambda info: info.key)
    for row in range(len(merged)):
        name, file = merged.tensors[int(merged.tensor[row])].name, merged.files[int(merged.file[row])]
        assert name.split("/")[1] == file.split("/")[1]


@given(st.data())
@settings(deadline=None)
def test_the_header_of_an_index_is_parsed_like_json(data: st.DataObject) -> None:
    infos = [TensorInfo(f"objects/rank{n:05d}", "object", "U8", (3,), "object") for n in range(100)]
    table = index_codec.to_bytes(index_of([FragmentRow(info, Box((0,), (3,)), 0, 0) for info in infos]))
    text = table[8 : 8 + int.from_bytes(table[:8], "little")]
    assert len(text) > index_codec._SMALL_BYTES
    at = data.draw(st.integers(0, 150) | st.integers(0, len(text)))
    pieces = [b"", b'"', b'\\"', b"\\", b"]]", b'","tensors":"[[', b'"tensors":"[["x"]]",', b"a", b" "]
    changed = text[:at] + data.draw(st.sampled_from(pieces)) + text[at + data.draw(st.integers(0, 3)) :]
    full = len(changed).to_bytes(8, "little") + changed + table[8 + len(text) :]

    def by_json() -> object:
        header = parse_header(full, file_bytes=len(full), where="x")
        return header.header_bytes, header.slots, header.metadata.get("tensors", "")

    def apart() -> object:
        header, found = index_codec._header_and_table(full, "x")
        return header.header_bytes, header.slots, found.decode() if isinstance(found, bytes) else found

    results = []
    for parse in (by_json, apart):
        try:
            results.append(parse())
        except FormatError as err:
            results.append(str(err))
    assert results[0] == results[1]


def test_a_table_in_another_place_of_the_header_is_not_the_table() -> None:
    """The text that begins the table can be the end of a key and the begin of a value."""
    infos = [TensorInfo(f"objects/rank{n:05d}", "object", "U8", (0,), "object") for n in range(100)]
    good = index_codec.to_bytes(index_of([], tensors=infos))
    assert isinstance(index_codec._header_and_table(good, "x")[1], bytes)
    text = good[8 : 8 + int.from_bytes(good[:8], "little")]
    hidden = text.replace(b'"tensors":"', b'"an entry\\"tensors":"', 1)
    hidden = hidden.replace(b']]"', b']]","tensors":"[]"', 1)
    full = len(hidden).to_bytes(8, "little") + hidden + good[8 + len(text) :]
    assert index_codec._header_and_table(full, "x")[1] == "[]"


@given(st.lists(st.lists(st.integers(-(2**62), 2**62) | st.integers(0, 70000), max_size=4), max_size=5), st.integers(1, 3))
@settings(deadline=None)
def test_a_column_that_grows_keeps_its_values(parts: list[list[int]], rows: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("unickpt.checkpoint.format.row_columns._FIRST_ROWS", rows)
        patch.setattr("unickpt.checkpoint.format.row_columns._ROWS", 2 * rows)
        column = GrowingColumn()
        for part in parts:
            column.extend(np.array(part, np.int64))
        dtype = column.dtype
        found = column.take()
    values = [value for part in parts for value in part]
    assert found.tolist() == values
    narrowest = np.uint16 if all(0 <= value < 2**16 for value in values) else np.int64
    assert dtype == (np.uint32 if narrowest is np.int64 and all(0 <= value < 2**32 for value in values) else narrowest)


@pytest.mark.parametrize("order", [(1, 3, 2), (3, 1, 2), (2, 0, 3)])
def test_ranks_with_tensors_of_several_dimensions_are_merged(order: tuple[int, ...]) -> None:
    infos = [TensorInfo(f"t{ndim}", "weight", "F32", (5, 6, 7)[:ndim], "parameter") for ndim in order]
    parts = [
        (f"data/{info.name}", rank_rows.to_bytes([FragmentRow(info, Box.whole(info.shape), 2**33 * at, at)]))
        for at, info in enumerate(infos)
    ]
    merged = rank_rows.merge(parts)
    check_coverage(merged)
    for row in range(3):
        info = merged.tensors[int(merged.tensor[row])]
        at = infos.index(info)
        assert merged.box(row) == Box.whole(info.shape)
        assert (int(merged.offset_bytes[row]), int(merged.checksum[row])) == (2**33 * at, at)
        assert merged.start[row].tolist() == [0, 0, 0]
        assert merged.shape[row].tolist() == [*info.shape, *[1] * (3 - len(info.shape))]


def test_tables_of_objects_and_of_text_are_equal() -> None:
    infos = [TensorInfo(f"t{n}", "weight", "F32", (n,), "parameter") for n in range(3)]
    text = tensor_table.from_text(tensor_table.to_text(infos), where="x")
    assert text == TensorTable(infos) == tuple(infos)
    assert text != infos[:2]
    assert text[1:] == tuple(infos[1:])
    assert text[-1] == infos[-1]


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_objects_of_tensors_are_kept_up_to_a_number(monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    monkeypatch.setattr(tensor_table, "_KEPT_TENSORS", kept)
    infos = [TensorInfo(name, "weight", "F32", (2,), "parameter") for name in ("a", "b")]
    table = tensor_table.from_text(tensor_table.to_text(infos).encode(), where="x")
    assert [table[0], table[1], table[-1]] == [*infos, infos[1]]
    assert [table[at] is table[at] for at in (0, 1)] == [kept > 0, kept > 1]
