"""The check ``self``: the first layer that the backward pass computes otherwise is named, and nothing that is meant."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce
from torch.utils.checkpoint import checkpoint

from unickpt.base.errors import ConfigError
from unickpt.training.witness.agreeing import Ranks
from unickpt.training.witness.recomputing import Differs, Recomputed, Selves, Suspicion, suspicions_of
from unickpt.training.witness.schedule import components
from unickpt.training.witness.vote import Ballot, Kind, Subject, Verdict, differing_from_itself
from unickpt.training.witness.words import next_steps, text

JOB = Ranks(None, torch.device("cpu"), 0, (0,), ("a",))
Fault = Callable[[torch.Tensor], torch.Tensor]


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6)
        self.drop, self.broken, self.down = torch.nn.Dropout(0.5), Broken(), torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.broken(self.drop(self.norm(self.up(x)))))


class Broken(torch.nn.Module):
    fault: Fault | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) if self.fault is None else self.fault(torch.tanh(x))


class Model(torch.nn.Module):
    def __init__(self, *, reentrant: bool = False, keep_random: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = torch.nn.ModuleList([Block(), Block()]), torch.nn.Linear(6, 2)
        self.settings = {"use_reentrant": reentrant, "preserve_rng_state": keep_random}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, **self.settings)
        found: torch.Tensor = self.head(x)
        return found


def loss_of(model: Model) -> torch.Tensor:
    return model(torch.randn(5, 6, requires_grad=True)).square().mean()


def flipped(x: torch.Tensor) -> torch.Tensor:
    other = x.detach().clone()
    other.view(torch.int32).view(-1)[3] ^= 1 << 20
    return x + (other - x).detach()


def in_call(number: int, fault: Fault) -> Fault:
    calls = [0]

    def passed(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return fault(x) if calls[0] == number else x

    return passed


@pytest.fixture
def made() -> Iterator[list[Recomputed]]:
    found: list[Recomputed] = []
    yield found
    for each in found:
        each.close()


def recomputed(model: Model, made: list[Recomputed]) -> Recomputed:
    made.append(Recomputed([model]))
    return made[-1]


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_computed_again_is_equal_and_leaves_no_trace(made: list[Recomputed], reentrant: bool) -> None:
    ends = []
    for watched in (False, True):
        model = Model(reentrant=reentrant)
        own = recomputed(model, made) if watched else None
        torch.manual_seed(1)
        for _ in range(3):
            if own is not None:
                own.arm()
            loss_of(model).backward()
            loss_of(model).backward()
            if own is not None:
                compared, differs = own.take()
                assert differs is None
                assert compared == (12 if reentrant else 8)  # otherwise it ends before the last layer
        ends.append([*model.state_dict().values(), *(each.grad for each in model.parameters()), torch.get_rng_state()])
    assert all(map(torch.equal, *ends))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("number", [1, 2])  # the forward pass, and when it is computed again
def test_a_wrong_activation_is_named(made: list[Recomputed], reentrant: bool, number: int) -> None:
    model = Model(reentrant=reentrant)
    own = recomputed(model, made)
    model.blocks[1].broken.fault = in_call(number, flipped)
    own.arm()
    torch.manual_seed(1)
    loss_of(model).backward()
    assert own.take()[1] == Differs("blocks.1.broken", True, 9)


class Counted(torch.nn.Module):
    """A layer that is wrong in its second call."""

    def __init__(self, function: Fault, inside: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.function, self.inside, self.called = function, inside, Mock()  # a counter would be set back

    @property
    def calls(self) -> int:
        return self.called.call_count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.called()
        x = self.function(x)
        return flipped(x) if self.calls == 2 else x


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def reduced(x: torch.Tensor) -> torch.Tensor:
    found = x.detach().clone()
    dist.all_reduce(found)
    return x + (found - x).detach()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("layer", "calls", "alone"),
    [
        (Counted(torch.tanh), 5, True),
        (Counted(reduced), 3, False),  # the first of its repetitions sends something, and is given up
        (Counted(lambda x: all_reduce(x, "sum", [0]).wait()), 3, False),
        (Counted(torch.tanh, torch.nn.Identity()), 2, False),  # what is inside may send something in its hooks
    ],
)
def test_a_layer_that_needs_other_ranks_is_not_computed_again(
    made: list[Recomputed], layer: Counted, calls: int, alone: bool
) -> None:
    model = Model()
    model.blocks[1].broken = layer
    own = recomputed(model, made)
    own.arm()
    torch.manual_seed(1)
    loss_of(model).backward()
    assert own.take()[1] == Differs("blocks.1.broken", True, 9, alone)
    assert layer.calls == calls


def differs(layer: str, *, alone: bool = True) -> Differs:
    return Differs(layer, True, ord(layer), alone)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({}, []),
        ({1: differs("b")}, [Suspicion("b", (1,), frozenset({0}))]),
        ({0: differs("c"), 1: differs("b")}, [Suspicion("b", (1,), frozenset({0}))]),  # rank 0 went on with it
        ({0: differs("b"), 1: differs("b")}, [Suspicion("b", (0, 1), frozenset())]),
        ({1: differs("b", alone=False)}, [Suspicion("b", (0, 1), frozenset())]),  # rank 0 has a part in it
        ({2: differs("b"), 0: differs("a")}, [Suspicion("a", (0,), frozenset({1})), Suspicion("b", (2,), frozenset({3}))]),
        ({4: differs("b", alone=False)}, [Suspicion("b", (4,), frozenset())]),
    ],
)
def test_of_ranks_that_compute_the_same_layers_the_first_layer_counts(
    found: dict[int, Differs], expected: list[Suspicion]
) -> None:
    computing = components([{0, 1}, {0, 1}, {2, 3}, {3, 2}, {4}])
    assert sorted(suspicions_of(found, computing), key=lambda each: each.ranks) == expected


def test_groups_with_a_common_rank_are_one() -> None:
    assert sorted(map(sorted, components([{0, 1}, {2, 3}, {1, 2}, set(), {5}]))) == [[0, 1, 2, 3], [5]]


def test_a_wrong_input_that_was_stored_is_named_by_the_first_layer(made: list[Recomputed]) -> None:
    model, kept = Model(), []
    own = recomputed(model, made)
    model.blocks[1].register_forward_pre_hook(lambda _module, args: kept.append(args[0]))
    own.arm()
    loss = loss_of(model)
    kept[0].data.view(torch.int32).view(-1)[0] ^= 1 << 22
    loss.backward()
    assert own.take()[1] == Differs("blocks.1.up", True, 6)


def test_several_micro_batches_in_one_backward_pass_and_evaluations_are_not_compared(made: list[Recomputed]) -> None:
    model = Model()
    own = recomputed(model, made)
    own.arm()
    (loss_of(model) + loss_of(model)).backward()
    assert own.take() == (0, None)
    own.arm()
    with torch.no_grad():
        model.eval()(torch.ones(2, 6))
    model.train()
    loss_of(model).backward()
    assert own.take()[0] > 0


def test_another_random_state_ends_the_check(made: list[Recomputed], caplog: pytest.LogCaptureFixture) -> None:
    model = Model(keep_random=False)
    selves = Selves(recomputed(model, made), JOB)
    selves.recomputed.arm()
    loss_of(model).backward()
    assert selves.check(1) == []
    assert "the check self ends: the backward pass computes blocks.1.drop otherwise than the forward pass" in caplog.text


def test_an_operator_that_is_not_repeatable_ends_the_check(made: list[Recomputed]) -> None:
    model, noise = Model(), torch.Generator().manual_seed(1)
    selves = Selves(recomputed(model, made), JOB)
    selves.recomputed.arm()
    loss_of(model).backward()
    assert selves.check(1) == []
    model.blocks[0].broken.fault = lambda x: x + torch.rand(x.shape, generator=noise) * 1e-3
    selves.recomputed.arm()
    loss_of(model).backward()
    (found,) = selves.check(2) or []
    assert (found.kind, found.subject.what) == (Kind.NONDETERMINISTIC, "blocks.0.broken")
    assert selves.off


def test_one_process_names_itself_after_a_check_that_passed(made: list[Recomputed]) -> None:
    model = Model()
    selves = Selves(recomputed(model, made), JOB)
    for step in (1, 2):
        model.blocks[0].broken.fault = in_call(1, flipped) if step == 2 else None
        selves.recomputed.arm()
        loss_of(model).backward()
        found = selves.check(step)
    assert found == [Verdict(Kind.NO_MAJORITY, Kind.SDC_COMPUTE, Subject("blocks.0.broken", 2, 0, twice=True), (0,), ("a",))]
    assert text(found[0]) == (
        "NO_MAJORITY step 2, micro-batch 0: rank 0 (on a) computed blocks.0.broken otherwise in the backward pass than in the "
        "forward pass; too few others agree to say who is wrong"
    )
    assert "test the memory and the GPU of a" in next_steps(found[0])


def test_a_model_that_computes_nothing_twice_has_no_check(made: list[Recomputed], caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 2))
    made.append(Recomputed([model]))
    selves = Selves(made[0], JOB)
    made[0].arm()
    model(torch.ones(2, 6)).sum().backward()
    assert selves.check(1) is None
    assert "the check self ends: the backward pass computes no layer again" in caplog.text
    with pytest.raises(ConfigError, match='"self" sees no layers of a compiled model'):
        Recomputed([torch.compile(model)])  # type: ignore[list-item]


def test_other_ranks_make_it_a_verdict_and_blame_no_host() -> None:
    ballots = [Ballot(rank, "abcd"[rank], ()) for rank in range(4)]
    found = differing_from_itself(Subject("mlp", 3, 0, twice=True), ballots, [2])
    assert (found.kind, found.ranks, found.hosts, found.blamed) == (Kind.SDC_COMPUTE, (2,), ("c",), ())
    assert text(found).endswith(
        "rank 2 (on c) computed mlp otherwise in the backward pass than in the forward pass, and 3 other ranks did not"
    )


def test_a_layer_that_is_called_several_times_is_not_compared(made: list[Recomputed]) -> None:
    model = Model()
    model.blocks[1] = model.blocks[0]  # which the backward pass computes in the other order
    own = recomputed(model, made)
    own.arm()
    loss_of(model).backward()
    assert own.take() == (0, None)


class Counting(torch.nn.Module):
    """Another result each time, from a counter and a random number."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls * random.random()


def test_a_layer_that_is_computed_again_leaves_no_trace() -> None:
    model = Model()
    model.blocks[0].broken = counting = Counting()
    recomputed = Recomputed([model])
    recomputed.arm()
    loss = loss_of(model)
    with pytest.MonkeyPatch.context() as patch:
        drawn: list[float] = []
        draw = random.random
        patch.setattr(random, "random", lambda: drawn.append(draw()) or drawn[-1])  # type: ignore[func-returns-value]
        random.seed(0)
        loss.backward()
    last = random.random()
    assert recomputed.take()[1] is not None
    assert counting.calls == 2
    assert len(drawn) == 4  # by the backward pass, and by three repetitions, which draw the same number
    random.seed(0)
    assert [random.random(), random.random()] == [drawn[0], last]
    recomputed.close()
