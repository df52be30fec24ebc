"""Which model a checkpoint belongs to. Two models of one job, such as an actor and a critic, must not take each other's place.

Names and shapes of tensors do not tell two such models apart. So a checkpoint has an ``Origin``: an identity that a model gets
when its engine is made, and that it keeps through saves and loads.
"""

from __future__ import annotations

import datetime
import gc
import time
import uuid
import weakref
from dataclasses import asdict, dataclass, field

from unickpt.checkpoint.format.manifest import Manifest

_SKEW_S = 60.0  # by which the clocks of two hosts may differ


@dataclass(frozen=True, slots=True)
class Origin:
    """The model whose state a checkpoint has.

    Attributes:
        lineage: identity of the model; '' if the writer has none.
        name: name that the user gave the model, or ''.
        label: kind of the model for messages, such as its class.
        number, count: the model was the ``number``-th of ``count`` models of its process when it was saved, in the order in
            which they were made.
        structure: digest of names and shapes of the parameters.
    """

    lineage: str = ""
    name: str = ""
    label: str = ""
    number: int = 0
    count: int = 0
    structure: str = ""

    @classmethod
    def of(cls, manifest: Manifest) -> Origin:
        """Return the origin in a manifest. Members of other types than expected are dropped."""
        stored, empty = manifest.writer.origin, cls()
        return cls(**{key: stored[key] for key, value in asdict(empty).items() if type(stored.get(key)) is type(value)})

    def continues(self, older: Origin) -> bool:
        """Whether a checkpoint takes the place of an older one in the same folder, as far as their origins tell.

        That of another model of a job with several models does not.
        """
        if older.lineage in ("", self.lineage):
            return True
        if older.name and self.name:
            return older.name == self.name
        return max(older.count, self.count) < 2

    def __str__(self) -> str:
        named = f" named {self.name!r}" if self.name else ""
        place = f", number {self.number} of the {self.count} of its process" if self.count > 1 else ""
        return f"{self.label[:80]}{named}{place}"


@dataclass(eq=False)
class Owner:
    """A model of this process.

    Attributes:
        label, name: as in ``Origin``.
        lineage: identity under which it is saved.
        known: identities of the checkpoints that it has saved or loaded.
        loaded: when it first loaded a checkpoint of an identity that is not its own, in seconds on the monotonic clock.
        made_s, since: when it was made, on the monotonic clock and since the epoch.
        used_s: when it last saved a checkpoint or continued one, on the monotonic clock; 0 before.
    """

    label: str
    name: str = ""
    lineage: str = field(default_factory=lambda: uuid.uuid4().hex)
    known: set[str] = field(default_factory=set)
    loaded: dict[str, float] = field(default_factory=dict)
    made_s: float = field(default_factory=time.monotonic)
    since: float = field(default_factory=time.time)
    used_s: float = 0.0

    def __post_init__(self) -> None:
        self.known.add(self.lineage)


