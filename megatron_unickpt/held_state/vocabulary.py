"""The number of entries of Megatron's tokenizers. Pure functions.

Megatron pads the vocabulary to a multiple of ``--make-vocab-size-divisible-by`` and the tensor parallel size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unickpt.checkpoint.load.vocabulary import Vocabulary
from unickpt.transform.dialects.model_facts import Model

# Arguments that choose the tokenizer: if all of them are equal, so is its number of entries.
TOKENIZER_ARGUMENTS = (
    "tokenizer_type", "tokenizer_model", "vocab_size", "vocab_file", "merge_file", "vocab_extra_ids", "tiktoken_pattern",
    "tiktoken_num_special_tokens", "tiktoken_special_tokens", "tokenizer_special_tokens",
)  # fmt: skip


def advice(vocabulary: Vocabulary) -> str:
    """Return what a user can do about a refusal."""
    known = (
        ""
        if vocabulary.stored is not None
        else (
            "The checkpoint does not record how many of its rows are padding (argument vocabulary of megatron_unickpt.save). "
        )
    )
    return (
        f"{known}Use the checkpoint's tokenizer, or more padding (--make-vocab-size-divisible-by). `unickpt edit "
        "--vocabulary` removes rows on request (docs/guides/editing.md)"
    )


def entries_of_checkpoint(
    model: Mapping[str, Any], arguments: Mapping[str, Any], own_arguments: Mapping[str, Any], own: int | None
) -> int | None:
    """Return the number of entries of the tokenizer that a checkpoint of Megatron was trained with; None if unknown.

    Args:
        model: model facts in the manifest.
        arguments: stored arguments of the scripts; empty if there are none.
        own_arguments: arguments of this job; empty if there are none.
        own: number of entries of this job's tokenizer.
    """
    facts = Model.from_json(dict(model)).facts
    for fact in ("tokens", "vocab"):
        if fact in facts:
            return facts[fact]
    padded = arguments.get("padded_vocab_size")
    multiple = int(arguments.get("make_vocab_size_divisible_by") or 0) * int(arguments.get("tensor_model_parallel_size") or 0)
    same = bool(arguments.get("tokenizer_type")) and all(
        arguments.get(name) == own_arguments.get(name) for name in TOKENIZER_ARGUMENTS
    )
    if same and own is not None and isinstance(padded, int) and padded - multiple < own <= padded:
        return own  # saved by a release that did not record it
    return None
