"""Arguments of ``unickpt completion``."""

from __future__ import annotations

import argparse

EXAMPLE = """\
unickpt completion bash > ~/.local/share/bash-completion/completions/unickpt
  unickpt completion zsh > ~/.zfunc/_unickpt        # a folder of $fpath
  unickpt completion fish > ~/.config/fish/completions/unickpt.fish"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="shell that the script is for")
