"""``unickpt completion``: scripts for bash, zsh and fish."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from unickpt.cli import main as main_module


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
    assert completed("unickpt", "exp") == ["export"]
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
