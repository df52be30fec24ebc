"""A checkpoint of Megatron FSDP, converted and resumed under tensor parallelism. Needs a Megatron-LM tree (``MEGATRON_LM``)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.integration.megatron.test_training import TREE, close, losses, run, until
from unickpt.cli.main import main

pytestmark = pytest.mark.skipif(
    not TREE or os.environ.get("UNICKPT_FULL_MATRIX") != "1", reason="needs MEGATRON_LM, and UNICKPT_FULL_MATRIX=1"
)
FSDP = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --ddp-average-in-collective"


def test_fsdp_dtensor_is_converted_and_resumed_under_tp(tmp_path: Path) -> None:
    """With a gated projection, whose halves Megatron FSDP stores apart. Gloo has no scaled sum, so gradients are averaged."""
    saving = f"--save {tmp_path / 'fsdp'} --save-interval 3 --ckpt-format fsdp_dtensor {FSDP} {until(5)}"
    done = run(2, f"{saving} --bf16 --use-distributed-optimizer --swiglu", env={"CUDA_DEVICE_MAX_CONNECTIONS": "8"})
    where = tmp_path / "converted"
    where.mkdir()
    assert main(["convert", str(tmp_path / "fsdp/iter_0000003"), str(where / "iter_0000003")]) == 0
    (where / "latest_checkpointed_iteration.txt").write_text("3")
    shape = "--bf16 --use-distributed-optimizer --swiglu --tensor-model-parallel-size 2"
    resumed = run(2, f"--load {where} --ckpt-format unickpt {shape} {until(5)}")
    assert list(losses(resumed.stdout)) == [4, 5], resumed.stdout[-3000:]
    assert close(losses(resumed.stdout), losses(done.stdout))
    print({at: (loss, losses(done.stdout)[at]) for at, loss in losses(resumed.stdout).items()})


def test_unickpt_is_refused_with_megatron_fsdp_and_says_what_to_do(tmp_path: Path) -> None:
    done = run(2, f"--save {tmp_path} --ckpt-format unickpt {FSDP} {until(1)} --bf16 --use-distributed-optimizer", check=False)
    assert done.returncode != 0
    assert "--ckpt-format unickpt with --use-megatron-fsdp: Megatron saves such a job with" in done.stdout + done.stderr
