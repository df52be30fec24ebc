"""Compares the global batch size of the job that saved a checkpoint with that of the job that resumes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

BATCH = "batch"  # key in the objects of the job
_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True, slots=True)
class Batch:
    """Global batch size: samples of one optimizer step.

    Attributes:
        total: samples over all ranks.
        per_device, accumulation, ranks: factors of ``total``; None if unknown.
    """

    total: int
    per_device: int | None = None
    accumulation: int | None = None
    ranks: int | None = None

    def __str__(self) -> str:
        if None in (self.per_device, self.accumulation, self.ranks):
            return f"{self.total}"
        return f"{self.total} ({self.per_device} per device x {self.accumulation} accumulated x {self.ranks} ranks)"

    def to_json(self) -> dict[str, int | None]:
        """Return the value that ``from_json`` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Batch | None:
        """Return the batch size that a checkpoint recorded, or None if it is not one."""
        if not isinstance(value, Mapping):
            return None
        total, *factors = (_count(value.get(key)) for key in ("total", "per_device", "accumulation", "ranks"))
        return None if total is None else cls(total, *factors)


@dataclass(frozen=True, slots=True)
class SettingNames:
    """Settings of the batch size as the user writes them, with ``{}`` for the value."""

    per_device: str
    accumulation: str


TRAINER = SettingNames("--per_device_train_batch_size {}", "--gradient_accumulation_steps {}")
DEEPSPEED = SettingNames('"train_micro_batch_size_per_gpu": {}', '"gradient_accumulation_steps": {}')


def of_engine(engine: Any) -> Batch:
    """Return the batch size of a DeepSpeedEngine."""
    total, per_device, accumulation = (
        int(value())
        for value in (engine.train_batch_size, engine.train_micro_batch_size_per_gpu, engine.gradient_accumulation_steps)
    )
    return Batch(total, per_device, accumulation, max(total // (per_device * accumulation), 1))


def of_saved(objects: Mapping[str, Any], ranks: int) -> Batch | None:
    """Return the batch size of the job that saved a checkpoint with these objects; None if unknown. ``ranks``: as below."""
    config = objects.get("ds_config")
    return Batch.from_json(objects.get(BATCH)) or of_config(config if isinstance(config, Mapping) else None, ranks)


def of_config(config: Mapping[str, Any] | None, ranks: int) -> Batch | None:
    """Return the batch size that a configuration sets on so many data-parallel ranks, or None if it does not determine one."""
    total, per_device, accumulation = (_count((config or {}).get(key)) for key in _KEYS)
    if total is None and per_device is not None:
        total = per_device * (accumulation or 1) * ranks
    if total is None:
        return None
    factors = (per_device, accumulation or 1, ranks)
    known = per_device is not None and per_device * (accumulation or 1) * ranks == total
    return Batch(total, *factors) if known else Batch(total)


def changed(saved: Batch | None, now: Batch, *, step: int, trainer: bool) -> str:
    """Return a warning about a changed global batch size, with the settings that keep it; '' if it is the same.

    Args:
        step: optimizer step of the checkpoint.
        trainer: transformers' Trainer selects the position in the data; otherwise the user's loop does.
    """
    if saved is None or saved.total == now.total:
        return ""
    longer = saved.total > now.total
    ratio = (saved.total / now.total) if longer else (now.total / saved.total)
    moved = step * abs(saved.total - now.total)
    place = f"{moved:,} samples are {'seen twice' if longer else 'skipped'}"
    who = (
        "Trainer finds its position in the data by steps" if trainer else "If your loop finds its position in the data by steps"
    )
    return (
        f"the global batch changes from {saved} to {now}. One pass over the data takes {ratio:.3g} times "
        f"{'as many' if longer else 'fewer'} steps. A learning-rate schedule in steps does not adapt. "
        f"{who}{', so' if trainer else ','} {place}. {kept(saved.total, now, trainer)}"
    )


def resumed(saved: Batch | None, now: Batch, *, step: int, samples: int, worlds: tuple[int | None, int]) -> tuple[str, bool]:
    """Return the log line of a resume: position, and what changed since the checkpoint; and whether something did.

    None: unknown.
    """
    before = saved or now
    values = [
        ("world", *worlds),
        ("global batch", before.total, now.total),
        ("micro batch", before.per_device, now.per_device),
        ("accumulation", before.accumulation, now.accumulation),
    ]
    changes = [f"{name} {new}" if old in (None, new) else f"{name} {old} -> {new}" for name, old, new in values]
    line = f"resumed at step {step:,} after {samples:,} samples: {', '.join(changes)}"
    return line, any(old not in (None, new) for _, old, new in values)


def kept(total: int, now: Batch, trainer: bool) -> str:
    """Return a sentence with the settings that give a global batch size of ``total`` on the ranks of this job."""
    names = TRAINER if trainer else DEEPSPEED
    per_device, accumulation, ranks = now.per_device or 1, now.accumulation or 1, now.ranks or 1
    share, rest = divmod(total, ranks)
    if rest:
        near = [value for value in (share * ranks, (share + 1) * ranks) if value]
        return f"{ranks} ranks cannot make {total}; nearest are {' and '.join(map(str, near))}."
    ways = []
    if share % per_device == 0:
        ways.append(names.accumulation.format(share // per_device))
    if share % accumulation == 0:
        ways.append(names.per_device.format(share // accumulation))
    if not ways:
        fits = max(size for size in range(1, per_device + 1) if share % size == 0)
        ways.append(f"{names.per_device.format(fits)} with {names.accumulation.format(share // fits)}")
    text = f"To keep {total}: {', or '.join(ways)}"
    return f"{text}." if trainer else f'{text}, and "train_batch_size": {total}.'


def _count(value: Any) -> int | None:
    """Return a value that can be a number of samples, steps or ranks; None for any other value."""
    return value if type(value) is int and value > 0 else None
