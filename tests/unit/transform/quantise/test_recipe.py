"""Which modules are rounded, and the configuration that states it."""

from __future__ import annotations

from typing import Any

import pytest

from unickpt.base.errors import FormatError, MismatchError
from unickpt.transform.quantise.modules import units_of
from unickpt.transform.quantise.recipe import planned, uniform
from unickpt.transform.quantise.scheme import Scheme

LLAMA = {
    f"model.layers.{layer}.{name}.weight": shape
    for layer in (0, 10, 2)
    for name, shape in {
        "self_attn.q_proj": (256, 256), "self_attn.k_proj": (64, 256), "self_attn.v_proj": (64, 256),
        "self_attn.o_proj": (256, 256), "mlp.gate_proj": (384, 256), "mlp.up_proj": (384, 256),
        "mlp.down_proj": (256, 384), "input_layernorm": (256,),
    }.items()
} | {"model.embed_tokens.weight": (300, 256), "lm_head.weight": (300, 256), "model.norm.weight": (256,)}  # fmt: skip
MIXTRAL = {
    "model.layers.0.block_sparse_moe.gate.weight": (4, 256),
    **{
        f"model.layers.0.block_sparse_moe.experts.{expert}.{name}.weight": shape
        for expert in range(2)
        for name, shape in {"w1": (96, 256), "w2": (256, 96), "w3": (96, 256)}.items()
    },
}


def plan(scheme: Scheme = Scheme(4, 128), **other: Any) -> dict[str, Any]:  # noqa: B008
    """A plan with one scheme for all units but those named, whose entry is replaced."""
    units = [{"unit": u.name, "bits": scheme.bits, "group": scheme.group or None} for u in units_of(LLAMA.items())]
    return {"schema": 1, "units": [other.get(each["unit"], each) for each in units]}


def test_modules_that_vllm_computes_as_one_are_a_unit() -> None:
    units = units_of(LLAMA.items())
    assert [unit.layer for unit in units] == [0] * 4 + [2] * 4 + [10] * 4
    assert [unit.name.partition("layers.0.")[2] for unit in units[:4]] == [
        "self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"
    ]  # fmt: skip
    assert units[0].modules == tuple(f"model.layers.0.self_attn.{part}_proj" for part in "qkv")
    assert units[0].shapes == ((256, 256), (64, 256), (64, 256))


def test_experts_of_a_layer_are_a_unit_and_routers_are_not_rounded() -> None:
    (unit,) = units_of(MIXTRAL.items())
    assert unit.name == "model.layers.0.block_sparse_moe.experts"
    assert len(unit.modules) == 6


def test_one_scheme_has_the_target_linear() -> None:
    config = uniform(Scheme(4, 128), units_of(LLAMA.items())).quantization_config(["score"])
    (group,) = config["config_groups"].values()
    assert group["targets"] == ["Linear"]
    assert group["weights"]["strategy"] == "group"
    assert config["ignore"] == ["lm_head", "score"]


def test_shapes_that_do_not_divide_are_told() -> None:
    found = uniform(Scheme(4, 128), units_of(MIXTRAL.items()))
    assert set(found.schemes.values()) == {Scheme(4)}
    assert found.notes == (
        "4/channel instead of 4/128, because of their shapes: model.layers.0.block_sparse_moe.experts",
    )  # fmt: skip


def test_a_plan_names_the_modules_of_each_scheme() -> None:
    first, second = "model.layers.0.mlp.down_proj", "model.layers.2.self_attn.qkv_proj"
    entries = {first: {"unit": first, "bits": 8, "group": None}, second: {"unit": second, "bits": 16, "group": None}}
    found = planned(plan(**entries), units_of(LLAMA.items()), "plan.json")
    assert found.schemes[first] == Scheme(8)
    config = found.quantization_config(["lm_head"])
    low, high = config["config_groups"].values()
    assert high["targets"] == [first]
    assert high["weights"]["group_size"] is None
    assert len(low["targets"]) == 3 * 7 - 1 - 3
    assert config["ignore"] == ["lm_head", *(f"model.layers.2.self_attn.{part}_proj" for part in "kqv")]


@pytest.mark.parametrize(
    "document",
    [[], {}, {"schema": 2, "units": []}, {"schema": 1, "units": [{"unit": "x"}]}, {"schema": 1, "units": [7]}],
    ids=str,
)
def test_other_documents_are_refused(document: Any) -> None:
    with pytest.raises(FormatError):
        planned(document, units_of(LLAMA.items()), "plan.json")


@pytest.mark.parametrize(("bits", "group"), [(2, None), (4, -1), (4, "128"), (16, 128), ("4", None), (4, True)])
def test_impossible_schemes_in_a_plan_are_refused(bits: Any, group: Any) -> None:
    name = "model.layers.0.mlp.down_proj"
    with pytest.raises(FormatError, match="not possible"):
        planned(plan(**{name: {"unit": name, "bits": bits, "group": group}}), units_of(LLAMA.items()), "plan.json")


def test_the_plan_of_another_model_is_refused() -> None:
    units = units_of(LLAMA.items())
    with pytest.raises(MismatchError, match=r"it lacks model\.layers\.0\.block_sparse_moe"):
        planned(plan(), units_of(MIXTRAL.items()), "plan.json")
    with pytest.raises(MismatchError, match="the model has no"):
        planned(plan(), units[:-1], "plan.json")
    with pytest.raises(MismatchError, match="does not divide"):
        planned(plan(Scheme(4, 256)), units, "plan.json")


def test_a_model_without_linear_modules_is_refused() -> None:
    units = units_of({"h.0.attn.c_attn.weight": (64, 192)}.items())  # GPT-2: Conv1D
    with pytest.raises(MismatchError, match=r"layers\.N"):
        uniform(Scheme(4, 128), units)
    assert not uniform(Scheme(16), units).rounds
