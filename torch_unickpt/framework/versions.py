"""torch: tested versions, and the installed one."""

from __future__ import annotations

from packaging.specifiers import SpecifierSet

FRAMEWORK = "torch"
VERSIONS = SpecifierSet(">=2.6,<2.16")


def version() -> str:
    """Return the version of torch."""
    import torch

    return str(torch.__version__)
