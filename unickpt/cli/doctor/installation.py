"""What of unickpt is installed: the entry point that PyTorch calls, and the extensions."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module, metadata

from unickpt.base.autoload import asked

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
    """

    does: str
    installed: bool
    without: str


_EXTENSIONS = (
    ("recording", "unickpt.diagnosis.recording._fast", "a record of a call takes some microseconds"),
    ("copying", "unickpt.checkpoint.format._casts", "asynchronous saves stop training longer"),
    ("checksums", "unickpt.checkpoint.format._checksums", "training beside a save is slower"),
    ("reading", "unickpt.checkpoint.load._checked_read", "loads from memory take longer"),
)


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
    return [Extension(does, _usable(module), without) for does, module, without in _EXTENSIONS]


def _usable(module: str) -> bool:
    try:
        found = import_module(module)
    except ImportError:
        return False
    return bool(getattr(found, "is_fast", lambda: True)())
