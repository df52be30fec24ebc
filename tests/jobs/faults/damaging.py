"""Checkpoints damaged where they lie: bits flipped, files cut off, pages lost."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.jobs.faults import ranks
from tests.jobs.faults.state import Resumed, files, resume
from tests.jobs.faults.tally import Tally, spread

HARMLESS = "harmless: newest checkpoint resumed bit for bit"
DETECTED = "detected with an error that names the file; previous checkpoint resumed"
NAMELESS = "`latest` unusable: newest complete checkpoint resumed, and the log gives the reason"
NO_LATEST = "`latest` missing: nothing resumed, as in DeepSpeed; a warning lists the complete checkpoints"


def _each(tally: Tally, folder: Path, count: int, chance: random.Random, damage: Callable[[bytes, int], bytes | None]) -> None:
    """Damage one file at a time, resume, and put it right again. ``damage`` gets the content and a number."""
    base = ranks.sound(folder / "base") if not (folder / "base").exists() else folder / "base"
    names = sorted(name for name in files(base) if name.startswith("best/") or name == "latest")
    met: Counter[str] = Counter()
    for number in range(count):
        name = names[number % len(names)]
        path = base / name
        content = path.read_bytes()
        changed = damage(content, number // len(names))
        if changed is None:
            path.unlink()
        else:
            path.write_bytes(changed)
        try:
            found = resume(base)
        finally:
            path.write_bytes(content)
        met[name.split("/")[-1].split(".")[0]] += 1
        where = f"{name}, {number}"
        if found.wrong:
            tally.wrong.append(f"{where}: {found}")
        if found.step is None and not (name == "latest" and changed is None):
            tally.lost.append(f"{where}: {found}")
        tally.outcomes[_kind(found, name, path)] += 1
    tally.notes.append(f"files: {spread(met)}")


def _kind(found: Resumed, name: str, path: Path) -> str:
    if found.step is None:
        return NO_LATEST
    if found.step == 2:
        return NAMELESS if found.skipped else HARMLESS
    named = any(path.name in reason or (name == "best/manifest.json" and "manifest" in reason) for reason in found.skipped)
    return DETECTED if named else f"detected, the message does not name {path.name}"


def bits(folder: Path, count: int, seed: int) -> list[Tally]:
    """One bit of one file."""
    tally = Tally("flipped bit", "at random positions of the newest checkpoint: manifest, index, data files (headers and "
                  "data) and `latest`, in turn; the checksum of the manifest is not updated")  # fmt: skip
    chance = random.Random(seed)

    def flip(content: bytes, _: int) -> bytes:
        at = chance.randrange(len(content))
        return content[:at] + bytes([content[at] ^ (1 << chance.randrange(8))]) + content[at + 1 :]

    _each(tally, folder, count, chance, flip)
    return [tally]


def ends(folder: Path, count: int, seed: int) -> list[Tally]:
    """A file cut off, or longer than it was, or gone."""
    tally = Tally(
        "truncated file", "to 0 bytes, to 1 byte, by 1 byte, longer by 1 byte, deleted; in all other cases to a random length"
    )
    chance = random.Random(seed)

    def cut(content: bytes, number: int) -> bytes | None:
        special = [b"", content[:1], content[:-1], content + b"\0", None]
        return special[number] if number < len(special) else content[: chance.randrange(len(content))]

    _each(tally, folder, count, chance, cut)
    return [tally]


def pages(folder: Path, count: int, seed: int) -> list[Tally]:
    """What a crash of the machine leaves of a file that was never synced: its length, and zeros."""
    tally = Tally(
        "block of zeros", "512 aligned bytes at a random position become zeros, as after a loss of power without fsync"
    )
    chance = random.Random(seed)

    def zero(content: bytes, _: int) -> bytes:
        at = chance.randrange(-(-len(content) // 512)) * 512
        return content[:at] + bytes(len(content[at : at + 512])) + content[at + 512 :]

    _each(tally, folder, count, chance, zero)
    return [tally]