class Owners:
    """The models of this process. The answers of the coordinator count, so the others may differ."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[Owner]] = []
        self._lineages: set[str] = set()  # that were made in this process
        self._in_memory: dict[str, tuple[weakref.ref[Owner], float]] = {}  # owner of the memory tier of a folder, and last use

    def add(self, label: str, name: str = "") -> Owner:
        """Return the owner for a new model. The model must keep it, because an owner lives as long as its model."""
        made = Owner(label, name)
        self._made.append(weakref.ref(made))
        self._lineages.add(made.lineage)
        return made

    def living(self) -> list[Owner]:
        """Return the models that exist, in the order in which they were made."""
        self._made = [each for each in self._made if each() is not None]
        return [found for each in self._made if (found := each()) is not None]

    def origin(self, owner: Owner) -> Origin:
        """Return the origin of a checkpoint that a model saves now, without its structure."""
        living = self.living()
        number = next((at for at, each in enumerate(living, 1) if each is owner), 0)
        return Origin(owner.lineage, owner.name, owner.label, number, len(living))

    def claim(self, owner: Owner, *, replaces: bool = False, any_structure: bool = False) -> Claim:
        """Return the claim of a model to the directories that it saves into. It saves now. ``any_structure``: as in ``Claim``.

        ``replaces``: the model was known when it was made, and not at its first save. So models of this process that were not
        used since then are discarded ones, which a framework may keep alive.
        """
        owner.used_s = time.monotonic()
        return Claim(self, owner, owner.made_s if replaces else 0.0, any_structure)

    def adopt(self, owner: Owner, origin: Origin) -> None:
        """Note that a model has loaded its whole state from a checkpoint, and continues it."""
        owner.used_s = time.monotonic()
        if origin.lineage:
            owner.lineage = origin.lineage
            if origin.lineage not in owner.known:  # a rollback to its own checkpoint does not make it another model's
                owner.loaded[origin.lineage] = time.monotonic()
            owner.known.add(origin.lineage)

    def memory_of(self, folder: str, owner: Owner) -> bool:
        """Claim the memory tier of a folder for a model.

        Returns False if another model of this process has it, and has used it since this one was made. One that has not was
        replaced by this one.
        """
        if folder in self._in_memory:
            held, used_s = self._in_memory[folder]
            holder = held()
            if holder not in (None, owner) and used_s > owner.made_s and not holder.known & owner.known:
                return False
        self._in_memory[folder] = weakref.ref(owner), time.monotonic()
        return True

    def load_refusal(self, owner: Owner, manifest: Manifest) -> str:
        """Return why a model cannot continue from the whole state of a checkpoint; '' if it can."""
        stored, own = Origin.of(manifest), self.origin(owner)
        if not stored.lineage or stored.lineage in owner.known:
            return ""
        if stored.name and own.name:
            return "" if stored.name == own.name else _not_mine(stored, own)
        if stored.lineage in self._lineages or stored.count < 2 or own.name:
            return ""
        if (stored.count, stored.number) == (own.count, own.number) or stored.count != own.count:
            return ""
        gc.collect()  # a model of which only garbage is left does not count
        own = self.origin(owner)
        return _not_mine(stored, own) if stored.count == own.count and stored.number != own.number else ""

    def load_notice(self, owner: Owner, manifest: Manifest) -> str:
        """Return that another model of this process has loaded the whole state of a checkpoint, too; '' if none has.

        That is no mistake in a job that starts several models from one checkpoint, or compares them.
        """
        stored = Origin.of(manifest)
        other = self.holder(stored.lineage, owner) if stored.lineage and stored.lineage not in owner.known else None
        if other is None or owner.made_s >= other.loaded.get(stored.lineage, 0.0):
            return ""
        return (
            f"the whole state that {stored} saved goes to {self.origin(owner)}, and {self.origin(other)} has loaded it before. "
            "If this model has checkpoints of its own, pass their folder or tag. To start from the weights alone, pass "
            "load_module_only=True."
        )

    def holder(self, lineage: str, but: Owner, used_after_s: float = 0.0) -> Owner | None:
        """Return another living model with an identity that has saved or loaded since a time of the monotonic clock."""
        for _ in range(2):
            if self._first(lineage, but, used_after_s) is None:
                return None
            gc.collect()  # a discarded model may be garbage that the collector has not found yet
        return self._first(lineage, but, used_after_s)

    def _first(self, lineage: str, but: Owner, used_after_s: float) -> Owner | None:
        living = (each for each in self.living() if lineage in each.known and each is not but)
        return next((each for each in living if each.used_s >= used_after_s), None)


def _not_mine(stored: Origin, own: Origin) -> str:
    return (
        f"it has the state of another model: saved by {stored}; this is {own}. To start from its weights, pass "
        "load_module_only=True. If it is the same model, give both runs the same name (the option name)."
    )


@dataclass(frozen=True, slots=True)
class Claim:
    """The claim of a model to the directory that it saves into. A save asks on the coordinator.

    Attributes:
        used_after_s: other models of this process count if they were used since then, on the monotonic clock.
        any_structure: names and shapes of the model's tensors may change from save to save, and the user names the directory of
            every save. So only a model of other names or shapes is not replaced.
    """

    owners: Owners
    owner: Owner
    used_after_s: float = 0.0
    any_structure: bool = False

    def refusal(self, manifest: Manifest) -> str:
        """Return why a save must not replace a checkpoint, before the parameters of the save are known; '' if it may."""
        return "" if self.any_structure or not self._is_of_another(manifest) else self._text(Origin.of(manifest), manifest)

    def notice(self, manifest: Manifest) -> str:
        """Return that a save replaces a checkpoint of another model that may still be needed; '' if it does not."""
        stored = Origin.of(manifest)
        if not stored.lineage or stored.lineage in self.owner.known or (stored.name and stored.name == self.owner.name):
            return ""
        if self.owners.holder(stored.lineage, self.owner) is None:
            return ""
        return (
            f"the checkpoint that {stored} saved at {manifest.created} is replaced by one of "
            f"{self.owners.origin(self.owner)}. If both models are in use, save each into a folder of its own."
        )

    def structure_refusal(self, manifest: Manifest, structure: str) -> str:
        """Return why a save must not replace a checkpoint of these parameters; '' if it may.

        A new process may save the same model again. It must not replace another one.
        """
        stored = Origin.of(manifest)
        named = bool(stored.name) and stored.name == self.owner.name
        same = named or not stored.structure or not structure or stored.structure == structure
        if not stored.lineage or stored.lineage in self.owner.known or same:
            return ""
        if self.any_structure and not self._is_of_another(manifest):
            return ""
        return f"{self._text(stored, manifest)} Their parameters have different names or shapes."

    def _is_of_another(self, manifest: Manifest) -> bool:
        """Whether a checkpoint is of another model that is in use, here or in another process, as far as origins tell."""
        stored = Origin.of(manifest)
        if not stored.lineage or stored.lineage in self.owner.known:
            return False
        if stored.name and self.owner.name:
            return stored.name != self.owner.name
        if self.owners.holder(stored.lineage, self.owner, self.used_after_s) is not None:
            return True
        return _time_of(manifest) > self.owner.since

    def _text(self, stored: Origin, manifest: Manifest) -> str:
        ahead = _time_of(manifest) > time.time() + _SKEW_S
        when = f"{manifest.created}{', which is in the future by the clock of this host' if ahead else ''}"
        return (
            f"there is the checkpoint of another model: {stored} saved it at {when}, and this is "
            f"{self.owners.origin(self.owner)}. It is not replaced. Save each model into a folder of its own or under a tag of "
            "its own, or remove the old checkpoint."
        )


def _time_of(manifest: Manifest) -> float:
    """Return when a checkpoint was written, in seconds since the epoch; 0 if that is unknown."""
    try:
        return datetime.datetime.fromisoformat(manifest.created).timestamp()
    except (ValueError, OverflowError, OSError):
        return 0.0
