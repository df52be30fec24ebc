"""What of unickpt is installed: the entry point that PyTorch calls, and the extensions."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import metadata

from unickpt.base.autoload import asked
from unickpt.base.extensions import EXTENSIONS, Built

GROUP, NAME, VALUE = "torch.backends", "unickpt", "_unickpt_autoload:arm"
TORCH_SWITCH, OWN_SWITCH = "TORCH_DEVICE_BACKEND_AUTOLOAD", "UNICKPT_AUTOLOAD"


@dataclass(frozen=True, slots=True)
class Autoload:
    """Whether ``import torch`` arms unickpt.

    Attributes:
        registered: whether an installation has registered the entry point that PyTorch calls.
        off: the assignment in the environment that switches it off, such as ``UNICKPT_AUTOLOAD=0``, or ''.
    """

    registered: bool
    off: str

    @property
    def works(self) -> bool:
        """Whether it is registered and not switched off."""
        return self.registered and not self.off


@dataclass(frozen=True, slots=True)
class Extension:
    """An extension in C.

    Attributes:
        does: what it does, as the key in JSON: ``recording``, ``copying`` or ``reading``.
        installed: whether it is, and this processor has its instructions.
        without: what is slower without it.
        old: it was built before its code was changed, and lacks functions.
    """

    does: str
    installed: bool
    without: str
    old: bool = False


def autoload() -> Autoload:
    """Return whether ``import torch`` arms unickpt in a process with this environment."""
    registered = any(point.name == NAME and point.value == VALUE for point in metadata.entry_points(group=GROUP))
    off = ""
    if not asked():
        off = f"{OWN_SWITCH}={os.environ[OWN_SWITCH]}"
    elif os.environ.get(TORCH_SWITCH, "1") != "1":  # as torch reads it
        off = f"{TORCH_SWITCH}={os.environ[TORCH_SWITCH]}"
    return Autoload(registered, off)


def extensions() -> list[Extension]:
    """Return the extensions. Imports those that are installed, and nothing else: not torch."""
    return [Extension(each.does, each.built is Built.READY, each.without, each.built is Built.OLD) for each in EXTENSIONS]
