"""``unickpt example``: the files of the guides, from one copy in the repository."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.repository import REPO
from unickpt.testing.launch import environment


def names(run: Any) -> list[str]:
    code, out, _ = run("example")
    assert code == 0
    return [line.split()[0] for line in out.splitlines()]


def test_every_configuration_and_script_is_an_example(run: Any) -> None:
    """One that is added to the repository is added to the list as well."""
    folders = ("configs", "configs/deepspeed", "configs/megatron", "configs/launch", "configs/monitoring", "examples")
    files = {file.name for place in folders for file in (REPO / place).iterdir() if file.is_file() and file.suffix != ".pyc"}
    assert sorted(names(run)) == sorted({*files, "demo", "dialects"})
    assert {each.name for each in (REPO / "configs").iterdir() if each.is_dir()} == {
        "deepspeed",
        "dialects",
        "launch",
        "megatron",
        "monitoring",
    }


def test_the_list_has_one_line_for_each(run: Any) -> None:
    _, out, _ = run("example")
    assert re.search(r"^zero2\.json +DeepSpeed: ZeRO-2 in bf16$", out, re.M)
    assert all(len(line) <= 120 for line in out.splitlines())


def test_a_file_is_printed_as_it_is(run: Any) -> None:
    for name, path in (("zero2.json", "configs/deepspeed"), ("slurm.sbatch", "configs/launch"), ("demo/run.py", "examples")):
        code, out, _ = run("example", name)
        assert (code, out) == (0, (REPO / path / name).read_text())


def test_the_files_of_a_folder_are_listed(run: Any) -> None:
    code, out, _ = run("example", "demo")
    assert code == 0
    assert {"demo/run.py", "demo/ds_config.json", "demo/megatron_run.py"} <= set(out.splitlines())


@pytest.mark.parametrize("name", ["minimal.args", "dialects", "dialects/huggingface.llama.toml"])
def test_an_example_is_written(name: str, tmp_path: Path, run: Any) -> None:
    code, out, _ = run("example", name, "--to", tmp_path / "new")
    assert code == 0
    written = [Path(line) for line in out.splitlines()]
    assert written == sorted(file for file in (tmp_path / "new").rglob("*") if file.is_file())
    for file in written:
        (source,) = (each for each in (REPO / "configs").rglob(file.name))
        assert file.read_bytes() == source.read_bytes()


def test_no_file_is_replaced(tmp_path: Path, run: Any) -> None:
    mine = tmp_path / "demo" / "train.py"
    mine.parent.mkdir()
    mine.symlink_to("nowhere")
    code, out, err = run("example", "demo", "--to", tmp_path)
    assert (code, out) == (2, "")
    assert f"{mine}: exists" in err
    assert list(mine.parent.iterdir()) == [mine]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["zero.json"], "did you mean zero"),
        (["../setup.py"], "no example '../setup.py'"),
        (["--to", "."], "--to needs the NAME"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], message: str, run: Any) -> None:
    code, out, err = run("example", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_it_needs_no_torch() -> None:
    code = "import sys; from unickpt.cli.main import main; main(['example']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), cwd=REPO, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "False", done.stderr


def test_a_guide_names_examples_that_exist(run: Any) -> None:
    known = {*names(run), *(f"dialects/{file.name}" for file in (REPO / "configs/dialects").iterdir())}
    pages = [REPO / "README.md", *(REPO / "docs").rglob("*.md")]
    named = {name for page in pages for name in re.findall(r"unickpt example ([\w./-]+\w)", page.read_text())}
    assert named
    assert named <= known
