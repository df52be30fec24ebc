"""``unickpt watch`` runs a program with timing on, and ends as it ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.repository import REPO
from unickpt.testing.launch import environment

PROGRAM = "import os, sys; print(os.environ['UNICKPT_TIMING'], sys.argv[1:]); sys.exit(7)"
WATCH = [sys.executable, "-m", "unickpt.cli.main", "watch"]


@pytest.mark.parametrize("dashes", [["--"], []])
def test_the_program_runs_with_timing_and_its_exit_code_is_kept(dashes: list[str]) -> None:
    done = subprocess.run(
        [*WATCH, *dashes, sys.executable, "-c", PROGRAM, "--json", "-x"],
        env=environment(REPO), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (7, "1 ['--json', '-x']\n"), done.stderr


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        (["--", "no-such-program"], {}, "no-such-program: no such program"),
        ([], {}, "no program; unickpt watch -- torchrun"),
        (["--", sys.executable], {"UNICKPT_AUTOLOAD": "0"}, "UNICKPT_AUTOLOAD=0 is in the environment"),
    ],
)
def test_what_cannot_be_watched_is_said(arguments: list[str], variables: dict[str, str], said: str) -> None:
    done = subprocess.run([*WATCH, *arguments], env=environment(REPO, **variables), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert said in done.stderr
