"""``unickpt completion``: print a shell completion script, which is generated from the parsers.

The script is static: a completion starts no Python process. argcomplete and shtab would add a dependency at run time
(docs/developing/dependencies.md).
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

from unickpt.cli.exit_codes import SOUND
from unickpt.cli.output import Output


@dataclass(frozen=True, slots=True)
class _Option:
    """An option of a command.

    Attributes:
        names: option strings. Empty for a positional argument.
        values: choices, if the argument lists them.
        takes_value: whether a value follows the option.
        help: help text.
    """

    names: tuple[str, ...]
    values: tuple[str, ...]
    takes_value: bool
    help: str


def run(args: argparse.Namespace, out: Output) -> int:
    """Print the script."""
    from unickpt.cli.main import COMMANDS  # which names this module

    helps = {command.name: command.help for command in COMMANDS}
    options: dict[str, list[_Option]] = {}
    for command in COMMANDS:
        parser = argparse.ArgumentParser(prog=command.name)
        import_module(command.arguments).configure(parser)
        options[command.name] = [_option(action) for action in parser._actions]
    out.text({"bash": _bash, "zsh": _zsh, "fish": _fish}[args.shell](helps, options))
    return SOUND


def _option(action: argparse.Action) -> _Option:
    values = tuple(map(str, action.choices)) if action.choices is not None else ()
    return _Option(tuple(action.option_strings), values, action.nargs != 0, " ".join((action.help or "").split()))


def _bash(helps: Mapping[str, str], options: Mapping[str, Sequence[_Option]]) -> str:
    values = [
        f'    "{command} {name}") COMPREPLY=($(compgen -W "{" ".join(option.values)}" -- "$cur")); return ;;'
        for command, found in options.items()
        for option in found
        for name in option.names
        if option.values
    ]
    words = [
        f"    {command}) options={shlex.quote(' '.join(name for option in found for name in option.names))} "
        f"words={shlex.quote(' '.join(value for option in found if not option.names for value in option.values))} ;;"
        for command, found in options.items()
    ]
    return "\n".join(
        (
            "_unickpt() {",
            '  local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" options="" words=""',
            "  COMPREPLY=()",
            '  if [ "$COMP_CWORD" -eq 1 ]; then',
            f'    COMPREPLY=($(compgen -W "{" ".join(helps)}" -- "$cur")); return',
            "  fi",
            '  case "${COMP_WORDS[1]} $prev" in',
            *values,
            "  esac",
            '  case "${COMP_WORDS[1]}" in',
            *words,
            "  esac",
            '  case "$cur" in -*) words=$options ;; esac',
            '  COMPREPLY=($(compgen -W "$words" -- "$cur"))',
            "}",
            "complete -o bashdefault -o default -F _unickpt unickpt",  # without a match: files
        )
    )


def _zsh(helps: Mapping[str, str], options: Mapping[str, Sequence[_Option]]) -> str:
    lines = ["#compdef unickpt", "_unickpt() {", "  if (( CURRENT == 2 )); then", "    local -a commands=("]
    lines += [f"      {shlex.quote(f'{name}:{text}')}" for name, text in helps.items()]
    lines += [
        "    )",
        "    _describe command commands",
        "    return",
        "  fi",
        "  shift words; (( CURRENT-- ))",
        "  case $words[1] in",
    ]
    for command, found in options.items():
        specs = []
        for option in found:
            help_text = option.help.replace("[", "(").replace("]", ")").replace(":", " ")
            value = f":value:({' '.join(option.values)})" if option.values else ":value:_files" if option.takes_value else ""
            specs += [f"{name}[{help_text}]{value}" for name in option.names] or ([f"1{value}"] if option.values else [])
        lines.append(f"    {command}) _arguments -S {' '.join(map(shlex.quote, [*specs, '*:path:_files']))} ;;")
    return "\n".join([*lines, "  esac", "}", "compdef _unickpt unickpt"])


def _fish(helps: Mapping[str, str], options: Mapping[str, Sequence[_Option]]) -> str:
    lines = [
        f"complete -c unickpt -n __fish_use_subcommand -f -a {name} -d {shlex.quote(text)}" for name, text in helps.items()
    ]
    for command, found in options.items():
        for option in found:
            names = "".join(f" -l {n[2:]}" if n.startswith("--") else f" -s {n[1:]}" for n in option.names)
            more = f" -xa {shlex.quote(' '.join(option.values))}" if option.values else " -r" if option.takes_value else ""
            if names or option.values:
                when = f"-n '__fish_seen_subcommand_from {command}'"
                lines.append(f"complete -c unickpt {when}{names}{more} -d {shlex.quote(option.help)}")
    return "\n".join(lines)
