"""Names of parameters in a checkpoint."""

from __future__ import annotations

from ds_unickpt.framework.internals import plain
from ds_unickpt.held_state.names import spelled_plainly


def test_names_of_compiled_modules_are_plain_unless_that_is_another_ones_name() -> None:
    assert plain("_orig_mod.layers.0._orig_mod.weight") == "layers.0.weight"
    names = ["_orig_mod.a", "b", "_orig_mod.b", "c._orig_mod", "c_orig_mod.d"]
    assert spelled_plainly(names) == {"_orig_mod.a": "a", "b": "b", "_orig_mod.b": "_orig_mod.b", "c._orig_mod": "c",
                                      "c_orig_mod.d": "c_orig_mod.d"}  # fmt: skip
