"""Which part of which global tensor a rank's parameter of megatron-core is, by its name. Pure functions.

The names and dimensions are those of the modules' ``sharded_state_dict``: transformer_block.py (layers), mlp.py and
moe/experts.py (``apply_swiglu_sharded_factory``, experts), tensor_parallel/layers.py (``make_sharded_tensors_for_checkpoint``
with the axis of every kind of layer), gpt_layer_specs.py (``sharded_state_dict_keys_map``), language_module.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unickpt.fragments import Box

Shape = tuple[int, ...]

EXTRA_STATE = "_extra_state"
# Persistent buffers of the modules (moe/router.py): no optimizer has them.
BUFFERS = ("expert_bias", "local_tokens_per_expert", "global_tokens_per_expert")
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"

_LAYER = re.compile(r"^(decoder|mtp)\.layers\.(\d+)\.(.+)$")
_SEQUENTIAL = re.compile(r"^(.*\bmlp\.experts)\.local_experts\.(\d+)\.(.+)$")
_GROUPED = re.compile(r"^(.*\bmlp\.experts)\.(linear_fc[12]\.(?:weight|bias))(\d+)$")
_NORM = r"(?:weight|bias)"

# Of a layer, what it is of: the dimension that tensor parallel ranks divide, or None if each has all of it.
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
)  # fmt: skip
_COMPILED = tuple((re.compile(pattern), axis) for pattern, axis in _RULES)
# Multi-latent attention: divided in one kind of spec, and on every rank in another; the size of the whole tells.
_DOWN = {
    "self_attention.linear_q_down_proj.weight": "query", "self_attention.linear_kv_down_proj.weight": "latent",
}  # fmt: skip
_RENAMED = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_", "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
_INNER = re.compile(r"^(?:transformer_layer|mtp_model_layer)\.(.+)$")  # what a layer of multi-token prediction wraps


class UnknownNameError(ValueError):
    """No rule is about a parameter."""


@dataclass(frozen=True)
class Model:
    """What is known of the model beyond its tensors' names.

    Attributes:
        layers: of the decoder.
        stacked: layers are alike, and one tensor has all of them.
        renamed: norms have the names that TransformerEngine's fused layers have for them (the local spec's map).
        down: rows of ``linear_q_down_proj`` and ``linear_kv_down_proj`` ("query", "latent"), of all ranks together.
    """

    layers: int
    stacked: bool = True
    renamed: bool = False
    down: Mapping[str, int] | None = None


@dataclass(frozen=True)
class Chunk:
    """Where a rank's chunk of the model is.

    Attributes:
        first: global number of its first layer, by kind ("decoder", "mtp").
        first_expert, experts: global number of its first expert; of all there are.
        gated: names of ``linear_fc1`` weights and biases that are two halves, the gate and the rest.
        ranks, expert_ranks: tensor parallel ones, of experts and of the rest.
    """

    first: Mapping[str, int]
    first_expert: int = 0
    experts: int = 0
    gated: frozenset[str] = frozenset()
    ranks: int = 1
    expert_ranks: int = 1


@dataclass(frozen=True, slots=True)
class Placed:
    """Attributes: name of the global tensor; lead, ``(index, count)`` of axes before a rank's own; axis that ranks divide."""

    name: str
    lead: tuple[tuple[int, int], ...] = ()
    axis: int | None = None
    gated: bool = False


def is_expert(name: str) -> bool:
    """Whether a parameter is one of a routed expert."""
    return ".mlp.experts." in name


def is_renamed(name: str) -> bool:
    """Whether the name that a norm has among all depends on the kind of spec."""
    match = _LAYER.match(name)
    return match is not None and any(old in f".{match.group(3)}" for old in (f".{old}" for old in _RENAMED))


def layer_of(name: str) -> tuple[str, int] | None:
    """Kind and number, within its chunk, of the layer that a parameter is in."""
    match = _LAYER.match(name)
    return None if match is None else (match.group(1), int(match.group(2)))


def expert_of(name: str) -> int | None:
    """Number, among its rank's, of the expert that a parameter is of."""
    match = _SEQUENTIAL.match(name) or _GROUPED.match(name)
    return None if match is None else int(match.group(2) if match.re is _SEQUENTIAL else match.group(3))


