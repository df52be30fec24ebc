"""Unusual partitions, parameters and buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

from tests.jobs.deepspeed.jobs import build, scramble, train
from tests.jobs.deepspeed.model import Model
from tests.jobs.deepspeed.resumes import ADAM, assert_trains_on, assert_weights_equal, here
from tests.jobs.deepspeed.scenario_worker import scenario
from tests.jobs.deepspeed.truth import consolidated, differences
from unickpt.base.errors import MismatchError


@scenario(2)
def round_robin_partitions(folder: Path) -> None:
    """The flat buffer has another order than the parameters."""
    _unusual_partitions(folder, {"round_robin_gradients": True})


@scenario(2)
def aligned_partitions(folder: Path) -> None:
    """The flat buffer has padding between the parameters."""
    _unusual_partitions(folder, {"parameter_alignment": True})


def _unusual_partitions(folder: Path, extra: dict[str, Any]) -> None:
    source = build(here(2), seed=1, zero_optimization={"stage": 2, **extra})
    target = build(here(3), seed=2)
    train(source, 3)
    assert source.save_checkpoint(str(folder / "there"))
    target.load_checkpoint(str(folder / "there"))
    assert_weights_equal(source, target)
    back = build(here(2), seed=3, zero_optimization={"stage": 2, **extra})
    target.save_checkpoint(str(folder / "back"))
    back.load_checkpoint(str(folder / "back"))
    for x, y in zip(
        source.optimizer.single_partition_of_fp32_groups, back.optimizer.single_partition_of_fp32_groups, strict=True
    ):
        assert torch.equal(x, y)
        for key in ADAM:
            assert torch.equal(source.optimizer.optimizer.state[x][key], back.optimizer.optimizer.state[y][key])
    assert train(source, 2) == train(back, 2)


@scenario(1, 2)
def empty_and_one_element_parameters(folder: Path) -> None:
    class Odd(Model):
        def __init__(self) -> None:
            super().__init__(empty=True)
            self.temperature = torch.nn.Parameter(torch.full((1, 1), 1.5))  # DeepSpeed cannot broadcast a 0-d tensor

        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens, targets) * self.temperature.float().reshape(())

    def odd(stage: int, seed: int) -> Any:
        torch.manual_seed(seed)
        return build(here(stage), seed=seed, model=Odd())

    for a, b in ((0, 1), (1, 2), (2, 0)):
        source, target = odd(a, 1), odd(b, 2)
        train(source, 3)
        assert source.save_checkpoint(str(folder / f"{a}{b}"))
        target.load_checkpoint(str(folder / f"{a}{b}"))
        assert target.module.empty.shape == (0, 3)
        for (name, p), (_, q) in zip(source.module.named_parameters(), target.module.named_parameters(), strict=True):
            assert p.shape == q.shape or p.numel() == 0, name
            assert torch.equal(p.reshape(-1), q.reshape(-1)), name
        assert_trains_on(target, train(source, 2), folder / f"{a}{b}")


@scenario(2)
def tied_weights_load_into_an_untied_model(folder: Path) -> None:
    tied = build(here(1), seed=1, model=Model())
    torch.manual_seed(2)
    untied = build(here(3), seed=2, model=Model(tied=False))
    train(tied, 2)
    tied.save_checkpoint(str(folder))
    untied.load_checkpoint(str(folder))
    # One at a time: of several, DeepSpeed 0.18 waits for the last one only, if the backend is gloo.
    for weight in (untied.module.head.weight, untied.module.embed.weight):
        with deepspeed.zero.GatheredParameters([weight]):
            assert torch.equal(weight, tied.module.embed.weight)


@scenario(2)
def a_weight_changed_by_hand_is_not_replaced_by_the_cast_of_its_master(folder: Path) -> None:
    for stage in (0, 1, 3):
        source, target = build(here(stage, "bf16"), seed=1), build(here(2, "bf16"), seed=2)
        train(source, 2)
        with deepspeed.zero.GatheredParameters([source.module.blocks[0].out.weight], modifier_rank=0, enabled=stage == 3):
            source.module.blocks[0].out.weight.data[3, :] = 0.25
        expected = {k: v for k, v in consolidated(source, ()).items() if k.startswith("weight/")}
        source.save_checkpoint(str(folder / str(stage)))
        target.load_checkpoint(str(folder / str(stage)))
        found = consolidated(target, ())
        assert differences(expected, {k: found[k] for k in expected}) == []
        assert (found["weight/blocks.0.out.weight"][3] == 0.25).all()
        assert not (found["master/blocks.0.out.weight"][3] == 0.25).all()


@scenario(2)
def non_persistent_buffers_are_stored_only_with_the_option(folder: Path) -> None:
    plain = build(here(1), seed=1)
    plain.save_checkpoint(str(folder / "plain"))
    wanted = {"enabled": True, "non_persistent_buffers": True}
    source = build(here(1), seed=1, unickpt=wanted)
    source.module.volatile.fill_(0.125)
    source.save_checkpoint(str(folder / "asked"))
    target = build(here(2), seed=2, unickpt=wanted)
    target.load_checkpoint(str(folder / "asked"))
    assert (target.module.volatile == 0.125).all()
    other = build(here(2), seed=3)
    before = other.module.volatile.clone()
    other.load_checkpoint(str(folder / "asked"))
    assert torch.equal(other.module.volatile, before)
    entry = [e for e in other.checkpoint_engine.last_report.entries if e.name == "volatile"]
    assert [e.outcome for e in entry] == ["recreated"], entry
    other.load_checkpoint(str(folder / "plain"))


@scenario(2)
def frozen_parameters_can_be_excluded(folder: Path) -> None:
    source, target = build(here(2), seed=1), build(here(3), seed=2)
    train(source, 2)
    source.save_checkpoint(str(folder), exclude_frozen_parameters=True)
    scramble(target)
    target.load_checkpoint(str(folder), load_module_strict=False)
    with deepspeed.zero.GatheredParameters([target.module.positions.weight]):
        assert (target.module.positions.weight == -7.0).all()
    entry = next(e for e in target.checkpoint_engine.last_report.entries if e.name == "positions.weight")
    assert entry.outcome == "left out", entry
    assert "exclude_frozen_parameters" in entry.reason


@scenario(1)
def a_frozen_parameter_in_the_optimizer_has_no_state_and_needs_none(folder: Path) -> None:
    """Without ZeRO, DeepSpeed gives the optimizer whatever it is given, also frozen parameters."""

    def everything(model: Any) -> list[Any]:
        return list(model.parameters())

    for place, given in (("same", everything), ("other", None)):
        source = build(here(0), seed=1, parameters=given, scheduler={})
        target = build(here(0), seed=2, parameters=everything, scheduler={})
        train(source, 2)
        assert source.save_checkpoint(str(folder / place)) is True
        train(target, 1)
        scramble(target)
        target.load_checkpoint(str(folder / place))
        assert_weights_equal(source, target)
        assert train(target, 2) == train(source, 2)


@scenario(1)
def another_shape_has_the_remedy_that_fits(folder: Path) -> None:
    class Other(Model):
        def __init__(self, rows: int) -> None:
            super().__init__(tied=False)
            self.head = torch.nn.Linear(15, rows, bias=False)
            self.register_buffer("scale", torch.rand(3 + (rows != 31), 5))

    build(here(1), seed=1, model=Other(31)).save_checkpoint(str(folder))
    with pytest.raises(MismatchError) as raised:
        build(here(1), seed=2, model=Other(40)).load_checkpoint(str(folder))
    message = str(raised.value)
    assert "head.weight: (31, 15) in the checkpoint, (40, 15) in this job (if the rows are tokens, 'unickpt edit" in message
    assert "scale: (3, 5) in the checkpoint, (4, 5) in this job (a buffer, whose shape follows" in message
    assert "run one forward pass before the load" in message
    assert message.count("--vocabulary") == 1


class _Quantized(torch.nn.Module):
    """Quantization-aware training: scales per channel get their shape in the first forward pass."""

    def __init__(self) -> None:
        from torch.ao.quantization import FakeQuantize, MovingAveragePerChannelMinMaxObserver

        super().__init__()
        self.layer = torch.nn.Linear(4, 3)
        self.rounded = FakeQuantize(
            MovingAveragePerChannelMinMaxObserver, -128, 127, dtype=torch.qint8, qscheme=torch.per_channel_symmetric
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.linear(x, self.rounded(self.layer.weight)) ** 2).mean()


@scenario(1)
def buffers_that_take_the_shape_of_data_load_after_one_forward_pass(folder: Path) -> None:
    config = {
        "train_batch_size": 2, "unickpt": {"enabled": True}, "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
    }  # fmt: skip

    def engine_of(seed: int) -> Any:
        torch.manual_seed(seed)
        net = _Quantized()
        return deepspeed.initialize(model=net, model_parameters=list(net.parameters()), config=config)[0]

    def losses(engine: Any) -> list[float]:
        found = []
        for _ in range(2):
            loss = engine(torch.ones(2, 4))
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        return found

    source, target = engine_of(1), engine_of(2)
    losses(source)
    source.save_checkpoint(str(folder))
    with pytest.raises(MismatchError, match="run one forward pass before the load"):
        target.load_checkpoint(str(folder))
    target(torch.zeros(2, 4))
    target.load_checkpoint(str(folder))
    assert losses(target) == losses(source)
