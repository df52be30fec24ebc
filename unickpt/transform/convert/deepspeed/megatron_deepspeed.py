"""Detection of Megatron-DeepSpeed checkpoints (deepspeedai/Megatron-DeepSpeed) and of their models.

The jobs store their arguments beside the state of DeepSpeed (``save_checkpoint`` in megatron/checkpointing.py). Names and
layouts are those of megatron/model/gpt_model.py, language_model.py and transformer.py. There are variants:

- Names are those of a pipeline (``GPTModelPipe``: layer numbers) or of ``GPTModel`` (``language_model.encoder...``).
- The rows of ``query_key_value`` are the queries, the key and the value of each group of heads. Since FPDT (4 December 2024,
  pull request 441) each tensor parallel rank has all its queries, then all its keys, then all its values. The argument
  ``ds_sequence_parallel_fpdt`` identifies that release. ``universal_checkpoint_info`` does not contain this layout, so
  ``ds_to_universal`` concatenates the ranks. This module concatenates the queries, the keys and the values separately.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from unickpt.transform.convert.deepspeed.files import File
from unickpt.transform.convert.pickles.safe_pickle import Record
from unickpt.transform.dialects.model_facts import Model

PLAIN, PIPE = "megatron-deepspeed", "megatron-deepspeed-pipe"
FIRST_LAYER = 2  # number of the first transformer layer of a pipeline, after a cast and the embedding
_FPDT = "ds_sequence_parallel_fpdt"
_FUSED = re.compile(r".*\.self_attention\.query_key_value\.(weight|bias)")
_LAYER = re.compile(r"(\d+)\.self_attention\.query_key_value\.weight")
_ORDERED = 2.0  # checkpoint_version since which query_key_value has this layout


@dataclass(frozen=True)
class MegatronDeepSpeed:
    """Facts about a Megatron-DeepSpeed job.

    Attributes:
        dialect: dialect of the names.
        model: facts about the model.
        thirds: each rank has its queries, keys and values as three consecutive parts.
    """

    dialect: str
    model: Model
    thirds: bool

    def parts(self, name: str) -> int:
        """Return the number of parts of a tensor of which every tensor parallel rank has a share; 0 if unknown."""
        return 3 if self.thirds and _FUSED.fullmatch(name) else 0


def megatron_deepspeed(first: File, names: Collection[str], info: Mapping[str, Any]) -> MegatronDeepSpeed | None:
    """Return the facts about a Megatron-DeepSpeed job, or None for another job.

    Args:
        first: model state file that describes the job.
        names: names of all weights.
        info: ``universal_checkpoint_info``.
    """
    found = first.content.get("args")
    arguments = found.state if isinstance(found, Record) and found.kind == "argparse.Namespace" else {}
    layers = [int(match[1]) for name in names if (match := _LAYER.fullmatch(name))]
    plain = any(name.startswith("language_model.encoder.layers.") for name in names)
    if "num_attention_heads" not in arguments or not (plain or layers):
        return None
    version = first.content.get("checkpoint_version")
    variant = "" if isinstance(version, (int, float)) and version >= _ORDERED else f"-version-{version}"
    if layers and min(layers) != FIRST_LAYER and not variant:
        variant = f"-first-layer-{min(layers)}"
    entries = info.get("original_vocab_size")
    return described(arguments, plain=plain, variant=variant, entries=entries if type(entries) is int else None)


def described(arguments: Mapping[str, Any], *, plain: bool, variant: str = "", entries: int | None) -> MegatronDeepSpeed:
    """Return the facts about a Megatron-DeepSpeed job.

    Args:
        arguments: arguments of its scripts.
        plain: names are those of ``GPTModel``, not of a pipeline.
        variant: suffix of a dialect without rules, for an unusual variant; '' normally.
        entries: number of entries of the tokenizer; None if unknown.
    """
    heads = arguments["num_attention_heads"]
    groups = arguments.get("num_key_value_heads") or heads
    thirds = _FPDT in arguments
    facts = {
        "layers": arguments.get("num_layers"),
        "heads": heads,
        "groups": groups,
        "head_dim": arguments.get("kv_channels"),
        "vocab": entries,
        "qkv_blocks": 1 if thirds else groups,
    }
    known = {name: number for name, number in facts.items() if type(number) is int and number > 0}
    dialect = PLAIN if plain else PIPE
    if arguments.get("apply_layernorm_1p") and "version" not in variant:
        variant = "-layernorm-1p"  # its LayerNorm weights are stored minus one
    return MegatronDeepSpeed(dialect + variant, Model(_family(arguments), known), thirds)


def _family(arguments: Mapping[str, Any]) -> str:
    """Return the model family if the arguments identify it. GPT-2 has learned positions and biases."""
    plain = arguments.get("normalization", "layernorm") == "layernorm" and not arguments.get("swiglu")
    return "gpt2" if plain and arguments.get("add_position_embedding") and arguments.get("add_bias_linear", True) else ""
