"""Checkpoints of Megatron FSDP, converted and resumed under tensor parallelism, and the other way round.

Needs a Megatron-LM tree (``MEGATRON_LM``).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.support.extent import FULL
from tests.support.rounding import assert_continues
from unickpt.cli.main import main
from unickpt.testing.launch import torchrun

TREE = os.environ.get("MEGATRON_LM", "")
pytestmark = pytest.mark.skipif(not TREE or not FULL, reason="needs MEGATRON_LM, and UNICKPT_FULL_MATRIX=1")
FSDP = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --ddp-average-in-collective"
SHAPE = "--train-iters 9 --bf16 --use-distributed-optimizer --swiglu"


def pretrain(arguments: str, *, check: bool = True) -> str:
    """Run the script on two ranks, and return what it prints."""
    env = {"MEGATRON_LM": TREE, "GLOO_SOCKET_IFNAME": "lo", "CUDA_DEVICE_MAX_CONNECTIONS": "8" if FSDP in arguments else "1"}
    module = "tests.jobs.megatron.pretrain"
    done = torchrun(2, module, *f"{SHAPE} {arguments}".split(), env=env, timeout_s=300, check=check)
    return done.stdout + done.stderr


def losses(output: str) -> list[float]:
    """Return the losses of the steps 4 and 6: the first one after the load, and one after steps with the loaded moments."""
    return [float(re.findall(rf"iteration +{step}/.*lm loss: ([0-9.E+-]+)", output)[0]) for step in (4, 6)]


def test_fsdp_dtensor_is_converted_and_resumed_under_tp(tmp_path: Path) -> None:
    """With a gated projection, whose halves Megatron FSDP stores apart. Gloo has no scaled sum, so gradients are averaged."""
    saving = f"--save {tmp_path / 'fsdp'} --save-interval 3 --ckpt-format fsdp_dtensor {FSDP} --exit-interval 6"
    whole = losses(pretrain(saving))
    where = tmp_path / "converted"
    where.mkdir()
    assert main(["convert", str(tmp_path / "fsdp/iter_0000003"), str(where / "iter_0000003")]) == 0
    (where / "latest_checkpointed_iteration.txt").write_text("3")
    resumed = losses(pretrain(f"--load {where} --ckpt-format unickpt --tensor-model-parallel-size 2 --exit-interval 6"))
    other = losses(pretrain(f"--load {where} --ckpt-format unickpt --pipeline-model-parallel-size 2 --exit-interval 6"))
    assert_continues(resumed, whole, resumed, other)


def test_a_checkpoint_under_tp_is_exported_and_resumed_by_megatron_fsdp(tmp_path: Path) -> None:
    saving = f"--save {tmp_path / 'tp'} --save-interval 3 --ckpt-format unickpt --exit-interval 6"
    whole = losses(pretrain(f"{saving} --tensor-model-parallel-size 2"))
    assert main(["export", str(tmp_path / "tp/iter_0000003"), str(tmp_path / "fsdp"), "--to", "fsdp-dtensor"]) == 0
    resumed = losses(pretrain(f"--load {tmp_path / 'fsdp'} --ckpt-format fsdp_dtensor {FSDP} --exit-interval 6 --no-load-rng"))
    other = losses(pretrain(f"--load {tmp_path / 'tp'} --ckpt-format unickpt --exit-interval 6"))  # data parallel, as FSDP is
    assert_continues(resumed, whole, whole, other)


def test_unickpt_is_refused_with_megatron_fsdp_and_says_what_to_do(tmp_path: Path) -> None:
    output = pretrain(f"--save {tmp_path} --ckpt-format unickpt {FSDP}", check=False)
    assert "--ckpt-format unickpt with --use-megatron-fsdp: Megatron saves such a job with" in output
