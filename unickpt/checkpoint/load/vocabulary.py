"""Decides which rows of a padded vocabulary a load leaves out, and which it creates. Pure functions.

Megatron and Megatron-DeepSpeed pad the vocabulary so that the tensor parallel ranks can divide it. The embedding and the output
layer therefore have other shapes in other layouts. Padding may change, but no row of a token may be lost.
"""

from __future__ import annotations

from dataclasses import dataclass


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
        initialised: rows of entries that the checkpoint lacks. They keep the model's initial values.
        zeros: padding rows that the checkpoint lacks.
        refused: why the tensor cannot be loaded, or ''.
    """

    initialised: tuple[int, int] = (0, 0)
    zeros: tuple[int, int] = (0, 0)
    refused: str = ""


def rows_of(stored_rows: int, own_rows: int, vocabulary: Vocabulary) -> Rows:
    """Return what to do with the rows of an embedding or an output layer. Both numbers of rows include padding."""
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
    return Rows()


def _interval(first: int, last: int) -> tuple[int, int]:
    return (first, last) if last > first else (0, 0)
