"""Capture, restore and re-seed the random generators of a process."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

State = dict[str, Any]


def capture() -> State:
    """Return the states of the generators of Python, NumPy and torch as tensors and plain values."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: State = {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64).to(torch.uint32), "gauss": gauss},
        "numpy": {
            "kind": str(kind),
            "keys": torch.from_numpy(np.array(keys, np.uint32)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: State) -> list[str]:
    """Set the generators.

    Returns:
        Names of generators that the state holds and this process does not have.
    """
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state((numpy["kind"], numpy["keys"].numpy(), numpy["position"], numpy["has_gauss"], numpy["cached"]))
    torch.set_rng_state(state["torch"])
    if "cuda" not in state:
        return []
    if not torch.cuda.is_available():
        return ["cuda"]
    torch.cuda.set_rng_state(state["cuda"])
    return []


def reseed(state: State, rank: int) -> None:
    """Seed all generators from a hash of a saved state and the rank. The result is deterministic."""
    digest = hashlib.sha256(bytes(state["torch"].numpy()) + rank.to_bytes(8, "little")).digest()
    seed = int.from_bytes(digest[:8], "little") >> 1
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def equal(a: State, b: State) -> bool:
    """Whether all generators of two states are equal."""
    return (
        a["python"]["gauss"] == b["python"]["gauss"]
        and torch.equal(a["python"]["words"], b["python"]["words"])
        and torch.equal(a["numpy"]["keys"], b["numpy"]["keys"])
        and a["numpy"]["position"] == b["numpy"]["position"]
        and torch.equal(a["torch"], b["torch"])
    )
