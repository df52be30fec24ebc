"""What serves a tensor, what overrides a cast, what the report says, and which tensors no rank requests."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest
import torch

from tests.support import handmade
from tests.support.rank_threads import WORLD, on_all_ranks
from unickpt.checkpoint.coordination.message_exchange import Message, MessageExchange
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.state.filling import Filling, lost_parameters, mask_of, shapes_of_all, union_of, unrequested
from unickpt.checkpoint.state.optimizer_record import decoded, encoded

BOX = Box((2, 1), (2, 4))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return Checkpoint.open(handmade.save_single(tmp_path))


@pytest.mark.parametrize("flat", [False, True])
def test_a_derived_weight_has_the_values_that_are_not_casts(checkpoint: Checkpoint, flat: bool) -> None:
    filling, out = Filling(checkpoint), torch.zeros(BOX.shape, dtype=torch.bfloat16)
    wide = torch.zeros(BOX.shape)
    info = filling.source("layer.weight", "weight")
    assert info == handmade.WEIGHT
    assert filling.origin(info) == handmade.MASTER
    filling.request(info, BOX, out.view(-1) if flat else out)
    filling.copy_later(wide, out)
    filling.read(filling.plan(), verify="always", host_peers=None)
    assert torch.equal(out, handmade.weight()[BOX.slices()])
    assert torch.equal(wide, out.float()), "after the overrides"
    assert filling.report.bytes_needed > 0


def test_a_weight_serves_for_a_master_and_back_and_the_report_says_so(checkpoint: Checkpoint) -> None:
    filling = Filling(checkpoint)
    embed = filling.source("embed.weight", "master")
    assert embed == handmade.EMBED
    assert filling.source("embed.weight", "exp_avg") is None
    filling.account("e", "master", embed, "F32")
    filling.account("e", "weight", embed, "F16", "all of it")
    filling.account("w", "weight", handmade.WEIGHT, "F16")
    assert [(entry.outcome, entry.reason) for entry in filling.report.entries] == [
        ("cast", "F16 weight to F32 master"), ("restored", "all of it"), ("cast", "F32 master to F16 weight"),
    ]  # fmt: skip


def test_tensors_that_no_rank_requests(checkpoint: Checkpoint) -> None:
    """A weight counts for its master."""
    masks = [mask_of(checkpoint, [handmade.WEIGHT]), mask_of(checkpoint, []), mask_of(checkpoint, [handmade.COUNT])]
    for each in (masks, [union_of(masks)]):
        left = unrequested(checkpoint, each)
        assert {info.key for info in left} == {handmade.MOMENT.key, handmade.EMBED.key, handmade.EMPTY.key}
        assert lost_parameters(checkpoint, left) == ["embed.weight", "empty.weight"]
    assert lost_parameters(checkpoint, unrequested(checkpoint, [mask_of(checkpoint, [handmade.MOMENT])])) == []


def test_every_rank_learns_the_shapes_of_all() -> None:
    def action(exchange: MessageExchange) -> dict[str, tuple[int, ...]]:
        return shapes_of_all({f"own{exchange.rank}": (exchange.rank, 2), "common": ()}, exchange)

    expected = {"own0": (0, 2), "common": (), "own1": (1, 2), "own2": (2, 2)}
    assert on_all_ranks(action) == [expected] * WORLD


def test_only_the_coordinator_warns_of_a_late_rank(caplog: pytest.LogCaptureFixture) -> None:
    warned = threading.Event()

    class Seen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:  # noqa: ARG002 - the signature of logging
            warned.set()

    def action(exchange: MessageExchange) -> Message:
        if exchange.rank == WORLD - 1:
            assert warned.wait(30)
        return exchange.combined(
            "sum", {"rank": exchange.rank}, lambda messages: {"sum": sum(each["rank"] for each in messages)}
        )

    logger, seen = logging.getLogger("unickpt"), Seen(logging.WARNING)
    logger.addHandler(seen)
    try:
        assert on_all_ranks(action) == [{"sum": 3}] * WORLD
    finally:
        logger.removeHandler(seen)
    assert all("rank 0 waits" in text or "rank 2" in text for text in caplog.messages), caplog.messages


def test_a_value_that_cannot_be_encoded_is_named() -> None:
    values = {"lr": torch.tensor([0.5]), "betas": (0.9, 0.99), "held": threading.Lock(), "mask": torch.zeros(3), "step": 2}
    group = encoded(values, ["a", "b", "a"])
    assert group.left_out == ("held", "mask")
    assert group.parameters == ("a", "b")
    found = decoded(group, where="t", device=torch.device("cpu"))
    assert found.keys() == {"lr", "betas", "step"}
    assert torch.equal(found["lr"], values["lr"])
    assert (found["betas"], found["step"]) == ((0.9, 0.99), 2)
    assert decoded(encoded(values, typed=False), where="t", device=torch.device("cpu"))["lr"] == 0.5
