"""Megatron's keys of sharded tensors. The key of an optimizer state contains the name of its parameter."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

WEIGHT, MASTER = "weight", "master"
DIALECT = "megatron-core"
CONTENT_METADATA = "content_metadata"  # key of the common state: metadata that ``dist_checkpointing`` stores
# Keys that identify the groups of an optimizer, with their default values
# (megatron/core/optimizer/optimizer.py, ``param_group_identifier_keys``).
GROUP_IDENTITY: Mapping[str, Any] = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
# Content metadata of a checkpoint whose optimizer is described per parameter, as the adapter writes it.
BACKEND = "torch_dist"  # of distributed checkpoints
MARK = "unickpt"
BY_PARAMETER: Mapping[str, Any] = {MARK: True, "distrib_optim_sharding_type": "fully_sharded_model_space"}
# Name endings of the tensors of megatron-core with one row per entry of the vocabulary.
VOCABULARY_TENSORS = ("word_embeddings.weight", "output_layer.weight", "output_layer.bias")
# Names of a master in the distributed optimizer (distrib_optimizer.py) and in the others (optimizer.py).
MASTER_STATES = ("param", "fp32_param")
_OPTIMIZER_KEY = re.compile(r"^(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)$")
_MASTER_NAMES = dict.fromkeys(MASTER_STATES, MASTER)


def tensor_of(key: str) -> tuple[str, str]:
    """Return ``(name, state)`` of the key of a sharded tensor."""
    match = _OPTIMIZER_KEY.match(key)
    if match is None:
        return key, WEIGHT
    return match.group(2), _MASTER_NAMES.get(match.group(1), match.group(1))


def key_of(name: str, state: str) -> str:
    """Return the key under which Megatron's optimizers load a tensor; inverse of ``tensor_of``."""
    if state == WEIGHT:
        return name
    return f"optimizer.state.{'fp32_param' if state == MASTER else state}.{name}"


def keys_of(name: str, state: str) -> tuple[str, ...]:
    """Return all keys under which any of Megatron's optimizers stores a tensor."""
    if state == WEIGHT:
        return (name,)
    return tuple(f"optimizer.state.{each}.{name}" for each in (MASTER_STATES if state == MASTER else (state,)))


def is_expert(name: str) -> bool:
    """Return whether a parameter belongs to a routed expert."""
    return ".experts." in name
