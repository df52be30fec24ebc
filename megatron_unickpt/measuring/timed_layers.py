"""Layers of a Megatron model."""

from __future__ import annotations

import re
from typing import Any

import torch

from unickpt.diagnosis.recording.layer_times import TimedLayer

_LAYER = re.compile(r"(?:^|\.)decoder\.layers\.\d+$")
_ENDS = {"embedding": "embedding", "output_layer": "loss"}


def layers_of(chunk: torch.nn.Module) -> list[TimedLayer]:
    """Return the layers of one pipeline chunk of this rank: the transformer layers, the embedding and the output layer."""
    total = int(_config(chunk).num_layers) + 2
    found = []
    for name, module in chunk.named_modules():
        role = _ENDS.get(name.rpartition(".")[2])
        if _LAYER.search(name):
            number: Any = getattr(module, "layer_number", None)  # from 1, in the whole model
            if number is not None:
                found.append(TimedLayer(int(number), f"decoder.layers.{int(number) - 1}", "layer", module, total))
        elif role == "embedding" and hasattr(module, "word_embeddings"):
            found.append(TimedLayer(0, "embedding", role, module, total))
        elif role == "loss":
            found.append(TimedLayer(total - 1, "output_layer", role, module, total))
    return found


def _config(chunk: torch.nn.Module) -> Any:
    return next(each.config for each in chunk.modules() if hasattr(each, "config"))
