"""Which weights are rounded, and which of them need the same scheme.

Linear modules of the transformer layers are rounded. Embeddings, the head and the routers of experts are not: vLLM and
llm-compressor leave them as they are by default. vLLM computes some modules as one (queries, keys and values; gate and up; all
experts of a layer), so they have one scheme: they are a *unit*.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_IN_LAYER = re.compile(r"(?:.+\.)?layers\.(\d+)\.(.+)\.weight")
_ROUTERS = ("gate", "router", "shared_expert_gate")
_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
_FUSED_NAME = {part: whole for whole, parts in _FUSED.items() for part in parts}
_EXPERTS = ".experts."


@dataclass(frozen=True, slots=True)
class Unit:
    """Linear modules with one scheme.

    Attributes:
        name: name in vLLM, such as ``model.layers.0.self_attn.qkv_proj``.
        layer: number of the transformer layer.
        modules: names of the modules in transformers, without ``.weight``.
        shapes: ``[out, in]`` of each module.
    """

    name: str
    layer: int
    modules: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]


def layer_of(name: str) -> int | None:
    """Return the number of the transformer layer of a tensor, or None for a tensor outside of layers."""
    found = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    return None if found is None else int(found[1])


def units_of(tensors: Iterable[tuple[str, Sequence[int]]]) -> list[Unit]:
    """Return the units of a model, by layer.

    Args:
        tensors: names and shapes of all weights, as in the files of transformers.
    """
    found: dict[str, list[tuple[str, tuple[int, int]]]] = {}
    layers: dict[str, int] = {}
    for name, shape in tensors:
        match = _IN_LAYER.fullmatch(name)
        if match is None or len(shape) != 2 or match[2].rpartition(".")[2] in _ROUTERS:
            continue
        module = name.removesuffix(".weight")
        unit = _unit_name(module)
        layers[unit] = int(match[1])
        found.setdefault(unit, []).append((module, (shape[0], shape[1])))
    ordered = sorted(found, key=lambda unit: layers[unit])  # sorted() keeps the order of the tensors
    return [
        Unit(unit, layers[unit], tuple(module for module, _ in found[unit]), tuple(shape for _, shape in found[unit]))
        for unit in ordered
    ]


def _unit_name(module: str) -> str:
    if _EXPERTS in module:
        return module.partition(_EXPERTS)[0] + _EXPERTS.rstrip(".")
    parent, _, last = module.rpartition(".")
    return f"{parent}.{_FUSED_NAME.get(last, last)}"
