"""Facts and answers as lines of text and as one JSON document. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from unickpt.cli.doctor.answers import Action, answer
from unickpt.cli.doctor.declared import Role
from unickpt.cli.doctor.facts import Acting, Facts
from unickpt.cli.doctor.frameworks import Framework
from unickpt.cli.doctor.masking import document_without_secrets, variable, without_secrets

JSON_SCHEMA = 1
_GIB = 1 << 30


def acting_lines(known: Acting) -> list[str]:
    """Return what ``unickpt hooks status`` prints: the answer first."""
    switch = [] if known.autoload.works else [_autoload(known)]
    hooks = _frameworks(known)
    return [answer(known).text, *hooks, extensions_line(known), *switch]


def extensions_line(known: Acting) -> str:
    """Return which extensions are installed, and what is slower without the others."""
    return f"extensions: {_extensions(known)}"


def _frameworks(known: Acting) -> list[str]:
    """Return one line for each framework."""
    return [_framework(each, "act" if known.autoload.works else "would act") for each in known.frameworks]


def _framework(found: Framework, act: str) -> str:
    if found.problem:
        return f"{found.title}: {found.problem}"
    acting = [hook for hook in found.hooks if hook.state == "acts" and hook.role is not Role.OPTION]
    noted = [hook.name for hook in acting if hook.reason]
    parts = [f"{len(acting)} hooks {act}" if found.acts else "no hook acts"]
    if noted and found.acts:
        parts.append(f"{len(noted)} of them on a source that was not tested: {', '.join(noted)}")
    if found.unverified:
        parts.append(f"{len(found.unverified)} wait for a self-test at the first use")
    parts += [f"{hook.name} is refused: {hook.reason}" for hook in found.refused]
    absent = [hook for hook in found.hooks if hook.state == "absent" and hook.role is Role.NEEDED]
    if absent:
        packages = sorted({".".join(hook.module.split(".")[:2]) for hook in absent})
        parts.append(f"{len(absent)} more are for {', '.join(packages)}, not installed here")
    return f"{found.title}: {'; '.join(parts)}"


def _extensions(known: Acting) -> str:
    there = [each.does for each in known.extensions if each.installed]
    missing = [
        f"{each.does} ({'built before a change; ' * each.old}{each.without})" for each in known.extensions if not each.installed
    ]
    return "; ".join([f"{', '.join(there)} in C" if there else "none", *([f"not {', '.join(missing)}"] if missing else [])])


def _autoload(known: Acting) -> str:
    registered = "registered" if known.autoload.registered else "not registered"
    return f"entry point of torch.backends: {registered}" + (f", off by {known.autoload.off}" if known.autoload.off else "")


def lines(facts: Facts, found: Sequence[Action]) -> list[str]:
    """Return the text of ``unickpt doctor``, without secrets: five lines, what to do, then the facts."""
    return [without_secrets(line) for line in (*_first(facts, found), *_sections(facts))]


def _first(facts: Facts, found: Sequence[Action]) -> Iterator[str]:
    needed = sum(action.needed for action in found)
    advised = len(found) - needed
    counts = [f"{needed} needed" * (needed > 0), f"{advised} advised" * (advised > 0)]
    todo = ", ".join(filter(None, counts)) or "nothing"
    yield f"active:     {answer(facts.acting).text}"
    yield f"for:        {'; '.join(_frameworks(facts.acting)) or 'no framework'}"
    yield f"extensions: {_extensions(facts.acting)}"
    yield f"storage:    {_storage(facts)}"
    yield f"to do:      {todo}"
    for number, action in enumerate(found, 1):
        yield f"  {number}. {'' if action.needed else '(advised) '}{action.text}"


def _storage(facts: Facts) -> str:
    place = facts.place
    stores = ", ".join(f"{name} {version}" for name, version in facts.drivers.items()) or "no driver of object stores"
    if place is None:
        return f"not tried, name a folder or URL: unickpt doctor FOLDER; {stores}"
    if place["problem"]:
        return f"{place.get('tried', '')} cannot be written: {place['problem']}; {stores}"
    direct = {None: "", True: ", O_DIRECT", False: ", no O_DIRECT"}[place["direct"]]
    free = "" if place["free_bytes"] is None else f", {_size(place['free_bytes'])} free"
    above = " (the folder itself does not exist yet)" if place["exists"] is False else ""
    return f"{place['tried']} can be written{above}: {place['filesystem'] or 'unknown file system'}{direct}{free}; {stores}"


def _sections(facts: Facts) -> Iterator[str]:
    machine, clock, torch = facts.machine, facts.machine.clock, facts.torch
    yield from ("", "versions")
    yield from (f"  {name} {version}" for name, version in facts.versions.items())
    yield from ("", "machine", f"  {machine.system}", f"  memory {_size(machine.memory_bytes)}")
    shared = (
        "none" if machine.shared_bytes is None else f"{_size(machine.shared_bytes)}, {_size(machine.shared_free_bytes)} free"
    )
    yield f"  /dev/shm {shared}"
    yield f"  locked memory: {'no limit' if machine.memlock_bytes is None else _size(machine.memlock_bytes)}"
    kept = {None: "synchronisation unknown", True: "synchronised", False: "not synchronised"}[clock.synchronised]
    error = "" if clock.error_ms is None else f", error below {clock.error_ms:,.1f} ms"
    yield f"  clock: {clock.source or 'unknown source'}, {kept}{error}"
    yield f"  driver: {machine.driver or 'none of NVIDIA'}"
    read, closed = (", ".join(name for name, told in machine.told.items() if told is is_read) for is_read in (True, False))
    yield f"  hardware tells by: {read or 'nothing'}" + (f"; not by: {closed}" if closed else "")
    yield from ("", "torch")
    if "problem" in torch:
        yield f"  {torch['problem']}"
    else:
        yield f"  GPUs: {', '.join(_counted(torch['devices'])) or 'none'}"
        yield f"  CUDA {torch['cuda'] or 'none'}, HIP {torch['hip'] or 'none'}, NCCL {torch['nccl'] or 'none'}"
        yield f"  backends of torch.distributed: {', '.join(torch['backends']) or 'none'}"
        yield f"  {_autoload(facts.acting)}; its import {'arms' if torch['armed'] else 'does not arm'} unickpt"
    yield from ("", "hooks")
    yield from (
        f"  {line} ({each.folder})" for line, each in zip(_frameworks(facts.acting), facts.acting.frameworks, strict=True)
    )
    yield from ("", "variables")
    yield from (f"  {name}={variable(name, value)}" for name, value in facts.variables.items())


def _counted(names: Sequence[str]) -> list[str]:
    return [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]


def _size(size_bytes: int | None) -> str:
    if size_bytes is None:
        return ""
    return f"{size_bytes / _GIB:,.1f} GiB" if size_bytes >= _GIB else f"{size_bytes / (1 << 20):,.0f} MiB"


def document(facts: Facts, found: Sequence[Action]) -> dict[str, Any]:
    """Return the JSON document of ``unickpt doctor``, without secrets."""
    made = {
        "schema": JSON_SCHEMA,
        "sound": not any(action.needed for action in found),
        "active": asdict(answer(facts.acting)),
        "to_do": [{"kind": action.kind.value, "needed": action.needed, "text": action.text} for action in found],
        **acting_document(facts.acting),
        "versions": facts.versions,
        "drivers": facts.drivers,
        "machine": asdict(facts.machine),
        "torch": facts.torch,
        "place": facts.place,
    }
    shown: dict[str, Any] = document_without_secrets(made)
    return {**shown, "variables": {name: variable(name, value) for name, value in facts.variables.items()}}


def acting_document(known: Acting) -> dict[str, Any]:
    """Return the hooks, the entry point and the extensions as members of a JSON document."""
    return {
        "frameworks": [
            {
                "name": each.name, "version": each.version or None, "folder": each.folder, "acts": each.acts,
                "problem": each.problem,
                "hooks": [{**asdict(hook), "role": hook.role.value} for hook in each.hooks],
            }
            for each in known.frameworks
        ],
        "autoload": asdict(known.autoload),
        "extensions": {each.does: each.installed for each in known.extensions},
    }  # fmt: skip
