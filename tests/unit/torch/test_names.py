"""Names of the plain module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from torch_unickpt.held_state.names import names_of, plain


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("_orig_mod.a._checkpoint_wrapped_module.b", "a.b"),
        ("_fsdp_wrapped_module._orig_mod.w", "w"),
        ("a._orig_mod_of_mine.b", "a._orig_mod_of_mine.b"),
        ("w", "w"),
    ],
)
def test_wrappers_leave_no_trace(name: str, expected: str) -> None:
    assert plain(name) == expected


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(2, 2)
        self.second = checkpoint_wrapper(torch.nn.Linear(2, 2))
        self.tied = self.first
        self.same = self.first.weight
        self.register_buffer("kept", torch.zeros(3))
        self.register_buffer("shared", self.kept)
        self.register_buffer("scratch", torch.zeros(4), persistent=False)


def test_tied_parameters_and_shared_buffers_have_their_first_name() -> None:
    model: Any = torch.compile(Module(), backend="eager")
    names = names_of(model)
    assert set(names.parameters) == {"same", "first.bias", "second.weight", "second.bias"}
    assert names.aliases == {
        "first.weight": "same", "tied.weight": "same", "tied.bias": "first.bias", "shared": "kept",
    }  # fmt: skip
    assert set(names.buffers) == {"kept"}
    assert names.shapes["tied.weight"] == (2, 2)
    assert "scratch" not in names.shapes
