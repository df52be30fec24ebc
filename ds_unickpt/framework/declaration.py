"""Declares hooks on DeepSpeed and transformers, with the fingerprints of the hooked functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from packaging.specifiers import SpecifierSet

from ds_unickpt.framework.fingerprints import FINGERPRINTS
from ds_unickpt.framework.versions import SOURCE, VERSIONS
from unickpt.base.hooks import Hook


def declared(
    name: str, module: str, attribute: str, wrapper: Callable[..., Any], *, why: str, until: str, strict: bool,
    upstream: str | None = None, versions: SpecifierSet = VERSIONS, parameters: tuple[str, ...] = (),
) -> Hook:  # fmt: skip
    """Return a hook. The arguments that are not here are attributes of ``Hook``.

    Args:
        strict: refuse a function of unknown source. False for a wrapper that passes the call through, or that only adds to
            the text of an error: it cannot do harm.
        upstream: URL of the source to change upstream. None: the source of ``module`` in DeepSpeed.
        versions: tested versions of the framework.
    """
    upstream = upstream or f"{SOURCE}{module.replace('.', '/')}.py"
    return Hook(
        name=name, module=module, attribute=attribute, wrapper=wrapper, versions=versions, fingerprints=FINGERPRINTS[name],
        why=why, upstream=upstream, until=until, parameters=parameters, strict=strict,
    )  # fmt: skip
