"""A step of an optimizer on a part of a tensor gives the same bits when it is repeated, and another rank's fault is seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from unickpt.training.witness import updating
from unickpt.training.witness.updating import ELEMENTWISE, Range, StepTap, unsuited

OPTIONS: dict[type, dict[str, Any]] = {
    torch.optim.SGD: {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    torch.optim.AdamW: {"lr": torch.tensor(0.01), "amsgrad": True},
    torch.optim.Adam: {"weight_decay": 0.1, "maximize": True},
}


def trained(kind: Any, dtype: torch.dtype, most_bytes: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, StepTap]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 40), torch.nn.Linear(40, 8)).to(dtype)
    options = {"lr": 0.01, **OPTIONS.get(kind, {})}
    optimizer = kind([{"params": model[0].parameters(), "lr": 0.02}, {"params": model[1].parameters()}], **options)
    ranges = [Range(each, name, 0, each.numel()) for name, each in model.named_parameters()]
    return model, optimizer, StepTap([optimizer], lambda: ranges, 3, most_bytes)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 8, dtype=next(model.parameters()).dtype)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("kind", ELEMENTWISE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("most_bytes", [40, 400, 1 << 20])
def test_a_repetition_is_equal(kind: Any, dtype: torch.dtype, most_bytes: int) -> None:
    ends, whats = [], set()
    for watched in (False, True):
        model, optimizer, tap = trained(kind, dtype, most_bytes)
        for turn in range(6):
            if watched:
                tap.arm(turn)
            step(model, optimizer)
            if watched:
                case, _ = tap.take()
                if case is None:  # of bf16 on a CPU no part is repeated
                    assert dtype is torch.bfloat16
                    assert most_bytes < 1000
                    continue
                assert tap.repeat(case.data) == tap.repeat(case.data) == case.values
                assert len(case.data) < 5000 + most_bytes
                whats.add(case.what)
        ends.append([each.detach().clone() for each in model.parameters()])
        tap.close()
    assert len(whats) > 1 or (dtype is torch.bfloat16 and most_bytes < 1000)
    assert all(map(torch.equal, *ends))


def test_a_wrong_step_is_seen_and_a_step_that_is_left_out_is_not_recorded() -> None:
    model, optimizer, tap = trained(torch.optim.AdamW, torch.float32, 1 << 20)
    tap.close()
    for place in ("weight", "exp_avg", "exp_avg_sq"):

        def wrong(optimizer: Any, _args: Any, _kwargs: Any, place: str = place) -> None:
            for each in model.parameters():
                tensor = each.data if place == "weight" else optimizer.state[each][place]
                tensor.view(torch.int32).view(-1)[1] ^= 1

        handle = optimizer.register_step_post_hook(wrong)
        tap = StepTap([optimizer], lambda: [Range(each, "it", 0, each.numel()) for each in model.parameters()], 0)
        tap.arm(1)
        step(model, optimizer)
        handle.remove()
        case, _ = tap.take()
        assert case is not None
        assert tap.repeat(case.data) != case.values
        tap.arm(2)
        assert tap.take() == (None, "")
        tap.close()


def test_what_is_not_elementwise_has_no_check() -> None:
    model = torch.nn.Linear(2, 2)
    assert unsuited([torch.optim.AdamW(model.parameters())]) == ""
    assert unsuited([]) == "there is no optimizer"
    some = [kind(model.parameters()) for kind in (torch.optim.AdamW, torch.optim.SGD)]
    assert unsuited(some) == "there are optimizers of several classes"
    assert unsuited([torch.optim.Adafactor(model.parameters())]).startswith("Adafactor is none of")


def test_of_several_optimizers_each_is_recorded_at_times() -> None:
    """As those of experts and of all other parameters, which step one after the other."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 40), torch.nn.Linear(40, 8))
    optimizers = [torch.optim.AdamW(each.parameters(), lr=lr) for each, lr in zip(model, (0.1, 0.2), strict=True)]
    tap = StepTap(optimizers, lambda: [Range(each, name, 0, each.numel()) for name, each in model.named_parameters()], 0)
    whats = set()
    for turn in range(20):
        tap.arm(turn)
        model(torch.randn(4, 8)).square().mean().backward()
        for each in optimizers:
            each.step()
            each.zero_grad()
        case, _ = tap.take()
        assert case is not None
        assert tap.repeat(case.data) == case.values
        whats.add(case.what)
    assert whats == {"0.weight", "0.bias", "1.weight", "1.bias"}
    tap.close()


def test_an_error_while_a_step_is_recorded_does_not_reach_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as that of a device whose memory is full."""
    model, optimizer, tap = trained(torch.optim.AdamW, torch.float32, 1 << 20)
    whole = updating._hash
    for name in ("_cut", "_hash"):

        def full(*_: Any) -> Any:
            raise RuntimeError("out of memory")

        with monkeypatch.context() as patch:
            patch.setattr(updating, name, full)
            tap.arm(1)
            step(model, optimizer)
            assert tap.take() == (None, "a step cannot be recorded: RuntimeError: out of memory")
    assert updating._hash is whole
    tap.arm(2)
    step(model, optimizer)
    case, why = tap.take()
    assert case is not None
    assert why == ""
    tap.close()


def test_an_error_that_finds_nothing_to_step_on_is_told_after_the_step() -> None:
    model, optimizer, tap = trained(torch.optim.SGD, torch.float32, 1 << 20)
    tap.close()

    def gone() -> list[Range]:
        raise KeyError("a parameter")

    tap = StepTap([optimizer], gone, 0)
    tap.arm(1)
    step(model, optimizer)
    assert tap.take() == (None, "a step cannot be recorded: KeyError: 'a parameter'")
    tap.close()


def test_odd_parameters_of_an_optimizer_are_repeated() -> None:
    """One number, none, columns of a larger tensor, one that two modules share, and a frozen one, which has no gradient."""
    shared = torch.nn.Parameter(torch.randn(5, 3))
    columns = torch.nn.Parameter(torch.randn(6, 4).t())
    some = [torch.nn.Parameter(torch.tensor(2.0)), torch.nn.Parameter(torch.empty(0)), columns, shared]
    frozen = torch.nn.Parameter(torch.randn(4), requires_grad=False)
    optimizer = torch.optim.AdamW([*some, frozen], lr=0.1)
    tap = StepTap(
        [optimizer],
        lambda: [Range(each, str(each.shape), 0, each.numel()) for each in optimizer.param_groups[0]["params"] if each.numel()],
        0,
    )
    whats = set()
    for turn in range(30):
        tap.arm(turn)
        (some[0] * columns.sum() + (shared @ shared.t()).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        case, why = tap.take()
        assert why == ""
        assert case is not None
        assert tap.repeat(case.data) == case.values
        whats.add(case.what)
    assert whats == {str(each.shape) for each in (some[0], columns, shared)}
    tap.close()
