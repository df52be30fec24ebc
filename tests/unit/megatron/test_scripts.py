"""Which checkpoints the training scripts refuse before they load."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from megatron_unickpt.pretraining.scripts import _optimizer_refusal

OPTIMIZER = object()


@pytest.mark.parametrize(
    ("flags", "stored", "optimizer", "refused"),
    [
        ({}, {"no_save_optim": True}, OPTIMIZER, True),
        ({}, {"no_save_optim": True}, None, False),
        ({"no_load_optim": True}, {"no_save_optim": True}, OPTIMIZER, False),
        ({"finetune": True}, {"no_save_optim": True}, OPTIMIZER, False),
        ({"unickpt_missing_state": "fresh"}, {"no_save_optim": True}, OPTIMIZER, False),
        ({}, {}, OPTIMIZER, False),
    ],
)
def test_a_checkpoint_without_optimizer_is_refused_if_one_is_to_be_loaded(
    flags: dict[str, Any], stored: dict[str, Any], optimizer: Any, refused: bool
) -> None:
    assert bool(_optimizer_refusal(Namespace(**flags), Namespace(**stored), optimizer)) is refused
