"""Limits on the size of a pickle's value when shared references are expanded.

A list that contains the same list twice, sixty levels deep, takes sixty lists of memory and 2^60 steps to walk. The code that
uses a pickle's values walks them recursively, so the limits are checked once before. Cycles exceed the depth.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from types import MappingProxyType
from typing import Any

import torch

from unickpt.base.errors import FormatError
from unickpt.checkpoint.format.dtype_names import itemsize_bytes
from unickpt.transform.convert.pickles.lazy_tensor import Located
from unickpt.transform.convert.pickles.pickle_records import Name, Record

MAX_DEPTH = 100
# Limits of an expanded value: a fixed amount plus a multiple of the pickle's length (for tensors: of the file's length).
# Without shared references, there are fewer members than the pickle has bytes.
MEMBERS, MEMBERS_FACTOR = 1 << 17, 4
TEXTS_BYTES, TEXTS_FACTOR = 64 << 20, 32
TENSORS_BYTES, TENSORS_FACTOR = 64 << 20, 256
_LEAVES = frozenset({int, float, complex, bool, type(None), torch.dtype, Name, MappingProxyType})
_TEXTS = frozenset({str, bytes, bytearray})
_ROWS, _MAPPINGS = frozenset({list, tuple, set, frozenset, deque}), frozenset({dict, OrderedDict})


def check_unfolding(value: Any, *, pickle_bytes: int, file_bytes: int) -> None:
    """Refuse a value that is cyclic, nested too deeply, or far larger when expanded than its file.

    Args:
        value: containers, records and leaves.
        pickle_bytes: length of the pickle.
        file_bytes: length of the file that contains its tensors.

    Raises:
        FormatError: a limit is exceeded; the message says which.
    """
    members_limit = MEMBERS + MEMBERS_FACTOR * pickle_bytes
    texts_limit = TEXTS_BYTES + TEXTS_FACTOR * pickle_bytes
    tensors_limit = TENSORS_BYTES + TENSORS_FACTOR * file_bytes
    members = texts = tensors = 0
    level = [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for each in level:
            kind = type(each)
            if kind in _TEXTS:
                texts += len(each)
            elif kind is Record:
                inner += (each.arguments, each.state, each.items, each.entries)
            elif kind in _ROWS:
                inner += each
            elif kind in _MAPPINGS:
                inner += each
                inner += each.values()
            elif kind is Located:
                tensors += each.numel * itemsize_bytes(each.dtype)
            if len(inner) > members_limit:
                break
        members += len(inner)
        if members > members_limit or texts > texts_limit:
            raise FormatError(
                f"repeats references to the same values: expanded, more than {members_limit:,} members or {texts_limit:,} "
                "bytes of text"
            )
        if tensors > tensors_limit:
            raise FormatError(f"its tensors would take {tensors:,} bytes, but the file has {file_bytes:,}")
        level = [each for each in inner if type(each) not in _LEAVES]
        if not level:
            return
    raise FormatError(f"is nested more than {MAX_DEPTH} levels deep, or refers to itself")
