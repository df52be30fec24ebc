"""How tensor parallel ranks divide a parameter, by the name patterns of ``universal_checkpoint_info``.

The keys are those of deepspeed/checkpoint/constants.py, and their order is that of ``merge_tp_slices`` in ds_to_universal.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unickpt.base.errors import FormatError

MAX_REPETITIONS = 4
VOCABULARY = "vocabulary_parameter_patterns"
_WHOLE = "tp_replicated_parameter_patterns"
_AVERAGED = "parameter_to_average_patterns"
_HALVES = "parameter_with_2_sub_params_cat_dim_0"
_SUB_PARAMETERS = "parameter_with_sub_params"
_WIDTHS = "sub_param_shard_widths"
_ROWS = "parameter_with_row_parallelism_patterns"


@dataclass(frozen=True, slots=True)
class Cut:
    """How the ranks divide a parameter.

    Attributes:
        dim: dimension along which each rank has a part; None if every rank has the whole parameter.
        parts: number of equal sub-parameters along ``dim``. Every rank has a part of each.
        averaged: every rank has the whole parameter with its own values, and the mean is used.
        view: shape of a view of the whole parameter in which ``dim`` counts, with the sizes of the sub-parameters in place of
            the size of ``dim``, and at most one -1. () for the parameter itself.
        widths: extents along ``dim`` of the view, by sub-parameter and rank. () if each sub-parameter is divided evenly.
    """

    dim: int | None
    parts: int = 1
    averaged: bool = False
    view: tuple[int | tuple[int, ...], ...] = ()
    widths: tuple[tuple[int, ...], ...] = ()


def cut_of(name: str, info: Mapping[str, Any], where: str, *, trusted: bool = False) -> Cut | None:
    """Return how a parameter is divided, or None if no pattern matches its name. DeepSpeed then concatenates along dimension 0.

    Args:
        name: name of the parameter.
        info: ``universal_checkpoint_info``.
        where: name of the file or job in messages.
        trusted: the patterns come from the program that runs, not from a file.

    Raises:
        FormatError: a pattern is not supported, or sub-parameters are described incompletely.
    """

    def listed(key: str) -> bool:
        return any(matches(pattern, name, where, trusted=trusted) for pattern in info.get(key) or ())

    if listed(_WHOLE):
        return Cut(None)
    if listed(_AVERAGED):
        return Cut(None, averaged=True)
    if listed(_HALVES):
        return Cut(0, parts=2)
    for each in info.get(_SUB_PARAMETERS) or ():
        for pattern in each.get("patterns") or ():
            if matches(pattern, name, where, trusted=trusted):
                return _sub_parameters(name, each, (info.get(_WIDTHS) or {}).get(pattern), where)
    if listed(_ROWS):
        return Cut(1)
    return Cut(0) if listed(VOCABULARY) else None


def _sub_parameters(name: str, entry: Mapping[str, Any], widths: Any, where: str) -> Cut:
    """Return the cut of a parameter with sub-parameters (``SubparamShape`` in universal_checkpoint.py)."""
    dim, shape = entry.get("partition_dim"), tuple(entry.get("shape") or ())
    known = tuple(tuple(map(int, each)) for each in widths or ())
    if type(dim) is not int or not 0 <= dim < len(shape):
        raise FormatError(f"{where}: {name} has sub-parameters of shape {shape} along dimension {dim}")
    sizes = shape[dim]
    if isinstance(sizes, int) and not known:  # before version 0.4: the number of equal sub-parameters
        if sizes < 1:
            raise FormatError(f"{where}: {name} has {sizes} sub-parameters along dimension {dim} of its shape {shape}")
        return Cut(dim, parts=sizes)
    sizes = (sizes,) if isinstance(sizes, int) else tuple(map(int, sizes))
    if known and [sum(each) for each in known] != list(sizes):
        raise FormatError(f"{where}: {name} has sub-parameters of sizes {sizes}, but its ranks have {known}")
    view = tuple(sum(each) if isinstance(each, (tuple, list)) else int(each) for each in shape)
    return Cut(dim, parts=len(sizes), view=(*view[:dim], sizes, *view[dim + 1 :]), widths=known)


def matches(pattern: str, name: str, where: str, *, trusted: bool = False) -> bool:
    """Return whether a pattern of DeepSpeed matches a name.

    The patterns are regular expressions; those that DeepSpeed generates are escaped names. Matching an arbitrary expression
    from a file can take exponential time, so patterns with groups or many repetitions are refused unless they are trusted.
    """
    plain = pattern.removeprefix("^").removesuffix("$")
    if re.sub(r"\\(.)", r"\1", plain) == name:
        return True
    risky = re.search(r"[\[\](){}|]", plain) or sum(plain.count(each) for each in "+*?") > MAX_REPETITIONS
    if risky and not trusted:
        raise FormatError(f"{where}: the name pattern {pattern[:80]!r} is not supported: it has groups or many repetitions")
    return re.match(pattern, name) is not None
