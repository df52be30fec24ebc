"""``torch_unickpt.witness`` in one process: what it installs, refuses and counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import torch_unickpt
import unickpt
from unickpt.base.errors import ConfigError
from unickpt.checkpoint.checkpoint_folder import read_manifest
from unickpt.checkpoint.format.witnessed import Passed
from unickpt.checkpoint.storage.posix import PosixStorage
from unickpt.training.witness.counting import WARM_UP, Counters
from unickpt.training.witness.nonfinite import Cause, NonFinite, Place
from unickpt.training.witness.vote import Kind, Verdict


class Log(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(x)


def model_of() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softplus(), Log(), torch.nn.Linear(4, 2))


def step(model: torch.nn.Module, optimizer: Any, *inputs: torch.Tensor, loss: Callable[[Any], Any] = torch.sum) -> None:
    for each in inputs:
        loss(model(each)).backward()
    optimizer.step()
    optimizer.zero_grad()


GOOD, BAD = torch.ones(3, 4), torch.tensor([[1.0, 1, 1, 1], [1, float("nan"), 1, 1], [1, 1, 1, 1]])


def flip(tensor: torch.Tensor) -> None:
    """Change a bit as a fault of the memory does: no counter of writes notices."""
    tensor.data.view(torch.int32).view(-1)[1] ^= 1


def hooks_of(model: torch.nn.Module, optimizer: Any) -> int:
    found = sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules())
    return found + len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


def test_it_is_off_without_options_and_leaves_nothing_behind() -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    before = hooks_of(model, optimizer)
    off = torch_unickpt.witness(model, optimizer, None)
    assert hooks_of(model, optimizer) == before
    assert (off.verdicts, off.passed) == ([], Passed(0, ()))
    off.close()
    on = torch_unickpt.witness(model, optimizer, {})
    assert hooks_of(model, optimizer) > before
    on.close()
    assert hooks_of(model, optimizer) == before
    assert not optimizer.state


def test_what_it_cannot_watch_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    torch_unickpt.witness(model, optimizer, {"checks": ["update"]}).close()
    assert "there is no check update: it needs FSDP2 on several ranks" in caplog.text
    with pytest.raises(ConfigError, match="there is no optimizer"):
        torch_unickpt.witness(model, None, {})
    silent = torch.optim.AdamW(model.parameters(), capturable=True)
    with pytest.raises(ConfigError, match="calls no hook"):
        torch_unickpt.witness(model, silent, {})
    compiled = torch.compile(model)
    with pytest.raises(ConfigError, match='"nonfinite" sees no layers of a compiled model'):
        torch_unickpt.witness(compiled, optimizer, {})
    torch_unickpt.witness(compiled, optimizer, {"checks": ["rest"]}).close()


def test_a_flip_at_rest_is_told_once_and_the_doing_of_the_program_is_not() -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    watching = torch_unickpt.witness(model, optimizer, {"every": 2, "checks": ["rest"]}, step=100)
    step(model, optimizer, GOOD)
    flip(model[0].weight)  # after a step that is not checked
    step(model, optimizer, GOOD)
    with torch.no_grad():
        model[3].weight.add_(1)
    model[3].bias.data = model[3].bias.data + 1  # other memory
    optimizer.load_state_dict(optimizer.state_dict())  # other tensors
    step(model, optimizer, GOOD)
    step(model, optimizer, GOOD)
    assert watching.verdicts == []
    flip(optimizer.state[model[0].weight]["exp_avg"])
    step(model, optimizer, GOOD)
    (found,) = watching.verdicts
    assert isinstance(found, Verdict)
    assert (found.kind, found.check, found.subject.what, found.subject.step, found.ranks) == (
        Kind.NO_MAJORITY, Kind.SDC_AT_REST, "exp_avg of 0.weight", 104, (0,),
    )  # fmt: skip
    assert watching.passed == Passed(102, ("rest",))


def test_a_program_that_writes_to_everything_leaves_nothing_to_compare(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching = torch_unickpt.witness(model, optimizer, {"every": 1, "checks": ["rest"]})
    for _ in range(3):
        step(model, optimizer, GOOD)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1)
    assert (watching.verdicts, watching.passed) == ([], Passed(0, ("rest",)))
    assert caplog.text.count("the check rest sees nothing") == 1


def test_the_first_layer_and_micro_batch_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching = torch_unickpt.witness(model, optimizer, {"checks": ["nonfinite"]})
    step(model, optimizer, GOOD, GOOD)
    assert watching.verdicts == []
    step(model, optimizer, GOOD, BAD, BAD)
    (found,) = watching.verdicts
    assert isinstance(found, NonFinite)
    assert (found.place, found.step, found.rank) == (Place("0", False, 1), 2, 0)
    step(model, optimizer, GOOD)  # with weights that are not finite
    assert len(watching.verdicts) == 1
    assert "NONFINITE step 2, micro-batch 1: rank 0" in caplog.text
    assert "step 3: rank 0 has weights that were not finite before" in caplog.text


@pytest.mark.parametrize(
    ("loss", "place"),
    [
        (lambda y: (y - y.detach()).sqrt().sum(), Place("", True, 0)),  # the derivative of a root at 0
        (lambda y: y.sum() / 0, Place("", True, 0)),
    ],
)
def test_a_loss_that_is_not_finite_is_named(loss: Callable[[Any], Any], place: Place) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching = torch_unickpt.witness(model, optimizer, {"checks": ["nonfinite"]})
    step(model, optimizer, GOOD, loss=loss)
    assert [each.place for each in watching.verdicts if isinstance(each, NonFinite)] == [place]


def test_a_derivative_inside_the_model_is_named() -> None:
    class Root(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x - x.detach()).sqrt()

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Root(), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching = torch_unickpt.witness(model, optimizer, {"checks": ["nonfinite"]})
    step(model, optimizer, GOOD)
    assert [each.place for each in watching.verdicts if isinstance(each, NonFinite)] == [Place("0", True, 0)]


def test_the_first_layer_with_far_larger_values_than_before_is_named_and_learned_if_they_stay() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    watching = torch_unickpt.witness(model, optimizer, {"checks": ["outlier"]})

    def large(steps: int) -> list[tuple[str, Place, float]]:
        before = len(watching.verdicts)
        for _ in range(steps):
            step(model, optimizer, GOOD, 1e4 * GOOD)
        found = [each for each in watching.verdicts[before:] if isinstance(each, NonFinite)]
        return [(each.kind, each.place, each.times) for each in found]

    for _ in range(WARM_UP):
        step(model, optimizer, GOOD, GOOD)
    ((kind, place, times),) = large(1)
    assert (kind, place) == ("OUTLIER", Place("0", False, 1))
    assert 5e3 < times < 2e4
    step(model, optimizer, GOOD, GOOD)
    assert len(large(3)) == 3
    assert large(1) == []  # that is how the model is now
    step(model, optimizer, GOOD, BAD)
    assert len(watching.verdicts) == 5  # NaN is more than any value


@pytest.mark.parametrize("check", ["nonfinite", "outlier", "self"])
@pytest.mark.parametrize(
    "odd",
    [
        lambda y: y.to_sparse(),
        lambda y: torch.nested.as_nested_tensor([y.detach()[:1], y.detach()[1:]], layout=torch.jagged),
        lambda y: y.detach().to(torch.float8_e4m3fn),
        lambda _: torch.zeros(4, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        lambda _: torch.empty(3, device="meta"),
        lambda y: torch.view_as_complex(y.detach().view(-1, 2)),
        lambda y: Stubborn(y.detach()),
        lambda y: y.detach()[:0],
        lambda y: y.sum(),
        lambda _: Odd(),
        lambda _: endless(),
    ],
)
def test_no_kind_of_output_of_a_layer_ends_training(check: str, odd: Callable[[torch.Tensor], torch.Tensor]) -> None:
    class Layer(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            y = super().forward(x)
            return y, odd(y)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer(4, 4)

        def forward(self, x: torch.Tensor) -> Any:
            found: Any = checkpoint(lambda x: self.layer(x)[0], x, use_reentrant=False)
            return found

    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching = torch_unickpt.witness(model, optimizer, {"every": 1, "checks": [check]})
    for _ in range(2):
        step(model, optimizer, GOOD, GOOD)
    assert watching.verdicts == []
    watching.close()


def test_a_program_that_never_steps_fills_no_memory() -> None:
    model = torch.nn.Linear(2, 2)
    counters = Counters(model)
    for _ in range(2000):
        model(torch.ones(1, 2))
    assert len(counters._rows) == 1024
    model(torch.full((1, 2), float("nan")))
    assert counters.found(lambda: False) is None
    counters.clear()
    model(torch.full((1, 2), float("nan")))
    assert counters.found(lambda: False) == Place("", False, 0)
    counters.close()


def test_outputs_that_nothing_uses_do_not_end_training(tmp_path: Path) -> None:
    """DDP passes all outputs through one operator, so that those without a use have no gradient there."""

    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> Any:
            return self.a(x), self.b(x)

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(str(tmp_path / "store"), 1))
    try:
        model = torch.nn.parallel.DistributedDataParallel(Two(), find_unused_parameters=True)
        optimizer = torch.optim.AdamW(model.parameters())
        watching = torch_unickpt.witness(model, optimizer, {"every": 1, "checks": ["nonfinite", "outlier"]})
        for _ in range(2):
            model(torch.randn(3, 2))[0].sum().backward()
            optimizer.step()
        assert watching.verdicts == []
        watching.close()
    finally:
        dist.destroy_process_group()


class Odd(dict[str, Any]):
    def values(self) -> Any:
        raise RuntimeError("no values")


def endless() -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["itself"] = found
    return found


class Stubborn(torch.Tensor):
    """A tensor of a class with which no operator works."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in ("aminmax", "view", "contiguous"):
            raise NotImplementedError(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_an_outlier_needs_steps_before_it() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    watching = torch_unickpt.witness(model, optimizer, {"checks": ["outlier"]})
    for _ in range(WARM_UP - 1):
        step(model, optimizer, GOOD)
    step(model, optimizer, 1e6 * GOOD)
    assert watching.verdicts == []


def test_a_parameter_that_layers_and_the_model_return_keeps_no_hook() -> None:
    class Biased(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return torch.nn.functional.linear(x, self.weight), self.bias

    class Returning(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = Biased(4, 2), torch.nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> Any:
            y, bias = self.layer(x)
            return y + bias, self.scale

    torch.manual_seed(0)
    model = Returning()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching = torch_unickpt.witness(model, optimizer, {"checks": ["nonfinite"]})
    step(model, optimizer, GOOD, GOOD, loss=lambda found: (found[0] * found[1]).sum())
    step(model, optimizer, GOOD, BAD, loss=lambda found: (found[0] * found[1]).sum())  # the micro-batch is repeated
    assert [each.place.layer for each in watching.verdicts if isinstance(each, NonFinite)] == ["layer"]
    assert not any(each._backward_hooks for each in model.parameters())


def test_infinities_that_reach_no_gradient_are_usual() -> None:
    class Mask(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.masked_fill(torch.tensor([True, False, False, False]), float("-inf"))

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Mask(), torch.nn.Softmax(-1), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching = torch_unickpt.witness(model, optimizer, {"checks": ["nonfinite"]})
    step(model, optimizer, GOOD)
    assert watching.verdicts == []
    with torch.no_grad():
        model[3].bias[0] = float("inf")
    step(model, optimizer, GOOD, loss=lambda y: (y * 0).sum())
    assert watching.verdicts == []  # its own weight was not finite before
    with torch.no_grad():
        model[3].bias[0] = 0
    step(model, optimizer, GOOD)
    step(model, optimizer, GOOD * 1e38 * 10)
    assert [each.place.layer for each in watching.verdicts if isinstance(each, NonFinite)] == ["0"]


def test_evaluations_do_not_count() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching = torch_unickpt.witness(model, optimizer, {"checks": ["nonfinite"]})
    model(GOOD).sum().backward()
    with torch.no_grad():
        model.eval()(BAD)
    model.train()
    optimizer.step()
    assert watching.verdicts == []


def test_a_load_between_two_steps_is_the_doing_of_the_program(tmp_path: Path) -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    watching = torch_unickpt.witness(model, optimizer, {"every": 1, "checks": ["rest"]})
    step(model, optimizer, GOOD)
    torch_unickpt.save_training(model, optimizer, tmp_path / "step1", step=1)
    step(model, optimizer, GOOD * 2)
    torch_unickpt.load_training(model, optimizer, tmp_path / "step1")
    step(model, optimizer, GOOD * 3)
    step(model, optimizer, GOOD)
    assert watching.verdicts == []
    assert watching.passed == Passed(3, ("rest",))


def test_a_checkpoint_has_what_the_witness_had_passed(tmp_path: Path) -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())

    def saved(number: int) -> Passed | None:
        unickpt.save_training(model, optimizer, tmp_path / f"s{number}", step=number)
        return read_manifest(PosixStorage(str(tmp_path / f"s{number}"))).witness

    assert saved(0) is None
    watching = torch_unickpt.witness(model, optimizer, {"every": 2, "checks": ["rest"]})
    assert saved(1) == Passed(0, ("rest",))
    for _ in range(3):  # the state after step 2 has passed when step 3 begins
        step(model, optimizer, GOOD)
    assert saved(3) == Passed(2, ("rest",))
    watching.close()
    assert saved(4) is None


def test_gradients_of_each_sample_do_not_end_it() -> None:
    """Tensors of a transform cannot be read after it. The micro-batch without transforms is still looked at."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching = torch_unickpt.witness(model, optimizer, {"checks": ["nonfinite", "outlier"]})
    detached = {name: each.detach() for name, each in model.named_parameters()}

    def loss(parameters: Any, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.func.functional_call(model, parameters, (x[None],)).sum()
        return found

    for inputs in (GOOD, BAD):
        torch.func.vmap(torch.func.grad(loss), (None, 0))(detached, GOOD)
        step(model, optimizer, inputs)
    assert [each.place for each in watching.verdicts if isinstance(each, NonFinite)] == [Place("0", False, 1)]
    watching.close()


@pytest.mark.parametrize(("counts", "cause"), [(False, Cause.HARDWARE), (True, Cause.UNDECIDED)])
def test_a_model_that_counts_its_calls_is_no_evidence_against_the_hardware(counts: bool, cause: Cause) -> None:
    class Counting(torch.nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if counts:
                self.calls += 1
            else:
                outside.append(0)
            return super().forward(x) * (float("nan") if 2 in (self.calls, len(outside)) else 1)

    outside: list[int] = []
    model = torch.nn.Sequential(Counting(4, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching = torch_unickpt.witness(model, optimizer, {"checks": ["nonfinite"]})
    step(model, optimizer, GOOD)
    step(model, optimizer, GOOD)
    assert [each.cause for each in watching.verdicts if isinstance(each, NonFinite)] == [cause]
    watching.close()
