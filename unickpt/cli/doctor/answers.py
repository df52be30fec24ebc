"""What the facts mean: whether unickpt acts, and what to do. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from unickpt.base.errors import ConfigError
from unickpt.base.installation import build_command
from unickpt.base.switch import VARIABLE, switch
from unickpt.cli.doctor.facts import Acting, Facts
from unickpt.cli.doctor.frameworks import ADAPTERS, Framework
from unickpt.cli.doctor.installation import Autoload
from unickpt.diagnosis.hardware.sources import DECISIVE

SMALL_SHARED_BYTES = 1 << 30
_LOST_WITH_ITS_HOST = ("tmpfs", "ramfs", "overlay")


class Kind(str, Enum):
    """What an action concerns."""

    ENTRY_POINT = "entry point"
    SWITCHED_OFF = "switched off"
    FRAMEWORK = "framework"
    TORCH = "torch"
    STORAGE = "storage"
    EXTENSION = "extension"
    SHARED_MEMORY = "shared memory"
    CLOCK = "clock"
    HARDWARE = "hardware"


@dataclass(frozen=True, slots=True)
class Action:
    """Something to do.

    Attributes:
        kind: what it concerns.
        needed: without it something does not work; False if something is worse.
        text: what is so, and what to do.
    """

    kind: Kind
    needed: bool
    text: str


@dataclass(frozen=True, slots=True)
class Answer:
    """Whether unickpt acts in a framework here, in one sentence that begins with yes or no."""

    acts: bool
    text: str


def answer(known: Acting) -> Answer:
    """Return whether unickpt acts in a framework, and in which."""
    adapted = [each for each in known.frameworks if each.package in ADAPTERS]
    acting = [each for each in adapted if each.acts]
    others = [f"{each.title} ({_why_not(each)})" for each in adapted if not each.acts]
    if not adapted:
        return Answer(
            False, "no: neither DeepSpeed nor megatron-core is installed; commands and the Python API work without them"
        )
    if not acting:
        return Answer(False, f"no: it does not act in {' and '.join(others)}")
    names = " and ".join(each.title for each in acting)
    if not known.autoload.works:
        return Answer(False, f"no: {_off(known.autoload, acting)}")
    tested = " and ".join(each.title for each in acting if each.unverified)
    rest = f"; in {tested} after a self-test at its first use, because functions have changed" if tested else ""
    rest += f"; not in {' and '.join(others)}" if others else ""
    return Answer(True, f"yes: unickpt acts in {names}, {_jobs(known.switch)}{rest}")


def _jobs(given: str) -> str:
    """Return in which jobs unickpt acts, by the value of the switch."""
    try:
        all_jobs = switch({VARIABLE: given}).saves
    except ConfigError as err:
        return f"but no job starts: {err}"
    if all_jobs:
        return f"in all jobs whose configuration does not say otherwise ({VARIABLE}={given})"
    return "in jobs whose configuration asks for it"


def _off(autoload: Autoload, frameworks: Sequence[Framework]) -> str:
    imports = " or ".join(f"'import {ADAPTERS[each.package]}'" for each in frameworks)
    if autoload.off:
        return f"{autoload.off} switches it off. If that is not on purpose, unset it; {imports} in a program switches it on"
    return (
        "no installation of unickpt in this Python has registered the entry point that PyTorch calls; install the package, "
        f"or add {imports} to the program"
    )


def _why_not(framework: Framework) -> str:
    if framework.problem:
        return framework.problem
    refused = framework.refused
    return f"{refused[0].name}: {refused[0].reason}" if refused else "it has none of the functions that are hooked"


def actions(facts: Facts) -> list[Action]:
    """Return what to do, what is needed first."""
    found = [*_of_acting(facts.acting), *_of_torch(facts), *_of_place(facts), *_of_machine(facts)]
    return sorted(found, key=lambda action: not action.needed)


def _of_acting(known: Acting) -> Iterator[Action]:
    adapted = [each for each in known.frameworks if each.package in ADAPTERS]
    acting = [each for each in adapted if each.acts]
    if acting and not known.autoload.works:
        kind = Kind.SWITCHED_OFF if known.autoload.off else Kind.ENTRY_POINT
        yield Action(kind, True, _off(known.autoload, acting))
    for each in known.frameworks:
        if not each.acts and (each.package in ADAPTERS or each.refused or each.problem):
            loses = f"{each.name} keeps its own behaviour" if each.package in ADAPTERS else "Trainer resumes without unickpt"
            yield Action(
                Kind.FRAMEWORK, True, f"{each.title}: {_why_not(each)}, so {loses}: use a tested version or a newer unickpt"
            )
        elif each.unverified:
            yield Action(Kind.FRAMEWORK, False, f"{each.title} is newer than this release: a self-test runs at the first use")
        elif each.refused:
            names = ", ".join(f"{hook.name} ({hook.reason})" for hook in each.refused)
            yield Action(Kind.FRAMEWORK, False, f"{each.title}: some functions of unickpt are off: {names}")
    old = [each for each in known.extensions if each.old]
    if old:
        does, slower = ", ".join(each.does for each in old), "; ".join(each.without for each in old)
        text = f"the extension for {does} was built before its code was changed, and lacks a part: {slower}. {build_command()}"
        yield Action(Kind.EXTENSION, True, text)
    missing = [each for each in known.extensions if not each.installed and not each.old]
    if missing:
        slower = "; ".join(each.without for each in missing)
        does = ", ".join(each.does for each in missing)
        yield Action(
            Kind.EXTENSION, False,
            f"no extension for {does}: {slower}. Install a wheel that has them, or a C compiler, and then {build_command()}",
        )  # fmt: skip


def _of_torch(facts: Facts) -> Iterator[Action]:
    if "problem" in facts.torch:
        yield Action(Kind.TORCH, True, f"import torch: {facts.torch['problem']}")
        return
    if facts.acting.autoload.works and not facts.torch["armed"]:
        yield Action(Kind.ENTRY_POINT, True, "import torch does not call unickpt, although its entry point is registered")
    if facts.machine.driver and not facts.torch["devices"]:
        yield Action(Kind.TORCH, False, "there is a driver of NVIDIA, but torch sees no GPU: is it a build for the CPU?")


def _of_place(facts: Facts) -> Iterator[Action]:
    place = facts.place
    if place is None:
        return
    if place["problem"]:
        yield Action(Kind.STORAGE, True, f"{place.get('tried', 'the place')}: nothing can be written: {place['problem']}")
    elif place["filesystem"] in _LOST_WITH_ITS_HOST:
        yield Action(
            Kind.STORAGE, False, f"{place['tried']} is on {place['filesystem']}: it is lost with its host or container"
        )


def _of_machine(facts: Facts) -> Iterator[Action]:
    shared = facts.machine.shared_bytes
    if shared is None or shared < SMALL_SHARED_BYTES:
        size = "there is no /dev/shm" if shared is None else f"/dev/shm has {shared >> 20:,} MiB"
        yield Action(
            Kind.SHARED_MEMORY, False,
            f"{size}: NCCL and checkpoints in memory need more; start the container with --shm-size or --ipc=host",
        )  # fmt: skip
    told = facts.machine.told
    if facts.machine.driver and not any(told.get(name) for name in DECISIVE):
        yield Action(
            Kind.HARDWARE, False,
            "diagnosis cannot see errors of the GPUs: install nvidia-ml-py, or let the job read /dev/kmsg (in a container: "
            "--device /dev/kmsg --cap-add SYSLOG)",
        )  # fmt: skip
    if facts.machine.clock.synchronised is False:
        yield Action(
            Kind.CLOCK, False, "the clock is not synchronised (NTP, PTP): times in the logs of several hosts cannot be compared"
        )
