"""DeepSpeed: tested versions, the hooked module, and the URL of its source."""

from __future__ import annotations

from packaging.specifiers import SpecifierSet

VERSIONS = SpecifierSet(">=0.17.0,<0.20")
ENGINE = "deepspeed.runtime.engine"
SOURCE = "https://github.com/deepspeedai/DeepSpeed/blob/master/"


def version() -> str:
    """Return the version of the installed DeepSpeed."""
    from deepspeed.git_version_info import version as found

    return str(found)
