"""Names, pieces and numbers of Megatron's ranks equal those of its modules' ``sharded_state_dict``."""

from __future__ import annotations

import pytest
import torch

from unickpt.transform.convert.megatron import shard_rules
from unickpt.transform.convert.megatron.flat_buffers import Member, bucket_size, layout
from unickpt.transform.convert.megatron.shard_rules import (
    ModelChunk,
    ModelLayout,
    ShardPlace,
    UnknownNameError,
    first_layers,
    shard_boxes,
    shard_place,
    writing_ranks,
)

MODEL = ModelLayout(8)
CHUNK = ModelChunk({"decoder": 4, "mtp": 0}, first_expert=2, experts=4, ranks=2, expert_ranks=2)
LAYER = "decoder.layers."


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("embedding.word_embeddings.weight", ShardPlace("embedding.word_embeddings.weight", axis=0)),
        ("embedding.position_embeddings.weight", ShardPlace("embedding.position_embeddings.weight")),
        ("decoder.final_layernorm.bias", ShardPlace("decoder.final_layernorm.bias")),
        (f"{LAYER}1.self_attention.linear_qkv.bias", ShardPlace(f"{LAYER}self_attention.linear_qkv.bias", ((5, 8),), 0)),
        (f"{LAYER}1.self_attention.linear_proj.weight", ShardPlace(f"{LAYER}self_attention.linear_proj.weight", ((5, 8),), 1)),
        (f"{LAYER}1.self_attention.linear_proj.bias", ShardPlace(f"{LAYER}self_attention.linear_proj.bias", ((5, 8),))),
        (f"{LAYER}0.mlp.linear_fc1.layer_norm_weight", ShardPlace(f"{LAYER}mlp.linear_fc1.layer_norm_weight", ((4, 8),))),
        (f"{LAYER}0.mlp.router.expert_bias", ShardPlace(f"{LAYER}mlp.router.expert_bias", ((4, 8),))),
        (
            f"{LAYER}0.mlp.experts.local_experts.1.linear_fc2.weight",
            ShardPlace(f"{LAYER}mlp.experts.experts.linear_fc2.weight", ((4, 8), (3, 4)), 1),
        ),
        (
            f"{LAYER}0.mlp.experts.linear_fc1.weight1",
            ShardPlace(f"{LAYER}mlp.experts.experts.linear_fc1.weight", ((4, 8), (3, 4)), 0),
        ),
        ("mtp.layers.0.eh_proj.weight", ShardPlace("mtp.layers.0.eh_proj.weight", axis=0)),
        (
            "mtp.layers.0.transformer_layer.mlp.linear_fc2.weight",
            ShardPlace("mtp.layers.0.transformer_layer.mlp.linear_fc2.weight", axis=1),
        ),
    ],
)
def test_the_global_tensor_of_a_parameter(name: str, expected: ShardPlace) -> None:
    assert shard_place(name, (2, 2), MODEL, CHUNK) == expected


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.0.mixer.in_proj.weight", "encoder.layers.0.mlp.linear_fc1.weight", "language_model.embedding.weight",
        "decoder.layers.0.mlp.experts.weight1", "decoder.layers.0.mlp.linear_fc1.weight_scale", "output_layer.weight.extra",
    ],
)  # fmt: skip
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(UnknownNameError, match="division among tensor parallel ranks is unknown"):
        shard_place(name, (2, 2), MODEL, CHUNK)


def test_norms_are_renamed_as_the_local_spec_does() -> None:
    names = [f"{LAYER}0.{each}_layernorm.weight" for each in ("input", "pre_mlp")]
    found = [shard_place(name, (2,), ModelLayout(8, renamed=True), CHUNK).name for name in names]
    assert found == [f"{LAYER}self_attention.linear_qkv.layer_norm_weight", f"{LAYER}mlp.linear_fc1.layer_norm_weight"]
    assert [shard_place(name, (2,), MODEL, CHUNK).name for name in names] == [name.replace(".0.", ".") for name in names]
    assert [shard_rules.is_renamed(name) for name in (*names, "decoder.final_layernorm.weight")] == [True, True, False]


