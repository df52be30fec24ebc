"""Summaries of a checkpoint from its manifest and index. Pure functions, no I/O.

The field names of the dataclasses are the keys of ``unickpt inspect --json``
(``docs/reference/cli.md`` documents them), so a rename changes the JSON.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from unickpt.base.arrays import Ints
from unickpt.base.errors import ConfigError
from unickpt.checkpoint.format.index import Index, TensorInfo

_FIRST_STATES = {"weight": 0, "master": 1, "object": 9}


@dataclass(frozen=True, slots=True)
class StateSummary:
    """All tensors of one state.

    Attributes:
        state: ``weight``, ``master``, the optimizer's own key, or ``object``.
        derived_from: the state that these tensors are the cast of, or None for stored ones. A state
            of which some tensors are stored and some derived appears twice.
        dtypes: format dtype names, sorted.
        tensors, fragments: how many.
        elements: of the tensors, whether stored or derived.
        stored_bytes: of the fragments; for derived tensors only overrides are stored.
    """

    state: str
    derived_from: str | None
    dtypes: tuple[str, ...]
    tensors: int
    fragments: int
    elements: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """One state of one parameter or buffer; the fields mean what they mean in ``StateSummary``."""

    state: str
    dtype: str
    shape: tuple[int, ...]
    derived_from: str | None
    fragments: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class ParameterSummary:
    """One parameter or buffer.

    Attributes:
        name: fully qualified.
        kind: ``parameter``, ``buffer``, or ``optimizer`` for a name that has optimizer states only.
        states: weight first, master second, the rest by name.
    """

    name: str
    kind: str
    states: tuple[TensorSummary, ...]


@dataclass(frozen=True, slots=True)
class FragmentSummary:
    """Location of one fragment of a tensor.

    Attributes:
        start, shape: its box in the tensor.
        file: path relative to the checkpoint.
        offset_bytes: from the beginning of the file.
        size_bytes: length.
        checksum: xxh3_64 of its bytes, 16 hexadecimal digits.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    offset_bytes: int
    size_bytes: int
    checksum: str


@dataclass(frozen=True, slots=True)
class FragmentedTensor:
    """One tensor with its fragments, in the order of their boxes."""

    name: str
    state: str
    dtype: str
    shape: tuple[int, ...]
    derived_from: str | None
    fragments: tuple[FragmentSummary, ...]


@dataclass(frozen=True, slots=True)
class _Counts:
    """Fragments and stored bytes of every tensor of an index, by position."""

    fragments: Ints
    stored_bytes: Ints

    @classmethod
    def of(cls, index: Index) -> _Counts:
        fragments = np.bincount(index.tensor, minlength=len(index.tensors))
        stored_bytes = np.zeros(len(index.tensors), np.int64)
        np.add.at(stored_bytes, index.tensor, index.size_bytes())
        return cls(fragments, stored_bytes)


def states(index: Index) -> tuple[StateSummary, ...]:
    """The table of states: weight first, master second, objects last."""
    counts = _Counts.of(index)
    groups: dict[tuple[str, str | None], list[int]] = {}
    for position, info in enumerate(index.tensors):
        groups.setdefault((info.state, info.derived_from), []).append(position)
    ordered = sorted(groups, key=lambda key: (*_state_order(key[0]), key[1] or ""))
    return tuple(
        StateSummary(
            state=state,
            derived_from=derived,
            dtypes=tuple(sorted({index.tensors[at].dtype for at in groups[state, derived]})),
            tensors=len(groups[state, derived]),
            fragments=int(counts.fragments[groups[state, derived]].sum()),
            elements=sum(index.tensors[at].numel for at in groups[state, derived]),
            stored_bytes=int(counts.stored_bytes[groups[state, derived]].sum()),
        )
        for state, derived in ordered
    )


def parameters(index: Index) -> tuple[ParameterSummary, ...]:
    """Every parameter and buffer, by name; objects are not among them."""
    counts = _Counts.of(index)
    by_name: dict[str, list[int]] = {}
    for position, info in enumerate(index.tensors):
        if info.kind != "object":
            by_name.setdefault(info.name, []).append(position)
    return tuple(_parameter(name, positions, index, counts) for name, positions in by_name.items())


def _parameter(name: str, positions: list[int], index: Index, counts: _Counts) -> ParameterSummary:
    kinds = {index.tensors[at].kind for at in positions}
    return ParameterSummary(
        name=name,
        kind=next(kind for kind in ("parameter", "buffer", "optimizer") if kind in kinds),
        states=tuple(
            TensorSummary(
                state=info.state,
                dtype=info.dtype,
                shape=info.shape,
                derived_from=info.derived_from,
                fragments=int(counts.fragments[at]),
                stored_bytes=int(counts.stored_bytes[at]),
            )
            for at, info in sorted(((at, index.tensors[at]) for at in positions), key=lambda pair: _state_order(pair[1].state))
        ),
    )


def fragmented(index: Index, name: str, state: str | None, *, aliases: Mapping[str, str]) -> tuple[FragmentedTensor, ...]:
    """The fragments of one name.

    Args:
        index: of the checkpoint.
        name: of a tensor, or an alias of one.
        state: one state of it, or None for all.
        aliases: of the checkpoint.

    Raises:
        ConfigError: there is no such tensor; names the nearest ones.
    """
    stored = aliases.get(name, name)
    found = [(at, info) for at, info in enumerate(index.tensors) if info.name == stored]
    if not found:
        near = difflib.get_close_matches(name, {info.name for info in index.tensors}, n=3, cutoff=0.4)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ConfigError(f"no tensor is named {name!r}{hint}")
    chosen = [(at, info) for at, info in found if state in (None, info.state)]
    if not chosen:
        raise ConfigError(f"{stored!r} has no state {state!r}; it has {', '.join(info.state for _, info in found)}")
    chosen.sort(key=lambda pair: _state_order(pair[1].state))
    sizes = index.size_bytes()
    return tuple(_fragmented(index, at, info, sizes) for at, info in chosen)


def _fragmented(index: Index, position: int, info: TensorInfo, sizes: Ints) -> FragmentedTensor:
    fragments = []
    for row in index.rows_of(position):
        box = index.box(row)
        fragments.append(
            FragmentSummary(
                start=box.start,
                shape=box.shape,
                file=index.files[int(index.file[row])],
                offset_bytes=int(index.offset_bytes[row]),
                size_bytes=int(sizes[row]),
                checksum=f"{int(index.checksum[row]):016x}",
            )
        )
    return FragmentedTensor(info.name, info.state, info.dtype, info.shape, info.derived_from, tuple(fragments))


def ranks_with_objects(index: Index) -> tuple[int, ...]:
    """Return the ranks of the saving job that stored non-tensor state of their own, such as random generators."""
    found = (re.fullmatch(r"objects/rank([0-9]{1,9})", info.name) for info in index.tensors if info.kind == "object")
    return tuple(sorted(int(match[1]) for match in found if match))


def _state_order(state: str) -> tuple[int, str]:
    return _FIRST_STATES.get(state, 5), state
