"""Layouts of a small model against their definition."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unickpt.diagnosis.layer_costs.compute import ComputeCosts
from unickpt.diagnosis.layer_costs.measured import EMBEDDING, LAYER, LOSS, MeasuredLayer
from unickpt.planning.plan.links import Line, LinkCosts
from unickpt.planning.plan.parallel import (
    LayoutBinds,
    MeasuredJob,
    PlannedLayout,
    RatedLayout,
    Space,
    UnmetLayout,
    deepspeed_json,
    layouts,
    megatron_arguments,
    plan_layouts,
    rate,
)


def model(count: int = 8) -> list[MeasuredLayer]:
    found = [MeasuredLayer("embedding", EMBEDDING, 0.0, 0.0, 1000, 0, 8, 8, "Embedding", "cpu")]
    found += [MeasuredLayer(str(at), LAYER, 0.01, 0.02, 10_000, 400, 64, 8, "Layer", "cpu") for at in range(count)]
    return [*found, MeasuredLayer("loss", LOSS, 0.0, 0.0, 1000, 0, 64, 8, "Linear", "cpu")]


def measured(layers: list[MeasuredLayer] | None = None, *, links: LinkCosts | None = None) -> MeasuredJob:
    layers = layers or model()
    return MeasuredJob(layers, 1, 1, ComputeCosts(layers), links or LinkCosts({}))


def rated(layout: PlannedLayout, links: LinkCosts | None = None, space: Space | None = None) -> RatedLayout:
    found = rate(measured(links=links), space or Space(4, 16), layout)
    assert isinstance(found, RatedLayout)
    return found


def test_without_communication_every_sound_layout_takes_the_time_of_its_schedule() -> None:
    """A row takes 0.24 s on one device."""
    assert rated(PlannedLayout(1, 1, 1, 4, 1, 4)).step_s == pytest.approx(4 * 0.24)
    assert rated(PlannedLayout(4, 1, 1, 1, 1, 16)).step_s == pytest.approx(16 * 0.06)
    assert rated(PlannedLayout(1, 4, 1, 1, 1, 16)).step_s == pytest.approx((16 + 3) * 0.06)
    assert rated(PlannedLayout(1, 4, 1, 1, 4, 4)).step_s == pytest.approx((4 + 3) * 0.24)
    assert rated(PlannedLayout(1, 2, 2, 2, 1, 8)).step_s == pytest.approx((8 + 1 / 2) * 0.12)


def test_groups_pay_for_their_communication() -> None:
    links = LinkCosts({(False, False): Line(0.001, 0.0), (True, False): Line(0.0005, 0.0)})
    # each of 8 layers of 16 microbatches: two all-reduces of 2 (4 - 1) steps forward, and two backward
    tensor = rated(PlannedLayout(4, 1, 1, 1, 1, 16), links)
    assert tensor.step_s == pytest.approx(16 * (0.06 + 8 * 4 * 6 * 0.001))
    data = rated(PlannedLayout(1, 1, 1, 4, 1, 4), links)
    assert data.gradients_s == pytest.approx(3 * 0.001 + 3 * 0.001)
    plain = rated(PlannedLayout(1, 1, 1, 4, 1, 4), links, Space(4, 16, sharded=False))
    assert plain.gradients_s == pytest.approx(6 * 0.001)
    pipeline = rated(PlannedLayout(1, 4, 1, 1, 1, 1), links)
    assert pipeline.step_s == pytest.approx(0.24 + 6 * 0.0005)


def test_the_line_of_a_class_gives_the_constant_part_of_small_layers() -> None:
    """Seconds are 0.01 + work / 4e6, known from two sizes."""
    small = MeasuredLayer("a", LAYER, 0.01, 0.02, 10_000, 400, 64, 8, "Layer", "cpu")
    large = replace(small, name="b", forward_s=0.03, backward_s=0.06, tokens=32)
    costs = ComputeCosts([small, large])
    line = costs.lines["cpu", "Layer", ""]
    assert line.at(80_000) == pytest.approx(0.03)
    assert line.at(320_000) == pytest.approx(0.09)
    half = costs.resized(small, 2.0, 1.0)
    assert half.forward_s + half.backward_s == pytest.approx(0.05)
    assert (half.activation_bytes, half.input_bytes, half.tokens, half.parameters) == (800, 128, 16, 10_000)
    fast = replace(small, device="new", forward_s=0.005, backward_s=0.01)
    assert ComputeCosts([small, large, fast]).speed("new", "cpu") == pytest.approx(2.0)
    assert costs.speed("new", "cpu") is None


def test_layouts_divide_devices_rows_and_layers() -> None:
    found = list(layouts(Space(8, 16, per_host=4), 10))
    assert {each.tensor for each in found} == {1, 2, 4}
    for each in found:
        assert each.tensor * each.pipeline * each.data == 8
        assert each.rows * each.microbatches * each.data == 16
        assert each.chunks == 1 or each.microbatches % each.pipeline == 0
    assert len(set(found)) == len(found)


def test_the_best_layout_is_the_least_of_all() -> None:
    links = LinkCosts({(False, False): Line(1e-3, 1e-8), (True, False): Line(1e-4, 1e-8)})
    space = Space(4, 16)
    known = measured(links=links)
    found = plan_layouts(known, space)
    assert isinstance(found, list)
    single = [rate(known, space, layout) for layout in layouts(space, len(known.layers))]
    assert found[0].step_s == min(each.step_s for each in single if isinstance(each, RatedLayout))


def test_memory_leaves_out_layouts_and_is_named_when_none_fits() -> None:
    known = measured()
    free = plan_layouts(known, Space(4, 16))
    tight = plan_layouts(known, Space(4, 16, memory_bytes=600_000))
    none = plan_layouts(known, Space(4, 16, memory_bytes=100_000))
    assert isinstance(free, list)
    assert isinstance(tight, list)
    assert isinstance(none, UnmetLayout)
    assert len(tight) < len(free)
    assert all(each.memory_bytes <= 600_000 for each in tight)
    assert none.binds is LayoutBinds.MEMORY
    assert "memory binds: the smallest of" in none.text
    uneven = plan_layouts(known, Space(7, 16, tensors=(2,)))
    assert isinstance(uneven, UnmetLayout)
    assert uneven.binds is LayoutBinds.BATCH


def test_a_layout_is_written_in_the_words_of_each_framework() -> None:
    space = Space(8, 32)
    found = rated(PlannedLayout(2, 2, 2, 2, 1, 16), space=space)
    arguments = megatron_arguments(found, space, model())
    assert arguments == [
        "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2", "--micro-batch-size", "1",
        "--global-batch-size", "32", "--pipeline-model-parallel-layout", "Et*2|t*2|t*2|t*2L", "--use-distributed-optimizer",
    ]  # fmt: skip
    assert deepspeed_json(found, space) == {
        "train_batch_size": 32, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 16,
        "zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 2},
    }  # fmt: skip
