"""Which layers compute in which dtype, on which ranks: the file that ``unickpt plan precision`` writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unickpt.base.errors import ConfigError
from unickpt.base.private_files import read_text

LOW, FULL = "bf16", "fp32"
DTYPES = (LOW, FULL)
SCHEMA = 1
_MOST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Policy:
    """Layers with a dtype of their own.

    Attributes:
        dtypes: dtype of ``DTYPES`` by name of the layer, as in the files of measured layers.
        device: name of the kind of device whose ranks have the policy; '' for any.
        ranks: global ranks that have it; empty for all.
        world: number of ranks of the job that ``ranks`` counts in; 0 without ``ranks``.
    """

    dtypes: Mapping[str, str] = field(default_factory=dict)
    device: str = ""
    ranks: tuple[int, ...] = ()
    world: int = 0

    def has(self, rank: int, device: str) -> bool:
        """Return whether a rank with this kind of device has the policy."""
        return self.device in ("", device) and (not self.ranks or rank in self.ranks)

    def mismatch(self, world: int) -> str:
        """Return why the policy does not fit a job of this number of ranks, as text; '' if it does."""
        if not self.ranks or self.world == world:
            return ""
        return f"it names ranks of a job of {self.world}, and this job has {world} ranks"

    def as_json(self) -> dict[str, Any]:
        """Return the document that ``policy_of`` reads."""
        return {
            "schema": SCHEMA,
            "device": self.device,
            "ranks": list(self.ranks),
            "world": self.world,
            "dtypes": dict(self.dtypes),
        }


def policy_of(document: Any, where: str) -> Policy:
    """Return the policy of a parsed JSON document. It may have further keys, such as the prediction of the plan.

    Args:
        document: parsed JSON.
        where: file, for messages.

    Raises:
        ConfigError: it is no such document.
    """
    if not isinstance(document, dict) or document.get("schema") != SCHEMA or not isinstance(document.get("dtypes"), dict):
        raise ConfigError(f'{where}: expected a JSON object with "schema": {SCHEMA} and "dtypes", as of unickpt plan precision')
    dtypes, device = document["dtypes"], document.get("device", "")
    ranks, world = document.get("ranks", []), document.get("world", 0)
    for name, dtype in dtypes.items():
        if dtype not in DTYPES:
            raise ConfigError(f'{where}: the dtype of layer "{name}" must be one of {", ".join(DTYPES)}, not {dtype!r}')
    if not isinstance(device, str):
        raise ConfigError(f'{where}: "device" must be a string, not {device!r}')
    if not isinstance(ranks, list) or not all(type(rank) is int and rank >= 0 for rank in [*ranks, world]):
        raise ConfigError(f'{where}: "ranks" must be a list of numbers from 0, and "world" a number')
    if ranks and not max(ranks) < world:
        raise ConfigError(f'{where}: rank {max(ranks)} of "ranks" is not one of the {world} ranks of "world"')
    return Policy(dtypes, device, tuple(ranks), world)


def read_policy(path: str | Path) -> Policy:
    """Read a policy.

    Raises:
        ConfigError: the file cannot be read, or is no policy.
    """
    try:
        document = json.loads(read_text(Path(path), _MOST_BYTES))
    except (OSError, ValueError, RecursionError) as err:
        raise ConfigError(f"{path}: cannot be read as JSON ({err})") from err
    return policy_of(document, str(path))
