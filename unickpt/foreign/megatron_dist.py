"""Megatron's ``torch_dist`` checkpoints: tensors in the files of torch.distributed.checkpoint, the rest in ``common.pt``.

What is in them: megatron/core/dist_checkpointing/strategies/torch.py and common.py, optimizer/distrib_optimizer.py
(``sharded_state_dict``) and megatron/training/checkpointing.py (``generate_state_dict``). They become what the Megatron
adapter would have written of the same job (megatron_unickpt/capture.py): the same tensors, objects and hyperparameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from unickpt.converting import Source
from unickpt.errors import FormatError, NotACheckpointError
from unickpt.foreign.distcp import METADATA, Stored, Table, portions_of
from unickpt.foreign.limits import bounded
from unickpt.foreign.located import Files
from unickpt.foreign.megatron_state import (
    GROUPS_NOT_TOLD,
    arguments_of,
    content_of,
    dimensions,
    encoded,
    hyperparameters,
    leaves,
    name_of_optimizer,
    objects_of,
    owners,
    step_of,
    writer_of,
)
from unickpt.foreign.pickles import load
from unickpt.foreign.plain import NotPlainError, plain
from unickpt.index import TensorInfo
from unickpt.manifest import OptimizerRecord, ParameterGroup
from unickpt.megatron_keys import MASTER, WEIGHT, tensor_of
from unickpt.regular_files import read_json

CONFIG, COMMON, BACKEND = "metadata.json", "common.pt", "torch_dist"
_BUCKETS = re.compile(r"^(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.(gbuf_idx_\d+\.)?")


def backend_of(folder: Path) -> str:
    """What Megatron says that a folder holds (``torch_dist``, ``fsdp_dtensor``, ...); '' if it says nothing."""
    try:
        return str(read_json(folder / CONFIG).get("sharded_backend", ""))
    except (OSError, FormatError):
        return ""


@bounded
def megatron_dist(folder: Path, files: Files, *, also: Sequence[str] = ()) -> Source:
    """A checkpoint of Megatron's, as ``--ckpt-format torch_dist`` writes it.

    Args:
        folder: of the iteration (``iter_0001000``).
        files: through which it is read.
        also: as of ``pickles.load``.

    Raises:
        NotACheckpointError: it is not such a folder.
        FormatError: it is damaged, a file is missing, or its optimizer is in a form that only the same job can read.
    """
    if backend_of(folder) != BACKEND or not (folder / METADATA).is_file():
        raise NotACheckpointError(f"{folder}: no {CONFIG} with the backend {BACKEND} and {METADATA} are there")
    return _Reader(folder, files, also).source()


class _Reader:
    def __init__(self, folder: Path, files: Files, also: Sequence[str]) -> None:
        self.folder = folder
        self.left_out: list[str] = []
        common = load(folder / COMMON, files, also=also)
        if not isinstance(common, dict):
            raise FormatError(f"{folder / COMMON}: holds a {type(common).__name__}, not a dictionary")
        self._common: Mapping[str, Any] = common
        self._optimizer = list(leaves(common.get("optimizer")))
        self._table = Table(folder, files, also)
        self._refuse_buckets()

    def _refuse_buckets(self) -> None:
        """The optimizer's buckets as they lay in memory, of which nothing tells what is where."""
        bucket = next((name for name in self._table.tensors if _BUCKETS.match(name)), None)
        if bucket is not None:
            kind = self._content().get("distrib_optim_sharding_type") or "dp_reshardable"
            raise FormatError(
                f"{self.folder}: the distributed optimizer's state is in the form {kind} ({bucket}): its buckets as they lay "
                "in memory, and nothing tells which parameter is where. Load it once with Megatron itself, under the same "
                "tensor and pipeline parallel sizes, and save it again with --dist-ckpt-optim-fully-reshardable (or with "
                "--ckpt-format unickpt, which needs no conversion)"
            )

    def _content(self) -> Mapping[str, Any]:
        return content_of(self._common)

    # ---------------------------------------------------------------- the whole

    def source(self) -> Source:
        named = self._named()
        trained = list(dict.fromkeys(name for name, state in named if state != WEIGHT))
        described = list(self._described(named, trained))
        portions, empty = portions_of(described)
        derived = [info for info, _, _ in described if info.derived_from is not None]
        arguments = arguments_of(self._common, self.left_out.append)
        return Source(
            "Megatron torch_dist", portions, writer_of(arguments), step=step_of(self._common),
            tensors=[*derived, *empty], optimizer=self._record(named, trained),
            objects=objects_of(self._common, arguments, self._optimizer, bool(trained), self.left_out.append),
            shared_objects=self._shared(), left_out=self.left_out,
        )  # fmt: skip

    def _named(self) -> dict[tuple[str, str], Stored]:
        found: dict[tuple[str, str], Stored] = {}
        for key, stored in self._table.tensors.items():
            name = tensor_of(key)
            if name in found and not stored.is_same_as(found[name]):
                raise FormatError(f"{self.folder}: {key} and {found[name].name} are both {name[1]} of {name[0]}")
            found[name] = stored
        return found

    def _described(
        self, named: Mapping[tuple[str, str], Stored], trained: Sequence[str]
    ) -> Iterator[tuple[TensorInfo, Stored, Stored | None]]:
        """Every tensor as the adapter lists it: a trained parameter has a master, and its weight is what that tells.

        An optimizer that steps on the weights themselves has no masters in Megatron's files: they are the weights.
        """
        for name in trained:
            weight = named.get((name, WEIGHT))
            if weight is None:
                raise FormatError(f"{self.folder}: has states of an optimizer for {name}, but not its weight")
            if (name, MASTER) not in named:
                yield TensorInfo(name, MASTER, weight.dtype, weight.shape, "parameter"), weight, None
        of_optimizer = set(trained)
        for (name, state), stored in named.items():
            weight = named.get((name, WEIGHT), stored)
            if stored.shape != weight.shape:
                raise FormatError(
                    f"{self.folder}: {state} of {name} has shape {list(stored.shape)}, the weight {list(weight.shape)}; such "
                    "states were flattened by a megatron-core before 0.15: load it once with that, and save it with "
                    "--ckpt-format unickpt"
                )
            kind = "parameter" if state in (WEIGHT, MASTER) else "optimizer"
            if state == WEIGHT and name in of_optimizer:
                origin = named.get((name, MASTER), stored)
                yield TensorInfo(name, state, stored.dtype, stored.shape, kind, MASTER), stored, origin
            else:
                yield TensorInfo(name, state, stored.dtype, stored.shape, kind), stored, None

    # ---------------------------------------------------------------- what is no tensor

    def _shared(self) -> dict[str, Any]:
        """Objects by position, of which Megatron keeps a list (strategies/torch.py, ``_mcore_to_torch_sharded_object``)."""
        found = {}
        for key, place in self._table.objects.items():
            held = self._table.load(place, key)
            if not isinstance(held, list) or len(held) != 1:
                raise FormatError(f"{place.path}: {key} is {held!r:.80}, not a list of one object")
            try:
                found[key] = plain(held[0], key)
            except NotPlainError as err:
                self.left_out.append(str(err))
        return found

    # ---------------------------------------------------------------- hyperparameters

    def _record(self, named: Mapping[tuple[str, str], Stored], trained: Sequence[str]) -> OptimizerRecord | None:
        """Hyperparameters and step, as far as the files tell.

        They do not tell which parameter is in which group. Where the groups are those that Megatron makes by default
        (``get_standard_config_overrides``: no weight decay for biases and for what has one dimension; experts apart), it is
        known; where not, the groups are kept without parameters, and Megatron finds them by what makes them differ.
        """
        groups = [group for leaf in self._optimizer for group in leaf.groups]
        if not groups:
            if trained:
                self.left_out.append(f"hyperparameters: {COMMON} has none, although there are states of an optimizer")
            return None
        held = [hyperparameters(group) for group in groups]
        owner_of = self._owners(held, {name: named[name, WEIGHT].shape for name in trained})
        described = tuple(
            ParameterGroup(encoded(values), tuple(name for name in trained if owner_of.get(name) == at))
            for at, values in enumerate(held)
        )
        steps = {leaf_step for leaf in self._optimizer for leaf_step in leaf.steps}
        if len(steps) > 1:
            self.left_out.append(f"steps of the optimizer: {sorted(steps)}, and nothing tells of what")
        scalars = tuple(ParameterGroup({"step": step}, tuple(trained)) for step in steps) if len(steps) == 1 and trained else ()
        return OptimizerRecord(name_of_optimizer({state for _, state in named}, held), described, scalars)

    def _owners(self, groups: Sequence[Mapping[str, Any]], shapes: Mapping[str, Sequence[int]]) -> Mapping[str, int]:
        found = owners(groups, {name: (dimensions(name, shape), ".experts." in name) for name, shape in shapes.items()})
        if found is None:
            self.left_out.append(GROUPS_NOT_TOLD)
        return found or {}
