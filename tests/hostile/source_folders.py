"""Small checkpoint folders of other frameworks."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_dcp
from safetensors.torch import save_file

from unickpt.cli.main import main
from unickpt.transform.convert.detect import open_source
from unickpt.transform.convert.pickles.lazy_tensor import OpenFiles


def dcp(folder: Path) -> Path:
    tree = {"model": {"w": torch.arange(12.0).view(4, 3)}, "optim": {"state.w.exp_avg": torch.zeros(4, 3)}, "step": 3}
    torch_dcp.save(tree, checkpoint_id=folder, no_dist=True)
    return folder


def transformers(folder: Path) -> Path:
    folder.mkdir(parents=True)
    save_file({"w": torch.ones(2, 2)}, folder / "model-00001-of-00001.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama", "limit": [0.0, Infinity]}')
    index = {"weight_map": {"w": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def deepspeed(folder: Path) -> Path:
    """ZeRO 0: a module, an optimizer by number, and DeepSpeed's other members."""
    folder.mkdir(parents=True)
    torch.save(deepspeed_state(), folder / "mp_rank_00_model_states.pt")
    return folder


def deepspeed_state() -> dict[str, Any]:
    weight = torch.arange(6.0).view(2, 3)
    group = {"lr": 0.1, "betas": (0.9, 0.99), "params": [0]}
    return {
        "module": {"w": weight, "b": torch.ones(4)}, "buffer_names": ["b"], "param_shapes": [{"w": torch.Size([2, 3])}],
        "optimizer": {"state": {0: {"step": 3, "exp_avg": torch.zeros(2, 3)}}, "param_groups": [group]},
        "shared_params": {}, "frozen_param_shapes": None, "frozen_param_fragments": None, "dp_world_size": 1,
        "mp_world_size": 1, "global_steps": 3, "global_samples": 6, "skipped_steps": 0, "lr_scheduler": {"last": 1},
        "ds_config": {"optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 0}}, "ds_version": "0.19",
        "checkpoint_parallel_dimensions": {"tp_degree": 1, "pp_degree": 1}, "universal_checkpoint_info": {}, "mine": [1],
    }  # fmt: skip


def megatron(folder: Path) -> Path:
    (folder / "mp_rank_00").mkdir(parents=True)
    torch.save(megatron_state(), folder / "mp_rank_00" / "model_optim_rng.pt")
    return folder


def megatron_state() -> dict[str, Any]:
    arguments = argparse.Namespace(
        num_layers=1, tensor_model_parallel_size=1, pipeline_model_parallel_size=1, world_size=1,
        untie_embeddings_and_output_weights=True, transformer_impl="local",
    )  # fmt: skip
    names = ("decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.0.mlp.linear_fc2.weight")
    weights = {name: torch.zeros(4, 4) for name in names}
    group = {"lr": 0.1, "wd_mult": 1.0, "is_expert_parallel": False, "params": [0, 1], "step": 3}
    states = {number: {"exp_avg": torch.zeros(4, 4)} for number in range(2)}
    return {
        "args": arguments, "checkpoint_version": 3.0, "iteration": 3, "model": weights, "rng_state": [{"seed": 1}],
        "optimizer": {"state": states, "param_groups": [group]},
    }  # fmt: skip


def everything(folder: Path) -> None:
    """Open a source, and read everything that a conversion would write."""
    with OpenFiles() as files:
        source = open_source(folder, files)
        for portion in source.portions:
            for part in portion.parts:
                part.read(part.box)
                if part.unless is not None:
                    part.unless(part.box)


def converted(folder: Path, to: Path) -> bytes:
    """Return everything that a conversion writes; empty if it is refused."""
    code = main(["convert", str(folder), str(to)])
    assert code in (0, 2)
    return b"".join(path.read_bytes() for path in sorted(to.rglob("*")) if path.is_file())
