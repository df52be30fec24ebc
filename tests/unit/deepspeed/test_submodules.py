"""One walk through a module finds what ``named_parameters`` and ``named_buffers`` find."""

from __future__ import annotations

import torch

from ds_unickpt.framework.internals import buffers_of, non_persistent_names, parameters_of, submodules


def module() -> torch.nn.Module:
    shared = torch.nn.BatchNorm1d(4)
    root = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), shared, torch.nn.Sequential(shared, torch.nn.Linear(4, 4)))
    root[2][1].weight = root[0].weight
    root.register_buffer("table", torch.zeros(3), persistent=False)
    root[0].register_buffer("same", root.get_buffer("table"))
    root[0].register_buffer("absent", None)
    root.register_parameter("scale", torch.nn.Parameter(torch.ones(2)))
    root.register_parameter("nothing", None)
    return root


def test_the_walk_gives_the_names_and_the_order_of_torch() -> None:
    root = module()
    children = submodules(root)
    parameters = dict(root.named_parameters(remove_duplicate=False))
    assert [(name, id(p)) for name, p in parameters_of(children).items()] == [(name, id(p)) for name, p in parameters.items()]
    assert {"scale", "0.weight", "2.1.weight", "1.weight", "2.0.weight"} <= parameters.keys()
    buffers = dict(root.named_buffers())
    assert [(name, id(b)) for name, b in buffers_of(children).items()] == [(name, id(b)) for name, b in buffers.items()]
    assert "table" in buffers
    assert "0.same" not in buffers
    assert non_persistent_names(children) == {"table"}
