"""DeepSpeed's 1-bit optimizers, which 0.19.8 no longer has: a resumed job is equal to an uninterrupted one, bit for bit."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.forked_jobs import fork_ranks

pytest.importorskip("deepspeed")
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("deepspeed.runtime.fp16.onebit") is None, reason="no 1-bit optimizers"),
]


def run(folder: Path, world: int, name: str, **task: Any) -> list[dict[str, Any]]:
    file = folder / f"{name}.json"
    file.write_text(json.dumps({"folder": str(folder), "name": name, "unickpt": True, "save": False, **task}))
    fork_ranks(world, "tests.jobs.compression.one_bit_job", str(file), timeout_s=300)
    return [torch.load(folder / f"{name}-{rank}.pt") for rank in range(world)]


def different(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    def same(a: Any, b: Any) -> bool:
        return bool(torch.equal(a, b)) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b

    return [key for key in left.keys() | right.keys() if key not in left or key not in right or not same(left[key], right[key])]


@pytest.mark.parametrize("steps", [2, 5, 8])
@pytest.mark.parametrize(("optimizer", "dtype"), [
    ("OneBitAdam", "fp32"), ("OneBitAdam", "bf16"), ("ZeroOneAdam", "fp32"), ("OneBitLamb", "fp32"),
])  # fmt: skip
def test_a_resumed_job_is_equal(optimizer: str, dtype: str, steps: int, tmp_path: Path) -> None:
    task: dict[str, Any] = {"optimizer": optimizer, "dtype": dtype, "steps": [steps, 5]}
    saved = run(tmp_path, 2, "saved", save=True, **task)
    resumed = run(tmp_path, 2, "resumed", **task)
    for before, after in zip(saved, resumed, strict=True):
        assert after["losses"] == before["losses"], after["report"]
        assert not different(before["states"], after["states"])


@pytest.mark.parametrize("steps", [0, 6])
@pytest.mark.parametrize("optimizer", ["OneBitAdam", "ZeroOneAdam", "OneBitLamb"])
def test_a_job_that_has_trained_and_goes_back_is_equal(optimizer: str, steps: int, tmp_path: Path) -> None:
    task: dict[str, Any] = {"optimizer": optimizer, "dtype": "fp32", "steps": [steps, 6], "lived": 8}
    saved = run(tmp_path, 2, "saved", save=True, **task)
    resumed = run(tmp_path, 2, "resumed", **task)
    for before, after in zip(saved, resumed, strict=True):
        assert after["losses"] == before["losses"], after["report"]
        assert not different(before["states"], after["states"])


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("optimizer", ["OneBitAdam", "ZeroOneAdam", "OneBitLamb"])
def test_another_number_of_ranks_owes_as_much(optimizer: str, world: int, tmp_path: Path) -> None:
    task: dict[str, Any] = {"optimizer": optimizer, "dtype": "fp32", "steps": [8, 2]}
    saved = run(tmp_path, 2, "saved", save=True, **task)
    resumed = run(tmp_path, world, "resumed", **task)
    assert all("another number of ranks" in each["report"][0] for each in resumed)
    before, after = (owed([each["at_once"] for each in job]) for job in (saved, resumed))
    assert before
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        torch.testing.assert_close(after[key], tensor, rtol=0, atol=1e-6 * float(tensor.abs().max()))


def test_the_error_buffers_of_loco_are_those_of_each_rank(tmp_path: Path) -> None:
    task: dict[str, Any] = {"optimizer": "LoCo", "dtype": "fp32", "steps": [2, 0]}
    saved = run(tmp_path, 2, "saved", save=True, **task)
    resumed = run(tmp_path, 2, "resumed", **task)
    for before, after in zip(saved, resumed, strict=True):
        assert sum("ef_buf" in key for key in before["at_once"]) == 16
        assert not different(before["at_once"], after["at_once"])
    other = run(tmp_path, 1, "other", **task)
    assert not [key for key in other[0]["at_once"] if "ef_buf" in key]
    assert "another number of ranks" in other[0]["report"][0]


def owed(ranks: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return the mean of what the ranks did not send, and what they together did not send back, without padding."""
    found = {}
    for key in ranks[0]:
        if "worker_error" in key:
            number = key.split()[0] if "errors" not in key else None
            masters = [t for k, t in ranks[0].items() if k.endswith("master") and number in (None, k.split()[0])]
            elements = sum(t.numel() for t in masters)
            found[key] = torch.stack([rank[key].double() for rank in ranks]).mean(0)[:elements]
            back = key.replace("worker", "server")
            found[back] = torch.cat([rank[back].double() for rank in ranks])[:elements]
    return found
