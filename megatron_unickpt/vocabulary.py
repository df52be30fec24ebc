"""The rows of a vocabulary: which of them a load may leave out, and which the model initialises. Pure functions.

Megatron pads the vocabulary to a multiple of ``--make-vocab-size-divisible-by`` and the tensor parallel size, so that its
embedding and output layer have other shapes under other arguments. Padding may change; rows of tokens may not be lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unickpt.language.facts import Model

# Arguments that choose the tokenizer: if all of them are equal, so is its number of entries.
TOKENIZER_ARGUMENTS = (
    "tokenizer_type", "tokenizer_model", "vocab_size", "vocab_file", "merge_file", "vocab_extra_ids", "tiktoken_pattern",
    "tiktoken_num_special_tokens", "tiktoken_special_tokens", "tokenizer_special_tokens",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Entries of the tokenizers, without padding.

    Attributes:
        stored: of the checkpoint's; None if that is not known.
        own: of this job's; None if that is not known.
    """

    stored: int | None = None
    own: int | None = None

    @property
    def change(self) -> str:
        """How the two differ, for the log; '' if they do not, or if one of them is not known."""
        if self.stored is None or self.own is None or self.stored == self.own:
            return ""
        if self.own > self.stored:
            follows = f"rows {self.stored}:{self.own} are new"
        else:
            follows = f"rows {self.own}:{self.stored} become padding"
        return f"the checkpoint's tokenizer has {self.stored:,} entries, this job's has {self.own:,}: {follows}"


@dataclass(frozen=True, slots=True)
class Rows:
    """What a load does with the rows of one tensor. Intervals are half-open; (0, 0) is none.

    Attributes:
        padding_left_out: rows of the checkpoint that are padding and that this job does not have.
        initialised: rows for entries that the checkpoint does not have: they keep what the model initialised them with.
        zeros: rows of padding that the checkpoint does not have.
        refused: why the tensor must not be loaded, or ''.
    """

    padding_left_out: tuple[int, int] = (0, 0)
    initialised: tuple[int, int] = (0, 0)
    zeros: tuple[int, int] = (0, 0)
    refused: str = ""


def rows_of(stored_rows: int, own_rows: int, vocabulary: Vocabulary) -> Rows:
    """What to do with the rows of an embedding or an output layer.

    Args:
        stored_rows: of the tensor in the checkpoint, padding included.
        own_rows: of the tensor in this job, padding included.
        vocabulary: how many of them are entries.
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
        told = f"{stored_rows:,} rows in the checkpoint, {entries:,} of them entries of its tokenizer, {own_rows:,} in this job"
        return Rows(refused=told)
    return Rows(padding_left_out=(own_rows, stored_rows))


def _interval(first: int, last: int) -> tuple[int, int]:
    return (first, last) if last > first else (0, 0)


def advice(vocabulary: Vocabulary) -> str:
    """What a user can do about a refusal."""
    known = "" if vocabulary.stored is not None else (
        "The checkpoint does not tell how many of its rows are padding (megatron_unickpt.save has the argument vocabulary). "
    )  # fmt: skip
    return (
        f"{known}Use the checkpoint's tokenizer, or more padding (--make-vocab-size-divisible-by). `unickpt edit "
        "--vocabulary` cuts rows on purpose (docs/surgery.md)"
    )


def entries_of_checkpoint(
    model: Mapping[str, Any], arguments: Mapping[str, Any], own_arguments: Mapping[str, Any], own: int | None
) -> int | None:
    """Entries of the tokenizer that a checkpoint of Megatron was trained with; None if nothing proves their number.

    Args:
        model: of the manifest's writer.
        arguments: of the scripts, as stored; empty if there are none.
        own_arguments: this job's; empty if there are none.
        own: entries of this job's tokenizer.
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
        return own  # saved by a release that did not note it
    return None
