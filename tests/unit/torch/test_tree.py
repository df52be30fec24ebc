"""Keys of DCP as names, and back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torch_unickpt.dcp.tree import Tree

_PARTS = st.sampled_from(
    ["model", "optimizer", "optim", "state", "param_groups", "0", "1", "w", "step", "exp_avg", "weight", "lr", ""]
)
_KEYS = st.sets(st.lists(_PARTS, min_size=1, max_size=6).map(".".join), max_size=8)


@given(_KEYS, _KEYS)
def test_each_key_has_a_name_of_its_own(tensors: set[str], others: set[str]) -> None:
    tree = Tree.of(tensors, others)
    names = {key: tree.name_of(key) for key in tensors}
    assert len(set(names.values())) == len(tensors)
    assert {tree.key_of(*name) for name in names.values()} == tensors


@given(_KEYS, _KEYS)
def test_a_tree_comes_back_from_the_manifest(tensors: set[str], others: set[str]) -> None:
    tree = Tree.of(tensors, others)
    assert Tree.from_json(tree.as_json()) == tree


@given(_KEYS, _KEYS, _KEYS)
def test_the_joined_tree_of_two_ranks_names_the_keys_of_both(one: set[str], two: set[str], others: set[str]) -> None:
    tree = Tree.joined([Tree.of(one, others), Tree.of(two, set())]).over(one | two)
    names = {key: tree.name_of(key) for key in one | two}
    assert len(set(names.values())) == len(one | two)


@given(
    st.one_of(
        st.none(), st.integers(), st.dictionaries(st.sampled_from(["model", "optimizer", "flat", "generic"]), st.integers())
    )
)
def test_a_malformed_tree_has_defaults(value: object) -> None:
    assert isinstance(Tree.from_json(value), Tree)


def test_parameters_are_found_by_their_states() -> None:
    keys = {"app.net.w", "app.ema.w", "app.optim.state.w.exp_avg", "app.optim.state.w.exp_avg_sq", "app.net.buffer"}
    tree = Tree.of(keys, {"app.optim.param_groups.0.lr", "app.optim.param_groups.0.params"})
    assert (tree.model, tree.optimizer, tree.flat) == ("app.net.", "app.optim.", False)
    assert tree.name_of("app.net.w") == ("w", "weight")
    assert tree.name_of("app.ema.w") == ("app.ema.w", "weight")
    assert tree.name_of("app.optim.state.w.exp_avg") == ("w", "exp_avg")