def gated(shapes: Mapping[str, Shape]) -> frozenset[str]:
    """Names of the ``linear_fc1`` tensors of gated layers: they have twice the rows that ``linear_fc2`` has columns."""
    found = set()
    for name, shape in shapes.items():
        second = shapes.get(name.replace("linear_fc1.weight", "linear_fc2.weight"))
        if "linear_fc1.weight" in name and second is not None and len(shape) == len(second) == 2 and shape[0] == 2 * second[1]:
            found |= {name, name.replace("linear_fc1.weight", "linear_fc1.bias")}
    return frozenset(found)


def placed(name: str, shape: Shape, model: Model, chunk: Chunk) -> Placed:
    """Which tensor a rank's parameter is part of, and how it is divided.

    Args:
        name: in the rank's state dict; its layers and experts are numbered from 0.
        shape: of what the rank has.

    Raises:
        UnknownNameError: there is no rule for it.
    """
    prefix, inner, lead = _numbered(name, model, chunk)
    axis = _axis(name, inner, shape, model, chunk)
    return Placed(prefix + _renamed(inner, model), lead, axis, name in chunk.gated)


def object_key(name: str, model: Model, chunk: Chunk) -> str:
    """The name among all of a module's extra state (dist_checkpointing/mapping.py, ``ShardedObject.unique_key``).

    Raises:
        UnknownNameError: it is of several experts together, which only TransformerEngine can tell apart.
    """
    prefix, inner, lead = _numbered(name, model, chunk)
    if inner.startswith("mlp.experts.linear_"):
        raise UnknownNameError(f"{name}: of several experts together")
    at, of = (".".join(str(pair[which]) for pair in lead or ((0, 1),)) for which in range(2))
    return f"{prefix}{_renamed(inner, model)}/shard_{at}_{of}"


def _numbered(name: str, model: Model, chunk: Chunk) -> tuple[str, str, tuple[tuple[int, int], ...]]:
    """The layer's part of a name, the rest, and the axes that layers and experts make."""
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


def _renamed(inner: str, model: Model) -> str:
    old = next((old for old in _RENAMED if inner.startswith(old)), None) if model.renamed else None
    return inner if old is None else _RENAMED[old] + inner.removeprefix(old)


def _axis(name: str, inner: str, shape: Shape, model: Model, chunk: Chunk) -> int | None:
    what = _DOWN.get(inner)
    if what is not None:
        whole = (model.down or {}).get(what)
        if shape and shape[0] == whole:
            return _WHOLE
        if shape and whole and shape[0] * chunk.ranks == whole:
            return _COLUMN
        raise UnknownNameError(f"{name} has {list(shape)}, and the arguments tell of {whole} rows")
    for pattern, axis in _COMPILED:
        if pattern.fullmatch(inner):
            return axis
    raise UnknownNameError(f"{name}: no rule tells how tensor parallel ranks divide it")


def boxes(place: Placed, shape: Shape, rank: int, ranks: int) -> tuple[Shape, list[tuple[Box, Box]]]:
    """What of the global tensor a rank has.

    Args:
        place: of the parameter.
        shape: of what the rank has.
        rank, ranks: which of the tensor parallel ranks it is, of how many.

    Returns:
        The global tensor's shape, and boxes of the rank's tensor with those that they are in the global one. Nothing, if
        every rank has the same and this is not the first.
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
    """Global number of the first layer of every chunk, by kind.

    Args:
        counts: layers of every chunk, by kind, in the order in which a batch goes through them.
    """
    found, so_far = [], {"decoder": 0, "mtp": 0}
    for each in counts:
        found.append(dict(so_far))
        for kind, count in each.items():
            so_far[kind] += count
    return found


def written(tensor: int, expert: int, expert_tensor: int) -> dict[tuple[int, int], int]:
    """Of one pipeline stage, the ranks that write files: those that are first among the copies of their experts.

    Args:
        tensor, expert, expert_tensor: parallel sizes.

    Returns:
        Expert tensor parallel rank by tensor and expert parallel rank, which are in the file's name. Ranks are numbered with
        tensor parallel ones innermost (parallel_state.py, ``RankGenerator``).
    """
    return {(at % tensor, at // expert_tensor): at % expert_tensor for at in range(expert_tensor * expert)}
