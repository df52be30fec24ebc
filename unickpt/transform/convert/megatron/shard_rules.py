"""Rules that map a rank's parameter of megatron-core to its part of a global tensor, by name. Pure functions.

The names and dimensions are those of ``sharded_state_dict`` of the modules: transformer_block.py (layers), mlp.py and
moe/experts.py (``apply_swiglu_sharded_factory``, experts), tensor_parallel/layers.py (``make_sharded_tensors_for_checkpoint``
with the axis of every kind of layer), gpt_layer_specs.py (``sharded_state_dict_keys_map``), language_module.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unickpt.base.arrays import Shape
from unickpt.checkpoint.format.boxes import Box


EXTRA_STATE = "_extra_state"
# Persistent buffers of the modules (moe/router.py), which are not trained.
BUFFERS = ("expert_bias", "local_tokens_per_expert", "global_tokens_per_expert")
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"

_LAYER = re.compile(r"^(decoder|mtp)\.layers\.(\d+)\.(.+)$")
_SEQUENTIAL = re.compile(r"^(.*\bmlp\.experts)\.local_experts\.(\d+)\.(.+)$")
_GROUPED = re.compile(r"^(.*\bmlp\.experts)\.(linear_fc[12]\.(?:weight|bias))(\d+)$")
_NORM = r"(?:weight|bias)"

# Dimension that tensor parallel ranks divide, by the name within a layer; None if every rank has the whole tensor.
_COLUMN, _ROW, _WHOLE = 0, 1, None
_RULES: tuple[tuple[str, int | None], ...] = (
    (r"embedding\.word_embeddings\.weight", _COLUMN),
    (r"embedding\.position_embeddings\.weight", _WHOLE),
    (r"output_layer\.(?:weight|bias)", _COLUMN),
    (rf"decoder\.(?:final_layernorm|final_norm)\.{_NORM}", _WHOLE),
    (rf"(?:input|pre_mlp|post_self_attn|post_mlp|final)_layernorm\.{_NORM}", _WHOLE),
    (r"self_attention\.linear_qkv\.(?:weight|bias)", _COLUMN),
    (r"self_attention\.linear_(?:q|q_up|kv_up)_proj\.(?:weight|bias)", _COLUMN),
    (rf"self_attention\.linear_(?:qkv|q_up_proj|kv_up_proj)\.layer_norm_{_NORM}", _WHOLE),
    (rf"self_attention\.(?:q|k|kv)_layernorm\.{_NORM}", _WHOLE),
    (r"self_attention\.linear_proj\.weight", _ROW),
    (r"self_attention\.linear_proj\.bias", _WHOLE),
    (r"self_attention\.core_attention\.softmax_offset", _COLUMN),
    (r"mlp\.(?:experts\.experts\.|shared_experts\.)?linear_fc1\.(?:weight|bias)", _COLUMN),
    (r"mlp\.(?:experts\.experts\.|shared_experts\.)?linear_fc2\.weight", _ROW),
    (r"mlp\.(?:experts\.experts\.|shared_experts\.)?linear_fc2\.bias", _WHOLE),
    (rf"mlp\.(?:experts\.experts\.|shared_experts\.)?linear_fc1\.layer_norm_{_NORM}", _WHOLE),
    (r"mlp\.shared_experts\.gate_weight", _WHOLE),
    (r"mlp\.router\.(?:weight|bias|expert_bias|local_tokens_per_expert|global_tokens_per_expert)", _WHOLE),
    (rf"(?:enorm|hnorm)\.{_NORM}", _WHOLE),
    (r"eh_proj\.weight", _COLUMN),
)
_COMPILED = tuple((re.compile(pattern), axis) for pattern, axis in _RULES)
# Multi-latent attention: divided in one layer spec and replicated in another; the global size decides.
_DOWN = {"self_attention.linear_q_down_proj.weight": "query", "self_attention.linear_kv_down_proj.weight": "latent"}
_RENAMED = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_", "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
_INNER = re.compile(r"^(?:transformer_layer|mtp_model_layer)\.(.+)$")  # module wrapped by a layer of multi-token prediction


class UnknownNameError(ValueError):
    """No rule matches the name of a parameter."""


@dataclass(frozen=True)
class ModelLayout:
    """Facts about the model beyond the names of its tensors.

    Attributes:
        layers: number of decoder layers.
        stacked: the layers are equal, and one tensor has the parameters of all.
        renamed: norms get the names of TransformerEngine's fused layers (the key map of the local spec).
        down: global rows of ``linear_q_down_proj`` ("query") and ``linear_kv_down_proj`` ("latent").
    """

    layers: int
    stacked: bool = True
    renamed: bool = False
    down: Mapping[str, int] | None = None


@dataclass(frozen=True)
class ModelChunk:
    """Position of a rank's chunk in the model.

    Attributes:
        first: global number of the first layer, by kind ("decoder", "mtp").
        first_expert: global number of the first expert.
        experts: global number of experts.
        gated: names of ``linear_fc1`` weights and biases that consist of two halves, the gate and the projection.
        ranks, expert_ranks: numbers of tensor parallel ranks of dense parameters and of experts.
    """

    first: Mapping[str, int]
    first_expert: int = 0
    experts: int = 0
    gated: frozenset[str] = frozenset()
    ranks: int = 1
    expert_ranks: int = 1


@dataclass(frozen=True, slots=True)
class ShardPlace:
    """Place of a parameter in a global tensor.

    Attributes:
        name: name of the global tensor.
        lead: ``(index, count)`` of the leading axes that the rank's tensor lacks (layers, experts).
        axis: axis that the ranks divide, or None.
        gated: the axis has two halves, each divided by the ranks.
    """

    name: str
    lead: tuple[tuple[int, int], ...] = ()
    axis: int | None = None
    gated: bool = False


def is_renamed(name: str) -> bool:
    """Return whether the global name of a norm depends on the layer spec."""
    match = _LAYER.match(name)
    return match is not None and any(old in f".{match.group(3)}" for old in (f".{old}" for old in _RENAMED))


def layer_of(name: str) -> tuple[str, int] | None:
    """Return kind and number (within the chunk) of the layer of a parameter, or None."""
    match = _LAYER.match(name)
    return None if match is None else (match.group(1), int(match.group(2)))


def expert_of(name: str) -> int | None:
    """Return the number (on the rank) of the expert of a parameter, or None."""
    match = _SEQUENTIAL.match(name) or _GROUPED.match(name)
    return None if match is None else int(match.group(2) if match.re is _SEQUENTIAL else match.group(3))


def gated(shapes: Mapping[str, Shape]) -> frozenset[str]:
    """Return the names of ``linear_fc1`` tensors of gated layers, whose rows are twice the columns of ``linear_fc2``."""
    found = set()
    for name, shape in shapes.items():
        second = shapes.get(name.replace("linear_fc1.weight", "linear_fc2.weight"))
        if "linear_fc1.weight" in name and second is not None and len(shape) == len(second) == 2 and shape[0] == 2 * second[1]:
            found |= {name, name.replace("linear_fc1.weight", "linear_fc1.bias")}
    return frozenset(found)


def shard_place(name: str, shape: Shape, model: ModelLayout, chunk: ModelChunk) -> ShardPlace:
    """Return the place of a rank's parameter in a global tensor.

    Args:
        name: name in the rank's state dict. Its layers and experts are numbered from 0.
        shape: shape on the rank.
        model, chunk: the model, and the chunk of the parameter.

    Raises:
        UnknownNameError: no rule matches the name.
    """
    prefix, inner, lead = _numbered(name, model, chunk)
    axis = _axis(name, inner, shape, model, chunk)
    return ShardPlace(prefix + _renamed(inner, model), lead, axis, name in chunk.gated)


def object_key(name: str, model: ModelLayout, chunk: ModelChunk) -> str:
    """Return the global key of the extra state of a module (``ShardedObject.unique_key`` in dist_checkpointing/mapping.py).

    Raises:
        UnknownNameError: the state belongs to several experts, which only TransformerEngine can separate.
    """
    prefix, inner, lead = _numbered(name, model, chunk)
    if inner.startswith("mlp.experts.linear_"):
        raise UnknownNameError(f"{name}: the state of several experts cannot be separated")
    at, of = (".".join(str(pair[which]) for pair in lead or ((0, 1),)) for which in range(2))
    return f"{prefix}{_renamed(inner, model)}/shard_{at}_{of}"


def _numbered(name: str, model: ModelLayout, chunk: ModelChunk) -> tuple[str, str, tuple[tuple[int, int], ...]]:
    """Return the layer prefix of a name, the rest, and the leading axes of layers and experts."""
    match = _LAYER.match(name)
    if match is None:
        return "", name, ()
    kind, number, inner = match.group(1), int(match.group(2)), match.group(3)
    at = chunk.first.get(kind, 0) + number
    prefix, lead = f"{kind}.layers.{at}.", []
    if kind == "decoder" and model.stacked:
        prefix = f"{kind}.layers."
        lead.append((at, model.layers))
    wrapped = _INNER.match(inner) if kind == "mtp" else None
    if wrapped is not None:
        prefix, inner = prefix + inner[: wrapped.start(1)], wrapped.group(1)
    expert = expert_of(inner)
    if expert is not None:
        lead.append((chunk.first_expert + expert, chunk.experts))
        inner = _GROUPED.sub(r"\1.experts.\2", _SEQUENTIAL.sub(r"\1.experts.\3", inner))
    return prefix, inner, tuple(lead)


def _renamed(inner: str, model: ModelLayout) -> str:
    old = next((old for old in _RENAMED if inner.startswith(old)), None) if model.renamed else None
    return inner if old is None else _RENAMED[old] + inner.removeprefix(old)


def _axis(name: str, inner: str, shape: Shape, model: ModelLayout, chunk: ModelChunk) -> int | None:
    what = _DOWN.get(inner)
    if what is not None:
        whole = (model.down or {}).get(what)
        if shape and shape[0] == whole:
            return _WHOLE
        if shape and whole and shape[0] * chunk.ranks == whole:
            return _COLUMN
        raise UnknownNameError(f"{name} has shape {list(shape)}, which does not fit {whole} global rows by the arguments")
    for pattern, axis in _COMPILED:
        if pattern.fullmatch(inner):
            return axis
    raise UnknownNameError(f"{name}: its division among tensor parallel ranks is unknown")


def shard_boxes(place: ShardPlace, shape: Shape, rank: int, ranks: int) -> tuple[Shape, list[tuple[Box, Box]]]:
    """Return the boxes of a rank's tensor in the global tensor.

    Args:
        place: place of the parameter.
        shape: shape on the rank.
        rank, ranks: tensor parallel rank, and their number.

    Returns:
        Shape of the global tensor, and pairs ``(box on the rank, box in the global tensor)``. A replicated tensor has no
        pairs except on rank 0.
    """
    whole = list(shape)
    counts = tuple(count for _, count in place.lead)
    start = tuple(index for index, _ in place.lead)
    ones = (1,) * len(start)
    if place.axis is None:
        pairs = [(Box.whole(shape), Box((*start, *(0,) * len(shape)), (*ones, *shape)))] if rank == 0 else []
        return (*counts, *shape), pairs
    axis = place.axis
    whole[axis] *= ranks
    parts = 2 if place.gated else 1
    rows = shape[axis] // parts
    pairs = []
    for part in range(parts):
        local, there = [0] * len(shape), [0] * len(shape)
        local[axis], there[axis] = part * rows, (part * ranks + rank) * rows
        extent = (*shape[:axis], rows, *shape[axis + 1 :])
        pairs.append((Box(tuple(local), extent), Box((*start, *there), (*ones, *extent))))
    return (*counts, *whole), pairs


def first_layers(counts: Sequence[Mapping[str, int]]) -> list[dict[str, int]]:
    """Return the global number of the first layer of every chunk, by kind.

    Args:
        counts: number of layers of every chunk by kind, in the order in which a batch passes the chunks.
    """
    found, so_far = [], {"decoder": 0, "mtp": 0}
    for each in counts:
        found.append(dict(so_far))
        for kind, count in each.items():
            so_far[kind] += count
    return found


def writing_ranks(tensor: int, expert: int, expert_tensor: int) -> dict[tuple[int, int], int]:
    """Return the ranks of one pipeline stage that write files: the first replica of each set of experts.

    Args:
        tensor, expert, expert_tensor: parallel sizes.

    Returns:
        Expert tensor parallel rank by (tensor parallel rank, expert parallel rank), which are in the file name. The tensor
        parallel rank varies fastest (``RankGenerator`` in parallel_state.py).
    """
    return {(at % tensor, at // expert_tensor): at % expert_tensor for at in range(expert_tensor * expert)}
