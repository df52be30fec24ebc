"""Files of a DeepSpeed checkpoint, by the ranks that wrote them."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unickpt.base.errors import FormatError, NotACheckpointError
from unickpt.transform.convert.pickles.lazy_tensor import Located, OpenFiles
from unickpt.transform.convert.pickles.safe_pickle import load

MODEL = re.compile(r"(?:zero_pp_rank_(?P<data>\d+)_)?mp_rank_(?P<model>\d+)_model_states\.pt")
OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<data>\d+)_mp_rank_(?P<model>\d+)_optim_states\.pt")
EXPERTS_OPTIMIZER = re.compile(r"expp_rank_(?P<data>\d+)_mp_rank_(?P<model>\d+)_optim_states\.pt")
LAYER = re.compile(r"layer_(?P<layer>\d+)(?:-model_(?P<model>\d+))?-model_states\.pt")
EXPERT = re.compile(r"layer_(?P<layer>\d+)_expert_(?P<expert>\d+)_mp_rank_(?P<model>\d+)_model_states\.pt")
EXPERTS = ".deepspeed_moe.experts.deepspeed_experts."  # in names, before the number of an expert
EXTRA_STATE = "_extra_state"  # PyTorch's name for the extra state of a module, which can have any type
UNIVERSAL_LATEST = "latest_universal"  # in the save directory: the tag of a universal checkpoint
# torch's wrapper of activation checkpointing, and DeepSpeed's random-LTD: the state dict of a module lacks their part of a name
_WRAPPERS = frozenset(("_checkpoint_wrapped_module", "random_ltd_layer"))
_NAMED = ("param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params", "buffer_names")
_KNOWN = (MODEL, OPTIMIZER, EXPERTS_OPTIMIZER, LAYER, EXPERT)


@dataclass(frozen=True)
class File:
    """A file and its unpickled content."""

    path: Path
    content: Mapping[str, Any]

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Return a member, or ``default`` if it is missing or None. Raises FormatError if it has another type."""
        found = self.content.get(key)
        if found is None:
            return default
        if not isinstance(found, kind):
            raise FormatError(f"{self.path}: {key} is {type(found).__name__}, expected {kind}")
        return found

    def group_shapes(self) -> list[dict[str, tuple[int, ...]]]:
        """Return the shapes of the parameters of every optimizer group, in flat order. Only ZeRO has them."""
        groups = self.get("param_shapes", (list, tuple), ())
        return [{str(name): tuple(shape) for name, shape in group.items()} for group in groups]

    def buffers(self) -> set[str]:
        """Return the names of the module's buffers."""
        return set(self.get("buffer_names", (list, tuple), ()))


@dataclass(frozen=True)
class Weight:
    """A weight of one model parallel rank: its file, and its position there."""

    path: Path
    data: Located


@dataclass
class ModelRank:
    """The files of one model parallel rank, which is one tensor parallel rank of one pipeline stage.

    Attributes:
        number: number in file names: ``stage * number of tensor parallel ranks + tensor`` (``ds_model_rank`` in
            runtime/pipe/topology.py).
        stage: pipeline stage.
        tensor: tensor parallel rank.
        models, optimizers: model state files and optimizer state files, by data parallel rank.
        weights: weights by name. A tied parameter has an entry under each of its names. Under ZeRO 3 they are empty.
        extra_states: names of the module's values that are not tensors.
    """

    number: int
    stage: int
    tensor: int
    models: dict[int, File] = field(default_factory=dict)
    optimizers: dict[int, File] = field(default_factory=dict)
    weights: dict[str, Weight] = field(default_factory=dict)
    extra_states: list[str] = field(default_factory=list)

    @property
    def first(self) -> File:
        return self.models[min(self.models)]

    def numels(self) -> dict[str, int]:
        """Return the number of elements of the optimizer's parameters, by name; empty if the files have no names."""
        found = {name: math.prod(shape) for group in self.first.group_shapes() for name, shape in group.items()}
        if not found:
            for file in self.optimizers.values():
                for mapping in file.get("optimizer_state_dict", dict, {}).get("param_slice_mappings") or ():
                    for name, address in mapping.items():
                        found[name] = found.get(name, 0) + int(address.state["numel"])
        return found


