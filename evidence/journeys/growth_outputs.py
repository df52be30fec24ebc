"""Logits of grown models and of models with experts, relative to their sources.

``python -m evidence.journeys.growth_outputs``: every family and dimension, tied and untied, in two dtypes, and grown
twice. Each number is the largest difference of logits, relative to the largest logit.
"""

from __future__ import annotations

import torch

from tests.support.grown_models import (
    DIMENSIONS,
    FAMILIES,
    changes_of,
    difference,
    grown,
    model_of_table,
    source,
    table_of_model,
)
from unickpt.transform.grow.upcycle import Upcycle

DTYPES = (torch.float64, torch.float32)
AGAIN = {"hidden_size": 96, "num_attention_heads": 12, "num_hidden_layers": 4}
EXPERTS = ((4, 2, 1), (8, 4, 2), (8, 4, 4))
DENSE = {"llama": {"attention_bias": False, "mlp_bias": False}, "mistral": {}, "qwen3": {}}


def largest(family: str, dimension: str) -> float:
    """Return the largest difference of a family and a dimension."""
    found = 0.0
    for tied in (False, True):
        for dtype in DTYPES:
            model = source(family, tied=tied, dtype=dtype)
            if dimension == "twice":
                larger = grown(grown(model, changes_of(family, "all"), (0, 2)), AGAIN, (0, 2, 3), seed=1)
            else:
                larger = grown(model, changes_of(family, dimension))
            found = max(found, difference(model, larger))
    return found


def experts_of(family: str, experts: int, top_k: int, granularity: int) -> tuple[float, float]:
    """Return the differences of a model with experts from its dense source, in float32: ours, and with Megatron's factors.

    Megatron multiplies all three projections by the cube root of the granularity (``moe_weight_scale`` in
    megatron/core/transformer/moe/upcycling_utils.py), and unickpt only the last one, by the granularity.
    """
    model = source(family, dtype=torch.float32, **DENSE[family])
    table, config = Upcycle(experts, top_k, granularity, 0, model.config.to_dict()).result(table_of_model(model))
    made = model_of_table(table, config, torch.float32)
    ours = difference(model, made)
    with torch.no_grad():
        for layer in made.model.layers:
            layer.mlp.experts.gate_up_proj *= granularity ** (1 / 3)
            layer.mlp.experts.down_proj *= granularity ** (-2 / 3)
    return ours, difference(model, made)


def main() -> None:
    torch.set_num_threads(1)
    columns = [*DIMENSIONS, "twice"]
    print(f"| family | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for family in FAMILIES:
        print(f"| {family} | {' | '.join(f'{largest(family, dimension):.1e}' for dimension in columns)} |", flush=True)
    titles = [f"{experts} experts, top {top_k}, granularity {parts}" for experts, top_k, parts in EXPERTS]
    print(f"\n| dense family | {' | '.join(titles)} |\n|---|{'---|' * len(titles)}")
    for family in DENSE:
        cells = [f"{ours:.1e} ({megatrons:.1e})" for ours, megatrons in (experts_of(family, *each) for each in EXPERTS)]
        print(f"| {family} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
