"""torch: tested versions, and the installed one."""

from __future__ import annotations

from packaging.specifiers import SpecifierSet

FRAMEWORK = "torch"
VERSIONS = SpecifierSet(">=2.6,<2.16")
TRANSFORMERS_VERSIONS = SpecifierSet(">=4.50,<6")
VERL_VERSIONS = SpecifierSet(">=0.9,<0.10")


def version() -> str:
    """Return the version of torch."""
    import torch

    return str(torch.__version__)
