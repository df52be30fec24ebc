"""Everything that ``unickpt doctor`` knows, read once. No step takes longer than its time limit."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from unickpt.base.switch import VARIABLE
from unickpt.cli.doctor import bounded, declared, frameworks, installation, machine, path_probe, torch_probe
from unickpt.cli.doctor.frameworks import Framework
from unickpt.cli.doctor.installation import Autoload, Extension
from unickpt.cli.doctor.machine import Machine

TORCH_SECONDS, PATH_SECONDS = 90.0, 20.0


@dataclass(frozen=True, slots=True)
class Acting:
    """What ``unickpt hooks status`` answers from.

    Attributes:
        frameworks: the installed ones.
        autoload: whether ``import torch`` arms unickpt.
        extensions: those in C.
        switch: value of the variable ``UNICKPT``.
    """

    frameworks: tuple[Framework, ...]
    autoload: Autoload
    extensions: tuple[Extension, ...]
    switch: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of this machine and its software.

    Attributes:
        acting: hooks, entry point and extensions.
        machine: the host.
        versions: of packages, by name.
        drivers: versions of fsspec and of drivers of object stores.
        variables: variables of the environment, as they are.
        torch: as ``torch_probe.facts``, or ``problem``.
        place: as ``path_probe.of_folder``, or ``problem``; None if no folder or URL is given.
    """

    acting: Acting
    machine: Machine
    versions: dict[str, str]
    drivers: dict[str, str]
    variables: dict[str, str]
    torch: dict[str, Any]
    place: dict[str, Any] | None


def acting() -> Acting:
    """Read which hooks act, without an import of a framework or of torch."""
    return Acting(
        tuple(frameworks.installed(declared.read())),
        installation.autoload(),
        tuple(installation.extensions()),
        os.environ.get(VARIABLE, ""),
    )


def read(place: str | None) -> Facts:
    """Read all facts. ``place``: a folder or URL where checkpoints would be written."""
    environment = dict(os.environ)
    return Facts(
        acting(),
        machine.machine(),
        machine.versions(),
        machine.drivers(),
        machine.variables(environment),
        bounded.answer_of(torch_probe.__name__, [], TORCH_SECONDS, environment),
        None if place is None else bounded.answer_of(path_probe.__name__, [place], PATH_SECONDS, environment),
    )
