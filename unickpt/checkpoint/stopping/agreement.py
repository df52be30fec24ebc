"""The ranks of a job agree on the step boundary at which they stop, over the job's key-value store, without a collective.

A rank that knows of the notice says at which boundary it looks first: the one after the last that it has passed without
knowing. The greatest of these numbers is the boundary at which all ranks stop. Each rank looks there, because its own number
is no greater. No rank waits for a step of another one before it has said its number, so the answer comes although ranks wait
for one another in collectives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

SPREAD = 4096  # keys that are asked for at once


class Store(Protocol):
    """What is used of torch's ``Store``."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Decision:
    """What the ranks do.

    Attributes:
        boundary: number of the boundary at which all stop; 0 for none.
        reason: why there is none.
    """

    boundary: int = 0
    reason: str = ""

    @property
    def text(self) -> str:
        """The decision as it lies in the store."""
        return f"{self.boundary} {self.reason}"

    @classmethod
    def of(cls, text: str) -> Decision:
        """Return the decision of a text. One that cannot be read is none."""
        number, _, reason = text.partition(" ")
        return cls(int(number), reason) if number.isascii() and number.isdigit() else cls(0, "the decision cannot be read")


@dataclass(frozen=True, slots=True)
class Look:
    """Where a rank looks first.

    Attributes:
        boundary: boundaries that it has passed, and one.
        ahead: its step number at a boundary, less the number of the boundary. The same on all ranks. None before the first one.
    """

    boundary: int
    ahead: int | None = None


def decide(looks: list[Look]) -> Decision:
    """Return the boundary at which all ranks stop."""
    known = {look.ahead for look in looks if look.ahead is not None}
    if len(known) > 1:
        steps = ", ".join(map(str, sorted(known)))
        return Decision(0, f"the ranks count their steps differently: they are ahead of the boundaries by {steps}")
    return Decision(max(look.boundary for look in looks))


class Agreement:
    """The agreement of one rank with the others.

    Args:
        store: connection to the store that no other thread uses while it waits.
        rank, world: of the job.
        prefix: of all keys, the same on all ranks of one start of the workers.
    """

    def __init__(self, store: Any, *, rank: int, world: int, prefix: str) -> None:
        self._store, self._rank, self._world, self._prefix = store, rank, world, prefix

    def told(self) -> str:
        """Return why the job is to end; '' while nobody has said so."""
        return self._read("told")

    def tell(self, why: str) -> None:
        """Tell all ranks. The first to tell counts."""
        self._store.compare_set(self._key("told"), "", why)

    def look_from(self, look: Look) -> None:
        """Say where this rank looks first. Once."""
        self._store.set(self._key(f"look/{self._rank}"), f"{look.boundary} {'' if look.ahead is None else look.ahead}")

    def decision(self) -> Decision | None:
        """Return the decision; None while there is none. Rank 0 makes it when all ranks have said where they look."""
        found = self._read("decision")
        if not found and self._rank == 0:
            looks = self._looks()
            return None if looks is None else self._settle(decide(looks))
        return Decision.of(found) if found else None

    def give_up(self, reason: str) -> Decision:
        """Decide that there is no common boundary, unless there is a decision. Return the one that counts."""
        return self._settle(Decision(0, reason))

    def missing(self) -> tuple[int, ...]:
        """Return the ranks that have not said where they look, the first few."""
        return tuple(rank for rank in range(self._world) if not self._store.check([self._key(f"look/{rank}")]))[:8]

    def arrive(self) -> None:
        """Say that this rank has saved and may end."""
        self._store.set(self._key(f"arrived/{self._rank}"), "1")

    def all_arrived(self) -> bool:
        """Return whether all ranks may end."""
        return self._has("arrived")

    def _settle(self, decision: Decision) -> Decision:
        return Decision.of(self._store.compare_set(self._key("decision"), "", decision.text).decode())

    def _looks(self) -> list[Look] | None:
        if not self._has("look"):
            return None
        found = []
        for keys in self._keys("look"):
            for value in self._store.multi_get(keys):
                boundary, _, ahead = value.decode().partition(" ")
                found.append(Look(int(boundary), int(ahead) if ahead else None))
        return found

    def _has(self, what: str) -> bool:
        return all(self._store.check(keys) for keys in self._keys(what))

    def _keys(self, what: str) -> list[list[str]]:
        keys = [self._key(f"{what}/{rank}") for rank in range(self._world)]
        return [keys[at : at + SPREAD] for at in range(0, len(keys), SPREAD)]

    def _read(self, what: str) -> str:
        key = self._key(what)
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _key(self, what: str) -> str:
        return f"{self._prefix}/{what}"
