"""Facts about a model that do not follow from the shapes of its tensors: numbers such as attention heads, and the family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unickpt.base.errors import MismatchError

FACTS = {
    "layers": "transformer layers",
    "heads": "attention heads of queries",
    "groups": "groups of heads that share a key and a value",
    "head_dim": "elements of a head",
    "experts": "routed experts of a layer",
    "vocab": "entries of the vocabulary, without padding",
    "tokens": "entries of the tokenizer; further rows of the vocabulary are padding",
    "qkv_blocks": "blocks of a fused tensor of queries, keys and values, each with all three",
    "query_rank": "rank of the low-rank queries in multi-latent attention",
    "latent_rank": "rank of the latent keys and values in multi-latent attention",
    "plain_dim": "elements of the query and key of a head without a position, in multi-latent attention",
    "rotary_dim": "elements of the query and key of a head with a position, in multi-latent attention",
    "value_dim": "elements of the value of a head, in multi-latent attention",
}


# Keys in configurations of transformers; the first existing key is used.
CONFIG_KEYS = {
    "layers": ("num_hidden_layers", "n_layer"),
    "heads": ("num_attention_heads", "n_head"),
    "groups": ("num_key_value_heads", "num_attention_heads", "n_head"),
    "head_dim": ("head_dim",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "vocab": ("vocab_size",),
    "query_rank": ("q_lora_rank",),
    "latent_rank": ("kv_lora_rank",),
    "plain_dim": ("qk_nope_head_dim",),
    "rotary_dim": ("qk_rope_head_dim",),
    "value_dim": ("v_head_dim",),
}
_WIDTH, _FAMILY = ("hidden_size", "n_embd"), "model_type"
# Settings in configurations of transformers that change the computation but no shape, under the names of Megatron's arguments.
SETTING_KEYS = {
    "norm_epsilon": ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "layernorm_epsilon", "norm_eps", "norm_epsilon"),
    "rotary_base": ("rope_theta", "rotary_emb_base"),
    "rotary_percent": ("partial_rotary_factor", "rotary_pct"),
}
_ROPE = ("rope_parameters", "rope_scaling")  # a dictionary; transformers 5 and later use the first, which contains rope_theta
CONFIG_NAMES = (*{key for keys in (*CONFIG_KEYS.values(), *SETTING_KEYS.values()) for key in keys}, *_ROPE, *_WIDTH, _FAMILY)


def _number(config: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    found = (config.get(key) for key in keys)
    return next((value for value in found if type(value) is int and 0 < value < 1 << 40), 0)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e30


def _settings(config: Mapping[str, Any]) -> dict[str, float | str]:
    """Return the ``SETTING_KEYS`` in a configuration and the scaling of rotary embeddings."""
    rope = next((each for name in _ROPE if isinstance(each := config.get(name), Mapping)), {})
    found: dict[str, float | str] = {}
    for name, keys in SETTING_KEYS.items():
        value = next((each for key in keys if _is_number(each := rope.get(key, config.get(key)))), None)
        if value is not None:
            found[name] = value
    kind = rope.get("rope_type", rope.get("type"))
    if "rotary_base" in found:
        found["rope_scaling"] = kind if isinstance(kind, str) else "default"
    return found


@dataclass(frozen=True)
class Model:
    """Facts about a model.

    Attributes:
        family: ``model_type`` of transformers, or ''.
        facts: values by the names of ``FACTS``.
        settings: settings that change no shape: the numbers of ``SETTING_KEYS``, and the name of the kind of ``rope_scaling``.
    """

    family: str = ""
    facts: Mapping[str, int] = field(default_factory=dict)
    settings: Mapping[str, float | str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the form for the manifest; empty if nothing is known."""
        if not (self.family or self.facts):
            return {}
        settings = {"settings": dict(self.settings)} if self.settings else {}
        return {"family": self.family, "facts": dict(self.facts), **settings}

    @classmethod
    def from_json(cls, value: Any) -> Model:
        """Return the facts in a manifest. Malformed values are ignored."""
        if not isinstance(value, dict):
            return cls()
        family, facts = value.get("family"), value.get("facts")
        known = {
            name: number
            for name, number in (facts.items() if isinstance(facts, dict) else ())
            if name in FACTS and type(number) is int and 0 < number < 1 << 40
        }
        settings = value.get("settings")
        valid = {
            name: each
            for name, each in (settings.items() if isinstance(settings, dict) else ())
            if (name in SETTING_KEYS and _is_number(each)) or (name == "rope_scaling" and isinstance(each, str))
        }
        return cls(family if isinstance(family, str) else "", known, valid)

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Model:
        """Return the facts in a configuration of transformers (``config.json``, or the attributes of ``CONFIG_NAMES``)."""
        family = config.get(_FAMILY)
        if not isinstance(family, str) or not family:
            return cls()
        facts = {name: _number(config, keys) for name, keys in CONFIG_KEYS.items()}
        width, heads = _number(config, _WIDTH), facts["heads"]
        facts["head_dim"] = facts["head_dim"] or (width // heads if width and heads else 0)
        return cls(family, {name: number for name, number in facts.items() if number}, _settings(config))

    @classmethod
    def of_module(cls, module: Any) -> Model:
        """Return the facts that the configuration of a transformers model states; none for other modules."""
        config = getattr(module, "config", None)
        return cls.of_config({name: getattr(config, name, None) for name in CONFIG_NAMES})

    @classmethod
    def of_megatron(cls, arguments: Any) -> Model:
        """Return the facts in the arguments of Megatron's training scripts; None gives no facts.

        With the NullTokenizer ``vocab_size`` is not used, because releases differ in whether it counts the extra token.
        """
        heads = getattr(arguments, "num_attention_heads", None)
        grouped = getattr(arguments, "group_query_attention", False)
        null = getattr(arguments, "tokenizer_type", None) == "NullTokenizer"
        facts = {
            "layers": getattr(arguments, "num_layers", None),
            "heads": heads,
            "groups": getattr(arguments, "num_query_groups", None) if grouped else heads,
            "head_dim": getattr(arguments, "kv_channels", None),
            "experts": getattr(arguments, "num_experts", None),
            "vocab": None if null else getattr(arguments, "vocab_size", None),  # without padding
        }
        return cls("", {name: number for name, number in facts.items() if type(number) is int and number > 0})

    def with_more(self, other: Model, where: str) -> Model:
        """Return the facts of this job's model together with those of a checkpoint of it.

        Args:
            other: facts of the checkpoint.
            where: name of the checkpoint in messages.

        Raises:
            MismatchError: the facts contradict each other.
        """
        if self.family and other.family and self.family != other.family:
            raise MismatchError(f"{where}: has the model family {other.family!r}, this job's model has {self.family!r}")
        for name in sorted(self.facts.keys() & other.facts.keys()):
            if self.facts[name] != other.facts[name]:
                raise MismatchError(
                    f"{where}: the model has {other.facts[name]} {FACTS[name]}, this job's model has {self.facts[name]}"
                )
        return Model(self.family or other.family, {**other.facts, **self.facts}, {**other.settings, **self.settings})
