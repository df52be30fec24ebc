"""Checkpoints of single steps in an object store."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from tests.support.rank_threads import WORLD, on_all_ranks
from tests.support.saves import INFO, part, values
from tests.support.saving import save
from unickpt.checkpoint.coordination.message_exchange import MessageExchange
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.verify import verify_checkpoint
from unickpt.checkpoint.save.requests import SaveResult

_MISSING = [name for name in ("fsspec", "s3fs", "moto", "flask") if importlib.util.find_spec(name) is None]
needs_store = pytest.mark.skipif(bool(_MISSING), reason=f"not installed: {', '.join(_MISSING)} (the 'dev' extra has them)")


def save_step(where: str, step: int, tag: str, **more: Any) -> list[SaveResult]:
    """Save on three ranks."""

    def run(exchange: MessageExchange) -> SaveResult:
        return save(lambda _: part(step, exchange.rank), save_dir=where, tag=tag, save_latest=True, exchange=exchange, **more)

    return on_all_ranks(run)


def assert_holds(where: str, step: int) -> None:
    """Assert that the checkpoint is valid and has the values of this step."""
    assert verify_checkpoint(where).problems == ()
    checkpoint = Checkpoint.open(where)
    assert checkpoint.manifest.step == step
    assert torch.equal(checkpoint.read_tensor(*INFO.key).reshape(-1), values(step))
    assert checkpoint.objects().value == {"step": step}
    assert [checkpoint.rank_objects(rank).value for rank in range(WORLD)] == [{"rank": rank} for rank in range(WORLD)]
