"""The JSON documents have the members that the reference lists."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.support import handmade
from tests.support.cli import REPOSITORY
from tests.support.report_records import call, group, ring
from unickpt.diagnosis.recording.records import Op


def test_docs_cli_names_every_member_of_the_json(
    ranks: Path, tmp_path: Path, run_json: Any, hooks_in_a_process: tuple[str, ...]
) -> None:
    text = (REPOSITORY / "docs/reference/cli.md").read_text()
    described = set(re.findall(r"`\.?(?:checkpoint\.)?(\w+)`", text))
    handmade.save_single(tmp_path / "several")
    inspected, listed = (run_json("inspect", directory)[1] for directory in (ranks, tmp_path / "several"))
    tensors, verified = run_json("inspect", ranks, "--tensor", "layer.weight")[1], run_json("verify", ranks)[1]
    for member in ("writer", "files", "optimizer", "objects", "aliases"):  # as the manifest has them
        del inspected["checkpoint"][member]
    newest = run_json("latest", ranks)[1]
    documents = [inspected, listed["save_directory"], tensors, verified, newest, json.loads(hooks_in_a_process[0])]
    assert {key for document in documents for key in _members(document)} <= described


def _members(value: Any) -> set[str]:
    if isinstance(value, list):
        return {key for item in value for key in _members(item)}
    if not isinstance(value, dict):
        return set()
    return set(value) | {key for item in value.values() for key in _members(item)}


def test_commands_that_write_checkpoints_print_one_document(
    checkpoint: Path, ranks: Path, tmp_path: Path, run_json: Any
) -> None:
    code, planned = run_json("edit", checkpoint, tmp_path / "new", "--no-optimizer", "--dry-run")
    assert (code, planned["ok"], planned["written"]) == (0, True, None)
    assert not (tmp_path / "new").exists()
    code, edited = run_json("edit", checkpoint, tmp_path / "new", "--no-optimizer")
    assert (code, edited["schema"], edited["tensors"]) == (0, 1, planned["tensors"])
    assert (edited["written"]["files"], edited["written"]["kept"]) == (1, 0)
    assert run_json("verify", tmp_path / "new")[1]["sound"]
    assert run_json("edit", checkpoint, tmp_path / "other", "--cast", "*:exp_avg=bfloat16")[0] == 0
    code, mean = run_json("average", tmp_path / "mean", checkpoint, tmp_path / "other")
    assert (code, mean.get("ok")) == (0, True), mean
    assert "mean of 2 checkpoints" in mean["done"][0]
    code, exported = run_json("export", ranks, tmp_path / "dcp", "--to", "dcp")
    assert (code, exported["to"], exported["folder"]) == (0, "dcp", str(tmp_path / "dcp"))
    assert [name for name in exported["files"] if not (tmp_path / "dcp" / name).is_file()] == []
    code, converted = run_json("convert", tmp_path / "dcp", tmp_path / "back")
    assert (code, converted["program"]) == (0, None)
    assert [made["directory"] for made in converted["checkpoints"]] == [str(tmp_path / "back")]
    assert run_json("convert", tmp_path / "dcp", tmp_path / "back")[1]["error"]["type"] == "MismatchError"


def test_damage_is_in_the_document_and_nothing_is_written(ranks: Path, tmp_path: Path, run_json: Any) -> None:
    handmade.flip_bit(ranks / "data/rank00002.safetensors", -1)
    for words in (["edit", ranks, tmp_path / "new", "--no-optimizer"], ["export", ranks, tmp_path / "new", "--to", "dcp"]):
        code, document = run_json(*words)
        assert (code, document["ok"]) == (1, False)
        assert "rank00002.safetensors" in document["problems"][0]
    assert not (tmp_path / "new").exists()


def test_commands_on_records_print_one_document(tmp_path: Path, run_json: Any) -> None:
    calls = [call(Op.ALL_REDUCE, 1, number, 10.0 * number, 10.0 * number + 2, step=number) for number in range(1, 4)]
    for rank in range(2):
        ring(tmp_path, rank, 2, [group("dp", range(2))], calls, step=3)
    code, traced = run_json("trace", tmp_path, "-o", tmp_path / "trace.json")
    assert (code, traced["schema"], traced["ranks"]) == (0, 1, 2)
    assert traced["size_bytes"] == (tmp_path / "trace.json").stat().st_size
    code, reported = run_json("report", tmp_path, "-o", tmp_path / "report.html")
    assert (code, reported["ranks"], reported["world"], reported["times"]) == (0, 2, 2, None)
    code, measured = run_json("metrics", tmp_path)
    assert code == 0
    assert {"name", "labels", "value", "step"} == set(measured["measurements"][0])
    assert "unickpt_rank_step" in {each["name"] for each in measured["measurements"]}
