"""A witness at work in one process: what it compares, forgets, and does when it fails itself."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from unickpt.training.witness.agreeing import Ranks, meet
from unickpt.training.witness.comparing import Changed, compare_at_rest, verdicts_at_rest
from unickpt.training.witness.counting import Counters
from unickpt.training.witness.held import WEIGHT, Stepped, Tensors, repeated
from unickpt.training.witness.vote import Kind, Verdict
from unickpt.training.witness.watching import Watched, Watching, forget_all

JOB = Ranks(None, torch.device("cpu"), 0, (0,), (socket.gethostname(),))


class Held:
    """A weight and a master, and a weight that is gathered late."""

    def __init__(self) -> None:
        self.tensors = {"w": torch.ones(4), "master": torch.ones(4), "late": torch.ones(4)}

    def __call__(self) -> list[Stepped]:
        return [
            Stepped("a", lambda: [(WEIGHT, self.tensors["w"]), ("master", self.tensors["master"])]),
            Stepped("b", lambda: [(WEIGHT, self.tensors["late"])], moving=True),
        ]

    def flip(self, name: str) -> None:
        self.tensors[name].data.view(torch.int32)[2] ^= 1


@pytest.fixture
def held() -> Held:
    return Held()


@pytest.fixture
def make(held: Held) -> Iterator[Callable[..., tuple[Watching, Watched]]]:
    made: list[Watching] = []

    def of(read: Callable[[], list[Stepped]] = held, counters: tuple[Counters, ...] = ()) -> tuple[Watching, Watched]:
        watched = Watched(read, [meet(JOB, held())], lambda: False)
        made.append(Watching(1, {"rest", "nonfinite"}, [watched], JOB, counters))
        return made[-1], watched

    yield of
    for each in made:
        each.close()


Make = Callable[..., tuple[Watching, Watched]]


def step(watching: Watching, watched: Watched, *, applied: bool = True) -> None:
    watching.before(watched)
    watching.after(watched, applied=applied)


def told(watching: Watching) -> list[tuple[Kind, str, int]]:
    return [(each.check, each.subject.what, each.subject.step) for each in watching.verdicts if isinstance(each, Verdict)]


def test_what_moves_is_not_compared_at_rest(make: Make, held: Held) -> None:
    watching, watched = make()
    step(watching, watched)
    held.flip("late")
    step(watching, watched)
    assert told(watching) == []
    held.flip("master")
    step(watching, watched)
    assert told(watching) == [(Kind.SDC_AT_REST, "master of a", 2)]
    assert watching.passed() == (1, ("rest",))


def test_what_the_program_announces_is_forgotten_until_the_next_check(make: Make, held: Held) -> None:
    watching, watched = make()
    step(watching, watched)
    forget_all()
    held.flip("w")
    step(watching, watched)
    assert (told(watching), watching.passed()) == ([], (0, ("rest",)))
    held.flip("w")
    step(watching, watched)
    assert told(watching) == [(Kind.SDC_AT_REST, "a", 2)]


def test_its_own_failure_ends_it_and_not_training(make: Make, held: Held, caplog: pytest.LogCaptureFixture) -> None:
    fails = False

    def read() -> list[Stepped]:
        if fails:
            raise RuntimeError("a state that cannot be read")
        return held()

    watching, watched = make(read)
    step(watching, watched)
    fails = True
    step(watching, watched)
    fails = False
    held.flip("w")
    step(watching, watched)
    assert watching.off == "RuntimeError: a state that cannot be read"
    assert caplog.text.count("it ends, and training goes on: RuntimeError: a state that cannot be read") == 1
    assert told(watching) == []


def test_other_parameters_than_at_the_beginning_end_it(make: Make, held: Held, caplog: pytest.LogCaptureFixture) -> None:
    late: list[Stepped] = []
    watching, watched = make(lambda: [*late, *held()])
    step(watching, watched)
    assert not watching.off
    late.append(Stepped("new", lambda: []))
    step(watching, watched)
    assert watching.off
    assert "the optimizer has other parameters than at the beginning: new in place of a" in caplog.text
    assert not told(watching)


def test_a_failure_of_the_counters_ends_their_check_alone(make: Make, held: Held, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(2, 2)
    watching, watched = make(counters=(Counters(model),))

    def failing() -> bool:
        raise RuntimeError("no gradients")

    watched.finite = failing
    step(watching, watched)
    model(torch.full((1, 2), float("nan")))
    step(watching, watched)
    held.flip("w")
    step(watching, watched)
    assert caplog.text.count("the check nonfinite ends: RuntimeError: no gradients") == 1
    assert not model._forward_hooks
    assert told(watching) == [(Kind.SDC_AT_REST, "a", 2)]


def test_a_step_that_a_loss_scaler_leaves_out_has_no_verdict(make: Make) -> None:
    model = torch.nn.Linear(2, 2)
    watching, watched = make(counters=(Counters(model, parameters=model.parameters()),))
    for applied in (False, True):
        model(torch.full((1, 2), float("inf"))).sum().backward()
        step(watching, watched, applied=applied)
        assert len(watching.verdicts) == applied


def test_gradients_are_counted_before_any_reduction() -> None:
    model = torch.nn.Linear(2, 2)
    counters = Counters(model, parameters=model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    assert counters.gradients_finite()
    model(torch.full((1, 2), float("inf"))).sum().backward()
    assert not counters.gradients_finite()
    counters.clear()
    assert counters.gradients_finite()
    counters.close()


def test_parts_without_a_weight_have_columns_of_states_alone() -> None:
    master = torch.ones(3)
    tensors: Tensors = [("exp_avg", torch.zeros(3)), ("master", master)]
    part = Stepped("a", lambda: tensors)
    assert [part.numbered(at) for at in range(4)] == ["a", "exp_avg of a", "master of a", "a state of a"]
    before = repeated(part, 1, 2)
    master[1] = 2
    after = repeated(part, 1, 2)
    changed = [at for at, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    assert changed == [0, 1, 4]  # both repetitions, and of the weight (2) and the states alone the second state


FOUR = (0, 1, 2, 3)
MASTER = (Kind.NO_MAJORITY, "master of a", (0,))


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({}, []),
        ({1: [("w", FOUR)]}, [(Kind.SDC_AT_REST, "w", (1,))]),
        ({0: [("w", FOUR)], 1: [("w", FOUR)]}, []),  # the program
        ({0: [("master of a", ())]}, [MASTER]),
        ({0: [("master of a", ())], 1: [("master of b", ())]}, []),  # the program, which writes to parts of ranks
        ({0: [("master of a", ())], 2: [("w", FOUR)]}, [MASTER, (Kind.SDC_AT_REST, "w", (2,))]),
    ],
)
def test_what_ranks_find_changed_becomes_verdicts(found: dict[int, list[Changed]], expected: list[object]) -> None:
    alone = {rank for rank, changed in found.items() if any(not copies for _, copies in changed)}
    verdicts = verdicts_at_rest(found, 7, dict.fromkeys(FOUR, "h"), alone)
    assert [(each.kind, each.subject.what, each.ranks) for each in verdicts] == expected


class Threads:
    """Ranks that are threads of this process."""

    def __init__(self, rank: int, ranks: int, shared: dict[int, Any], barrier: threading.Barrier) -> None:
        self.ranks, self.hosts = tuple(range(ranks)), tuple(f"h{at}" for at in range(ranks))
        self._rank, self._shared, self._barrier = rank, shared, barrier

    def gather_objects(self, value: Any) -> list[Any]:
        self._shared[self._rank] = value
        self._barrier.wait()
        every = [self._shared[rank] for rank in self.ranks]
        self._barrier.wait()
        return every

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.gather_objects(values))


def at_rest(of_ranks: Sequence[Sequence[Changed]]) -> list[tuple[str, tuple[int, ...]]]:
    """Return what all ranks are told if each has found these tensors changed."""
    shared: dict[int, Any] = {}
    barrier = threading.Barrier(len(of_ranks), timeout=30)

    def judge(rank: int) -> list[Verdict]:
        ranks: Any = Threads(rank, len(of_ranks), shared, barrier)
        return compare_at_rest(of_ranks[rank], 7, ranks)

    with ThreadPoolExecutor(len(of_ranks)) as pool:
        every = list(pool.map(judge, range(len(of_ranks))))
    assert all(each == every[0] for each in every)
    return [(each.subject.what, each.ranks) for each in every[0]]


def test_what_the_program_writes_to_many_tensors_has_no_verdict_if_ranks_hold_different_states() -> None:
    weights: list[Changed] = [(f"layer {at}", (0, 1)) for at in range(20)]
    states: list[Changed] = [(f"master of layer {at}", ()) for at in range(20)]
    mixed: list[Changed] = [each for pair in zip(weights, states, strict=True) for each in pair]
    assert at_rest([weights, mixed]) == []
    assert at_rest([[*weights[:9], *states[9:]], [*states[:9], *weights]]) == []


def test_a_tensor_that_changed_is_told_beside_those_that_the_program_wrote_to() -> None:
    weights: list[Changed] = [(f"w{at}", FOUR[:3]) for at in range(2)]
    assert at_rest([weights, [*weights, ("z", (0, 1, 2))], weights]) == [("z", (1,))]
