"""Which rows of a vocabulary a load of Megatron's may leave out: the rules, without Megatron."""

from __future__ import annotations

import pytest

from megatron_unickpt.held_state.vocabulary import entries_of_checkpoint
from unickpt.checkpoint.load.vocabulary import Rows, Vocabulary, rows_of


@pytest.mark.parametrize(
    ("stored_rows", "own_rows", "vocabulary", "expected"),
    [
        (1024, 1152, Vocabulary(1000, 1000), Rows(zeros=(1024, 1152))),
        (1152, 1024, Vocabulary(1000, 1000), Rows()),
        (1152, 1024, Vocabulary(1024, None), Rows()),
        (512, 1152, Vocabulary(500, 1100), Rows(initialised=(512, 1100), zeros=(1100, 1152))),
        (512, 1152, Vocabulary(None, 1100), Rows(initialised=(512, 1100), zeros=(1100, 1152))),
        (512, 640, Vocabulary(None, None), Rows(zeros=(512, 640))),
        (512, 640, Vocabulary(500, 400), Rows(zeros=(512, 640))),
    ],
)
def test_padding_changes_freely_and_new_entries_are_initialised(
    stored_rows: int, own_rows: int, vocabulary: Vocabulary, expected: Rows
) -> None:
    assert rows_of(stored_rows, own_rows, vocabulary) == expected


@pytest.mark.parametrize("vocabulary", [Vocabulary(None, 512), Vocabulary(1023, 512), Vocabulary(9999, None)])
def test_rows_that_may_be_entries_are_never_left_out(vocabulary: Vocabulary) -> None:
    refused = rows_of(1024, 512, vocabulary).refused
    assert refused.startswith("1,024 rows in the checkpoint")
    assert refused.endswith("512 in this job")


def test_the_sources_of_a_checkpoints_number_of_entries() -> None:
    assert entries_of_checkpoint({"family": "", "facts": {"tokens": 1000, "vocab": 900}}, {}, {}, 700) == 1000
    assert entries_of_checkpoint({"family": "", "facts": {"vocab": 900}}, {}, {}, None) == 900
    own = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "a"}
    stored = {**own, "padded_vocab_size": 1024, "make_vocab_size_divisible_by": 128, "tensor_model_parallel_size": 2}
    assert entries_of_checkpoint({}, stored, own, 1000) == 1000, "the same tokenizer"
    assert entries_of_checkpoint({}, stored, {**own, "tokenizer_model": "b"}, 1000) is None
    assert entries_of_checkpoint({}, stored, own, 700) is None, "that would have been padded to less"
    assert entries_of_checkpoint({}, {}, {}, 1000) is None
