"""``unickpt inspect``: output for checkpoints, save directories and Trainer runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import handmade
from tests.support.cli import box_of, scalar, trainer_run
from tests.support.opened_files import opened_files
from unickpt.checkpoint.format.boxes import Box


def test_inspect_json_accounts_for_everything_that_was_saved(ranks: Path, run_json: Any) -> None:
    code, document = run_json("inspect", ranks)
    assert code == 0
    assert document["save_directory"] is None
    found = document["checkpoint"]
    assert (found["step"], found["generation"], found["format_version"], found["problem"]) == (3, 0, 3, None)
    assert found["writer"]["topology"] == {"world_size": 2, "zero_stage": 1}
    on_disk = sum(path.stat().st_size for path in ranks.rglob("*") if path.is_file())
    assert found["total_bytes"] == on_disk
    assert [record["path"] for record in found["files"]] == [
        "data/rank00000.safetensors", "data/rank00001.safetensors", "data/rank00002.safetensors", "index.safetensors"
    ]  # fmt: skip
    states = {(s["state"], s["derived_from"]): s for s in found["states"]}
    assert list(states) == [("weight", None), ("weight", "master"), ("master", None), ("exp_avg", None), ("object", None)]
    assert states["master", None] == {
        "state": "master", "derived_from": None, "dtypes": ["F32"], "tensors": 1, "fragments": 6, "elements": 24,
        "stored_bytes": 96,
    }  # fmt: skip
    derived = states["weight", "master"]
    assert (derived["elements"], derived["stored_bytes"], derived["fragments"]) == (24, 12, 1)  # the override alone
    assert states["weight", None]["dtypes"] == ["F16", "F32", "I64"]
    parameters = {p["name"]: p for p in found["parameters"]}
    assert list(parameters) == ["embed.weight", "empty.weight", "layer.weight", "norm.count"]
    assert [s["state"] for s in parameters["layer.weight"]["states"]] == ["weight", "master", "exp_avg"]
    assert parameters["norm.count"]["kind"] == "buffer"
    assert parameters["norm.count"]["states"][0]["shape"] == []
    assert found["optimizer"]["groups"][0]["parameters"] == ["layer.weight"]
    assert found["optimizer"]["scalars"][0]["hyperparameters"] == {"step": 3.0}
    assert found["objects"]["client_state"]["$dict"][0] == ["hello", {"$tuple": [1, 2]}]
    assert found["objects"]["unknown"]["$opaque"]["type"] == "ipaddress.IPv4Address"
    assert found["ranks_with_objects"] == [0, 1, 2]
    assert found["aliases"] == {"head.weight": "embed.weight"}
    assert found["excluded"] == ["frozen.weight"]


def test_inspect_text_shows_the_same_to_people(ranks: Path, run: Any) -> None:
    code, out, err = run("inspect", ranks)
    assert (code, err) == (0, "")
    assert "\x1b" not in out  # plain if standard output is not a terminal
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line}
    assert lines["master"] == ["master", "F32", "1", "6", "24", "96"]
    assert "derived from master" in out
    assert "betas=(0.9, 0.999)" in out
    assert "{'hello': (1, 2), 'scale': inf, 7: 'seven'}" in out
    assert "<opaque ipaddress.IPv4Address: a pickle, loaded with allow_pickle only>" in out
    assert "tied: head.weight = embed.weight" in out
    assert "excluded: frozen.weight" in out
    assert "ranks with objects of their own (such as random generators): 0, 1, 2\n" in out


def test_inspect_of_a_tensor_shows_the_location_of_its_bytes(ranks: Path, run_json: Any, run: Any) -> None:
    code, document = run_json("inspect", ranks, "--tensor", "layer.weight", "--state", "master")
    (tensor,) = document["tensors"]
    assert code == 0
    assert (tensor["dtype"], tensor["shape"]) == ("F32", [4, 6])
    values = torch.full((4, 6), torch.nan)
    for fragment in tensor["fragments"]:
        with (ranks / fragment["file"]).open("rb") as file:
            file.seek(fragment["offset_bytes"])
            data = torch.frombuffer(bytearray(file.read(fragment["size_bytes"])), dtype=torch.float32)
        values[Box(tuple(fragment["start"]), tuple(fragment["shape"])).slices()] = data.reshape(fragment["shape"])
    assert torch.equal(values, handmade.master())
    assert all(len(f["checksum"]) == 16 for f in tensor["fragments"])
    _, out, _ = run("inspect", ranks, "--tensor", "layer.weight", "--state", "master")
    assert [line.split()[0] for line in out.splitlines()[3:]] == [str(box_of(f)) for f in tensor["fragments"]]


def test_inspect_of_a_tied_name_shows_the_stored_tensor(checkpoint: Path, run_json: Any) -> None:
    _, document = run_json("inspect", checkpoint, "--tensor", "head.weight")
    assert [(t["name"], t["state"]) for t in document["tensors"]] == [("embed.weight", "weight")]


def test_inspect_of_an_unknown_tensor_names_the_nearest(checkpoint: Path, run: Any) -> None:
    code, _, err = run("inspect", checkpoint, "--tensor", "layer.wieght")
    assert code == 2
    assert "did you mean layer.weight" in err
    code, _, err = run("inspect", checkpoint, "--tensor", "layer.weight", "--state", "exp_avg_sq")
    assert code == 2
    assert "it has exp_avg, master, weight" in err


def test_inspect_shortens_long_tables_by_default(tmp_path: Path, run: Any, run_json: Any) -> None:
    extra = [scalar(f"many.{at:03d}") for at in range(60)]
    directory = handmade.save_single(tmp_path, extra=extra)
    _, out, _ = run("inspect", directory)
    assert "many.036" in out
    assert "many.037" not in out
    assert "and 24 more: --all shows them" in out
    assert "many.059" in run("inspect", directory, "--all")[1]
    _, out, _ = run("inspect", directory, "--grep", r"many\.05[89]$")
    assert [line.split()[0] for line in out.splitlines() if line.startswith("many")] == ["many.058", "many.059"]
    assert len(run_json("inspect", directory)[1]["checkpoint"]["parameters"]) == 64  # JSON is not shortened


def test_inspect_reads_manifest_and_index_only(ranks: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = opened_files(monkeypatch)
    monkeypatch.setattr("pickle.loads", lambda *_: pytest.fail("inspect unpickled something"))
    for arguments in ([], ["--objects", "--all"], ["--json"], ["--tensor", "layer.weight"]):
        assert run("inspect", ranks, *arguments)[0] == 0
    assert set(opened) == {"manifest.json", "index.safetensors"}


def test_inspect_objects_in_full(checkpoint: Path, run: Any) -> None:
    handmade.edit_manifest(checkpoint, lambda body: body["objects"].update(long=list(range(200))))
    assert "199]" not in run("inspect", checkpoint)[1]
    assert "199]" in run("inspect", checkpoint, "--objects")[1]


def test_inspect_of_a_save_directory_lists_its_checkpoints(tmp_path: Path, run: Any, run_json: Any) -> None:
    handmade.save_single(tmp_path, "global_step3")
    damaged = handmade.save_single(tmp_path, "global_step5", step=5)
    handmade.save_single(tmp_path, "global_step4", step=4)
    (damaged / "data/rank00000.safetensors").unlink()
    (tmp_path / "global_step9" / "data").mkdir(parents=True)  # remains of a killed save
    (tmp_path / "logs").mkdir()
    code, document = run_json("inspect", tmp_path)
    assert code == 0
    assert document["save_directory"]["latest"] == "global_step4"
    tags = document["save_directory"]["tags"]
    assert [(t["tag"], t["step"], t["complete"]) for t in tags] == [
        ("global_step9", None, False), ("global_step3", 3, True), ("global_step4", 4, True), ("global_step5", 5, False)
    ]  # fmt: skip
    assert "rank00000.safetensors is missing" in tags[3]["problem"]
    assert document["checkpoint"]["step"] == 4
    _, out, _ = run("inspect", tmp_path)
    assert "latest: global_step4" in out
    assert "the save did not finish" in out
    (tmp_path / "latest").unlink()
    code, out, _ = run("inspect", tmp_path)
    assert code == 0
    assert "latest: (no such file)" in out
    assert run_json("inspect", tmp_path)[1]["checkpoint"] is None


def test_inspect_reports_a_damaged_checkpoint(ranks: Path, run: Any, run_json: Any) -> None:
    (ranks / "data/rank00001.safetensors").unlink()
    code, out, _ = run("inspect", ranks)
    assert code == 1
    assert "DAMAGED" in out
    assert "rank00001.safetensors is missing" in out
    assert "layer.weight" in out
    code, document = run_json("inspect", ranks)
    assert code == 1
    assert "rank00001.safetensors is missing" in document["checkpoint"]["problem"]


def test_a_second_save_under_a_tag_is_shown_as_such(checkpoint: Path, run: Any, run_json: Any) -> None:
    handmade.save_single(checkpoint.parent, step=8)
    _, document = run_json("inspect", checkpoint)
    assert (document["checkpoint"]["generation"], document["checkpoint"]["step"]) == (1, 8)
    assert document["checkpoint"]["files"][0]["path"] == "data/rank00000.1.safetensors"
    assert "generation 1 (this tag was saved again)" in run("inspect", checkpoint)[1]


def test_inspect_of_a_trainer_run_lists_its_checkpoints(tmp_path: Path, run: Any, run_json: Any) -> None:
    folder = trainer_run(tmp_path / "out", 3, 12, 6)
    (folder / "checkpoint-12" / "trainer_state.json").unlink()
    (folder / "checkpoint-15").mkdir()
    code, document = run_json("inspect", folder)
    assert code == 0
    assert document["checkpoint"] is None
    assert [(tag["tag"], tag["step"], tag["complete"]) for tag in document["save_directory"]["tags"]] == [
        ("checkpoint-15", None, False), ("checkpoint-3/global_step3", 3, True), ("checkpoint-6/global_step6", 6, True),
        ("checkpoint-12/global_step12", 12, False),
    ]  # fmt: skip
    code, out, _ = run("inspect", folder)
    assert code == 0
    assert "newest complete checkpoint: checkpoint-6/global_step6" in out
    assert "it has no trainer_state.json, so its save did not finish" in out
    assert "no unickpt checkpoint" in out
    code, _, err = run("verify", folder)
    assert code == 2
    assert "name one of the checkpoints there: checkpoint-3/global_step3, checkpoint-6/global_step6" in err
