"""The command line: what it says about sound, damaged and foreign directories, and with which exit code."""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import handmade
from unickpt import converting
from unickpt.cli import main as main_module
from unickpt.cli.main import main
from unickpt.cli.output import human_bytes, one_line
from unickpt.cli.rendering import render
from unickpt.contribution import Shard
from unickpt.errors import StorageError
from unickpt.fragments import Box
from unickpt.index import TensorInfo
from unickpt.posix import PosixStorage

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return handmade.save_single(tmp_path / "out")


@pytest.fixture
def ranks(tmp_path: Path) -> Path:
    return handmade.save_ranks(tmp_path / "ranks" / "global_step3", world=3)


Run = tuple[int, str, str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*argv: object) -> Run:
        code = main([str(word) for word in argv])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def run_json(run: Any) -> Any:
    def call(*argv: object) -> tuple[int, Any]:
        code, out, _ = run(*argv, "--json")
        return code, json.loads(out)

    return call


# ---------------------------------------------------------------- inspect


def test_inspect_json_accounts_for_everything_that_was_saved(ranks: Path, run_json: Any) -> None:
    code, document = run_json("inspect", ranks)
    assert code == 0
    assert document["save_directory"] is None
    found = document["checkpoint"]
    assert (found["step"], found["generation"], found["format_version"], found["problem"]) == (3, 0, 2, None)
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
    assert found["objects"]["unknown"]["$opaque"]["type"] == "builtins.range"
    assert found["ranks_with_objects"] == [0, 1, 2]
    assert found["aliases"] == {"head.weight": "embed.weight"}
    assert found["excluded"] == ["frozen.weight"]


def test_inspect_text_shows_the_same_to_people(ranks: Path, run: Any) -> None:
    code, out, err = run("inspect", ranks)
    assert (code, err) == (0, "")
    assert "\x1b" not in out  # plain where standard output is no terminal
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line}
    assert lines["master"] == ["master", "F32", "1", "6", "24", "96"]
    assert "derived from master" in out
    assert "betas=(0.9, 0.999)" in out
    assert "{'hello': (1, 2), 'scale': inf, 7: 'seven'}" in out
    assert "<opaque builtins.range: a pickle, loaded with allow_pickle only>" in out
    assert "tied: head.weight = embed.weight" in out
    assert "excluded: frozen.weight" in out


def test_inspect_of_a_tensor_says_where_its_bytes_are(ranks: Path, run_json: Any, run: Any) -> None:
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
    assert [line.split()[0] for line in out.splitlines()[3:]] == [str(_box(f)) for f in tensor["fragments"]]


def _box(fragment: dict[str, Any]) -> Box:
    return Box(tuple(fragment["start"]), tuple(fragment["shape"]))


def test_inspect_of_a_tied_name_shows_what_is_stored_for_it(checkpoint: Path, run_json: Any) -> None:
    _, document = run_json("inspect", checkpoint, "--tensor", "head.weight")
    assert [(t["name"], t["state"]) for t in document["tensors"]] == [("embed.weight", "weight")]


def test_inspect_of_an_unknown_tensor_names_the_nearest(checkpoint: Path, run: Any) -> None:
    code, _, err = run("inspect", checkpoint, "--tensor", "layer.wieght")
    assert code == 2
    assert "did you mean layer.weight" in err
    code, _, err = run("inspect", checkpoint, "--tensor", "layer.weight", "--state", "exp_avg_sq")
    assert code == 2
    assert "it has exp_avg, master, weight" in err


def test_inspect_cuts_long_tables_unless_told_not_to(tmp_path: Path, run: Any, run_json: Any) -> None:
    extra = [_scalar(f"many.{at:03d}") for at in range(60)]
    directory = handmade.save_single(tmp_path, extra=extra)
    _, out, _ = run("inspect", directory)
    assert "many.036" in out
    assert "many.037" not in out
    assert "and 24 more: --all shows them" in out
    assert "many.059" in run("inspect", directory, "--all")[1]
    _, out, _ = run("inspect", directory, "--grep", r"many\.05[89]$")
    assert [line.split()[0] for line in out.splitlines() if line.startswith("many")] == ["many.058", "many.059"]
    assert len(run_json("inspect", directory)[1]["checkpoint"]["parameters"]) == 64  # JSON is never cut


