"""Short description of the parallel topology in a manifest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_DEGREES = {
    "tensor": "TP",
    "pipeline": "PP",
    "virtual_pipeline": "VPP",
    "context": "CP",
    "sequence": "SP",
    "expert": "EP",
    "expert_tensor": "ETP",
    "data": "DP",
}
_ALWAYS = ("tensor", "pipeline", "data")


def describe(layout: Mapping[str, Any]) -> str:
    """Return text such as ``ZeRO-2 on 4 ranks, BF16`` or ``TP2 PP2 DP2 on 8 ranks``, or ``no job`` without a topology."""
    parts = [f"ZeRO-{layout['zero_stage']}"] if "zero_stage" in layout else []
    parts += [f"{_DEGREES[k]}{layout[k]}" for k in _DEGREES if k in layout and (k in _ALWAYS or layout[k] != 1)]
    world = layout.get("world_size")
    if world:
        parts.append(f"on {world} {'rank' if world == 1 else 'ranks'}")
    dtypes = "+".join(map(str, layout.get("weight_dtypes") or []))
    return " ".join(parts) + (f", {dtypes}" if dtypes else "") or "no job"
