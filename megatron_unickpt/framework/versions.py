"""Megatron-core: tested versions, and the installed version."""

from __future__ import annotations

from packaging.specifiers import SpecifierSet

VERSIONS = SpecifierSet(">=0.12.0,<0.21")


def version() -> str:
    """Return the version of the installed megatron-core. The training scripts have the same version."""
    from megatron.core.package_info import __version__

    return str(__version__)
