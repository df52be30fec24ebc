"""Positions of the parameters of each rank in the global model, from the arguments of a ``torch`` checkpoint of Megatron."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unickpt.base.errors import FormatError
from unickpt.transform.convert.megatron.flat_buffers import bucket_size
from unickpt.transform.convert.megatron.keys import is_expert
from unickpt.transform.convert.megatron.optimizer_states import RankParameter
from unickpt.transform.convert.megatron.shard_rules import (
    BUFFERS,
    EMBEDDING,
    EXTRA_STATE,
    OUTPUT,
    ModelChunk,
    ModelLayout,
    ShardPlace,
    UnknownNameError,
    expert_of,
    first_layers,
    gated,
    is_renamed,
    layer_of,
    shard_place,
)
from unickpt.transform.convert.megatron.torch_files import MegatronFolder, MegatronRank
from unickpt.transform.convert.pickles.lazy_tensor import Located

_KINDS = ("decoder", "mtp")
# Arguments of models whose layers differ.
_UNLIKE = ("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json", "hetereogenous_dist_checkpoint")
_SUPPORTED = (
    "supported are models of megatron-core whose layers consist of attention and multilayer perceptrons or experts; save other "
    "models with --ckpt-format torch_dist or unickpt"
)


class TorchLayout:
    """The global model of a job, and the place of each rank's parameters in it.

    Attributes:
        job: files of the checkpoint.
        model: facts about the model.
        tied: whether the output layer of the last stage is a copy of the embedding of the first stage.
    """

    def __init__(self, job: MegatronFolder) -> None:
        """Read the arguments of the job. Raises FormatError if one is missing."""
        self.job = job
        self.model = self._model()
        self.tied = self._is_tied()
        self._owner: dict[tuple[ShardPlace, int], tuple[int, int]] = {}  # chunk and stage from which a parameter is read

    def argument(self, name: str) -> Any:
        """Return an argument of the job, or None."""
        return getattr(self.job.arguments, name, None)

    def _model(self) -> ModelLayout:
        layers = self.argument("num_layers")
        if type(layers) is not int:
            raise FormatError(f"{self.job.first.path}: the arguments have no num_layers")
        # As ``sharded_state_dict`` in transformer_block.py decides it.
        unlike = any(
            isinstance(found, list) or (isinstance(found, int) and found > 1)
            for found in (self.argument("moe_layer_freq"), self.argument("linear_attention_freq"))
        )
        unlike = unlike or any(self.argument(name) for name in _UNLIKE)
        latent = bool(self.argument("multi_latent_attention"))
        down: dict[str, int] = {}
        if latent:
            ranks = [self.argument(name) for name in ("q_lora_rank", "kv_lora_rank", "qk_pos_emb_head_dim")]
            query, low, rotary = (each if type(each) is int else 0 for each in ranks)
            down = {"query": query, "latent": low + rotary}
        return ModelLayout(layers, not unlike, self.argument("transformer_impl") == "local" and not latent, down)

    def _is_tied(self) -> bool:
        if self.job.sizes.pipeline == 1:
            return False  # a tied output layer is not in the files
        untied = self.argument("untie_embeddings_and_output_weights")
        if type(untied) is not bool:
            raise FormatError(
                f"{self.job.first.path}: the arguments have no untie_embeddings_and_output_weights, so it is unknown whether "
                "the output layer is the embedding"
            )
        return not untied

    # ---------------------------------------------------------------- layers

    def first_layers(self) -> dict[tuple[int, int], Mapping[str, int]]:
        """Return the global number of the first layer of each kind, by (chunk, stage).

        A batch passes all stages chunk by chunk.

        Raises:
            FormatError: ranks of a stage have different layers, or their number differs from the arguments.
        """
        stages: dict[int, list[dict[str, int]]] = {}
        for rank in self.job.ranks:
            counts = [_layer_counts(chunk, rank) for chunk in rank.chunks]
            if stages.setdefault(rank.pipeline, counts) != counts:
                raise FormatError(f"{rank.path}: its layers differ from those of other ranks of pipeline stage {rank.pipeline}")
        chunks = {len(counts) for counts in stages.values()}
        if len(chunks) != 1:
            raise FormatError(f"{self.job.folder}: pipeline stages have different numbers of model chunks: {sorted(chunks)}")
        order = [(chunk, stage) for chunk in range(chunks.pop()) for stage in range(len(stages))]
        firsts = first_layers([stages[stage][chunk] for chunk, stage in order])
        total = sum(stages[stage][chunk]["decoder"] for chunk, stage in order)
        if total != self.model.layers:
            raise FormatError(f"{self.job.folder}: the files have {total} layers, the arguments {self.model.layers}")
        return dict(zip(order, firsts, strict=True))

    def chunk(self, rank: MegatronRank, weights: Mapping[str, Located], first: Mapping[str, int]) -> ModelChunk:
        """Return the description of a model chunk of a rank.

        Args:
            rank: the rank.
            weights: parameters and buffers of the chunk.
            first: global number of the first layer of each kind.

        Raises:
            FormatError: experts are missing.
        """
        local = {expert for expert in map(expert_of, weights) if expert is not None}
        if local and max(local) != len(local) - 1:
            raise FormatError(f"{rank.path}: its experts are not numbered from 0 on")
        count, total = len(local), self.argument("num_experts")
        if local and type(total) is int and total != count * self.job.sizes.expert:
            raise FormatError(
                f"{rank.path}: has {count} of {total} experts, which does not fit {self.job.sizes.expert} expert parallel ranks"
            )
        shapes = {name: weight.shape for name, weight in weights.items()}
        return ModelChunk(
            first,
            rank.expert * count,
            count * self.job.sizes.expert,
            gated(shapes),
            self.job.sizes.tensor,
            self.job.sizes.expert_tensor,
        )

    # ---------------------------------------------------------------- parameters

    def place(self, rank: MegatronRank, number: int, name: str, weight: Located, chunk: ModelChunk) -> ShardPlace | None:
        """Return the place of a parameter in the global model; None if it is read from another rank or stage.

        Args:
            rank, number: the rank and the number of its chunk.
            name, weight: the parameter.
            chunk: description of the chunk.

        Raises:
            FormatError: the place is unknown, or another stage has the parameter too.
        """
        if not is_expert(name) and not rank.dense:
            return None
        if name == OUTPUT and self.tied:
            return None
        if is_renamed(name) and self.argument("transformer_impl") is None:
            raise FormatError(f"{rank.path}: the arguments have no transformer_impl, which decides the global name of {name}")
        try:
            place = shard_place(name, weight.shape, self.model, chunk)
        except UnknownNameError as err:
            raise FormatError(f"{rank.path}: {err}; {_SUPPORTED}") from None
        here = (number, rank.pipeline)
        owner = self._owner.setdefault((place, rank.tensor), here)
        if owner != here and not name.startswith("embedding."):
            raise FormatError(f"{rank.path}: {name} is also in pipeline stage {owner[1]}")
        return place if owner == here else None  # the embedding of multi-token prediction is a copy

    def parameters(self, rank: MegatronRank, weights: Sequence[Mapping[str, Located]]) -> list[RankParameter]:
        """Return the parameters that a rank trains if nothing is frozen, in the order of the model.

        Args:
            rank: the rank.
            weights: parameters and buffers of each chunk.
        """
        names = [
            (number, name, weight)
            for number, found in enumerate(weights)
            for name, weight in found.items()
            if name.rpartition(".")[2] not in BUFFERS
        ]
        total = sum(weight.numel for _, _, weight in names)
        last = (len(rank.chunks) - 1, self.job.sizes.pipeline - 1)
        made = []
        for number, name, weight in names:
            size = bucket_size(
                overlapped=bool(self.argument("overlap_grad_reduce")),
                pipeline_rank=rank.pipeline,
                chunk=number,
                size=self.argument("ddp_bucket_size"),
                buckets=self.argument("ddp_num_buckets"),
                parameters=total,
                data_ranks=self.job.sizes.data,
            )
            size = None if self.argument("overlap_param_gather_with_optimizer_step") else size
            shared = self._is_shared(name, (number, rank.pipeline), last, weights[number])
            made.append(RankParameter(number, name, weight, shared, size))
        return made

    def _is_shared(self, name: str, here: tuple[int, int], last: tuple[int, int], weights: Mapping[str, Located]) -> bool:
        """Return whether two stages have this embedding (``setup_embeddings_and_output_layer`` in language_module.py)."""
        if self.job.sizes.pipeline == 1 or name not in (EMBEDDING, OUTPUT):
            return False
        if here == (0, 0) or EMBEDDING in weights:
            return name == EMBEDDING and (self.tied or bool(self.argument("mtp_num_layers")))
        return here == last and self.tied


def chunk_weights(rank: MegatronRank, number: int) -> dict[str, Located]:
    """Return the parameters and buffers of a chunk of a rank, in the order of the model. Raises FormatError."""
    found = {}
    for name, value in rank.chunks[number].items():
        if str(name).endswith(EXTRA_STATE):
            continue
        if not isinstance(value, Located):
            raise FormatError(f"{rank.path}: {name} of the model is {value!r:.60}, expected a plain tensor")
        found[str(name)] = value
    return found


def _layer_counts(chunk: Mapping[str, Any], rank: MegatronRank) -> dict[str, int]:
    found = {layer for layer in map(layer_of, map(str, chunk)) if layer is not None}
    counts = {kind: sum(each == kind for each, _ in found) for kind in _KINDS}
    if any(number >= counts[kind] for kind, number in found):
        raise FormatError(f"{rank.path}: its layers are not numbered from 0 on")
    return counts
