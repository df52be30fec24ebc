"""Megatron's common state dict in a checkpoint: the keys that this package adds, and plain values for its arguments."""

from __future__ import annotations

import argparse
import enum
import pickle
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any

import torch

from unickpt.checkpoint.checkpoint_folder import step_named
from unickpt.checkpoint.format.object_encoder import digest_of

COMMON = "common"  # name of the common state among the objects of a checkpoint
VOCABULARY = "vocabulary"  # key of the number of entries of the tokenizer, an argument of megatron_unickpt.save

_PLAIN = (bool, int, float, str, enum.Enum, torch.dtype, type(None))


def step_of(common: Any, directory: str = "") -> int:
    """Return the iteration in the common state, else that in the name of the directory or of a folder above it, else 0."""
    found = common.get("iteration") if isinstance(common, dict) else None
    return int(found) if isinstance(found, Integral) and int(found) >= 0 else step_named(directory)


def digests_of(common: Any) -> dict[str, str]:
    """Return the digest of each value of the common state."""
    values = readable(common)
    return {str(key): digest_of(value) for key, value in values.items()} if isinstance(values, dict) else {}


def readable(common: Any) -> Any:
    """Return the common state with only those arguments of the scripts that JSON can hold."""
    if not isinstance(common, dict) or not isinstance(common.get("args"), argparse.Namespace):
        return common
    return {**common, "args": argparse.Namespace(**dict(_plain_arguments(vars(common["args"]))))}


def sendable(value: Any) -> Any:
    """Return a value as it can be sent to another rank: what cannot be pickled, such as a lambda, is the name of its type."""
    try:
        pickle.dumps(value)
    except Exception:  # by a class of the program
        if isinstance(value, argparse.Namespace):
            return argparse.Namespace(**sendable(vars(value)))
        if isinstance(value, dict):
            return {key: sendable(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [sendable(each) for each in value]
        return type(value).__qualname__
    return value


def _plain_arguments(values: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    return ((key, value) for key, value in values.items() if _is_plain(value))


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple, set)):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(k, str) and _is_plain(v) for k, v in value.items())
    return isinstance(value, _PLAIN)
