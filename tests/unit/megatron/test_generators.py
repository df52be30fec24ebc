"""Random generators of ranks in a job with other positions than the one that saved."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("megatron.core")

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron_unickpt.held_state.generators import StoredGenerators, are_in, found_for
from megatron_unickpt.held_state.positions import PositionFree

PLACE = {"pipeline": 0, "tensor": 0, "expert": 0, "expert_tensor": 0, "data": 0}


def state(seed: int) -> dict[str, Any]:
    made = torch.Generator().manual_seed(seed).get_state()
    return {"torch_rng_state": made, "rng_tracker_states": {"model-parallel-rng": made}, "other": "kept"}


def stored(values: list[Any], layout: dict[str, int]) -> StoredGenerators:
    named = {f"rng_state/shard_0.0.{at}_1.1.{len(values)}": value for at, value in enumerate(values)}
    return StoredGenerators(tuple(named), named.__getitem__, layout)


def request(data: int, count: int, own: Any = None) -> ShardedObject:
    return ShardedObject("rng_state", own, (1, 1, count), (0, 0, data))


@pytest.mark.parametrize("key", ["rng_state", "unickpt_rng", "extra.rng_state", "rng"])
def test_generators_are_known_by_the_word_in_their_key(key: str) -> None:
    assert are_in(ShardedObject(key, None, (1,), (0,)))
    assert not are_in(PositionFree(key, None, (1,), (0,)))
    assert not are_in(ShardedObject("strong_rngs", None, (1,), (0,)))


def test_data_parallel_ranks_keep_theirs_and_new_ones_share_a_common_state_or_are_seeded() -> None:
    one, two = {"data": 2}, {"data": 4}
    different, common = stored([state(1), state(2)], one), stored([state(1), state(1)], one)
    kept = found_for(request(1, 4), different, two, PLACE)
    assert torch.equal(kept.value["torch_rng_state"], state(2)["torch_rng_state"])
    assert kept.reason == "2 data parallel ranks became 4: ranks 0 to 1 keep their generators"
    shared = found_for(request(3, 4), common, two, PLACE)
    assert torch.equal(shared.value["torch_rng_state"], state(1)["torch_rng_state"])
    assert "share" in shared.reason
    new = [found_for(request(at, 4), different, two, PLACE | {"data": at}).value for at in (2, 3)]
    known = [state(1), state(2), *new]
    assert len({bytes(each["torch_rng_state"].numpy()) for each in known}) == 4
    assert new[0]["other"] == "kept"


def test_another_layout_seeds_also_positions_of_the_same_number() -> None:
    """With another expert parallel size, a data parallel rank is another expert parallel rank."""
    source = stored([state(1), state(1)], {"expert": 1, "data": 2})
    same = found_for(request(1, 2), source, {"expert": 1, "data": 2}, PLACE)
    assert (same.outcome, same.reason) == ("restored", "")
    found = found_for(request(1, 2), source, {"expert": 2, "data": 2}, PLACE)
    assert found.outcome == "re-seeded"
    assert not torch.equal(found.value["torch_rng_state"], state(1)["torch_rng_state"])


def test_the_generators_of_a_whole_job_do_not_depend_on_the_layout() -> None:
    item = ShardedObject("sampler.rng_state", state(9), (1,), (0,))
    source = StoredGenerators((item.unique_key,), {item.unique_key: state(1)}.__getitem__, {"tensor": 2})
    found = found_for(item, source, {"tensor": 1}, PLACE)
    assert found.outcome == "restored"
    assert torch.equal(found.value["torch_rng_state"], state(1)["torch_rng_state"])


def test_a_form_that_is_not_known_is_refused() -> None:
    found = found_for(request(0, 1, own="opaque"), stored(["a", "b"], {"tensor": 2}), {"tensor": 1}, PLACE)
    assert found.refused
    assert "form of generators" in found.reason


def test_generators_of_python_and_numpy_are_seeded_in_their_own_form() -> None:
    own = {"python": random.Random(1).getstate(), "numpy": np.random.RandomState(1).get_state(legacy=True)}
    found = found_for(request(0, 1), stored([own, own], {"tensor": 2}), {"tensor": 1}, PLACE)
    assert found.outcome == "re-seeded"
    drawn, before = random.Random(), random.Random(1)
    drawn.setstate(found.value["python"])
    assert drawn.random() != before.random()
    array = np.random.RandomState()
    array.set_state(found.value["numpy"])
    assert array.random_sample() != np.random.RandomState(1).random_sample()
