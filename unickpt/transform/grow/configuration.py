"""Configuration of the grown model, in the keys of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unickpt.transform.dialects.growth import STREAM, Growth
from unickpt.transform.dialects.model_facts import CONFIG_KEYS, SETTING_KEYS, Model
from unickpt.transform.grow.refusals import Refusal
from unickpt.transform.grow.sizes import GROUPS, HEADS, LAYERS, Sizes

EPSILON = "norm_epsilon"
_LAYER_LISTS = ("layer_types", "mlp_layer_types")  # one entry per layer
_LAYER_NUMBERS = ("mlp_only_layers",)  # numbers of layers
_FIRST_LAYERS = ("first_k_dense_replace",)  # number of first layers of another kind
# Settings with which a layer depends on its number, unless they have the given value.
_BY_NUMBER = {
    "scale_attn_by_inverse_layer_idx": False,
    "decoder_sparse_step": 1,
    "moe_layer_freq": 1,
    "use_sliding_window": False,
}


def refusals(config: Mapping[str, Any], sizes: Sizes) -> list[Refusal]:
    """Return reasons in the configuration of the source against a growth."""
    found = []
    if sizes.new[LAYERS] != sizes.old[LAYERS]:
        found = [
            Refusal("layer-dependent", key)
            for key, neutral in _BY_NUMBER.items()
            if config.get(key, neutral) != neutral and not (key == "use_sliding_window" and config.get("layer_types"))
        ]
    if sizes.scale != 1 and config and _epsilon_key(config) is None:
        found.append(Refusal("epsilon", more=f"{sizes.scale**2:.9g}"))
    return found


def grown_config(config: Mapping[str, Any], growth: Growth, sizes: Sizes) -> dict[str, Any]:
    """Return the configuration of the grown model.

    All sizes are written, so that no default depends on the new width.

    Args:
        config: configuration of the source, as in ``config.json``.
        growth: growth rules of its family.
        sizes: sizes of both models.
    """
    new = dict(config)
    for name, keys in growth.settings.items():
        if name in sizes.new:
            new |= {key: sizes.new[name] for at, key in enumerate(keys) if at == 0 or key in config}
    if "head" in sizes.old and not growth.square_heads:
        new["head_dim"] = sizes.old["head"]
    key = _epsilon_key(config)
    if key is not None:
        new[key] = config[key] * sizes.old[STREAM] / sizes.new[STREAM]
    layers = range(sizes.new[LAYERS])
    for name in _LAYER_LISTS:
        if isinstance(config.get(name), list) and len(config[name]) == sizes.old[LAYERS]:
            new[name] = [config[name][sizes.like(at)] for at in layers]
    for name in _LAYER_NUMBERS:
        if isinstance(config.get(name), list):
            new[name] = [at for at in layers if sizes.like(at) in config[name]]
    for name in _FIRST_LAYERS:
        if isinstance(config.get(name), int):
            new[name] = sum(sizes.like(at) < config[name] for at in layers)
    return new


def grown_model(model: Model, growth: Growth, sizes: Sizes, config: Mapping[str, Any]) -> Model:
    """Return the facts about the grown model.

    Args:
        model: facts about the source.
        growth, sizes: as for ``grown_config``.
        config: configuration of the grown model, or empty.
    """
    facts = dict(model.facts)
    for name, keys in growth.settings.items():
        for fact, known in CONFIG_KEYS.items():
            if fact in facts and name in sizes.new and fact in (LAYERS, HEADS, GROUPS) and set(keys) & set(known):
                facts[fact] = sizes.new[name]
    settings = dict(model.settings)
    epsilon = settings.get(EPSILON)
    if isinstance(epsilon, (int, float)):
        settings[EPSILON] = epsilon * sizes.old[STREAM] / sizes.new[STREAM]
    known_now = Model.of_config(config)
    return Model(model.family, {**facts, **known_now.facts}, {**settings, **known_now.settings})


def _epsilon_key(config: Mapping[str, Any]) -> str | None:
    return next((key for key in SETTING_KEYS[EPSILON] if isinstance(config.get(key), (int, float))), None)
