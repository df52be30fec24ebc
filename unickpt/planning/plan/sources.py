"""Measured layers from the files of a job."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unickpt.base.errors import FormatError, NotACheckpointError
from unickpt.base.private_files import read_text
from unickpt.diagnosis.layer_costs.measured import SUFFIX, MeasuredLayer, layers_of
from unickpt.planning.plan.layers import RankLayers, layers_of_ranks, ranks_of

_MOST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class LayerFiles:
    """Measured layers of a job.

    Attributes:
        layers: all layers of the model.
        ranks: what each rank has measured; empty for a file of layers.
    """

    layers: list[MeasuredLayer]
    ranks: list[RankLayers]


def read_layers(places: Sequence[Path]) -> LayerFiles:
    """Read the layers of a model.

    Args:
        places: folders with the files of a job's ranks, one per host; or one JSON file (``layers.layers_of``).

    Raises:
        NotACheckpointError: a folder has no times of layers.
        FormatError: a file cannot be read.
    """
    if len(places) == 1 and not places[0].is_dir():
        return LayerFiles(layers_of(_parsed(places[0]), str(places[0])), [])
    documents: dict[str, Any] = {}
    for folder in places:
        paths = sorted(folder.glob(f"*{SUFFIX}"))
        if not paths:
            raise NotACheckpointError(
                f"{folder}: no times of layers (*{SUFFIX}) are there; set the option timing.layers_every, and wait for a sample"
            )
        documents |= {str(path): _parsed(path) for path in paths}
    layers = layers_of_ranks(documents)
    return LayerFiles(layers, ranks_of(documents))


def _parsed(path: Path) -> Any:
    try:
        return json.loads(read_text(path, _MOST_BYTES))
    except (OSError, ValueError, RecursionError) as err:
        raise FormatError(f"{path}: cannot be read as JSON ({err})") from err
