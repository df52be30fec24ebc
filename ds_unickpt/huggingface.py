"""What Hugging Face's libraries tell: of a model, and of what Trainer does with a checkpoint directory after it was saved."""

from __future__ import annotations

import os
import sys
from typing import Any

from unickpt.language.facts import Model

_DEPTH = 40  # frames from a save up to Trainer's loop, callbacks of other libraries included


_FACTS = {
    "layers": ("num_hidden_layers", "n_layer"),
    "heads": ("num_attention_heads", "n_head"),
    "groups": ("num_key_value_heads", "num_attention_heads", "n_head"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "vocab": ("vocab_size",),
    "query_rank": ("q_lora_rank",),
    "latent_rank": ("kv_lora_rank",),
    "plain_dim": ("qk_nope_head_dim",),
    "rotary_dim": ("qk_rope_head_dim",),
    "value_dim": ("v_head_dim",),
}  # configurations of transformers: the first that there is


def model_of(module: Any) -> Model:
    """What the configuration of a model of transformers tells; nothing of other modules."""
    config = getattr(module, "config", None)
    family = getattr(config, "model_type", "")
    if not isinstance(family, str) or not family:
        return Model()
    facts = {name: _number(config, keys) for name, keys in _FACTS.items()}
    width, heads = _number(config, ("hidden_size", "n_embd")), facts["heads"]
    facts["head_dim"] = _number(config, ("head_dim",)) or (width // heads if width and heads else 0)
    return Model(family, {name: number for name, number in facts.items() if number})


def _number(config: Any, keys: tuple[str, ...]) -> int:
    found = (getattr(config, key, None) for key in keys)
    return next((value for value in found if type(value) is int and value > 0), 0)


def touches_checkpoints(save_dir: str) -> str:
    """Why a save must be over before it returns, or ''.

    Trainer deletes older checkpoints as soon as the save has returned (``save_total_limit``,
    ``Trainer._rotate_checkpoints``), which is only safe if this one exists by then; some versions
    save into ``tmp-checkpoint-...`` and rename it.
    """
    if "transformers.trainer" not in sys.modules:
        return ""
    if any(part.startswith("tmp-checkpoint-") for part in os.path.normpath(save_dir).split(os.sep)):
        return "Trainer renames the directory when the save returns"
    trainer = _trainer()
    if trainer is not None and getattr(trainer.args, "save_total_limit", None) is not None:
        return "Trainer deletes older checkpoints when the save returns (save_total_limit)"
    return ""


def _trainer() -> Any:
    """The Trainer that called us, if one did."""
    kind = sys.modules["transformers.trainer"].Trainer
    frame = sys._getframe(1)
    for _ in range(_DEPTH):
        found = frame.f_locals.get("self")
        if isinstance(found, kind):
            return found
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None
