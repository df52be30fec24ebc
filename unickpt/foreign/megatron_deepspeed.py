"""What tells that a checkpoint of DeepSpeed is of Megatron-DeepSpeed (deepspeedai/Megatron-DeepSpeed), and of what model.

Its jobs put their arguments beside DeepSpeed's state (megatron/checkpointing.py, ``save_checkpoint``). Names and layouts are
those of megatron/model/gpt_model.py, language_model.py and transformer.py. There are several of each:

- Names are of a pipeline (``GPTModelPipe``: numbers of its layers) or not (``GPTModel``: ``language_model.encoder...``).
- The rows of ``query_key_value`` are, for every group of heads, its queries, its key and its value. Since FPDT came (4 December
  2024, pull request 441) they are, on every tensor parallel rank, all queries, all keys and all values. That release is known
  by its argument ``ds_sequence_parallel_fpdt``. Its ``universal_checkpoint_info`` does not tell of this, so that
  ``ds_to_universal`` joins the ranks one after the other; here they are joined part by part.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from unickpt.foreign.deepspeed_files import File
from unickpt.foreign.pickles import Record
from unickpt.language.facts import Model

PLAIN, PIPE = "megatron-deepspeed", "megatron-deepspeed-pipe"
FIRST_LAYER = 2  # of a pipeline: before it come a cast and the embedding
_FPDT = "ds_sequence_parallel_fpdt"
_FUSED = re.compile(r".*\.self_attention\.query_key_value\.(weight|bias)")
_LAYER = re.compile(r"(\d+)\.self_attention\.query_key_value\.weight")
_ORDERED = 2.0  # the checkpoint_version since which query_key_value is as it is said here


@dataclass(frozen=True)
class MegatronDeepSpeed:
    """Attributes: dialect; what is known of the model; whether queries, keys and values are thirds of what a rank has."""

    dialect: str
    model: Model
    thirds: bool

    def parts(self, name: str) -> int:
        """Of which every tensor parallel rank has its share, one after the other; 0 if nothing is known of that."""
        return 3 if self.thirds and _FUSED.fullmatch(name) else 0


def megatron_deepspeed(first: File, names: Collection[str], told: Mapping[str, Any]) -> MegatronDeepSpeed | None:
    """What is known, or None if it is not of Megatron-DeepSpeed.

    Args:
        first: the file of model states that describes the job.
        names: of all weights.
        told: the ``universal_checkpoint_info``.
    """
    found = first.content.get("args")
    arguments = found.state if isinstance(found, Record) and found.kind == "argparse.Namespace" else {}
    layers = [int(match[1]) for name in names if (match := _LAYER.fullmatch(name))]
    plain = any(name.startswith("language_model.encoder.layers.") for name in names)
    if "num_attention_heads" not in arguments or not (plain or layers):
        return None
    heads = arguments["num_attention_heads"]
    groups = arguments.get("num_key_value_heads") or heads
    thirds = _FPDT in arguments
    facts = {
        "layers": arguments.get("num_layers"),
        "heads": heads,
        "groups": groups,
        "head_dim": arguments.get("kv_channels"),
        "vocab": told.get("original_vocab_size"),
        "qkv_blocks": 1 if thirds else groups,
    }
    known = {name: number for name, number in facts.items() if type(number) is int and number > 0}
    dialect = PLAIN if plain else PIPE
    return MegatronDeepSpeed(dialect + _variant(first, arguments, layers), Model(_family(arguments), known), thirds)


def _variant(first: File, arguments: Mapping[str, Any], layers: Collection[int]) -> str:
    """What makes another dialect of it, of which no rules are known; '' as a rule."""
    version = first.content.get("checkpoint_version")
    if not isinstance(version, (int, float)) or version < _ORDERED:
        return f"-version-{version}"
    if arguments.get("apply_layernorm_1p"):
        return "-layernorm-1p"  # whose weights are less by one
    if layers and min(layers) != FIRST_LAYER:
        return f"-first-layer-{min(layers)}"
    return ""


def _family(arguments: Mapping[str, Any]) -> str:
    """GPT-2 has learned positions and biases; of other models several families are alike."""
    plain = arguments.get("normalization", "layernorm") == "layernorm" and not arguments.get("swiglu")
    return "gpt2" if plain and arguments.get("add_position_embedding") and arguments.get("add_bias_linear", True) else ""
