"""Names in Megatron FSDP's ``fsdp_dtensor`` checkpoints, beside those that Megatron has in every other format.

The layers of a stack are one tensor elsewhere and apart here, and so are the two halves of a gated projection (``_w`` and
``_v``, ``handle_swiglu_in_state_dict`` in megatron/core/transformer/fsdp_dtensor_checkpoint.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

MODEL = "model"
STATE = ("optimizer", "state")
META = ("optimizer", "param_to_group_meta")
EXPERTS = ".experts."
# Norms before a projection, under the name that they have if they are part of it (``sharded_state_dict_keys_map`` in
# megatron/core/models/gpt/gpt_layer_specs.py).
NORMS = {".input_layernorm.": ".self_attention.linear_qkv.layer_norm_", ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_"}
_STACK = re.compile(r"^(.*?\blayers)\.(?!\d)(.+)$")
_FIRST = re.compile(r"^(.*\.mlp\.(?:shared_experts\.)?)linear_fc1\.(?:weight|bias)$")


def layer_of(name: str, layer: int) -> str:
    """Return the name of one layer of a stack, and any other name as it is."""
    return _STACK.sub(rf"\1.{layer}.\2", name)


def names_of(name: str) -> Iterator[str]:
    """Yield the names of a parameter in a module: that of TransformerEngine's layers, and that of Megatron's own."""
    yield name
    for own, fused in NORMS.items():
        if fused in name:
            yield name.replace(fused, own)


def is_gated(name: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether a tensor is the first projection of a gated MLP: it has twice as many rows as the second has columns.

    Args:
        name: name of a parameter.
        shapes: shapes of all parameters by name; those of a stack begin with the number of layers.
    """
    match = _FIRST.match(name)
    second = shapes.get(f"{match[1]}linear_fc2.weight") if match else None
    if second is None:
        return False
    rows = shapes[name][1 if _STACK.match(name) else 0]
    return rows == 2 * second[-1]
