"""Wrong usage, unusable directories, exit codes, and help of every command."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.support import handmade
from tests.support.cli import python
from unickpt.base.errors import StorageError
from unickpt.checkpoint.format.manifest import FORMAT_VERSION
from unickpt.checkpoint.storage.posix import PosixStorage
from unickpt.cli import main as main_module
from unickpt.cli.main import main
from unickpt.cli.parsers.plan import PLANS


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_newer_format_version_is_named_and_not_judged(checkpoint: Path, command: str, run: Any, run_json: Any) -> None:
    handmade.edit_manifest(checkpoint, lambda body: body.update(version=FORMAT_VERSION + 1))
    code, out, err = run(command, checkpoint)
    assert (code, out) == (2, "")
    assert f"format version {FORMAT_VERSION + 1}, this release reads up to {FORMAT_VERSION}; upgrade unickpt" in err
    code, document = run_json(command, checkpoint)
    assert (code, document["error"]["type"]) == (2, "NewerFormatError")


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_path_that_is_not_a_checkpoint_is_one_line_and_exit_code_2(tmp_path: Path, command: str, run: Any) -> None:
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


@pytest.mark.parametrize("command", ["diagnose", "report", "metrics", "whatif", "latest", "agent"])
def test_an_error_of_the_system_is_one_line(command: str, run: Any) -> None:
    code, out, err = run(command, "x" * 5000)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1


HELPED = [*([command.name] for command in main_module.COMMANDS), *(["plan", name] for name in PLANS), ["hooks", "status"]]


@pytest.mark.parametrize("words", HELPED, ids=" ".join)
def test_help_of_every_command_says_what_it_does_with_an_example_that_can_be_parsed(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*words, "--help"])
    assert caught.value.code == 0
    helps = {command.name: command.help for command in main_module.COMMANDS} | PLANS
    said = capsys.readouterr().out
    about = helps.get(words[-1], "")
    assert f"{about[:1].upper()}{about[1:]}" in " ".join(said.split())
    example = shlex.split(said.partition("example:\n")[2].splitlines()[0].partition(" > ")[0])
    assert example[: len(words) + 1] == ["unickpt", *words]
    args = main_module._parse(example[1:], words[0])
    assert args is not None


def test_help_of_every_command_imports_the_standard_library_alone() -> None:
    """Importing torch takes seconds."""
    program = (
        "import contextlib, io, sys\n"
        "before = set(sys.modules)\n"
        "from unickpt.cli.main import main\n"
        f"for words in {HELPED!r}:\n"
        "    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "        main([*words, '--help'])\n"
        "names = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(names - sys.stdlib_module_names))\n"
    )
    assert python("-c", program).stdout == "['unickpt']\n"


@pytest.mark.parametrize("to", ["hf", "dcp", "torch-dist", "fsdp-dtensor", "deepspeed-universal"])
def test_an_export_into_a_checkpoint_is_refused(checkpoint: Path, to: str, run: Any) -> None:
    (folder,) = checkpoint.rglob("manifest.json")
    before = sorted(checkpoint.rglob("*"))
    code, out, err = run("export", folder.parent, folder.parent, "--to", to)
    assert (code, out) == (2, "")
    assert f"{folder.parent}: is a unickpt checkpoint, and an export would add other files to it" in err
    assert sorted(checkpoint.rglob("*")) == before
