"""Megatron's ``torch_dist`` checkpoints: tensors in the files of torch.distributed.checkpoint, the rest in ``common.pt``.

What is in them: megatron/core/dist_checkpointing/strategies/torch.py and common.py, optimizer/distrib_optimizer.py
(``sharded_state_dict``) and megatron/training/checkpointing.py (``generate_state_dict``). They become what the Megatron
adapter would have written of the same job (megatron_unickpt/capture.py): the same tensors, objects and hyperparameters.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from unickpt import __version__, objects
from unickpt.converting import Source
from unickpt.errors import FormatError, NotACheckpointError
from unickpt.foreign.distcp import METADATA, Stored, Table, portions_of
from unickpt.foreign.located import Files, Located
from unickpt.foreign.pickles import Record, load
from unickpt.foreign.plain import NotPlainError, members, plain
from unickpt.index import TensorInfo
from unickpt.language.facts import Model
from unickpt.manifest import OptimizerRecord, ParameterGroup, Writer
from unickpt.megatron_keys import MASTER, WEIGHT, tensor_of

CONFIG, COMMON, BACKEND = "metadata.json", "common.pt", "torch_dist"
DIALECT = "megatron-core"
_CONTENT = "content_metadata"
# By which Megatron tells groups apart (``_filter_and_reorder_param_groups``).
_IDENTITY = ("wd_mult", "is_expert_parallel")
_BUCKETS = re.compile(r"^(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.(gbuf_idx_\d+\.)?")
_SIZES = {
    "world_size": "world_size", "tensor": "tensor_model_parallel_size", "pipeline": "pipeline_model_parallel_size",
    "virtual_pipeline": "virtual_pipeline_model_parallel_size", "context": "context_parallel_size",
    "expert": "expert_model_parallel_size", "expert_tensor": "expert_tensor_parallel_size", "data": "data_parallel_size",
}  # fmt: skip
# The adapter's own mark of optimizers that have described themselves by parameter (megatron_unickpt/optimizer.py).
_BY_PARAMETER = {"unickpt": True, "distrib_optim_sharding_type": "fully_sharded_model_space"}


def backend_of(folder: Path) -> str:
    """What Megatron says that a folder holds (``torch_dist``, ``fsdp_dtensor``, ...); '' if it says nothing."""
    try:
        found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return ""
    return str(found.get("sharded_backend", "")) if isinstance(found, dict) else ""


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
        self._optimizer = list(_leaves(common.get("optimizer")))
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
        found = self._common.get(_CONTENT)
        return found if isinstance(found, dict) else {}

    # ---------------------------------------------------------------- the whole

    def source(self) -> Source:
        named = self._named()
        trained = list(dict.fromkeys(name for name, state in named if state != WEIGHT))
        described = list(self._described(named, trained))
        portions, empty = portions_of(described)
        derived = [info for info, _, _ in described if info.derived_from is not None]
        arguments = self._arguments()
        step = self._common.get("iteration", 0)
        return Source(
            "Megatron torch_dist", portions, self._writer(arguments), step=step if type(step) is int and step >= 0 else 0,
            tensors=[*derived, *empty], optimizer=self._record(named, trained), objects=self._objects(arguments, trained),
            shared_objects=self._shared(), left_out=self.left_out,
        )  # fmt: skip

    def _named(self) -> dict[tuple[str, str], Stored]:
        found: dict[tuple[str, str], Stored] = {}
        for key, stored in self._table.tensors.items():
            name = tensor_of(key)
            if name in found:
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

    def _arguments(self) -> argparse.Namespace | None:
        found = self._common.get("args")
        if not isinstance(found, Record) or found.kind != "argparse.Namespace":
            return None
        made = argparse.Namespace()
        vars(made).update(members({str(key): value for key, value in found.state.items()}, "args", self.left_out.append))
        return made

    def _writer(self, arguments: argparse.Namespace | None) -> Writer:
        sizes = {name: getattr(arguments, argument, None) for name, argument in _SIZES.items()}
        topology = {name: size for name, size in sizes.items() if type(size) is int}
        model = Model.of_megatron(arguments).as_json()
        return Writer("megatron", "", __version__, torch.__version__, DIALECT, topology, model)

    # ---------------------------------------------------------------- what is no tensor

    def _objects(self, arguments: argparse.Namespace | None, trained: Sequence[str]) -> dict[str, Any]:
        """Megatron's common state as the adapter keeps it: without the optimizer, which is told by parameter."""
        rest = {key: value for key, value in self._common.items() if key not in ("args", "optimizer")}
        common = members(rest, "", self.left_out.append)
        if arguments is not None:
            common["args"] = arguments
        if trained:
            common[_CONTENT] = {**self._content(), **_BY_PARAMETER}
        scalers = [leaf["grad_scaler"] for leaf in self._optimizer if leaf.get("grad_scaler")]
        return {"common": common, "grad_scaler": plain(scalers[0], "grad_scaler") if scalers else None}

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
        groups = [group for leaf in self._optimizer for group in leaf["groups"]]
        if not groups:
            if trained:
                self.left_out.append(f"hyperparameters: {COMMON} has none, although there are states of an optimizer")
            return None
        held = [{key: value for key, value in group.items() if key not in ("params", "step")} for group in groups]
        owners = self._owners(held, named, trained)
        described = tuple(
            ParameterGroup(_encoded(values), tuple(name for name in trained if owners.get(name) == at))
            for at, values in enumerate(held)
        )
        steps = {leaf_step for leaf in self._optimizer for leaf_step in leaf["steps"]}
        if len(steps) > 1:
            self.left_out.append(f"steps of the optimizer: {sorted(steps)}, and nothing tells of what")
        scalars = tuple(ParameterGroup({"step": step}, tuple(trained)) for step in steps) if len(steps) == 1 and trained else ()
        states = {state for _, state in named}
        return OptimizerRecord(_name_of(states, held), described, scalars)

    def _owners(
        self, groups: Sequence[Mapping[str, Any]], named: Mapping[tuple[str, str], Stored], trained: Sequence[str]
    ) -> dict[str, int]:
        """The group of every parameter, by number; empty if the groups are not those of the default."""
        identities = [tuple(group.get(key, group.get(f"pre_{key}")) for key in _IDENTITY) for group in groups]
        numbers = {identity: at for at, identity in enumerate(identities)}
        apart = any(expert for _, expert in numbers)
        owners = {}
        for name in trained:
            decays = _dimensions(name, named[name, WEIGHT].shape) > 1 and not name.endswith(".bias")
            at = numbers.get((1.0 if decays else 0.0, apart and ".experts." in name))
            if at is None or len(numbers) != len(groups):
                self.left_out.append(
                    "which parameter is in which group of the optimizer: the groups are not Megatron's usual ones, and the "
                    "files do not tell"
                )
                return {}
            owners[name] = at
        return owners


