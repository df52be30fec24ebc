"""What a rank has computed in one repetition: hashes, in their order, and its file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from unickpt.base.errors import ConfigError

_SCHEMA = 1
_FILE = re.compile(r"rank-(\d+)\.json")


class Phase(str, Enum):
    """What is hashed, in the order of a micro-batch and of a step.

    Attributes:
        INPUT: input of the model.
        OUTPUT: output of a layer.
        OUTPUT_GRADIENT: gradient of such an output.
        GRADIENT: gradient of a parameter, before any reduction.
        REDUCED: gradient of a parameter, as the optimizer uses it.
        HELD: weight, master, or state of the optimizer, after the step; of the loaded step, after the load.
        BUFFER: buffer of the model, at the same time.
        RANDOM: state of torch's random generators before a micro-batch. It explains other differences, and is none itself.
    """

    INPUT = "input"
    OUTPUT = "output"
    OUTPUT_GRADIENT = "output gradient"
    GRADIENT = "gradient"
    REDUCED = "reduced gradient"
    HELD = "held"
    BUFFER = "buffer"
    RANDOM = "random"

    @property
    def local(self) -> bool:
        """Whether a rank computes it by itself, under data parallelism."""
        return self in (Phase.INPUT, Phase.OUTPUT, Phase.OUTPUT_GRADIENT, Phase.GRADIENT)


@dataclass(frozen=True, slots=True)
class Row:
    """One hash.

    Attributes:
        step: of the optimizer. Of what is held after the load, the loaded one.
        phase: what it is.
        micro_batch: of the step, from 0; -1 where all of a step counts.
        what: name of the tensor or layer.
        value: the hash.
        moving: of what is held: it also changes between steps, such as a weight that is gathered late.
    """

    step: int
    phase: Phase
    micro_batch: int
    what: str
    value: int
    moving: bool = False

    def to_json(self) -> list[Any]:
        """Return JSON types."""
        return [self.step, self.phase.value, self.micro_batch, self.what, self.value, int(self.moving)]

    @classmethod
    def from_json(cls, values: list[Any]) -> Row:
        """Return what ``to_json`` has encoded."""
        step, phase, micro_batch, what, value, moving = values
        return cls(int(step), Phase(phase), int(micro_batch), str(what), int(value), bool(moving))


@dataclass(slots=True)
class Record:
    """What one rank has recorded.

    Attributes:
        rank: global rank.
        world: number of ranks.
        host: of this rank.
        model_parallel: number of ranks that compute one replica of the model together.
        inexact: why a step after a load may differ from one of a job that goes on, although nothing is wrong; or ''.
        facts: what repetitions should have alike: device, threads, release of torch.
        rows: in their order.
    """

    rank: int
    world: int
    host: str
    model_parallel: int = 1
    inexact: str = ""
    facts: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)


Run = Mapping[int, Record]  # by rank


def write(folder: str, record: Record) -> None:
    """Write the file of a rank."""
    about = {key: getattr(record, key) for key in ("rank", "world", "host", "model_parallel", "inexact", "facts")}
    values = {"schema": _SCHEMA, **about, "rows": [each.to_json() for each in record.rows]}
    path = Path(folder, f"rank-{record.rank:05d}.json")
    part = path.with_suffix(".part")
    part.write_text(json.dumps(values))
    part.rename(path)


def read(folder: Path) -> Run:
    """Return what the ranks of a repetition have written. Empty if there is no such folder.

    Raises:
        ConfigError: a file is damaged, of another release, or ranks are missing.
    """
    found: dict[int, Record] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if _FILE.fullmatch(path.name):
            record = _record(path)
            found[record.rank] = record
    world = max((each.world for each in found.values()), default=0)
    missing = sorted(set(range(world)) - set(found))
    if missing:
        raise ConfigError(f"{folder}: rank {', '.join(map(str, missing[:8]))} of {world} has written nothing")
    return found


def _record(path: Path) -> Record:
    try:
        values = json.loads(path.read_text())
        if values["schema"] != _SCHEMA:
            raise ConfigError(f"{path}: another release of unickpt has written it")
        facts = {str(key): str(value) for key, value in values["facts"].items()}
        rows = [Row.from_json(each) for each in values["rows"]]
        sizes = int(values["rank"]), int(values["world"])
        return Record(*sizes, str(values["host"]), int(values["model_parallel"]), str(values["inexact"]), facts, rows)
    except (ValueError, TypeError, KeyError, AttributeError) as err:
        raise ConfigError(f"{path}: damaged ({type(err).__name__}: {err})") from None
