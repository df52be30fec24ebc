"""Generations of the memory tier: their names, what each host holds of them, and which of them can be loaded. Pure.

A generation is one checkpoint in the memory of the hosts of a job. Its number is the time of its save in nanoseconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from unickpt.base.errors import FormatError
from unickpt.checkpoint.format.file_names import MANIFEST_FILE

if TYPE_CHECKING:  # which imports torch; a keeper needs none
    from unickpt.checkpoint.format.manifest import Manifest
    from unickpt.checkpoint.format.witnessed import Passed

ABOUT_FILE = "about.json"
MOST_GENERATIONS, MOST_FILES = 64, 1 << 20  # of one host
_FOLDER = re.compile(r"g(\d{1,20})")
_FILE = re.compile(r"manifest\.json|about\.json|index\.safetensors|(?:data|rows)/rank\d{5,10}\.safetensors")


def folder_of(number: int) -> str:
    """Return the folder of a generation, below the folder of the job."""
    return f"g{number}"


def number_of(folder: str) -> int | None:
    """Return the number of a generation from the name of its folder, or None for another name."""
    found = _FOLDER.fullmatch(folder)
    return None if found is None else int(found.group(1))


def is_file_of_generation(name: str) -> bool:
    """Return whether a generation can have a file of this relative name."""
    return _FILE.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class Inventory:
    """What one host holds: size in bytes of each file, by generation and relative name."""

    files: Mapping[int, Mapping[str, int]] = field(default_factory=dict)

    def to_json(self) -> dict[str, dict[str, int]]:
        """Return a JSON-able form."""
        return {folder_of(number): dict(names) for number, names in self.files.items()}

    @classmethod
    def from_json(cls, value: Any) -> Inventory:
        """Return the inventory that ``to_json`` encoded. It comes from another host.

        Raises:
            FormatError: it has another form.
        """
        if not isinstance(value, dict) or len(value) > MOST_GENERATIONS:
            raise FormatError("an inventory of a host's memory is malformed")
        files: dict[int, dict[str, int]] = {}
        for folder, names in value.items():
            number = number_of(folder)
            if number is None or not isinstance(names, dict) or len(names) > MOST_FILES:
                raise FormatError(f"an inventory of a host's memory is malformed at {str(folder)[:80]!r}")
            if not all(is_file_of_generation(name) and type(size) is int and size >= 0 for name, size in names.items()):
                raise FormatError(f"an inventory of a host's memory names an invalid file or size in {folder}")
            files[number] = names
        return cls(files)


def numbers(inventories: Iterable[Inventory]) -> list[int]:
    """Return the numbers of all generations with a commit record, newest first."""
    found = {number for each in inventories for number, names in each.files.items() if MANIFEST_FILE in names}
    return sorted(found, reverse=True)


def missing(number: int, manifest: Manifest, inventories: Sequence[Inventory]) -> list[str]:
    """Return the files of a generation that no host holds in their full size."""
    return [
        record.path
        for record in manifest.files
        if not any(each.files.get(number, {}).get(record.path) == record.size_bytes for each in inventories)
    ]


def kept(complete: Sequence[int], count: int, needed: int | None = None) -> list[int]:
    """Return which of the complete generations, newest first, stay while a new one is made. At least the newest one stays.

    Args:
        complete: numbers.
        count: generations that a host may hold, including the new one.
        needed: number of the one that the job goes back to after a fault that the witness finds. It stays in place of the
            oldest, if that is not the newest as well.
    """
    found = list(complete[: max(count - 1, 1)])
    if needed is not None and needed in complete and needed not in found and len(found) > 1:
        found[-1] = needed
    return found


def passed_or_none(record: Passed | None) -> int:
    """Return until which step the witness had passed at a save; -1 without one."""
    return -1 if record is None else record.passed_until


def passed(steps: Mapping[int, tuple[int, int]]) -> int | None:
    """Return the newest of some generations that is not after the last step that the witness has passed; None without one.

    ``steps``: of each generation the step, and the ``passed_or_none`` of its save.
    """
    until = max((passed_until for _, passed_until in steps.values()), default=-1)
    return max(((step, number) for number, (step, _) in steps.items() if step <= until), default=(0, None))[1]


def sources(host: int, hosts: int, replicas: int) -> list[int]:
    """Return the hosts whose files a host (0 to ``hosts`` - 1) copies: those before it, in a ring, one for each replica."""
    return [(host - step) % hosts for step in range(1, min(replicas, hosts - 1) + 1)]