def _scalar(name: str) -> Shard:
    return Shard(TensorInfo(name, "weight", "F32", (), "parameter"), Box((), ()), torch.tensor(1.0))


def test_inspect_reads_manifest_and_index_only(ranks: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    reader = PosixStorage.reader

    def spy(self: PosixStorage, name: str) -> Any:
        opened.append(name)
        return reader(self, name)

    monkeypatch.setattr(PosixStorage, "reader", spy)
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
    (tmp_path / "global_step9" / "data").mkdir(parents=True)  # a save that was killed
    (tmp_path / "logs").mkdir()
    code, document = run_json("inspect", tmp_path)
    assert code == 0
    assert document["save_directory"]["latest"] == "global_step4"
    tags = document["save_directory"]["tags"]
    assert [(t["tag"], t["step"], t["whole"]) for t in tags] == [
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


def test_inspect_shows_a_damaged_checkpoint_and_says_so(ranks: Path, run: Any, run_json: Any) -> None:
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


# ---------------------------------------------------------------- a Trainer run, and the newest checkpoint


def trainer_run(folder: Path, *steps: int) -> Path:
    """The output directory of a Trainer run: ``checkpoint-N``, each with Trainer's own state and a save directory."""
    for step in steps:
        run = folder / f"checkpoint-{step}"
        handmade.save_single(run, f"global_step{step}", step=step)
        (run / "trainer_state.json").write_text("{}")
    return folder


def test_inspect_of_a_trainer_run_lists_its_checkpoints(tmp_path: Path, run: Any, run_json: Any) -> None:
    folder = trainer_run(tmp_path / "out", 3, 12, 6)
    (folder / "checkpoint-12" / "trainer_state.json").unlink()
    (folder / "checkpoint-15").mkdir()
    code, document = run_json("inspect", folder)
    assert code == 0
    assert document["checkpoint"] is None
    assert [(tag["tag"], tag["step"], tag["whole"]) for tag in document["save_directory"]["tags"]] == [
        ("checkpoint-15", None, False), ("checkpoint-3/global_step3", 3, True), ("checkpoint-6/global_step6", 6, True),
        ("checkpoint-12/global_step12", 12, False),
    ]  # fmt: skip
    code, out, _ = run("inspect", folder)
    assert code == 0
    assert "newest whole checkpoint: checkpoint-6/global_step6" in out
    assert "trainer_state.json is missing or damaged: Trainer cannot resume from it" in out
    assert "it holds no checkpoint of unickpt" in out
    code, _, err = run("verify", folder)
    assert code == 2
    assert "name one of the checkpoints there: checkpoint-3/global_step3, checkpoint-6/global_step6" in err


def test_latest_prints_what_a_job_resumes_from(tmp_path: Path, run: Any, run_json: Any) -> None:
    folder = trainer_run(tmp_path / "out", 3, 6)
    assert run("latest", folder) == (0, f"{folder}/checkpoint-6\n", "")
    assert run("latest", folder / "checkpoint-6") == (0, f"{folder}/checkpoint-6/global_step6\n", "")
    found = {"schema": 1, "path": f"{folder}/checkpoint-6", "checkpoint": f"{folder}/checkpoint-6/global_step6", "step": 6}
    assert run_json("latest", folder) == (0, found)
    state = folder / "checkpoint-6" / "trainer_state.json"
    state.write_text('{"log_history": [')  # killed while it was written
    assert run("latest", folder) == (0, f"{folder}/checkpoint-3\n", "")
    state.write_text("{}")
    (folder / "checkpoint-6" / "global_step6" / "data" / "rank00000.safetensors").unlink()
    assert run("latest", folder) == (0, f"{folder}/checkpoint-3\n", "")
    (folder / "checkpoint-3" / "trainer_state.json").unlink()
    (folder / "checkpoint-3" / "training_args.bin").touch()
    code, out, err = run("latest", folder)
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert "no whole checkpoint; checkpoint-6/global_step6: " in err


def test_latest_needs_no_state_of_trainer_where_there_is_no_trainer(tmp_path: Path, run: Any) -> None:
    folder = trainer_run(tmp_path / "out", 3, 6)  # as a script of accelerate writes them
    for path in folder.rglob("trainer_state.json"):
        path.unlink()
    assert run("latest", folder) == (0, f"{folder}/checkpoint-6\n", "")


def test_latest_of_a_save_directory_looks_at_files_and_not_at_the_pointer(tmp_path: Path, run: Any) -> None:
    for step in (9, 10):
        handmade.save_single(tmp_path / "out", f"global_step{step}", step=step)
    (tmp_path / "out" / "latest").write_text("global_step9")
    checkpoint = tmp_path / "out" / "global_step10"
    assert run("latest", tmp_path / "out") == (0, f"{checkpoint}\n", "")
    assert run("latest", checkpoint) == (0, f"{checkpoint}\n", "")


def test_latest_names_what_deepspeed_itself_has_saved(tmp_path: Path, run: Any) -> None:
    folder = trainer_run(tmp_path / "out", 3)
    own = folder / "checkpoint-6" / "global_step6"
    own.mkdir(parents=True)
    (own / "mp_rank_00_model_states.pt").touch()
    (own.parent / "latest").write_text("global_step6")
    code, out, err = run("latest", folder)
    assert (code, out) == (0, f"{folder}/checkpoint-3\n")
    assert "other programs wrote checkpoint-6 (DeepSpeed)" in err
    shutil.rmtree(folder / "checkpoint-3")
    assert run("latest", folder)[0] == 1  # not a first start


def test_latest_tells_a_first_start_from_a_failure(
    tmp_path: Path, run: Any, run_json: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = run("latest", tmp_path / "nowhere")
    assert (code, out) == (3, "")
    assert "no checkpoint of unickpt is there" in err
    assert run_json("latest", tmp_path) == (3, {"schema": 1, "path": None, "checkpoint": None, "step": None})
    assert run("latest", __file__)[0] == 2
    handmade.save_single(tmp_path / "out")

    def refuse(self: PosixStorage, *_: Any) -> None:
        raise StorageError(f"{self}: stale file handle")

    monkeypatch.setattr(PosixStorage, "folders", refuse)
    code, out, err = run("latest", tmp_path / "out")
    assert (code, out) == (2, "")
    assert "stale file handle" in err


# ---------------------------------------------------------------- verify


def test_verify_of_a_sound_checkpoint(ranks: Path, run: Any, run_json: Any) -> None:
    code, out, err = run("verify", ranks)
    assert (code, err) == (0, "")
    assert out.startswith("sound: ")
    code, document = run_json("verify", ranks)
    assert code == 0
    assert document["sound"] is True
    assert document["problems"] == []
    assert document["files"] == 4
    assert document["size_bytes"] == sum(r["size_bytes"] for r in handmade.read_manifest(ranks)["files"])


def test_verify_names_the_fragment_of_a_flipped_bit(ranks: Path, run: Any, run_json: Any) -> None:
    _, document = run_json("inspect", ranks, "--tensor", "layer.weight", "--state", "exp_avg")
    fragment = document["tensors"][0]["fragments"][2]
    handmade.flip_bit(ranks / fragment["file"], fragment["offset_bytes"] + 3)
    code, out, _ = run("verify", ranks)
    assert code == 1
    problem, verdict = out.splitlines()
    assert f"layer.weight (exp_avg) {_box(fragment)} is damaged" in problem
    assert fragment["file"] in problem
    assert verdict.startswith("damaged: ")
    code, document = run_json("verify", ranks)
    assert (code, document["sound"], document["problems"]) == (1, False, [problem])


@pytest.mark.parametrize("name", ["data/rank00001.safetensors", "index.safetensors"])
def test_verify_finds_a_truncated_or_missing_file(ranks: Path, name: str, run: Any) -> None:
    whole = (ranks / name).read_bytes()
    (ranks / name).write_bytes(whole[:-1])
    code, out, _ = run("verify", ranks)
    assert code == 1
    assert f"{name}: {len(whole) - 1:,} bytes, expected {len(whole):,} bytes" in out
    (ranks / name).unlink()
    code, out, _ = run("verify", ranks)
    assert code == 1
    assert f"{name}: missing" in out


def test_verify_finds_a_flipped_bit_in_header_index_and_manifest(ranks: Path, tmp_path: Path, run: Any) -> None:
    data, index = "data/rank00000.safetensors", "index.safetensors"
    for name, at in ((data, 40), (index, 40), (index, -1), ("manifest.json", 90)):
        copy = tmp_path / "copy"
        shutil.copytree(ranks, copy)
        handmade.flip_bit(copy / name, at)
        code, out, err = run("verify", copy)
        assert (code, err) == (1, ""), (name, at)
        assert name in out.splitlines()[0]
        shutil.rmtree(copy)


def test_verify_of_a_save_directory_follows_latest(checkpoint: Path, run_json: Any, run: Any) -> None:
    code, document = run_json("verify", checkpoint.parent)
    assert (code, document["directory"]) == (0, str(checkpoint))
    (checkpoint.parent / "latest").unlink()
    code, _, err = run("verify", checkpoint.parent)
    assert code == 2
    assert "name one of the checkpoints there: global_step3" in err


# ---------------------------------------------------------------- what cannot be looked at


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_newer_format_version_is_named_and_not_judged(checkpoint: Path, command: str, run: Any, run_json: Any) -> None:
    handmade.edit_manifest(checkpoint, lambda body: body.update(version=3))
    code, out, err = run(command, checkpoint)
    assert (code, out) == (2, "")
    assert "format version 3, this release reads up to 2; upgrade unickpt" in err
    code, document = run_json(command, checkpoint)
    assert (code, document["error"]["type"]) == (2, "NewerFormatError")


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_what_is_not_a_checkpoint_is_one_line_and_exit_code_2(tmp_path: Path, command: str, run: Any) -> None:
    for directory in (tmp_path, tmp_path / "nowhere", Path(__file__), tmp_path / ("x" * 300)):
        code, out, err = run(command, directory)
        assert (code, out) == (2, "")
        assert err.startswith("unickpt: ")
        assert err.count("\n") == 1
        assert "Traceback" not in err


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_latest_cannot_lead_out_of_its_directory(checkpoint: Path, tmp_path: Path, command: str, run: Any) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    for text in (b"../out/global_step3", str(checkpoint).encode()):
        (inner / "latest").write_bytes(text)
        code, _, err = run(command, inner)
        assert code == 2, text
        assert "latest: file path" in err
    for text in (b"", b" \n", b"\xff\xfe", b"x" * 5000):
        (inner / "latest").write_bytes(text)
        code, _, err = run(command, inner)
        assert code == 2, text
        assert "latest: does not hold the name of a checkpoint" in err


def test_wrong_usage_is_exit_code_2(checkpoint: Path, run: Any) -> None:
    for arguments in (["inspect"], ["hooks"], ["frobnicate"], [], ["verify", str(checkpoint), "--nonsense"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
    for arguments in (["--grep", "["], ["--state", "weight"]):
        code, _, err = run("inspect", checkpoint, *arguments)
        assert code == 2
        assert err.splitlines()[-1].startswith("unickpt: --")


def test_a_storage_error_is_one_line(checkpoint: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: PosixStorage, *_: Any) -> None:
        raise StorageError(f"{self}: stale file handle")

    monkeypatch.setattr(PosixStorage, "read", refuse)
    code, _, err = run("inspect", checkpoint)
    assert code == 2
    assert "stale file handle" in err


# ---------------------------------------------------------------- hooks


@pytest.fixture(scope="module")
def hooks_in_a_process() -> tuple[str, str]:
    """What ``hooks status`` prints with ``--json`` and with ``--markdown``, in a process that has DeepSpeed."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs DeepSpeed")
    program = (
        "from unickpt.cli.main import main\n"
        "assert main(['hooks', 'status', '--json']) == 0\n"
        "print('=====')\n"
        "assert main(['hooks', 'status', '--markdown']) == 0\n"
    )
    document, markdown = _python("-c", program).stdout.split("=====\n")
    return document, markdown


def test_hooks_status_of_an_installed_framework(hooks_in_a_process: tuple[str, str]) -> None:
    document = json.loads(hooks_in_a_process[0])  # whatever the framework says on import does not get in between
    assert document["adapters"][0]["state"] == "imported"
    names = [hook["name"] for hook in document["hooks"]]
    assert {"deepspeed.configure", "deepspeed.load", "deepspeed.save", "deepspeed.zero_to_fp32"} <= set(names)
    for hook in document["hooks"]:
        known = not hook["known_fingerprints"] or hook["fingerprint"] in hook["known_fingerprints"]
        assert (hook["state"] == "installed") == known, hook


def test_docs_hooks_is_what_the_command_prints(hooks_in_a_process: tuple[str, str]) -> None:
    _, markdown = hooks_in_a_process
    assert markdown == (REPOSITORY / "docs/hooks.md").read_text(), "unickpt hooks status --markdown > docs/hooks.md"


def test_hooks_status_without_a_framework_says_so(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unickpt.cli.hooks_command.find_spec", lambda _: None)
    monkeypatch.setattr("unickpt.hooks._status", {})
    code, out, _ = run("hooks", "status")
    assert code == 0
    assert "deepspeed (ds_unickpt): not installed" in out
    assert "hooks (0)" in out


def test_hooks_status_survives_a_broken_framework(run: Any, run_json: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        print("a framework that greets")
        raise RuntimeError("no libcudart")

    monkeypatch.setattr("unickpt.cli.hooks_command.find_spec", lambda _: object())
    monkeypatch.setattr("unickpt.cli.hooks_command.import_module", broken)
    code, document = run_json("hooks", "status")
    assert code == 0
    assert document["adapters"][0]["state"] == "failed"
    assert document["adapters"][0]["reason"] == "RuntimeError: no libcudart"


@pytest.mark.parametrize(
    ("framework", "missing"),
    [
        ("megatron", "megatron.core.optimizer.distrib_optimizer"),  # of the framework, when some hooks are in place already
        ("megatron", "megatron_unickpt.optimizer"),  # of the adapter, which a hook imports when a job calls it
        ("deepspeed", "ds_unickpt.engine"),
        ("megatron", "megatron_unickpt.hooks"),  # autoload reports it in one line, and the import goes on
        ("megatron", "wrapt"),
    ],
)
def test_hooks_status_says_failed_after_an_import_error(framework: str, missing: str) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"needs {framework}")
    program = (
        "import sys, importlib.abc\n"
        "class Broken(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {missing!r}: raise ImportError('cannot import name Gone')\n"
        "sys.meta_path.insert(0, Broken())\n"
        "from unickpt.cli.main import main\n"
        "assert main(['hooks', 'status', '--json']) == 0\n"
    )
    document = json.loads(_python("-c", program).stdout)
    adapter = next(each for each in document["adapters"] if each["framework"] == framework)
    assert adapter["state"] == "failed"
    assert "cannot import name Gone" in adapter["reason"]
    for hook in document["hooks"]:
        if hook["target"].startswith(f"{framework}."):
            assert (hook["state"], "cannot import name Gone" in hook["reason"]) == ("failed", True), hook


# ---------------------------------------------------------------- Ctrl-C


@pytest.fixture
def hears_ctrl_c() -> Iterator[None]:
    """Programs that a shell starts in the background ignore Ctrl-C, and so do their children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("hears_ctrl_c")
def test_ctrl_c_says_how_to_go_on_and_the_same_command_does(tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = handmade.save_ranks(tmp_path / "source", world=3)
    monkeypatch.setattr(converting, "FRAGMENT_BYTES", 8)
    monkeypatch.setattr(converting, "BATCH_BYTES", 8)
    batches, slow = converting._batches, threading.Event()

    def interrupted(shards: Any) -> Any:
        for at, batch in enumerate(batches(shards)):
            if at == 1 and not slow.is_set():
                slow.set()
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.5)  # the main thread stops the others meanwhile
            yield batch

    monkeypatch.setattr(converting, "_batches", interrupted)
    command = ["edit", source, tmp_path / "new", "--cast", "*:exp_avg=bfloat16"]
    code, _, err = run(*command)
    assert (code, err) == (
        130, "unickpt: interrupted: what is written is kept: run the same command again to go on. Until then DST is not a "
        "checkpoint\n",
    )  # fmt: skip
    assert not (tmp_path / "new" / "manifest.json").exists()
    assert run(*command)[0] == 0
    assert run("verify", tmp_path / "new")[0] == 0


@pytest.mark.parametrize("command", [command.name for command in main_module.COMMANDS])
def test_ctrl_c_in_every_command_is_one_line(command: str, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(next(each.module for each in main_module.COMMANDS if each.name == command))

    def interrupt(*_: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "run", interrupt)
    given = {"hooks": ["status"], "completion": ["bash"], "trace": ["x", "-o", "y"]}
    pairs = ("diff", "convert", "export", "edit", "average")
    code, out, err = run(command, *given.get(command, ["x", "y"] if command in pairs else ["x"]))
    assert (code, out) == (130, "")
    assert err.startswith("unickpt: interrupted: ")
    assert err.count("\n") == 1


@pytest.mark.usefixtures("hears_ctrl_c")
def test_ctrl_c_during_the_imports_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "rich.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nfrom unickpt.cli.main import main\nmain(['inspect', '.'])"
    found = _python("-c", program, code=130)
    assert found.stdout == ""
    assert found.stderr == "unickpt: interrupted: nothing was changed; run the same command again\n"


# ---------------------------------------------------------------- completion


def test_bash_completes_commands_options_and_values(run: Any) -> None:
    code, script, _ = run("completion", "bash")
    assert code == 0

    def completed(*words: str) -> list[str]:
        quoted = " ".join(map(shlex.quote, words))
        program = f"{script}\nCOMP_WORDS=({quoted}) COMP_CWORD={len(words) - 1}; _unickpt; printf '%s\\n' \"${{COMPREPLY[@]}}\""
        done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True, timeout=60)
        assert done.stderr == ""
        return done.stdout.split()

    assert completed("unickpt", "") == [command.name for command in main_module.COMMANDS]
    assert completed("unickpt", "ex") == ["export"]
    assert completed("unickpt", "edit", "--lora-") == [
        "--lora-config", "--lora-alpha", "--lora-rslora", "--lora-adapter", "--lora-base", "--lora-keep-dtype"
    ]  # fmt: skip
    assert completed("unickpt", "export", "--to", "d") == ["deepspeed-universal", "dcp"]
    assert completed("unickpt", "hooks", "") == ["status"]
    assert completed("unickpt", "inspect", "") == []  # the shell completes files then


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_script_of_another_shell_has_every_option_and_can_be_read(shell: str, tmp_path: Path, run: Any) -> None:
    code, script, _ = run("completion", shell)
    assert code == 0
    options = (command.name for command in main_module.COMMANDS), ("lora-keep-dtype", "shard-gigabytes", "torch-dist")
    assert all(word in script for words in options for word in words)
    if shutil.which(shell) is None:
        pytest.skip(f"without {shell} the script is not read")
    (tmp_path / "script").write_text(script)
    subprocess.run([shell, "-n", tmp_path / "script"], check=True, timeout=60)


# ---------------------------------------------------------------- the document of the JSON


def test_docs_cli_names_every_member_of_the_json(
    ranks: Path, tmp_path: Path, run_json: Any, hooks_in_a_process: tuple[str, str]
) -> None:
    text = (REPOSITORY / "docs/cli.md").read_text()
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


# ---------------------------------------------------------------- as a process, on a terminal, in pipes


def _python(*argv: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, argv)]
    found = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == code, found.stderr
    return found


def test_as_a_process(ranks: Path) -> None:
    handmade.flip_bit(ranks / "data/rank00002.safetensors", -1)
    found = _python("-m", "unickpt.cli.main", "verify", ranks, "--json", code=1)
    assert json.loads(found.stdout)["sound"] is False
    assert found.stderr == ""


def test_looking_at_a_checkpoint_imports_no_framework(checkpoint: Path) -> None:
    program = (
        "import sys\n"
        "from unickpt.cli.main import main\n"
        "assert 'torch' not in sys.modules, 'the entry point itself is light'\n"
        f"assert main(['inspect', {str(checkpoint)!r}]) == 0 == main(['verify', {str(checkpoint)!r}])\n"
        "print([name for name in ('deepspeed', 'megatron', 'ds_unickpt', 'megatron_unickpt') if name in sys.modules])\n"
    )
    assert _python("-c", program).stdout.splitlines()[-1] == "[]"


def test_a_reader_that_stops_early_is_no_error(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(["inspect", str(checkpoint)]) == 0


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_tables_are_styled_and_lose_nothing(ranks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = _Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["inspect", str(ranks)]) == 0
    assert "\x1b[1m" in stream.getvalue()  # titles
    assert "\x1b[2m" in stream.getvalue()  # column heads
    assert "…" not in stream.getvalue()


def test_verify_shows_progress_on_a_terminal(
    ranks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = _Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert main(["verify", str(ranks)]) == 0
    assert "━" in stream.getvalue()
    assert "━" not in capsys.readouterr().out


def test_names_in_a_checkpoint_cannot_steer_the_terminal(tmp_path: Path, run: Any) -> None:
    evil = "w\x1b[2J\u202e\n[red]\x07"
    directory = handmade.save_single(tmp_path, extra=[_scalar(evil)])
    handmade.edit_manifest(directory, lambda body: body.update(created=evil, aliases={evil: evil}, objects={evil: evil}))
    for arguments in ([], ["--tensor", evil], ["--json"]):
        code, out, _ = run("inspect", directory, *arguments)
        assert code == 0
        assert not set("\x1b\u202e\x07") & set(out)
    assert "w\\x1b[2J\\u202e\\n[red]\\x07" in run("inspect", directory)[1]


def test_a_terminal_without_unicode_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = handmade.save_single(tmp_path, extra=[_scalar("überschreiben")])
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["inspect", str(directory)]) == 0
    stream.seek(0)
    assert "\\xfcberschreiben" in stream.read()


def test_one_line_escapes_what_is_not_printable() -> None:
    assert one_line("a\tb\ud800é", io.StringIO()) == "a\\tb\\ud800é"


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (1, "1 byte"), (1023, "1,023 b"), (1024, "1.0 KiB"), (1536, "1.5 KiB (1,536 b"), (3 << 60, "3072.0 PiB")],
)
def test_human_bytes(size: int, text: str) -> None:
    assert human_bytes(size).startswith(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"$tuple": [1]}, "(1,)"),
        ({"$set": [1, "a"]}, "{1, 'a'}"),
        ({"$dict": [[{"$tuple": [1, 2]}, None]]}, "{(1, 2): None}"),
        ({"$float": "nan"}, "nan"),
        ({"$tensor": "objects/job/0"}, "<tensor objects/job/0>"),
        ({"$lost": "m.C"}, "<lost m.C: it could not be pickled when it was saved>"),
        ({"$opaque": 3}, "opaque(3)"),
        ({"$tuple": 3, "x": 1}, "{'$tuple': 3, 'x': 1}"),
        ({"$numpy": ["<f4", 1.5]}, "numpy(['<f4', 1.5])"),
    ],
)
def test_rendering_of_encoded_objects(value: Any, text: str) -> None:
    assert render(value, most=None) == text
    assert len(render(value, most=10)) <= 10


def test_every_command_is_a_module_that_can_be_configured(capsys: pytest.CaptureFixture[str]) -> None:
    for command in main_module.COMMANDS:
        with pytest.raises(SystemExit) as caught:
            main([command.name, "--help"])
        assert caught.value.code == 0
        assert f"{command.help[:1].upper()}{command.help[1:]}." in " ".join(capsys.readouterr().out.split())
