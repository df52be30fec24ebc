"""Capture, restore and re-seed the random generators of a process.

The rule of both adapters, when a job has other ranks than the one that saved:

- A rank that the checkpoint has keeps its generators. (A rank is the same if its position in every parallel dimension that
  generators depend on is the same.)
- A new rank gets the state that the saved ranks share, if they share one.
- Otherwise it is seeded from the state of the first saved rank and its own position. The result is deterministic, is another
  one at another step of the job, and differs where the positions need different random numbers.

The load report lists what was re-seeded, with ``change``.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from unickpt.checkpoint.format.dtypes import byte_view

RngState = dict[str, Any]
_MT19937 = "MT19937"  # of NumPy's global generator, unless the program chooses another


def capture() -> RngState:
    """Return the states of the generators of Python, NumPy and torch as tensors and plain values."""
    state: RngState = {
        "python": _python(random.getstate()),
        "numpy": _numpy(np.random.get_state(legacy=False)),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _python(state: Any) -> RngState:
    version, words, gauss = state
    packed = np.frombuffer(array("I", words), np.uint32)  # 60 us faster than ``torch.tensor``
    return {"version": version, "words": torch.from_numpy(packed), "gauss": gauss}


def _numpy(state: Mapping[str, Any]) -> RngState:
    """Return a state of NumPy's global generator. ``state``: as of ``get_state(legacy=False)``, of any bit generator."""
    kind = str(state["bit_generator"])
    if kind != _MT19937:  # the program has called ``np.random.set_bit_generator``
        return {"kind": kind, "state": dict(state)}
    return {
        "kind": kind,
        "keys": torch.from_numpy(np.array(state["state"]["key"], np.uint32)),
        "position": int(state["state"]["pos"]),
        "has_gauss": int(state["has_gauss"]),
        "cached": float(state["gauss"]),
    }


def _numpy_of_seed(seed: int, kind: str) -> RngState:
    """Return the state of a seeded generator of NumPy. ``kind``: of its bit generator, if NumPy has it."""
    found = getattr(np.random, kind, None)
    if kind == _MT19937 or not (isinstance(found, type) and issubclass(found, np.random.BitGenerator)):
        return _numpy(np.random.RandomState(seed % 2**32).get_state(legacy=False))
    bits: Any = found  # every class of NumPy itself takes a seed
    return _numpy(np.random.RandomState(bits(seed)).get_state(legacy=False))


def is_state(value: Any) -> bool:
    """Whether a value has the form of ``capture``."""
    return isinstance(value, Mapping) and value.keys() - {"cuda"} == {"python", "numpy", "torch"}


def of_seed(seed: int, like: RngState) -> RngState:
    """Return the state of generators with a seed below 2**63, those that ``like`` has. Changes no generator."""
    state: RngState = {
        "python": _python(random.Random(seed).getstate()),
        "numpy": _numpy_of_seed(seed, like["numpy"]["kind"]),
        "torch": torch.Generator().manual_seed(seed).get_state(),
    }
    return state | ({"cuda": cuda_of_seed(seed)} if "cuda" in like else {})


def cuda_of_seed(seed: int) -> torch.Tensor:
    """Return the state of a CUDA generator with this seed: the seed and an offset of 0 (``CUDAGeneratorImpl::get_state``)."""
    return torch.tensor(list(seed.to_bytes(8, "little") + bytes(8)), dtype=torch.uint8, device="cpu")


def seed_from(stored: Any) -> int:
    """Return a seed below 2**31 that depends on every bit of stored generators, in whatever form they are.

    It is the same in every process: of an object of an unknown class only the attributes count, because its text may contain
    its address.
    """
    digest = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, Mapping):
            for key in sorted(value, key=str):
                digest.update(str(key).encode())
                add(value[key])
        elif isinstance(value, (list, tuple)):
            for each in value:
                add(each)
        elif isinstance(value, torch.Tensor):
            digest.update(byte_view(value.detach().cpu().contiguous()).numpy().tobytes())
        elif isinstance(value, np.ndarray):
            add(value.tolist()) if value.dtype.hasobject else digest.update(value.tobytes())
        elif isinstance(value, torch.Generator):
            add(value.get_state())
        elif isinstance(value, np.random.Generator):
            add(value.bit_generator.state)
        elif isinstance(value, np.random.BitGenerator):
            add(value.state)
        elif isinstance(value, np.random.RandomState):
            add(value.get_state(legacy=False))
        elif isinstance(value, random.Random):
            add(value.getstate())
        elif value is None or isinstance(value, (bool, int, float, complex, str, bytes, np.generic)):
            digest.update(repr(value).encode())
        else:
            digest.update(type(value).__qualname__.encode())
            add(getattr(value, "__dict__", {}))

    add(stored)
    return int.from_bytes(digest.digest()[:4], "little") >> 1


def change(before: str, now: str, how: str) -> str:
    """Return the reason of a report entry for generators of another job: what they depend on, and what became of them."""
    return f"{before} became {now}: {how}"


def kept(before: int, now: int) -> str:
    """Return which ranks keep their generators if their number changes, for ``change``."""
    both = min(before, now)
    return "rank 0 keeps its generators" if both == 1 else f"ranks 0 to {both - 1} keep their generators"


def counted(ranks: int, what: str = "") -> str:
    """Return a number of ranks as text, for ``change``. ``what``: of which parallel dimension."""
    return f"{ranks} {what}{' ' if what else ''}rank{'' if ranks == 1 else 's'}"


def restore(state: RngState) -> list[str]:
    """Set the generators. Return the names of those that the state holds and this process does not have."""
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    lacking = _restore_numpy(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" not in state:
        return lacking
    if not torch.cuda.is_available():
        return [*lacking, "cuda"]
    torch.cuda.set_rng_state(state["cuda"])
    return lacking


def _restore_numpy(numpy: RngState) -> list[str]:
    """Set NumPy's global generator. It keeps its own state if its bit generator is of another kind, which is returned."""
    if numpy["kind"] != _kind():
        return [f"NumPy {numpy['kind']}"]
    if "state" in numpy:
        np.random.set_state(numpy["state"])
    else:
        np.random.set_state((numpy["kind"], numpy["keys"].numpy(), numpy["position"], numpy["has_gauss"], numpy["cached"]))
    return []


def _kind() -> str:
    """Return the name of the bit generator of NumPy's global generator."""
    state: Any = np.random.get_state(legacy=False)
    return str(state["bit_generator"])


def reseed(state: RngState, rank: int) -> None:
    """Seed all generators from a hash of a saved state and the rank. The result is deterministic."""
    digest = hashlib.sha256(bytes(state["torch"].numpy()) + rank.to_bytes(8, "little")).digest()
    seed = int.from_bytes(digest[:8], "little") >> 1
    random.seed(seed)
    _restore_numpy(_numpy_of_seed(seed, _kind()))
    torch.manual_seed(seed)


def equal(a: RngState, b: RngState) -> bool:
    """Whether all generators of two states are equal."""
    return (
        a["python"]["gauss"] == b["python"]["gauss"]
        and torch.equal(a["python"]["words"], b["python"]["words"])
        and _plain(a["numpy"]) == _plain(b["numpy"])
        and torch.equal(a["torch"], b["torch"])
    )


def _plain(value: Any) -> Any:
    """Return a state with lists in place of tensors and arrays."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return value.tolist() if isinstance(value, (torch.Tensor, np.ndarray)) else value
