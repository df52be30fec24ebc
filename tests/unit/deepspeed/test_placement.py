"""Ranks that hold the same parameters, and names that do not depend on stages of a pipeline or on expert-parallel ranks."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ds_unickpt.framework.internals import ExpertLayer, TiedCopy
from ds_unickpt.held_state.names import (
    ModuleNames,
    copied_from,
    expert_name,
    holders,
    of_all_ranks,
    original_of,
    stored_name,
    without_rank,
)
from ds_unickpt.placing.placement import Placement
from ds_unickpt.placing.slices import RankValues
from unickpt.checkpoint.state.held import Copies


def placement(rank: int, *, peers: tuple[int, ...], data: tuple[int, ...], world: int = 4) -> Placement:
    return Placement(rank, world, 0, world // len(peers), peers, peers, data, None)


def test_all_ranks_share_what_all_of_them_hold() -> None:
    placed = [placement(rank, peers=(0, 1, 2, 3), data=(0, 1, 2, 3)) for rank in range(4)]
    assert [(p.copies().rank, p.copies().world, p.first, p.partial) for p in placed] == [
        (0, 4, True, False), (1, 4, False, False), (2, 4, False, False), (3, 4, False, False),
    ]  # fmt: skip


def test_each_pipeline_stage_shares_its_own_parameters() -> None:
    placed = [placement(rank, peers=ranks, data=ranks) for ranks in ((0, 1), (2, 3)) for rank in ranks]
    assert [(p.copies().rank, p.copies().world, p.first, p.with_coordinator, p.partial) for p in placed] == [
        (0, 2, True, True, True), (1, 2, False, True, True), (0, 2, True, False, True), (1, 2, False, False, True),
    ]  # fmt: skip
    assert len({p.copies().ranks for p in placed}) == 2


def test_one_of_the_sequence_parallel_peers_stores_everything() -> None:
    placed = [placement(rank, peers=(0, 1, 2, 3), data=(rank % 2, rank % 2 + 2)) for rank in range(4)]
    assert [p.copies().rank for p in placed] == [0, -1, 1, -1]
    assert placed[1].copies() == Copies((), 1)


def test_each_expert_is_shared_by_the_ranks_that_have_it() -> None:
    everyone, ranks = (0, 1, 2, 3), {rank: (rank % 2, rank % 2 + 2) for rank in range(4)}
    placed = [Placement(rank, 4, 0, 1, ranks[rank], everyone, everyone, None) for rank in everyone]
    assert [(p.first, p.with_coordinator, p.partial) for p in placed] == [
        (True, True, True), (True, True, True), (False, True, True), (False, True, True),
    ]  # fmt: skip
    assert [p.copies(None).rank for p in placed] == [0, 1, 2, 3]
    assert [p.copies(ranks[p.rank]).rank for p in placed] == [0, 0, 1, 1]
    assert [(p.leads(None), p.leads(ranks[p.rank])) for p in placed] == [
        (True, True), (False, True), (False, False), (False, False),
    ]  # fmt: skip


LAYERS = {
    layer.name: layer
    for layer in (
        ExpertLayer("a.moe.deepspeed_experts", first=6, count=3, degree=4, ranks=(2, 6)),
        ExpertLayer("deepspeed_experts", first=0, count=2, degree=1, ranks=(0, 1)),
        ExpertLayer("b.mlp.experts", first=4, count=2, degree=4, ranks=(2, 6), stacked=True),
    )
}


@pytest.mark.parametrize(
    ("own", "stored", "ranks"),
    [
        ("a.moe.deepspeed_experts.2.up.weight", "a.moe.deepspeed_experts.8.up.weight", (2, 6)),
        ("a.moe.deepspeed_experts.0", "a.moe.deepspeed_experts.6", (2, 6)),
        ("a.moe.deepspeed_experts", "a.moe.deepspeed_experts", None),
        ("deepspeed_experts.1.blocks.0.weight", "deepspeed_experts.1.blocks.0.weight", (0, 1)),
        ("b.moe.deepspeed_experts.1.weight", "b.moe.deepspeed_experts.1.weight", None),
        ("a.moe.gate.wg.weight", "a.moe.gate.wg.weight", None),
        ("b.mlp.experts.w1", "b.mlp.experts.w1", (2, 6)),  # AutoEP: all experts of a rank
        ("b.mlp.router.gate.weight", "b.mlp.router.gate.weight", None),
    ],
)
def test_an_expert_has_its_number_among_all_experts(own: str, stored: str, ranks: tuple[int, ...] | None) -> None:
    assert expert_name(own, LAYERS) == stored
    assert holders(stored, LAYERS) == ranks


def test_ranks_with_other_experts_have_a_part_of_the_same_tensor_under_auto_ep() -> None:
    """So the first of all ranks describes it. An expert of ``deepspeed.moe`` is a tensor of its own."""
    names = dataclasses.replace(ModuleNames.read(torch.nn.Linear(1, 1)), experts=LAYERS)
    assert (names.having("b.mlp.experts.w1"), names.holders("b.mlp.experts.w1")) == (None, (2, 6))
    expert = "a.moe.deepspeed_experts.8.up.weight"
    assert names.having(expert) == names.holders(expert) == (2, 6)


COPIES = (TiedCopy("embed", 7, frozenset({"weight"})),)


@pytest.mark.parametrize(
    ("own", "stored"),
    [
        ("tied_modules.embed.weight", "tied_modules.embed.weight"),
        ("tied_modules.embed.bias", "tied_modules.embed@7.bias"),
        ("tied_modules.embed.norm.weight", "tied_modules.embed@7.norm.weight"),
        ("tied_modules.embed", "tied_modules.embed@7"),
        ("tied_modules.embedding.bias", "tied_modules.embedding.bias"),
        ("7.bias", "7.bias"),
    ],
)
def test_values_of_a_stage_have_a_name_of_their_own(own: str, stored: str) -> None:
    assert stored_name(own, COPIES) == stored
    assert stored_name(own, ()) == own


def test_the_original_of_a_stages_own_value_is_on_the_first_stage() -> None:
    assert original_of("tied_modules.embed@7.norm.weight") == "tied_modules.embed.norm.weight"
    assert original_of("tied_modules.embed.weight") == original_of("7.bias") == original_of("embed@7.bias") == ""


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("tied_modules.e.bias", "tied_modules.e.bias"),
        ("tied_modules.e@3.bias", "tied_modules.e.bias"),
        ("tied_modules.e@5.bias", "tied_modules.e@5.bias"),
        ("tied_modules.e@8.bias", "tied_modules.e@5.bias"),
        ("tied_modules.e@11.bias", "tied_modules.e@10.bias"),
        ("tied_modules.f@11.bias", ""),
        ("tied_modules.e@11.weight", ""),
        ("e@11.bias", ""),
    ],
)
def test_a_stage_gets_the_copy_that_its_layers_used_before(wanted: str, found: str) -> None:
    known = ["tied_modules.e.bias", "tied_modules.e@5.bias", "tied_modules.e@10.bias", "tied_modules.g@4.bias", "3.bias"]
    assert copied_from(wanted, known) == found


class Plain(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(3, 2)
        self.blocks = torch.nn.ModuleList([torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2)])

    def unickpt_pipeline_layers(self) -> list[object]:
        return [("embed", self.embed), torch.relu, *self.blocks, ("embed", self.embed)]


def test_a_plain_module_can_name_the_layers_of_its_pipeline() -> None:
    assert ModuleNames.read(Plain()).aliases == {
        "tied_modules.embed.weight": "embed.weight",
        "2.weight": "blocks.0.weight",
        "2.bias": "blocks.0.bias",
        "2.running_mean": "blocks.0.running_mean",
        "2.running_var": "blocks.0.running_var",
        "2.num_batches_tracked": "blocks.0.num_batches_tracked",
        "3.weight": "blocks.1.weight",
        "3.bias": "blocks.1.bias",
    }


@pytest.mark.parametrize(("rank", "stored"), [(0, "norm.weight"), (1, "norm.weight@tp1")])
def test_each_tensor_parallel_rank_has_a_name_for_its_values_of_a_parameter_to_average(rank: int, stored: str) -> None:
    module = torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(3)})
    weight = module.get_parameter("norm.weight")
    names = ModuleNames.read(module, RankValues(frozenset({id(weight)}), rank, 2, (rank, rank + 2)))
    assert list(names.parameters) == [stored, "norm.bias"]
    assert names.own[stored] == "norm.weight"
    assert [names.holders(name) for name in names.parameters] == [(1, 3) if rank else None, None]
    assert list(ModuleNames.read(module).parameters) == ["norm.weight", "norm.bias"]


def test_the_values_of_all_tensor_parallel_ranks_are_found_by_name() -> None:
    known = {"w", "w@tp1", "w@tp2", "w@tp4", "v"}
    assert of_all_ranks("w", known) == ("w", "w@tp1", "w@tp2")
    assert of_all_ranks("v", known) == ("v",)
    names = ("w@tp1", "w", "tied_modules.e@7.w@tp12", "w@tp0")
    assert [without_rank(name) for name in names] == ["w", "w", "tied_modules.e@7.w", "w@tp0"]
