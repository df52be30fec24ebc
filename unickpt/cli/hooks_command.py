"""``unickpt hooks status``: whether unickpt acts in the installed frameworks, and with ``--all`` the table of hooks.

The answer comes from the source files of the frameworks. The table needs their import; no other command imports them.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pkgutil import walk_packages
from typing import Any

from unickpt.base import hooks
from unickpt.base.autoload import DEEPSPEED, MEGATRON, TORCH
from unickpt.base.hooks import Hook, HookStatus
from unickpt.cli.doctor import answers, declared, facts, text
from unickpt.cli.doctor.declared import Role
from unickpt.cli.exit_codes import DAMAGED, SOUND
from unickpt.cli.output import Output

JSON_SCHEMA = 1
ADAPTERS = ("ds_unickpt", "megatron_unickpt", "torch_unickpt")
FALLBACKS = "ds_unickpt.framework.fallbacks"

_MARKDOWN_BEGINNING = """\
<!-- Generated, do not edit: unickpt hooks status --markdown > docs/developing/hooks.md -->
# Hooks

The functions of DeepSpeed, transformers, Megatron and torch that unickpt wraps. A hook is installed if the source of its
function is known, whatever the version, and if the function has the parameters that the hook needs. `timing`, `compression`
and `witness` in a name: only if these are enabled. A fingerprint is 12 hex digits of the SHA-256 of the function's source
without comment lines, blank lines and indentation. If it is unknown, "self-test": a
[self-test](../start/install.md#how-it-gets-into-the-framework) at the first use decides. "refused": the hook is not
installed, and one warning says so. "installed": it is, with a version that was tested, and `unickpt hooks status` names it:
it passes calls through, sets an argument, changes the text of an error, or belongs to Megatron-LM, whose users edit the
source. With another version the self-test decides.

| hook | target | tested versions | known fingerprints | unknown source | why | upstream | until |
|---|---|---|---|---|---|---|---|"""


@dataclass(frozen=True, slots=True)
class _Adapter:
    """One adapter package: ``imported``, ``not installed``, or ``failed`` with the error of the framework or the adapter."""

    adapter: str
    framework: str
    framework_version: str | None
    state: str
    reason: str


def run(args: argparse.Namespace, out: Output) -> int:
    """Answer, or print a table. The exit code of an answer is 1 if unickpt acts in no framework here."""
    if args.markdown:
        out.text(_markdown([pair for adapter in ADAPTERS for pair in _roles(adapter)]))
    elif args.fallbacks:
        out.text(
            "\n".join(["| the job uses | why |", "|---|---|", *(f"| {r['feature']} | {r['why']} |" for r in _fallbacks())])
        )
    elif args.declared:
        records = [declared.as_json(hook, role) for adapter in ADAPTERS for hook, role in _roles(adapter)]
        out.json(sorted(records, key=lambda record: str(record["name"])))
    elif args.all or args.json:
        _table(facts.acting(), args, out)
    else:
        known = facts.acting()
        for line in text.acting_lines(known):
            out.line(line)
        out.line("'unickpt hooks status --all' imports the frameworks and lists every hook, 'unickpt doctor' looks further")
        return SOUND if answers.answer(known).acts else DAMAGED
    return SOUND


def _table(known: facts.Acting, args: argparse.Namespace, out: Output) -> None:
    """Import the frameworks, and show every hook."""
    adapters = [
        _import("ds_unickpt", "deepspeed", DEEPSPEED),
        _import("megatron_unickpt", "megatron", MEGATRON),
        _import("torch_unickpt", "torch", TORCH),
    ]
    usable = [_usable(status, adapters) for status in hooks.status()]
    found = sorted([*usable, *_not_installed(usable, adapters)], key=lambda status: status.hook.name)
    fallbacks = _fallbacks() if adapters[0].state == "imported" else []
    answer = answers.answer(known)
    if args.json:
        acts = {"acts": answer.acts, "answer": answer.text}
        documents = {"adapters": [asdict(adapter) for adapter in adapters], "hooks": [_document(status) for status in found]}
        languages = {each.does: "C" if each.installed else "Python" for each in known.extensions}
        out.json({"schema": JSON_SCHEMA, **acts, **documents, "fallbacks": fallbacks, **languages})
        return
    out.line(answer.text)
    _show(out, adapters, found, text.extensions_line(known))
    if fallbacks:
        cells = [[row["feature"], row["why"]] for row in fallbacks]
        out.table(f"jobs that DeepSpeed saves by itself ({len(cells)})", ["the job uses", "why"], cells)


def _fallbacks() -> list[dict[str, str]]:
    """Return what the DeepSpeed adapter does not save, from its table."""
    return [{"feature": row.feature, "why": row.why} for row in import_module(FALLBACKS).FALLBACKS]


def _import(adapter: str, framework: str, installers: dict[str, str]) -> _Adapter:
    if find_spec(framework) is None:
        return _Adapter(adapter, framework, None, "not installed", "")
    try:
        with contextlib.redirect_stdout(sys.stderr):  # frameworks greet; standard output is the table's
            package = import_module(adapter)
            for module, installer in installers.items():
                if _exists(module):
                    import_module(module)
                    _install(module, installer)
            for part in walk_packages(package.__path__, f"{adapter}."):  # hooks import them when a job calls them
                if not part.name.startswith(f"{adapter}.testing"):
                    import_module(part.name)
    except Exception as err:  # whatever a broken installation raises is what the user needs to see
        return _Adapter(adapter, framework, None, "failed", f"{type(err).__name__}: {err}")
    version = getattr(sys.modules.get(framework), "__version__", None)
    return _Adapter(adapter, framework, None if version is None else str(version), "imported", "")


def _install(module: str, installer: str) -> None:
    """Install the hooks that a module lacks: its import swallows an error of the installer, a direct call raises it."""
    if not any(status.hook.module == module and status.state != "failed" for status in hooks.status()):
        place, _, name = installer.partition(":")
        getattr(import_module(place), name)()


def _usable(status: HookStatus, adapters: list[_Adapter]) -> HookStatus:
    """The status of a hook, ``failed`` where its framework or adapter cannot be imported: no job can use it there."""
    for adapter in adapters:
        if adapter.state == "failed" and status.hook.module.partition(".")[0] == adapter.framework:
            return replace(status, state="failed", reason=adapter.reason)
    return status


def _not_installed(known: list[HookStatus], adapters: list[_Adapter]) -> list[HookStatus]:
    """Return the declared hooks without a status: their module is not imported, such as transformers, or an option is off."""
    names = {status.hook.name for status in known}
    found = []
    for adapter in (each.adapter for each in adapters if each.state == "imported"):
        declarations = import_module(f"{adapter}.hooks")
        enabled_by_option = [
            *getattr(declarations, "OPTIONAL", []),
            *_timed(adapter),
        ]
        others = [hook for hook in declarations.DECLARED if hook not in enabled_by_option]
        found += [_without_status(hook) for hook in others if hook.name not in names]
        version = import_module(f"{adapter}.framework.versions").version()
        optional = [hook for hook in enabled_by_option if hook.name not in names]
        found += [replace(hooks.examine(hook, version), state="not enabled") for hook in optional]
    return found


def _without_status(hook: Hook) -> HookStatus:
    reason = (
        "the hook is installed when a program imports that module"
        if _exists(hook.module)
        else f"{hook.module} is not installed"
    )
    return HookStatus(hook, "not imported", reason, "")


def _declared(adapter: str) -> list[Hook]:
    declared: list[Hook] = import_module(f"{adapter}.hooks").DECLARED
    return [*declared, *_timed(adapter)]


def _timed(adapter: str) -> list[Hook]:
    """Return the hooks of an adapter that the timing of collectives needs."""
    if find_spec(f"{adapter}.measuring") is None:
        return []
    found: list[Hook] = import_module(f"{adapter}.measuring.timing").all_timing_hooks()
    return found


def _roles(adapter: str) -> list[tuple[Hook, Role]]:
    """Return the hooks that an adapter declares, each with what a job loses without it."""
    declarations = import_module(f"{adapter}.hooks")
    roles: dict[str, Role] = {hook.name: Role.BESIDE for hook in declarations.DECLARED}
    roles |= {hook.name: Role.NEEDED for hook in declarations.NEEDED}
    roles |= {hook.name: Role.OPTION for hook in (*getattr(declarations, "OPTIONAL", ()), *_timed(adapter))}
    return [(hook, roles[hook.name]) for hook in _declared(adapter)]


def _exists(module: str) -> bool:
    """Whether a framework has this module (a release may lack one; megatron-core's wheel has no training scripts)."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _target(status: HookStatus) -> str:
    return f"{status.hook.module}.{status.hook.attribute}"


def _document(status: HookStatus) -> dict[str, Any]:
    hook = status.hook
    return {
        "name": hook.name,
        "target": _target(status),
        "versions": str(hook.versions),
        "known_fingerprints": sorted(hook.fingerprints),
        "fingerprint": status.fingerprint or None,
        "state": status.state,
        "reason": status.reason,
        "why": hook.why,
        "upstream": hook.upstream,
        "until": hook.until,
    }


def _show(out: Output, adapters: list[_Adapter], found: list[HookStatus], extensions: str) -> None:
    for adapter in adapters:
        version = f" {adapter.framework_version}" if adapter.framework_version else ""
        reason = f": {adapter.reason}" if adapter.reason else ""
        out.line(f"{adapter.framework}{version} ({adapter.adapter}): {adapter.state}{reason}")
    out.line(extensions)
    rows = [
        [s.hook.name, _target(s), str(s.hook.versions), s.fingerprint or "-", s.state + (f": {s.reason}" if s.reason else "")]
        for s in found
    ]
    out.table(f"hooks ({len(rows)})", ["name", "target", "tested versions", "fingerprint", "state"], rows)


def _markdown(roles: list[tuple[Hook, Role]]) -> str:
    """Depends on the declarations alone, not on what is installed where it is made."""
    lines = [_MARKDOWN_BEGINNING]
    for hook, role in sorted(roles, key=lambda pair: pair[0].name):
        code = [hook.name, f"{hook.module}.{hook.attribute}", str(hook.versions), *sorted(hook.fingerprints)]
        name, target, versions, *fingerprints = (f"`{text}`" for text in code)
        unknown = "installed" if not hook.strict else "refused" if role is Role.OPTION else "self-test"
        cells = [name, target, versions, ", ".join(fingerprints) or "-", unknown, hook.why, f"<{hook.upstream}>", hook.until]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)
