"""Registry of hooks: the only way in which this package changes a framework's modules.

A hook declares the function that it wraps, the tested versions, the fingerprints of the tested source, the reason and
the condition for its removal. What counts is the source: DeepSpeed changed ``load_checkpoint`` ten times in 65 releases,
also in patch releases, and left it alone in most of them.

- The source is known: the hook is installed, whatever the version.
- The source has changed: the hook waits for a self-test at its first use (``settle``). If the test fails, the framework
  keeps its own behaviour, and one warning says so. Users edit the source of Megatron-LM, so for a tested version of it a
  changed source is noted in the status and the hook is installed.
- The function, or a parameter that the hook relies on, is not there: the framework keeps its own behaviour.

``UNICKPT_REQUIRE=1`` makes each of these refusals an error.
"""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from unickpt.base.errors import UnsupportedFrameworkError
from unickpt.base.logs import logger

ALLOW_UNTESTED = "UNICKPT_ALLOW_UNTESTED"
REQUIRE = "UNICKPT_REQUIRE"
ALL = "no universal checkpoints, no resume under another layout, no diagnosis"


Verify = Callable[[str, list[str]], str]  # (version, fingerprints of unknown source) -> why hooks cannot be used, or ''


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
        strict: an unknown source needs a self-test. False: it is noted in the status, at least for a tested version.
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
        state: ``installed``, ``unverified`` (the source is unknown; a self-test at the first use decides), ``refused``,
            ``failed`` (an error on installation), ``removed``. ``unickpt hooks status`` also has ``not imported`` (the module
            of the function is not imported) and ``not enabled`` (timing or compression is off; the reason names what enabling
            it would refuse or note).
        reason: reason of the state, or ''.
        fingerprint: fingerprint of the framework's function, or '' if its source is not available.
        framework: name of the framework, once ``install`` has run.
    """

    hook: Hook
    state: str
    reason: str
    fingerprint: str
    framework: str = ""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Hooks that a self-test decides about."""

    version: str
    verify: Verify
    names: frozenset[str]


_installed: dict[str, tuple[Any, str, Any]] = {}
_in_source: set[str] = set()
_status: dict[str, HookStatus] = {}
_waiting: dict[str, _Waiting] = {}  # by framework
_refused: dict[str, str] = {}  # framework -> why its self-test failed


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


def install(hooks: list[Hook], *, framework: str, version: str, verify: Verify | None = None, lost: str = ALL) -> bool:
    """Install all hooks of an adapter, or none.

    Args:
        framework, version: for messages, and for ``settle``.
        verify: self-test of hooks of unknown source. It runs at the first ``settle``. None: such hooks are refused if they
            are strict.
        lost: what a job lacks without the hooks. Jobs that need unickpt can go on without anything but ``ALL``.

    Returns:
        Whether the hooks are installed, perhaps until ``settle`` removes them. If not, one warning has the reason.

    Raises:
        UnsupportedFrameworkError: they are refused, and the environment requires them.
        Exception: the installation failed, for example because wrapt cannot be imported. No hook is installed then.
    """
    checks = [_decided(examine(hook, version), verify is not None) for hook in hooks]
    refused = [check for check in checks if check.state == "refused"]
    reason = _refused.get(framework, "") or (f"{refused[0].hook.name}: {refused[0].reason}" if refused else "")
    if reason and os.environ.get(ALLOW_UNTESTED) != "1":
        _note(checks, "refused", f"{refused[0].hook.name} is refused" if refused else reason)
        _complain(framework, version, reason, lost)
        return False
    before = set(_installed)
    try:
        for check in checks:
            _wrap(check, framework)
    except Exception as err:
        for name in set(_installed) - before:
            _restore(name)
        _note(checks, "failed", f"{type(err).__name__}: {err}")
        raise
    unverified = {check.hook.name for check in checks if _status[check.hook.name].state == "unverified"}
    if unverified and verify is not None:
        others = _waiting[framework].names if framework in _waiting else frozenset()
        _waiting[framework] = _Waiting(version, verify, others | unverified)
    return True


def _decided(check: HookStatus, verifiable: bool) -> HookStatus:
    """Return a check without ``unverified`` if there is no self-test."""
    if check.state != "unverified" or verifiable:
        return check
    return replace(check, state="refused" if check.hook.strict else "installed")


def settle(framework: str, agree: Callable[[str], str] = str) -> str:
    """Run the self-test of a framework's hooks if their source is unknown. Call it before their first use.

    Args:
        agree: takes this rank's reason, and returns that of any rank, or ''. All ranks call it.

    Returns:
        '' if the hooks can be used. Otherwise the reason; the framework has its own functions again, and the hooks that other
        modules of it hold pass calls through.

    Raises:
        UnsupportedFrameworkError: the self-test failed, and the environment requires the hooks.
    """
    waiting = _waiting.pop(framework, None)
    if waiting is None:
        return _refused.get(framework, "")
    found = [_status[name] for name in sorted(waiting.names)]
    reason = agree(waiting.verify(waiting.version, [check.fingerprint for check in found]))
    for check in found:
        _status[check.hook.name] = replace(check, state="installed", reason=f"{check.reason}; its self-test has passed")
    if reason:
        _refused[framework] = reason
        for check in [check for check in _status.values() if check.framework == framework and check.hook.name in _installed]:
            _restore(check.hook.name)
            _status[check.hook.name] = replace(check, state="refused", reason=reason)
        _complain(framework, waiting.version, reason, ALL)
    return reason


