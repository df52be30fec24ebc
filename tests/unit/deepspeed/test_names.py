"""Names of parameters in a checkpoint."""

from __future__ import annotations

from ds_unickpt.framework.internals import TiedCopy, plain
from ds_unickpt.held_state.names import spelled_plainly, stored_name


def test_names_of_compiled_modules_are_plain_unless_that_is_another_ones_name() -> None:
    assert plain("_orig_mod.layers.0._orig_mod.weight") == "layers.0.weight"
    names = ["_orig_mod.a", "b", "_orig_mod.b", "c._orig_mod", "c_orig_mod.d"]
    assert spelled_plainly(names) == {"_orig_mod.a": "a", "b": "b", "_orig_mod.b": "_orig_mod.b", "c._orig_mod": "c",
                                      "c_orig_mod.d": "c_orig_mod.d"}  # fmt: skip


def test_names_are_those_of_the_module_without_wrappers() -> None:
    assert plain("h.0._checkpoint_wrapped_module.mlp.weight") == "h.0.mlp.weight"
    assert plain("h.0.random_ltd_layer._orig_mod.mlp.weight") == "h.0.mlp.weight"
    assert plain("h.0.my_random_ltd_layer.weight") == "h.0.my_random_ltd_layer.weight"


def test_a_copy_of_a_tied_module_keeps_only_the_names_of_what_is_shared() -> None:
    copies = [TiedCopy("embed", 3, frozenset({"weight"}))]
    stored = {
        "tied_modules.embed": "tied_modules.embed@3",
        "tied_modules.embed.weight": "tied_modules.embed.weight",
        "tied_modules.embed.bias": "tied_modules.embed@3.bias",
        "tied_modules.embedding.bias": "tied_modules.embedding.bias",
        "3.bias": "3.bias",
    }
    assert {name: stored_name(name, copies) for name in stored} == stored
