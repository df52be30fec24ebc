"""Megatron-core: tested versions, the installed version, and whether the hooks can be used with it."""

from __future__ import annotations

from packaging.specifiers import SpecifierSet

from unickpt.base import hooks
from unickpt.base.errors import UnsupportedFrameworkError

FRAMEWORK = "Megatron"
VERSIONS = SpecifierSet(">=0.12.0,<0.21")


def version() -> str:
    """Return the version of the installed megatron-core. The training scripts have the same version."""
    from megatron.core.package_info import __version__

    return str(__version__)


def require_usable() -> None:
    """Run the self-test of the hooks if Megatron's source has changed. Call it before the first save or load.

    Raises:
        UnsupportedFrameworkError: the test failed. A caller that asks for unickpt has no other format to fall back to.
    """
    reason = hooks.settle(FRAMEWORK)
    if reason:
        raise UnsupportedFrameworkError(f"this release of unickpt cannot be used with Megatron {version()}: {reason}")