@dataclass(frozen=True)
class Folder:
    """The files of a tag.

    Attributes:
        path: folder of the tag.
        ranks: model parallel ranks, by number.
        stages, tensors: degrees of pipeline and of tensor parallelism.
        experts: number of experts, by name of their layer.
    """

    path: Path
    ranks: tuple[ModelRank, ...]
    stages: int
    tensors: int
    experts: Mapping[str, int]

    @property
    def first(self) -> File:
        """First file of rank 0, which describes the job."""
        return self.ranks[0].first


def is_deepspeed(folder: Path) -> bool:
    """Return whether a folder is a tag of DeepSpeed."""
    return folder.is_dir() and any(MODEL.fullmatch(path.name) for path in folder.iterdir())


def read_folder(folder: Path, files: OpenFiles, also: Sequence[str]) -> Folder:
    """Read all files of a tag, without the elements of tensors.

    Raises:
        NotACheckpointError: the folder is not a tag of DeepSpeed.
        FormatError: a file is missing or damaged.
    """
    if not is_deepspeed(folder):
        raise NotACheckpointError(f"{folder}: has no file mp_rank_*_model_states.pt")
    found: dict[re.Pattern[str], list[tuple[re.Match[str], File]]] = {pattern: [] for pattern in _KNOWN}
    for path in sorted(folder.iterdir()):
        for pattern in _KNOWN:
            match = pattern.fullmatch(path.name)
            if match:
                found[pattern].append((match, read_file(path, files, also)))
    numbers = sorted({int(match["model"]) for match, _ in found[MODEL]})
    missing = first_missing(numbers)
    if missing is not None:
        raise FormatError(f"{folder}: mp_rank_{missing:02d}_model_states.pt is missing")
    dims = found[MODEL][0][1].get("checkpoint_parallel_dimensions", dict, {})
    slices = len({match["model"] for match, _ in found[LAYER]})  # each layer of a pipeline has a file per tensor parallel rank
    tensors = int(dims.get("tp_degree", slices or len(numbers)))
    stages = int(dims.get("pp_degree", max(len(numbers) // max(tensors, 1), 1)))
    if stages * tensors != len(numbers) or slices not in (0, tensors):
        raise FormatError(
            f"{folder}: the job has {stages} pipeline stages with {tensors} tensor parallel ranks each, but there are files of "
            f"{len(numbers)} model parallel ranks" + (f" and layer files of {slices} tensor parallel ranks" if slices else "")
        )
    ranks = {number: ModelRank(number, number // tensors, number % tensors) for number in numbers}
    for match, file in found[MODEL]:
        ranks[int(match["model"])].models[int(match["data"] or 0)] = file
    for match, file in found[OPTIMIZER] or found[EXPERTS_OPTIMIZER]:
        ranks[int(match["model"])].optimizers[int(match["data"])] = file
    for rank in ranks.values():
        module = rank.first.get("module", dict, {})
        for named in (rank.models, rank.optimizers):
            named.update({at: named_as_module(file, module) for at, file in named.items()})
        _weights(rank, rank.first.path, module)
    for match, file in found[EXPERT]:
        _weights(ranks[int(match["model"])], file.path, file.content)
    for tensor in range(tensors):
        layers = [(int(match["layer"]), file) for match, file in found[LAYER] if int(match["model"] or 0) == tensor]
        _layers(layers, [rank for rank in ranks.values() if rank.tensor == tensor])
    return Folder(folder, tuple(ranks.values()), stages, tensors, _experts(list(ranks.values())))


def first_missing(numbers: Collection[int]) -> int | None:
    """Return the smallest missing number from 0 to the largest, or None. A file name may have any number."""
    if len(set(numbers)) == max(numbers) + 1:
        return None
    return next(number for number in range(len(numbers) + 1) if number not in numbers)


def read_file(path: Path, files: OpenFiles, also: Sequence[str]) -> File:
    """Read one file, without the elements of tensors. Raises FormatError, OSError."""
    content = load(path, files, also=also)
    if not isinstance(content, dict):
        raise FormatError(f"{path}: contains a {type(content).__name__}, expected a dictionary")
    return File(path, content)


def name_in_module(name: str, module: Mapping[str, Any]) -> str:
    """Return the name of a parameter or buffer in the state dict of its module, which lacks the names of wrappers."""
    return name if name in module else ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def named_as_module(file: File, module: Mapping[str, Any]) -> File:
    """Return a file whose values by name have the names of the module's state dict."""

    def plain(found: Any) -> Any:
        if isinstance(found, str):
            return name_in_module(found, module)
        if isinstance(found, dict):
            return {plain(key): plain(value) if isinstance(value, str) else value for key, value in found.items()}
        return [plain(each) for each in found] if isinstance(found, (list, tuple)) else found

    content = {**file.content, **{key: plain(file.content[key]) for key in _NAMED if key in file.content}}
    states, mappings = content.get("optimizer_state_dict"), "param_slice_mappings"
    if isinstance(states, dict) and mappings in states:
        content["optimizer_state_dict"] = {**states, mappings: plain(states[mappings])}
    return File(file.path, content)


def _weights(rank: ModelRank, path: Path, module: Mapping[str, Any], prefix: str = "") -> None:
    """Add the weights of a module. Megatron's modules have nested dictionaries (``state_dict_for_save_checkpoint``)."""
    for key, value in module.items():
        name = f"{prefix}{key}"
        if isinstance(value, Located):
            rank.weights[name] = Weight(path, value)
        elif isinstance(value, dict) and not name.endswith(EXTRA_STATE):
            _weights(rank, path, value, f"{name}.")
        else:
            rank.extra_states.append(name)


def _layers(layers: Sequence[tuple[int, File]], ranks: Sequence[ModelRank]) -> None:
    """Add the layer files of the ranks of one pipeline.

    The names in a layer file lack the number of the layer, or the name under which a tied layer is known.
    """
    names = [rank.numels() for rank in ranks]
    for number, file in layers:
        plain = {f"{number}.{name}": value for name, value in file.content.items()}
        known = [at for at, each in enumerate(names) if each.keys() & plain.keys()]
        for at in known or range(len(ranks)):
            tied = {} if known else _tied(number, file, names[at])
            _weights(ranks[at], file.path, {tied.get(name, name): value for name, value in plain.items() if known or tied})


def _tied(number: int, file: File, numels: Mapping[str, int]) -> dict[str, str]:
    """Return the names of a tied layer of this rank: ``0.weight`` -> ``tied_modules.key.weight``; empty if it is not tied."""
    found = {}
    for name, value in file.content.items():
        keys = [
            key
            for key, numel in numels.items()
            if key.startswith("tied_modules.") and key.split(".", 2)[2] == name and _elements(value) == numel
        ]
        if len(keys) > 1:
            raise FormatError(f"{file.path}: {name} is ambiguous; it can be any of {', '.join(keys)}")
        if keys:
            found[f"{number}.{name}"] = keys[0]
    return found


def _elements(value: Any) -> int:
    return value.numel if isinstance(value, Located) else -1


def _experts(ranks: Sequence[ModelRank]) -> dict[str, int]:
    found: dict[str, set[int]] = {}
    for rank in ranks:
        for name in rank.weights:
            layer, is_expert, rest = name.partition(EXPERTS)
            if is_expert:
                found.setdefault(layer, set()).add(int(rest.split(".", 1)[0]))
    return {layer: len(numbers) for layer, numbers in found.items()}


def states_of(file: File) -> Mapping[str, Any]:
    """Return the optimizer states of a file of a ZeRO optimizer."""
    found: Mapping[str, Any] = file.get("optimizer_state_dict", dict, {})
    return found
