"""The one registry through which anything is ever put into a framework's modules.

Each hook is a declared value: what it replaces, the versions and the very source it was written
against, why it is there and when it can go. A version range alone is not a safe gate (DeepSpeed
changed ``load_checkpoint`` ten times in 65 releases, some of them patch releases), so the source
is fingerprinted as well. Megatron-LM is a tree that its users edit; hooks on it only tell our calls
from its own by their arguments, and check that these have the known names. On an unknown one the
framework keeps its own behaviour, and it is said once.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

logger = logging.getLogger("unickpt")

ALLOW_UNTESTED = "UNICKPT_ALLOW_UNTESTED"


@dataclass(frozen=True, slots=True)
class Hook:
    """One function of a framework that is wrapped.

    Attributes:
        name: short, for the table.
        module, attribute: dotted place of the function, e.g. ``Class.method``.
        wrapper: ``wrapper(wrapped, instance, args, kwargs)`` as wrapt calls it.
        versions: framework versions it was tested with.
        fingerprints: accepted values of ``fingerprint`` of the wrapped function; empty for a wrapper that
            only looks at arguments and otherwise calls through, which needs no more than their names.
        parameters: names of parameters that the wrapper relies on.
        why, upstream, until: for whoever maintains it.
    """

    name: str
    module: str
    attribute: str
    wrapper: Callable[..., Any]
    versions: SpecifierSet
    fingerprints: frozenset[str]
    why: str
    upstream: str
    until: str
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HookStatus:
    """State of one hook in this process.

    Attributes:
        state: ``installed``, ``refused`` (this version or source is unknown), ``failed`` (an error while it was put in
            place) or ``removed``.
        reason: why it is in that state, if it is not simply installed.
        fingerprint: of the framework's function; '' if it cannot be examined.
    """

    hook: Hook
    state: str
    reason: str
    fingerprint: str


_installed: dict[str, tuple[Any, str, Any]] = {}
_in_source: set[str] = set()
_status: dict[str, HookStatus] = {}


def in_source(adapter: str, name: str) -> Callable[[Callable[..., Any]], Any]:
    """The decorator that a patched framework puts on the function of a hook: nothing is wrapped at run time then.

    Args:
        adapter: module with the list ``DECLARED``; imported at the first call, when the framework is complete.
        name: of a hook in it.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        import wrapt

        def wrapper(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
            declared: list[Hook] = import_module(adapter).DECLARED
            return next(hook for hook in declared if hook.name == name).wrapper(wrapped, instance, args, kwargs)

        _in_source.add(name)
        return wrapt.FunctionWrapper(function, wrapper)

    return decorate


def fingerprint(function: Callable[..., Any]) -> str:
    """Hash of a function's source without comment lines, blank lines and indentation (12 hex digits)."""
    return fingerprint_of_source(inspect.getsource(function))


def fingerprint_of_source(source: str) -> str:
    """``fingerprint`` of a function given as source text. Does not depend on the Python version."""
    lines = (line.strip() for line in source.splitlines())
    text = "\n".join(line for line in lines if line and not line.startswith("#"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def accepts(versions: SpecifierSet, version: str) -> bool:
    """Whether a version is in the tested range; local build suffixes and dev builds of it count."""
    try:
        return versions.contains(Version(version).public, prereleases=True)
    except InvalidVersion:
        return False


def install(hooks: list[Hook], *, framework: str, version: str) -> bool:
    """Install all hooks of an adapter, or none.

    Returns:
        Whether they are in place. If not, one warning has said why.

    Raises:
        Exception: a hook cannot be put in place (wrapt cannot be imported, say). None of them is, then.
    """
    checks = [_check(hook, version) for hook in hooks]
    refused = [check for check in checks if check.state == "refused"]
    if refused and os.environ.get(ALLOW_UNTESTED) != "1":
        _note(checks, "refused", f"{refused[0].hook.name} is refused")
        logger.warning(
            "unickpt: %s %s is not a version that this release knows (%s: %s); %s keeps its own behaviour. "
            "A newer unickpt may know it; %s=1 uses it all the same.",
            framework, version, refused[0].hook.name, refused[0].reason, framework, ALLOW_UNTESTED,
        )  # fmt: skip
        return False
    before = set(_installed)
    try:
        for check in checks:
            _wrap(check)
    except Exception as err:
        for name in set(_installed) - before:
            _restore(name)
        _note(checks, "failed", f"{type(err).__name__}: {err}")
        raise
    return True


def _note(checks: list[HookStatus], state: str, reason: str) -> None:
    """All hooks or none are in place: those without a reason of their own get this one."""
    for check in checks:
        _status[check.hook.name] = HookStatus(check.hook, state, check.reason or reason, check.fingerprint)


def uninstall(hooks: list[Hook]) -> None:
    """Put the framework's own functions back."""
    for hook in hooks:
        if hook.name in _installed:
            _restore(hook.name)
            old = _status[hook.name]
            _status[hook.name] = HookStatus(hook, "removed", "", old.fingerprint)


def _restore(name: str) -> None:
    owner, attribute, original = _installed.pop(name)
    setattr(owner, attribute, original)


def status() -> list[HookStatus]:
    """Every hook that was considered in this process."""
    return list(_status.values())


def _owner(hook: Hook) -> tuple[Any, str]:
    owner: Any = import_module(hook.module)
    *path, attribute = hook.attribute.split(".")
    for part in path:
        owner = getattr(owner, part)
    return owner, attribute


def _check(hook: Hook, version: str) -> HookStatus:
    try:
        owner, attribute = _owner(hook)
        original = inspect.unwrap(getattr(owner, attribute))
        found = fingerprint(original)
        absent = sorted(set(hook.parameters) - set(inspect.signature(original).parameters))
    except (AttributeError, ImportError, OSError, TypeError) as err:
        return HookStatus(hook, "refused", f"{hook.module}.{hook.attribute} cannot be examined ({err})", "")
    if not accepts(hook.versions, version):
        return HookStatus(hook, "refused", f"tested with {hook.versions}", found)
    if absent:
        return HookStatus(hook, "refused", f"{hook.attribute} has no parameter {absent[0]}", found)
    if hook.fingerprints and found not in hook.fingerprints:
        return HookStatus(hook, "refused", f"the source of {hook.attribute} is unknown ({found})", found)
    return HookStatus(hook, "installed", "", found)


def _wrap(check: HookStatus) -> None:
    hook = check.hook
    if hook.name in _installed:
        _status[hook.name] = HookStatus(hook, "installed", check.reason and f"in spite of: {check.reason}", check.fingerprint)
        return
    if hook.name in _in_source:
        _status[hook.name] = HookStatus(hook, "installed", "by the framework's own source", check.fingerprint)
        return
    import wrapt  # 60 ms to import: only when there is a framework to hook into

    owner, attribute = _owner(hook)
    original = owner.__dict__[attribute]
    _installed[hook.name] = (owner, attribute, original)
    setattr(owner, attribute, wrapt.FunctionWrapper(original, hook.wrapper))
    reason = check.reason and f"in spite of: {check.reason}"
    _status[hook.name] = HookStatus(hook, "installed", reason, check.fingerprint)
