"""Declares hooks on Megatron, with the versions, fingerprints and upstream URL of the hooked function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_unickpt.framework.fingerprints import FINGERPRINTS
from megatron_unickpt.framework.versions import VERSIONS
from unickpt.base.hooks import Hook

_SOURCE = "https://github.com/NVIDIA/Megatron-LM/blob/main"


def declared(
    name: str,
    module: str,
    attribute: str,
    wrapper: Callable[..., Any],
    *,
    why: str,
    until: str,
    parameters: tuple[str, ...] = (),
) -> Hook:
    """Return a hook on a function of Megatron.

    The hook is not strict. Users of Megatron-LM edit its source, and the wrapper relies only on the names of parameters.
    """
    return Hook(
        name=name, module=module, attribute=attribute, wrapper=wrapper, versions=VERSIONS, fingerprints=FINGERPRINTS[name],
        why=why, upstream=f"{_SOURCE}/{module.replace('.', '/')}.py", until=until, parameters=parameters, strict=False,
    )  # fmt: skip
