"""The warning about a changed global batch size: both sizes, the effect, and the setting that keeps it."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("deepspeed")

from ds_unickpt.batch.batches import Batch, changed, kept, of_config


def test_the_batch_of_a_config() -> None:
    full = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}
    assert of_config(full, 2) == Batch(12, 3, 2, 2)
    assert of_config(full, 5) == Batch(12), "sequence parallel ranks share their samples"
    assert of_config({"train_micro_batch_size_per_gpu": 6}, 2) == Batch(12, 6, 1, 2)
    assert of_config({"train_batch_size": 12}, 2) == Batch(12)
    assert of_config({"train_batch_size": "auto"}, 2) is None
    assert of_config({"gradient_accumulation_steps": 2}, 2) is None
    assert of_config(None, 2) is None


def test_fewer_ranks_make_a_smaller_batch() -> None:
    message = changed(Batch(12, 6, 1, 2), Batch(6, 6, 1, 1), step=3, trainer=True)
    assert "from 12 (6 per device x 1 accumulated x 2 ranks) to 6 (6 per device x 1 accumulated x 1 ranks)" in message
    assert "takes 2 times as many steps" in message
    assert "Trainer finds its position in the data by steps, so 18 samples are seen twice." in message
    assert message.endswith("To keep 12: --gradient_accumulation_steps 2, or --per_device_train_batch_size 12.")


def test_more_ranks_make_a_larger_batch() -> None:
    message = changed(Batch(8), Batch(16, 2, 2, 4), step=10, trainer=False)
    assert "2 times fewer steps" in message
    assert "If your loop finds its position in the data by steps, 80 samples are skipped." in message
    assert '"gradient_accumulation_steps": 1, or "train_micro_batch_size_per_gpu": 1, and "train_batch_size": 8' in message
    assert changed(Batch(16), Batch(16, 2, 2, 4), step=10, trainer=False) == ""
    assert changed(None, Batch(16, 2, 2, 4), step=10, trainer=False) == ""


@pytest.mark.parametrize("trainer", [True, False])
@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("total", [1, 6, 12, 30, 64])
def test_every_setting_that_is_named_gives_that_batch(total: int, ranks: int, trainer: bool) -> None:
    for per_device in (1, 2, 3, 4, 6):
        for accumulation in (1, 2, 3):
            message = kept(total, Batch(per_device * accumulation * ranks, per_device, accumulation, ranks), trainer)
            if total % ranks:
                near = [int(found) for found in re.findall(r"\d+", message.split("nearest are")[1])]
                assert all(value % ranks == 0 and abs(value - total) < ranks for value in near)
                continue
            for way in message.split(": ", 1)[1].split(", and ")[0].split(", or "):
                device = re.search(r"batch_size(?:_per_gpu)?\W+(\d+)", way)
                steps = re.search(r"accumulation_steps\W+(\d+)", way)
                found = (int(device[1]) if device else per_device) * (int(steps[1]) if steps else accumulation) * ranks
                assert found == total, message
