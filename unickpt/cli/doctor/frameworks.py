"""Which hooks would act in the installed frameworks: by their versions and the source files of the wrapped functions."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from unickpt.base.hook_sources import FunctionSource, SourceTree, from_folders
from unickpt.base.hooks import ALLOW_UNTESTED, Hook, fingerprint_of_source, judged
from unickpt.base.self_test import last_result
from unickpt.cli.doctor.declared import DeclaredHook, Role

# package -> its name in sentences, the distribution that has it, and its name in self-tests
_NAMES = {
    "deepspeed": ("DeepSpeed", "deepspeed", "DeepSpeed"),
    "megatron": ("megatron-core", "megatron-core", "Megatron"),
    "transformers": ("transformers", "transformers", "transformers"),
    "torch": ("PyTorch", "torch", "torch"),
}
ADAPTERS = {"deepspeed": "ds_unickpt", "megatron": "megatron_unickpt", "torch": "torch_unickpt"}


@dataclass(frozen=True, slots=True)
class ExaminedHook:
    """What a job would do with a hook.

    Attributes:
        name: of the hook.
        module: of the framework, which has the function.
        role: what a job loses without it.
        state: ``acts``, ``unverified`` (the source has changed; a self-test at the first use decides), ``refused``, or
            ``absent`` if this installation does not have the module or the function.
        reason: why it is refused, or what is noted; '' if nothing is.
    """

    name: str
    module: str
    role: Role
    state: str
    reason: str


@dataclass(frozen=True, slots=True)
class Framework:
    """An installed framework.

    Attributes:
        package: name of its package.
        name: its name in sentences.
        version: '' if unknown.
        folder: where its package is.
        hooks: what a job would do with the declared hooks.
        problem: why its files cannot be read, or ''.
    """

    package: str
    name: str
    version: str
    folder: str
    hooks: tuple[ExaminedHook, ...]
    problem: str = ""

    @property
    def acts(self) -> bool:
        """Whether unickpt acts in it: some needed hook does, and none is refused."""
        needed = {hook.state for hook in self.hooks if hook.role is Role.NEEDED}
        return not self.problem and bool(needed & {"acts", "unverified"}) and "refused" not in needed

    @property
    def refused(self) -> list[ExaminedHook]:
        """The hooks that are refused."""
        return [hook for hook in self.hooks if hook.state == "refused"]

    @property
    def unverified(self) -> list[ExaminedHook]:
        """The hooks that a self-test decides about."""
        return [hook for hook in self.hooks if hook.state == "unverified"]

    @property
    def title(self) -> str:
        """Name and version."""
        return f"{self.name} {self.version or 'of unknown version'}"


def installed(declared: Sequence[DeclaredHook]) -> list[Framework]:
    """Return the installed frameworks. Hooks on transformers belong to those on DeepSpeed."""
    places = {package: folders_of(package) for package in _NAMES}
    found = [framework(package, folders, declared) for package, folders in places.items() if folders]
    with_deepspeed = any(each.package == "deepspeed" and each.acts for each in found)
    return [each for each in found if each.package in ADAPTERS or with_deepspeed]


def folders_of(package: str) -> list[Path]:
    """Return the folders in which the modules of a package are found, without an import. A namespace has several."""
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        return []
    return [] if spec is None else [Path(each) for each in spec.submodule_search_locations or ()]


def framework(package: str, folders: Sequence[Path], declared: Sequence[DeclaredHook]) -> Framework:
    """Return what a job would do with the hooks on a framework.

    Args:
        package: its name.
        folders: where its modules are.
        declared: hooks, also of other frameworks.
    """
    name, distribution, tested_as = _NAMES[package]
    tree = SourceTree(from_folders([folder.parent for folder in folders]))
    try:
        version = _version(tree, package, distribution)
        own = [each for each in declared if each.hook.module.partition(".")[0] == package]
        hooks = _settled(tuple(_examined(each, version, tree) for each in own), tested_as, version)
    except (OSError, SyntaxError, ValueError) as err:
        return Framework(package, name, "", str(folders[0]), (), f"{type(err).__name__}: {err}")
    return Framework(package, name, version, str(folders[0]), hooks)


def _version(tree: SourceTree, package: str, distribution: str) -> str:
    """Return the version by the file that the adapter reads too, otherwise by the metadata of the installation."""
    if package == "deepspeed":
        version = tree.constants("deepspeed.git_version_info_installed").get("version")
    elif package == "megatron":
        known = tree.constants("megatron.core.package_info")
        parts = [known.get(part) for part in ("MAJOR", "MINOR", "PATCH")]
        version = None if None in parts else ".".join(map(str, parts)) + str(known.get("PRE_RELEASE", ""))
    else:
        version = None
    if version is not None:
        return str(version)
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _examined(declared: DeclaredHook, version: str, tree: SourceTree) -> ExaminedHook:
    hook = declared.hook
    if not tree.has(hook.module):
        return ExaminedHook(hook.name, hook.module, declared.role, "absent", f"{hook.module} is not installed")
    source = tree.function(hook.module, hook.attribute)
    if source is None and declared.role is not Role.NEEDED:  # a version without the function needs no hook on it
        return ExaminedHook(hook.name, hook.module, declared.role, "absent", f"{hook.module} has no {hook.attribute}")
    state, reason = examined(hook, version, source, declared.role)
    if state in ("refused", "unverified") and os.environ.get(ALLOW_UNTESTED) == "1":
        state, reason = "acts", f"despite: {reason}"
    return ExaminedHook(hook.name, hook.module, declared.role, state, reason)


def examined(hook: Hook, version: str, source: FunctionSource | None, role: Role) -> tuple[str, str]:
    """Return state and reason of a hook on a function, as an installation of the hook decides."""
    if source is None:
        return "refused", f"{hook.module}.{hook.attribute} is not there"
    absent = sorted(set(hook.parameters) - set(source.parameters))
    if absent:
        return "refused", f"{hook.attribute} has no parameter {absent[0]}"
    state, reason = judged(hook, version, fingerprint_of_source(source.text))
    if state == "unverified" and (role is Role.OPTION or (role is Role.BESIDE and not hook.strict)):  # without a self-test
        state = "refused" if hook.strict else "installed"
    return "acts" if state == "installed" else state, reason


def _settled(hooks: tuple[ExaminedHook, ...], framework: str, version: str) -> tuple[ExaminedHook, ...]:
    """Return the hooks with the result of the last self-test, if there was one."""
    result = last_result(framework, version) if any(hook.state == "unverified" for hook in hooks) else None
    if result is None:
        return hooks
    state, reason = ("refused", result) if result else ("acts", "its self-test has passed")
    return tuple(replace(hook, state=state, reason=reason) if hook.state == "unverified" else hook for hook in hooks)