def _dimensions(name: str, shape: Sequence[int]) -> int:
    """Of the parameter itself: layers of one kind, and experts, are stacked (transformer_block.py, moe/experts.py)."""
    stacked = len(re.findall(r"(?:^|\.)layers\.(?!\d+\.)", name)) + (".experts.experts." in name)
    return len(shape) - stacked


def _leaves(tree: Any) -> Iterator[dict[str, Any]]:
    """The optimizers of a common state dict: ``groups``, their ``steps``, and the ``grad_scaler``."""
    if not isinstance(tree, dict):
        return
    inner = tree.get("optimizer", tree)
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    if isinstance(groups, list) and all(isinstance(group, dict) for group in groups):
        states = inner.get("state")
        told = [states.get("common_step")] if isinstance(states, dict) else []
        steps = [_number(step) for step in (*told, *(group.get("step") for group in groups))]
        yield {
            "groups": groups, "steps": [step for step in steps if isinstance(step, (int, float))],
            "grad_scaler": tree.get("grad_scaler"),
        }  # fmt: skip
        return
    for key in sorted(key for key in tree if isinstance(key, int)):
        yield from _leaves(tree[key])


def _number(value: Any) -> Any:
    return value.read().item() if isinstance(value, Located) and value.numel == 1 else value


def _encoded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Of hyperparameters, those that are plain."""
    found = {}
    for key, value in values.items():
        encoded = objects.encode(_number(value), prefix="optimizer")
        if not encoded.tensors and not encoded.opaque:
            found[str(key)] = encoded.value
    return found


def _name_of(states: set[str], groups: Sequence[Mapping[str, Any]]) -> str:
    """The class of the optimizer, which the files do not tell: by its states, and by keys that only fused ones have."""
    if {"exp_avg", "exp_avg_sq"} <= states:
        return "FusedAdam" if any("bias_correction" in group for group in groups) else "AdamW"
    return "SGD" if "momentum_buffer" in states else "unknown"