def unsettled(framework: str) -> bool:
    """Return whether ``settle`` has something to decide."""
    return framework in _waiting


def self_test(module: str, framework: str) -> Verify:
    """Return the self-test of an adapter, for ``install``. ``module``: see ``unickpt.base.self_test.verified``."""

    def verify(version: str, fingerprints: list[str]) -> str:
        from unickpt.base.self_test import verified  # rarely needed

        logger.warning(
            "unickpt: %s %s was not tested, and functions that unickpt wraps have changed. A self-test runs now.",
            framework, version,
        )  # fmt: skip
        try:
            return verified(module, framework, version, fingerprints)
        except Exception as err:  # training goes on without the hooks
            return f"its self-test cannot run ({type(err).__name__}: {err}). Let UNICKPT_CACHE name a folder of a local disk"

    return verify


def refuse_switched_off() -> None:
    """Raise UnsupportedFrameworkError: the environment requires unickpt, and has switched it off."""
    off = f"UNICKPT_AUTOLOAD={os.environ.get('UNICKPT_AUTOLOAD', '')}"
    raise UnsupportedFrameworkError(
        f"{REQUIRE}=1 and {off} are set: this job requires unickpt, which is switched off. Unset UNICKPT_AUTOLOAD, or import "
        "ds_unickpt or megatron_unickpt before the framework"
    )


def _complain(framework: str, version: str, reason: str, lost: str) -> None:
    """Warn that hooks are refused.

    Raises:
        UnsupportedFrameworkError: the environment requires them.
    """
    text = (
        f"this release was not tested with {framework} {version} ({reason}); {framework} keeps its own behaviour: {lost}. "
        f"Upgrade unickpt, or pin {framework} to a version that it was tested with (unickpt hooks status). "
        f"{ALLOW_UNTESTED}=1 uses unickpt anyway, {REQUIRE}=1 makes this an error."
    )
    if os.environ.get(REQUIRE) == "1" and lost == ALL:
        raise UnsupportedFrameworkError(text)
    logger.warning("unickpt: %s", text)


def _note(checks: list[HookStatus], state: str, reason: str) -> None:
    """Set the status of all hooks. A check without its own reason gets ``reason``."""
    for check in checks:
        _status[check.hook.name] = replace(check, state=state, reason=check.reason or reason)


def uninstall(hooks: list[Hook]) -> None:
    """Restore the functions of the framework."""
    for hook in hooks:
        if hook.name in _installed:
            _restore(hook.name)
            _status[hook.name] = replace(_status[hook.name], state="removed", reason="")


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
    """Return what ``install`` would do with a hook, ``installed``, ``unverified`` or ``refused``, without installing it."""
    try:
        owner, attribute = _owner(hook)
        original = _undecorated(getattr(owner, attribute), attribute)
        found = fingerprint(original)
        absent = sorted(set(hook.parameters) - set(inspect.signature(original).parameters))
    except (AttributeError, ImportError, OSError, TypeError) as err:
        return HookStatus(hook, "refused", f"{hook.module}.{hook.attribute} cannot be examined ({err})", "")
    if absent:
        return HookStatus(hook, "refused", f"{hook.attribute} has no parameter {absent[0]}", found)
    return HookStatus(hook, *judged(hook, version, found), found)


def judged(hook: Hook, version: str, found: str) -> tuple[str, str]:
    """Return state and reason of a hook whose function has the fingerprint ``found``."""
    tested = accepts(hook.versions, version)
    if not hook.fingerprints or found in hook.fingerprints:
        return "installed", "" if tested else f"{version} is not tested ({hook.versions} is), but the source is the same"
    reason = f"the source of {hook.attribute} is unknown ({found})"
    return ("installed" if tested and not hook.strict else "unverified"), reason


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


def _wrap(check: HookStatus, framework: str) -> None:
    hook = check.hook
    if os.environ.get(ALLOW_UNTESTED) == "1" and check.state != "installed":
        check = replace(check, state="installed", reason=f"despite: {check.reason}")
    check = replace(check, framework=framework)
    if hook.name not in _installed and hook.name in _in_source:
        check = replace(check, reason="by the framework's own source")
    elif hook.name not in _installed:
        import wrapt  # takes 60 ms, so only if there is a hook to install

        owner, attribute = _owner(hook)
        original = owner.__dict__[attribute]
        _installed[hook.name] = (owner, attribute, original)
        wrapper = hook.wrapper if check.state == "installed" else _until_refused(hook.wrapper, framework)
        setattr(owner, attribute, wrapt.FunctionWrapper(original, wrapper))
    _status[hook.name] = check


def _until_refused(wrapper: Callable[..., Any], framework: str) -> Callable[..., Any]:
    """Return a wrapper that passes calls through after its framework is refused. Modules may hold it by name."""

    def wrapper_or_function(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        if framework in _refused:
            return wrapped(*args, **kwargs)
        return wrapper(wrapped, instance, args, kwargs)

    return wrapper_or_function
