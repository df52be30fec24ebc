"""Jobs whose model is Megatron-DeepSpeed's GPT (deepspeedai/Megatron-DeepSpeed), by the state of its scripts."""

from __future__ import annotations

import sys
from typing import Any

from unickpt.transform.convert.deepspeed.megatron_deepspeed import MegatronDeepSpeed, described

_MODELS = {"GPTModel": True, "GPTModelPipe": False}  # class -> whether its names are those of a plain module


def job_of(module: Any) -> MegatronDeepSpeed | None:
    """Return the facts about a job by its model, or None for another model."""
    kinds = (_MODELS.get(kind.__name__) for kind in type(module).__mro__ if kind.__module__ == "megatron.model.gpt_model")
    plain = next((kind for kind in kinds if kind is not None), None)
    if plain is None:
        return None
    state: Any = sys.modules["megatron.global_vars"]
    return described(vars(state.get_args()), plain=plain, entries=entries())


def entries() -> int | None:
    """Return the number of entries of the scripts' tokenizer; None if unknown or without the scripts."""
    state: Any = sys.modules.get("megatron.global_vars")
    found = getattr(getattr(state, "_GLOBAL_TOKENIZER", None), "vocab_size", None)
    return found if isinstance(found, int) else None