def test_layers_that_are_not_alike_have_their_numbers() -> None:
    found = shard_place(f"{LAYER}1.mlp.linear_fc2.weight", (2, 2), ModelLayout(8, stacked=False), CHUNK)
    assert found == ShardPlace(f"{LAYER}5.mlp.linear_fc2.weight", axis=1)


def test_down_projections_are_divided_by_their_sizes() -> None:
    name, model = f"{LAYER}0.self_attention.linear_q_down_proj.weight", ModelLayout(8, down={"query": 12, "latent": 0})
    assert shard_place(name, (12, 4), model, CHUNK).axis is None
    assert shard_place(name, (6, 4), model, CHUNK).axis == 0
    with pytest.raises(UnknownNameError, match="12 global rows"):
        shard_place(name, (5, 4), model, CHUNK)


def test_gated_layers_are_recognised_by_their_shapes() -> None:
    shapes = {
        "a.linear_fc1.weight": (8, 4),
        "a.linear_fc2.weight": (4, 4),
        "b.linear_fc1.weight": (8, 4),
        "b.linear_fc2.weight": (4, 8),
    }
    assert shard_rules.gated(shapes) == {"a.linear_fc1.weight", "a.linear_fc1.bias"}


@pytest.mark.parametrize(
    "place",
    [
        ShardPlace("x", axis=0),
        ShardPlace("x", axis=1),
        ShardPlace("x", ((2, 3),), 0, gated=True),
        ShardPlace("x", ((1, 2), (0, 4))),
    ],
)
def test_pieces_of_all_ranks_cover_the_tensor(place: ShardPlace) -> None:
    ranks, whole = 3, None
    for rank in range(ranks):
        local = torch.arange(24).view(6, 4) + 100 * rank
        shape, pairs = shard_boxes(place, tuple(local.shape), rank, ranks)
        whole = torch.full(shape, -1) if whole is None else whole
        for here, there in pairs:
            whole[there.slices()] = local[here.slices()].view(there.shape)
    assert whole is not None
    found = whole[tuple(index for index, _ in place.lead)]
    pieces = [torch.arange(24).view(6, 4) + 100 * rank for rank in range(ranks)]
    if place.axis is None:
        assert torch.equal(found, pieces[0])
    elif place.gated:
        halves = [piece.chunk(2) for piece in pieces]
        assert torch.equal(found, torch.cat([half[part] for part in range(2) for half in halves]))
    else:
        assert torch.equal(found, torch.cat(pieces, place.axis))


def test_chunks_follow_each_other() -> None:
    counts = [{"decoder": 1, "mtp": 0}, {"decoder": 3, "mtp": 0}, {"decoder": 2, "mtp": 1}, {"decoder": 1, "mtp": 1}]
    assert [each["decoder"] for each in first_layers(counts)] == [0, 1, 4, 6]
    assert [each["mtp"] for each in first_layers(counts)] == [0, 0, 0, 1]


def test_which_ranks_write() -> None:
    assert writing_ranks(2, 1, 2) == {(0, 0): 0, (1, 0): 1}
    assert writing_ranks(2, 2, 2) == {(0, 0): 0, (1, 0): 1, (0, 1): 0, (1, 1): 1}
    assert writing_ranks(2, 4, 1) == {(0, 0): 0, (1, 1): 0, (0, 2): 0, (1, 3): 0}


def test_buffers_begin_with_the_last_parameter() -> None:
    members = [Member(100), Member(10), Member(64)]
    assert layout(members, None) == ([128, 64, 0], 228)
    assert layout(members, 64) == ([128, 64, 0], 228)
    assert layout([Member(100), Member(10), Member(30)], 20) == ([94, 30, 0], 194)  # a bucket's padding is not written
    assert layout([Member(100, shared=True), Member(10)], None) == ([64, 0], 164)


def test_only_the_first_chunk_has_several_buckets() -> None:
    def size(
        stage: int, chunk: int, *, overlapped: bool = True, size: int | None = None, buckets: int | None = None
    ) -> int | None:
        return bucket_size(
            overlapped=overlapped, pipeline_rank=stage, chunk=chunk, size=size, buckets=buckets, parameters=90, data_ranks=64
        )

    assert size(0, 0) == 64_000_000
    assert size(0, 0, size=5) == 5
    assert size(0, 0, buckets=9) == 10
    assert [size(1, 0), size(0, 1), size(0, 0, overlapped=False)] == [None, None, None]
