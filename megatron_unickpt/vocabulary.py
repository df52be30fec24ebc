"""Decides which rows of a vocabulary a load leaves out, and which the model initialises. Pure functions.

Megatron pads the vocabulary to a multiple of ``--make-vocab-size-divisible-by`` and the tensor parallel size. The embedding and
the output layer therefore have other shapes with other arguments. Padding may change, but no row of a token may be lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unickpt.dialects.model_facts import Model

# Arguments that choose the tokenizer: if all of them are equal, so is its number of entries.
TOKENIZER_ARGUMENTS = (
    "tokenizer_type", "tokenizer_model", "vocab_size", "vocab_file", "merge_file", "vocab_extra_ids", "tiktoken_pattern",
    "tiktoken_num_special_tokens", "tiktoken_special_tokens", "tokenizer_special_tokens",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Numbers of entries of the tokenizers, without padding.

    Attributes:
        stored: number of the checkpoint's tokenizer; None if unknown.
        own: number of this job's tokenizer; None if unknown.
    """

    stored: int | None = None
    own: int | None = None

    @property
    def change(self) -> str:
        """Return how the two differ, for the log; '' if they are equal or one is unknown."""
        if self.stored is None or self.own is None or self.stored == self.own:
            return ""
        if self.own > self.stored:
            follows = f"rows {self.stored}:{self.own} are new"
        else:
            follows = f"rows {self.own}:{self.stored} become padding"
        return f"the checkpoint's tokenizer has {self.stored:,} entries, this job's has {self.own:,}: {follows}"


@dataclass(frozen=True, slots=True)
class Rows:
    """What a load does with the rows of one tensor. Intervals are half-open. (0, 0) is an empty one.

    Attributes:
        padding_left_out: padding rows of the checkpoint that this job lacks.
        initialised: rows of entries that the checkpoint lacks. They keep the model's initial values.
        zeros: padding rows that the checkpoint lacks.
        refused: why the tensor cannot be loaded, or ''.
    """

    padding_left_out: tuple[int, int] = (0, 0)
    initialised: tuple[int, int] = (0, 0)
    zeros: tuple[int, int] = (0, 0)
    refused: str = ""


def rows_of(stored_rows: int, own_rows: int, vocabulary: Vocabulary) -> Rows:
    """Return what to do with the rows of an embedding or an output layer.

    Args:
        stored_rows: number of rows in the checkpoint, including padding.
        own_rows: number of rows in this job, including padding.
        vocabulary: numbers of entries.
    """
    if own_rows >= stored_rows:
        first = stored_rows
        last = min(max(vocabulary.own or 0, first), own_rows)
        if vocabulary.stored is not None and vocabulary.own is not None and vocabulary.own <= vocabulary.stored:
            last = first
        return Rows(initialised=_interval(first, last), zeros=_interval(last, own_rows))
    if vocabulary.stored is None:
        return Rows(refused=f"{stored_rows:,} rows in the checkpoint, {own_rows:,} in this job")
    entries = min(vocabulary.stored, stored_rows)
    if own_rows < entries:
        entry_rows = f"{entries:,} of them entries of its tokenizer"
        reason = f"{stored_rows:,} rows in the checkpoint, {entry_rows}, {own_rows:,} in this job"
        return Rows(refused=reason)
    return Rows(padding_left_out=(own_rows, stored_rows))


def _interval(first: int, last: int) -> tuple[int, int]:
    return (first, last) if last > first else (0, 0)


def advice(vocabulary: Vocabulary) -> str:
    """Return what a user can do about a refusal."""
    known = "" if vocabulary.stored is not None else (
        "The checkpoint does not record how many of its rows are padding (argument vocabulary of megatron_unickpt.save). "
    )  # fmt: skip
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
