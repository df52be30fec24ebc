"""Arguments of Megatron's scripts that differ between a checkpoint and a job: refused, warned of, or allowed."""

from __future__ import annotations

import pytest

from megatron_unickpt.pretraining.argument_changes import EXEMPT, FUNCTION, MODEL, compare, function_changes, setting_changes
from unickpt.base.errors import MismatchError
from unickpt.transform.dialects.model_facts import Model

# As ``megatron.core.transformer.transformer_config`` has them: of each kind some.
FIELDS = (
    "window_size", "softmax_type", "no_rope_freq", "softmax_scale", "moe_router_score_function",
    "moe_router_topk_scaling_factor", "moe_expert_capacity_factor", "moe_router_pre_softmax",
    "apply_query_key_layer_scaling", "recompute_method", "hidden_dropout", "a_field_of_a_later_release",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "stored", "current"),
    [
        ("window_size", None, (128, 0)), ("softmax_type", "vanilla", "off-by-one"), ("no_rope_freq", None, 4),
        ("moe_router_score_function", "softmax", "sigmoid"), ("moe_router_topk_scaling_factor", None, 2.5),
        ("quick_geglu", False, True), ("use_rope_scaling", False, True), ("rope_scaling_factor", 8.0, 32.0),
        ("layernorm_epsilon", 1e-5, 1e-6), ("apply_query_key_layer_scaling", False, True),
        ("moe_expert_capacity_factor", None, 1.0), ("a_field_of_a_later_release", 1, 2),
    ],
)  # fmt: skip
def test_arguments_that_change_the_function_are_named_with_both_values(name: str, stored: object, current: object) -> None:
    found = function_changes({name: stored, "lr": 1}, {name: current, "lr": 2}, FIELDS)
    assert found == [f"{name}: {stored} in the checkpoint, {current} in this job"]
    assert not function_changes({name: stored}, {name: stored}, FIELDS)
    assert not function_changes({}, {name: current}, FIELDS), "an older release did not have it"


def test_how_it_is_computed_may_differ() -> None:
    stored = {"recompute_method": "uniform", "hidden_dropout": 0.1, "tensor_model_parallel_size": 2, "window_size": [128, 0]}
    current = {"recompute_method": None, "hidden_dropout": 0.0, "tensor_model_parallel_size": 4, "window_size": (128, 0)}
    assert function_changes(stored, current, FIELDS) == []
    assert compare(stored, current, where="here") == ["tensor_model_parallel_size: 2 in the checkpoint, 4 in this job"]
    with pytest.raises(MismatchError, match="num_layers: 4 in the checkpoint, 2 in this job"):
        compare({"num_layers": 4}, {"num_layers": 2}, where="here")


ROPE = {"position_embedding_type": "rope"}


@pytest.mark.parametrize(
    ("stored", "current"),
    [
        ({**ROPE, "max_position_embeddings": 4096}, {**ROPE, "max_position_embeddings": 131072}),
        ({**ROPE, "rotary_base": 10000}, {**ROPE, "rotary_base": 500000}),
        (ROPE, {"position_embedding_type": "yarn"}),
        ({**ROPE, "rotary_percent": 0.5}, {**ROPE, "rotary_percent": 1.0}),
        ({"norm_epsilon": 1e-5}, {"norm_epsilon": 1e-6}), ({"moe_router_topk": 2}, {"moe_router_topk": 1}),
        ({"spec": ["a", "b"]}, {"spec": ["a", "c"]}), ({"squared_relu": False}, {"squared_relu": True}),
    ],
)  # fmt: skip
def test_an_argument_that_changes_no_tensor_is_no_other_model(stored: dict[str, object], current: dict[str, object]) -> None:
    assert compare(stored, current, where="here") == []
    (line,) = function_changes(stored, current, FIELDS)
    name = line.partition(":")[0]
    assert stored[name] != current[name]
    assert not function_changes(stored, current, FIELDS, accepted={name})


def test_a_table_of_positions_has_the_shape_of_its_length() -> None:
    table = {"position_embedding_type": "learned_absolute", "max_position_embeddings": 4096}
    for other in ({**table, "max_position_embeddings": 8192}, {**ROPE, "max_position_embeddings": 4096}):
        for stored, current in ((table, other), (other, table)):
            with pytest.raises(MismatchError, match="position"):
                compare(stored, current, where="here")
            assert compare(stored, current, where="here", accepted=set(table)) == []


def test_a_refusal_names_the_flag_that_accepts_it() -> None:
    stored, current = {"mtp_num_layers": 1, "num_experts": 8}, {"mtp_num_layers": None, "num_experts": 4}
    with pytest.raises(MismatchError, match="--unickpt-accept-changed num_experts mtp_num_layers loads the tensors"):
        compare(stored, current, where="here")
    with pytest.raises(MismatchError, match=r"\(1 arguments differ\): num_experts"):
        compare(stored, current, where="here", accepted={"mtp_num_layers"})


def test_the_tables_do_not_contradict_each_other() -> None:
    assert not EXEMPT & set(MODEL)
    assert not EXEMPT & set(FUNCTION)


@pytest.mark.parametrize(
    "config",
    [
        {"rms_norm_eps": 1e-6, "rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0}},
    ],
)
def test_settings_of_a_model_of_transformers_are_kept_and_compared(config: dict[str, object]) -> None:
    model = Model.of_config({"model_type": "llama", "num_hidden_layers": 2, **config})
    assert Model.from_json(model.as_json()) == model
    job = {"position_embedding_type": "rope", "rotary_base": 10000, "rotary_percent": 1.0, "layernorm_epsilon": 1e-5}
    assert sorted(setting_changes(model.settings, job)) == [
        "norm_epsilon: 1e-06 in the checkpoint, 1e-05 in this job",
        "rope_scaling: llama3 in the checkpoint, default in this job",
        "rotary_base: 500000.0 in the checkpoint, 10000 in this job",
    ]
    same = {**job, "rotary_base": 500000, "norm_epsilon": 1e-6, "use_rope_scaling": True}
    assert setting_changes(model.settings, same) == []
    assert setting_changes({}, job) == []
