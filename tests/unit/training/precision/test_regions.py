"""Modules that compute in bf16 with float32 weights, compared with what torch computes under a hand-written autocast."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from unickpt.training.precision.apply import apply_policy
from unickpt.training.precision.policy import Policy
from unickpt.training.precision.regions import AUTOCAST, CAST, compute_in


class Block(torch.nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.inner = torch.nn.Linear(width, width)
        self.seen: list[tuple[torch.dtype, torch.dtype]] = []
        self.calls = 0

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> tuple[torch.Tensor, dict[str, Any]]:
        self.calls += 1
        out = self.inner(self.norm(x)) * scale
        self.seen.append((self.inner.weight.dtype, out.dtype))
        if scale < 0:
            raise ValueError(scale)
        return out, {"kept": [out], "count": 3}


def made(seed: int = 1) -> Block:
    torch.manual_seed(seed)
    return Block()


def gradients(module: torch.nn.Module, out: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(out.square().sum(), list(module.parameters())))


INPUT = torch.randn(4, 16, generator=torch.Generator().manual_seed(2))


def test_under_autocast_a_module_computes_what_torch_does() -> None:
    ours, theirs = made(), made()
    compute_in(ours, "bf16", "cpu")
    found, more = ours(INPUT, scale=2.0)
    with torch.autocast("cpu", torch.bfloat16):
        expected, _ = theirs(INPUT, scale=2.0)
    assert ours.seen == [(torch.float32, torch.bfloat16)]
    assert found.dtype is more["kept"][0].dtype is torch.float32
    assert more["count"] == 3
    assert torch.equal(found, expected.float())
    for mine, reference in zip(gradients(ours, found), gradients(theirs, expected.float()), strict=True):
        assert mine.dtype is torch.float32
        assert torch.equal(mine, reference)
    assert not torch.equal(found, made()(INPUT, scale=2.0)[0])
    assert not torch.is_autocast_enabled("cpu")


def test_with_cast_weights_a_module_computes_what_its_copy_in_bf16_does() -> None:
    ours, theirs = made(), made().bfloat16()
    names = [name for name, _ in ours.named_parameters()]
    compute_in(ours, "bf16", "cpu", CAST)
    found, _ = ours(INPUT)
    expected, _ = theirs(INPUT.bfloat16())
    assert ours.seen == [(torch.bfloat16, torch.bfloat16)]
    assert torch.equal(found, expected.float())
    for mine, reference in zip(gradients(ours, found), gradients(theirs, expected.float()), strict=True):
        assert mine.dtype is torch.float32
        assert torch.equal(mine, reference.float())
    assert [name for name, _ in ours.named_parameters()] == names
    assert all(parameter.is_leaf and parameter.dtype is torch.float32 for parameter in ours.parameters())


@pytest.mark.parametrize("way", [AUTOCAST, CAST])
def test_a_module_that_raises_leaves_its_dtype(way: str) -> None:
    module = made()
    compute_in(module, "bf16", "cpu", way)
    with pytest.raises(ValueError, match="-1"):
        module(INPUT, scale=-1.0)
    assert not torch.is_autocast_enabled("cpu")
    assert module.inner.weight.dtype is torch.float32
    assert module.inner(INPUT).dtype is torch.float32


def test_a_float32_module_of_a_job_under_autocast() -> None:
    low, full = made(), made(3)
    compute_in(full, "fp32", "cpu")
    with torch.autocast("cpu", torch.bfloat16):
        between, _ = low(INPUT)
        found, _ = full(between)
        assert torch.is_autocast_enabled("cpu")
    assert low.seen == [(torch.float32, torch.bfloat16)]
    assert full.seen == [(torch.float32, torch.float32)]
    assert torch.equal(found, made(3)(between.float())[0])


@pytest.mark.parametrize("way", [AUTOCAST, CAST])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_module_has_the_same_gradients(way: str, reentrant: bool) -> None:
    whole, repeated = made(), made()
    for module in (whole, repeated):
        compute_in(module, "bf16", "cpu", way)
    given = INPUT.clone().requires_grad_()
    expected = gradients(whole, whole(given)[0])
    out = checkpoint(lambda x: repeated(x)[0], given, use_reentrant=reentrant)
    out.square().sum().backward()
    assert repeated.calls == 2
    assert not torch.is_autocast_enabled("cpu")  # without reentrance, torch ends the repetition by an exception
    assert repeated.inner.weight.dtype is torch.float32
    for parameter, reference in zip(repeated.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, reference)


def test_without_its_hooks_a_module_computes_as_before() -> None:
    module = made()
    expected = module(INPUT)[0]
    for handle in compute_in(module, "bf16", "cpu"):
        handle.remove()
    assert torch.equal(module(INPUT)[0], expected)


def applied(policy: Policy, layers: Mapping[str, torch.nn.Module], **more: Any) -> Any:
    return apply_policy(policy, layers, "plan.json", **{"rank": 0, "world": 1, "all_layers": True, **more})


def test_only_the_layers_of_a_plan_on_its_ranks_are_changed() -> None:
    layers = {"a": made(), "b": made()}
    policy = Policy({"a": "bf16"}, ranks=(1,), world=2)
    assert applied(policy, layers, rank=0, world=2).layers == ()
    assert applied(policy, layers, rank=1, world=2).layers == ("a",)
    for name, module in layers.items():
        module(INPUT)
        assert module.seen[-1][1] is (torch.bfloat16 if name == "a" else torch.float32)


def test_a_plan_that_does_not_fit_is_a_warning() -> None:
    layers: dict[str, torch.nn.Module] = {"a": made(), "b": copy.deepcopy(made()).bfloat16()}
    other = applied(Policy({"a": "bf16"}, ranks=(0,), world=2), layers)
    assert other.layers == ()
    assert "plan.json is not used: it names ranks of a job of 2" in other.warnings[0]
    unknown = applied(Policy({"a": "bf16", "c": "bf16"}), layers)
    assert unknown.layers == ("a",)
    assert "names layers that this model does not have: c. It has a, b" in unknown.warnings[0]
    assert applied(Policy({"c": "bf16"}), layers, all_layers=False).warnings == ()
    none = applied(Policy({"c": "bf16"}, ranks=(0,), world=1), layers, all_layers=False)
    assert none.warnings == ("plan.json: rank 0 has none of the layers c. It has a, b",)
    narrow = applied(Policy({"b": "bf16"}), layers)
    assert narrow.layers == ()
    assert "a plan needs float32 weights" in narrow.warnings[0]
