"""Shards that an earlier save has described: the same shards as described anew, or none."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.dtypes import name_of
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.save.kept import BoundShards, Facts, Keeper, KeptFacts
from unickpt.checkpoint.save.module_tree import ModuleTree
from unickpt.checkpoint.save.shards import Shard


def _shard(name: str, data: torch.Tensor, unless: torch.Tensor | None = None) -> Shard:
    info = TensorInfo(name, "master" if unless is None else "weight", name_of(data.dtype), tuple(data.shape), "parameter")
    return Shard(info, Box.whole(info.shape), data, unless, steady=True)


def _flat() -> tuple[list[torch.Tensor], list[Shard]]:
    """Return bases, and shards of parts of them, one of which has a condition."""
    master, weight, own = torch.randn(60), torch.randn(60).bfloat16(), torch.nn.Parameter(torch.randn(4, 5))
    shards = [
        _shard("a", master.narrow(0, 0, 24).view(4, 6)), _shard("b", master.narrow(0, 24, 36)), _shard("own", own.detach()),
        _shard("a", weight.narrow(0, 0, 24).view(4, 6), master.narrow(0, 0, 24).view(4, 6)),
    ]  # fmt: skip
    return [master, weight, own], shards


def test_bound_shards_are_the_shards_that_were_kept() -> None:
    bases, shards = _flat()
    keeper = Keeper(bases)
    keeper.keep(shards)
    assert keeper.kept is not None
    for base in bases:
        base.data.add_(1.0)
    bound = BoundShards.of(keeper.kept, bases).shards()
    assert [(each.tensor, each.box, each.steady) for each in bound] == [(each.tensor, each.box, True) for each in shards]
    for one, other in zip(bound, shards, strict=True):
        assert one.data.data_ptr() == other.data.data_ptr()
        assert one.data.shape == other.data.shape
        assert not one.data.requires_grad
        assert (one.unless is None) == (other.unless is None)
    assert torch.equal(bound[3].unless, shards[3].unless)


def test_bases_may_share_a_storage_and_memory() -> None:
    buffer = torch.randn(60)
    bases = [buffer.narrow(0, 0, 20), buffer.narrow(0, 20, 40), buffer.narrow(0, 20, 40)]
    keeper = Keeper(bases)
    keeper.keep([_shard("a", buffer.narrow(0, 4, 6)), _shard("b", buffer.narrow(0, 24, 36).view(6, 6))])
    assert keeper.kept is not None
    found = BoundShards.of(keeper.kept, bases).shards()
    assert [each.data.data_ptr() - buffer.data_ptr() for each in found] == [16, 96]
    assert list(map(id, keeper.kept.bases(bases))) == [id(bases[0]), id(bases[2])]
    across = Keeper(bases)
    across.keep([_shard("across", buffer.narrow(0, 10, 20))])
    assert across.kept is None


def test_bound_shards_stay_when_a_base_gets_other_memory() -> None:
    bases, shards = _flat()
    keeper = Keeper(bases)
    keeper.keep(shards)
    assert keeper.kept is not None
    bound, before = BoundShards.of(keeper.kept, bases), bases[0].clone()
    bases[0].data = torch.zeros(60)
    assert torch.equal(bound.shards()[0].data.view(-1), before[:24])
    bound.watch().check_versions()


def test_kept_shards_hold_no_memory() -> None:
    bases, shards = _flat()
    keeper = Keeper(bases)
    keeper.keep(shards)
    facts = KeptFacts(Facts(bases, bases))
    references = [base.untyped_storage()._weak_ref() for base in bases]
    del shards, bases
    gc.collect()
    assert all(torch.UntypedStorage._expired(each) for each in references)
    assert keeper.kept is not None
    assert not facts.fit(Facts())


@pytest.mark.parametrize(
    "change",
    [
        lambda bases: setattr(bases[0], "data", bases[0].data.clone()),
        lambda bases: bases.__setitem__(0, bases[0].clone()),
        lambda bases: bases.__setitem__(0, bases[0].detach()),
        lambda bases: bases.append(torch.zeros(1)),
        lambda bases: bases.reverse(),
        lambda bases: setattr(bases[2], "data", bases[2].data.view(5, 4)),
        lambda bases: setattr(bases[2], "data", bases[2].data[:3]),
        lambda bases: setattr(bases[1], "data", bases[1].data.view(torch.float16)),
        lambda bases: setattr(bases[2], "data", bases[2].data.as_strided((4, 5), (1, 4))),
    ],
    ids=["memory", "copy", "another-tensor-of-the-memory", "more", "order", "shape", "rows", "dtype", "strides"],
)
def test_facts_differ_after_a_change(change: Callable[[list[torch.Tensor]], None]) -> None:
    bases, _ = _flat()
    kept = KeptFacts(Facts(bases, bases, values=(1, "a")))
    assert kept.fit(Facts(bases, bases, values=(1, "a")))
    assert not kept.fit(Facts(bases, bases, values=(1, "b")))
    alive = list(bases)
    change(bases)
    assert not kept.fit(Facts(bases, bases, values=(1, "a")))
    del alive


def test_facts_of_an_object_that_has_ended_fit_no_more() -> None:
    module = torch.nn.Linear(2, 2)
    kept = KeptFacts(Facts(objects=[module]))
    assert kept.fit(Facts(objects=[module]))
    del module
    gc.collect()
    kept._read[0] = []  # as if another object had its id
    assert not kept.fit(Facts())


@pytest.mark.parametrize("odd", ["strided", "foreign", "inference"])
def test_shards_that_cannot_be_watched_are_not_kept(odd: str) -> None:
    bases, shards = _flat()
    if odd == "strided":
        shards.append(_shard("c", bases[2].detach().t()))
    elif odd == "foreign":
        shards.append(_shard("c", torch.zeros(4)))
    else:
        with torch.inference_mode():
            bases.append(torch.zeros(4))
        shards.append(_shard("c", bases[3]))
    keeper = Keeper(bases)
    keeper.keep(shards)
    assert keeper.kept is None


def test_shards_that_change_at_any_time_are_described_anew() -> None:
    bases, shards = _flat()
    keeper = Keeper(bases)
    keeper.keep([*shards, Shard(shards[0].tensor, shards[0].box, torch.zeros(4, 6))])
    assert keeper.kept is not None
    assert len(keeper.kept.boxes()) == len(shards)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "more", torch.nn.Linear(2, 2)),
        lambda model: setattr(model[0], "weight", torch.nn.Parameter(torch.zeros(3, 3))),
        lambda model: model[1].register_buffer("more", torch.zeros(1)),
        lambda model: setattr(model[0], "bias", None),
        lambda model: model[1].register_buffer("seen", model[1].seen, persistent=False),
        lambda model: setattr(model, "1", model[0]),
        lambda model: setattr(model[1], "other", model[1]._buffers.pop("seen")),
    ],
    ids=["module", "parameter", "buffer", "no-bias", "not-persistent", "shared", "no-buffer"],
)
def test_a_tree_differs_after_a_change(change: Callable[[torch.nn.Module], None]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].register_buffer("seen", torch.zeros(2))
    kept = KeptFacts(ModuleTree.of(model).facts)
    model[0].weight.data = torch.ones(3, 3)  # the tree says nothing of memory
    assert kept.fit(ModuleTree.of(model).facts)
    before = ModuleTree.of(model)
    change(model)
    assert not kept.fit(ModuleTree.of(model).facts)
    del before
