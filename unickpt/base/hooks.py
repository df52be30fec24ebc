"""Registry of hooks: the only way in which this package changes a framework's modules.

A hook declares the function that it wraps, the tested versions, the fingerprints of the tested source, the reason and
the condition for its removal. A version range alone is not sufficient: DeepSpeed changed ``load_checkpoint`` ten times
in 65 releases, also in patch releases. So the source is checked by a fingerprint too. Users edit the source of
Megatron-LM, so its hooks rely only on parameter names, and an unknown source is noted in the status. On an unknown
version the framework keeps its own behaviour, and one warning is logged.
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
    """Declaration of one wrapped function of a framework.

    Attributes:
        name: short name.
        module, attribute: location of the function, such as ``package.module`` and ``Class.method``.
        wrapper: ``wrapper(wrapped, instance, args, kwargs)``, as wrapt calls it.
        versions: tested framework versions.
        fingerprints: fingerprints of the tested source.
        parameters: parameter names that the wrapper relies on.
        strict: refuse an unknown source. False: note it in the status and install the hook.
        why: reason for the hook.
        upstream: related issue or proposal of the framework.
        until: condition for the removal of the hook.
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
    strict: bool = True


@dataclass(frozen=True, slots=True)
class HookStatus:
    """State of one hook in this process.

    Attributes:
        state: ``installed``, ``refused`` (the version or the source is unknown), ``failed`` (an error on installation),
            ``removed``. ``unickpt hooks status`` also has ``not imported`` (the module of the function is not imported) and
            ``not enabled`` (timing or compression is off; the reason names what enabling it would refuse or note).
        reason: reason of the state, or ''.
        fingerprint: fingerprint of the framework's function, or '' if its source is not available.
    """

    hook: Hook
    state: str
    reason: str
    fingerprint: str


_installed: dict[str, tuple[Any, str, Any]] = {}
_in_source: set[str] = set()
_status: dict[str, HookStatus] = {}


def in_source(adapter: str, name: str) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator for a patched framework. It replaces the run-time installation of the hook of this name.

    ``adapter``: module with the list ``DECLARED`` of hooks. It is imported on the first call of the function.
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
    """Return a hash (12 hex digits) of the source of a function without comment lines, blank lines and indentation."""
    return fingerprint_of_source(inspect.getsource(function))


def fingerprint_of_source(source: str) -> str:
    """Return the ``fingerprint`` of a function given as source text. It does not depend on the Python version."""
    lines = (line.strip() for line in source.splitlines())
    text = "\n".join(line for line in lines if line and not line.startswith("#"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def accepts(versions: SpecifierSet, version: str) -> bool:
    """Return whether a version is in the tested range. Local build suffixes are ignored; development builds count."""
    try:
        return versions.contains(Version(version).public, prereleases=True)
    except InvalidVersion:
        return False


def install(hooks: list[Hook], *, framework: str, version: str) -> bool:
    """Install all hooks of an adapter, or none.

    Returns:
        Whether the hooks are installed. If not, one warning has the reason.

    Raises:
        Exception: the installation failed, for example because wrapt cannot be imported. No hook is installed then.
    """
    checks = [examine(hook, version) for hook in hooks]
    refused = [check for check in checks if check.state == "refused"]
    if refused and os.environ.get(ALLOW_UNTESTED) != "1":
        _note(checks, "refused", f"{refused[0].hook.name} is refused")
        logger.warning(
            "unickpt: this release was not tested with %s %s (%s: %s); %s keeps its own behaviour. "
            "Upgrade unickpt, or set %s=1 to use it with this version anyway.",
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
    """Set the status of all hooks. A check without its own reason gets ``reason``."""
    for check in checks:
        _status[check.hook.name] = HookStatus(check.hook, state, check.reason or reason, check.fingerprint)


def uninstall(hooks: list[Hook]) -> None:
    """Restore the functions of the framework."""
    for hook in hooks:
        if hook.name in _installed:
            _restore(hook.name)
            old = _status[hook.name]
            _status[hook.name] = HookStatus(hook, "removed", "", old.fingerprint)


def _restore(name: str) -> None:
    owner, attribute, original = _installed.pop(name)
    setattr(owner, attribute, original)


def status() -> list[HookStatus]:
    """Return the status of every hook that was checked in this process."""
    return list(_status.values())


def _owner(hook: Hook) -> tuple[Any, str]:
    owner: Any = import_module(hook.module)
    *path, attribute = hook.attribute.split(".")
    for part in path:
        owner = getattr(owner, part)
    return owner, attribute


def examine(hook: Hook, version: str) -> HookStatus:
    """Return what ``install`` would do with a hook, ``installed`` or ``refused``, without installing it."""
    try:
        owner, attribute = _owner(hook)
        original = _undecorated(getattr(owner, attribute), attribute)
        found = fingerprint(original)
        absent = sorted(set(hook.parameters) - set(inspect.signature(original).parameters))
    except (AttributeError, ImportError, OSError, TypeError) as err:
        return HookStatus(hook, "refused", f"{hook.module}.{hook.attribute} cannot be examined ({err})", "")
    if not accepts(hook.versions, version):
        return HookStatus(hook, "refused", f"tested with {hook.versions}", found)
    if absent:
        return HookStatus(hook, "refused", f"{hook.attribute} has no parameter {absent[0]}", found)
    if hook.fingerprints and found not in hook.fingerprints:
        state = "refused" if hook.strict else "installed"
        return HookStatus(hook, state, f"the source of {hook.attribute} is unknown ({found})", found)
    return HookStatus(hook, "installed", "", found)


def _undecorated(function: Any, name: str) -> Any:
    """Return the function below its decorators.

    DeepSpeed's ``instrument_w_nvtx`` lacks ``functools.wraps``: the function is only in the closure of its wrapper.
    """
    found = inspect.unwrap(function)
    while getattr(found, "__name__", name) != name:
        held = [cell.cell_contents for cell in getattr(found, "__closure__", None) or ()]
        below = [value for value in held if inspect.isfunction(value) and value.__name__ == name]
        if len(below) != 1:
            break
        found = inspect.unwrap(below[0])
    return found


def _wrap(check: HookStatus) -> None:
    hook = check.hook
    reason = check.reason and (f"despite: {check.reason}" if check.state == "refused" else check.reason)
    if hook.name in _installed:
        _status[hook.name] = HookStatus(hook, "installed", reason, check.fingerprint)
        return
    if hook.name in _in_source:
        _status[hook.name] = HookStatus(hook, "installed", "by the framework's own source", check.fingerprint)
        return
    import wrapt  # takes 60 ms, so only if there is a hook to install

    owner, attribute = _owner(hook)
    original = owner.__dict__[attribute]
    _installed[hook.name] = (owner, attribute, original)
    setattr(owner, attribute, wrapt.FunctionWrapper(original, hook.wrapper))
    _status[hook.name] = HookStatus(hook, "installed", reason, check.fingerprint)
