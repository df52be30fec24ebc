"""Megatron's keys of sharded tensors: an optimizer's states are known by the parameter that they belong to."""

from __future__ import annotations

import re

WEIGHT, MASTER = "weight", "master"
DIALECT = "megatron-core"
# How the names end of megatron-core's tensors that have a row for each entry of the vocabulary.
VOCABULARY_TENSORS = ("word_embeddings.weight", "output_layer.weight", "output_layer.bias")
BYTES_IO = "io.BytesIO"  # key of the bytes that stand for such an object among a checkpoint's objects
# Of a master: as the distributed optimizer names it (distrib_optimizer.py), and as the others do (optimizer.py).
MASTER_STATES = ("param", "fp32_param")
_OPTIMIZER_KEY = re.compile(r"^(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)$")
_MASTER_NAMES = dict.fromkeys(MASTER_STATES, MASTER)


def tensor_of(key: str) -> tuple[str, str]:
    """``(name, state)`` of a sharded tensor's key."""
    match = _OPTIMIZER_KEY.match(key)
    if match is None:
        return key, WEIGHT
    return match.group(2), _MASTER_NAMES.get(match.group(1), match.group(1))


def key_of(name: str, state: str) -> str:
    """The key under which Megatron's optimizers look for a tensor; inverse of ``tensor_of``."""
    if state == WEIGHT:
        return name
    return f"optimizer.state.{'fp32_param' if state == MASTER else state}.{name}"


def keys_of(name: str, state: str) -> tuple[str, ...]:
    """All keys under which one or another of Megatron's own optimizers keeps a tensor in its checkpoints."""
    if state == WEIGHT:
        return (name,)
    return tuple(f"optimizer.state.{each}.{name}" for each in (MASTER_STATES if state == MASTER else (state,)))
