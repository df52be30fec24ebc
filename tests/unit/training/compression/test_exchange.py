"""Exchange of gradients over real process groups of gloo: means, what is owed, bytes, and other numbers of ranks."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from tests.support.gloo_threads import ThreadWire, on_gloo
from unickpt.base.errors import FormatError
from unickpt.training.compression.carried import Common, Residuals, resized, slice_of
from unickpt.training.compression.exchange import GradientExchange
from unickpt.training.compression.settings import NONE, SCHEMES, Compression
from unickpt.training.compression.sizes import sent_bytes

SHAPES = {"embed": (31, 15), "weight": (48, 40), "bias": (40,), "gain": (1,)}
LOSSY = [scheme for scheme in SCHEMES if scheme != NONE]
Grads = dict[str, torch.Tensor]


def _settings(scheme: str, *, error_feedback: bool = True) -> Compression:
    return Compression(scheme, ratio=0.05, least_elements=64, error_feedback=error_feedback)


def _gradients(rank: int, step: int) -> Grads:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def _run(
    exchange: GradientExchange, steps: range, order: list[list[str]] | None = None, dtype: torch.dtype = torch.float32
) -> list[Grads]:
    """Exchange the gradients of these steps, in these buckets, and return the means."""
    found = []
    for step in steps:
        own = {name: grad.to(dtype) for name, grad in _gradients(exchange.rank, step).items()}
        for names in order or [list(SHAPES)]:
            exchange.exchange([(name, own[name]) for name in names])
        found.append(own)
    return found


def _debt(residuals: list[Residuals]) -> Grads:
    """Return what the job owes: the mean over the ranks of what was not sent, and all that was not returned."""
    world = len(residuals)
    found = {}
    for name, shape in SHAPES.items():
        owed = torch.zeros(torch.Size(shape).numel(), dtype=torch.float64)
        for each in residuals:
            if name in each.sent:
                owed += each.sent[name].double() / world
            if name in each.returned:
                lo, hi = slice_of(len(owed), each.rank, world)
                owed[lo:hi] += each.returned[name].double()
        found[name] = owed
    return found


def _assert_equal(one: list[Grads], other: list[Grads]) -> None:
    for a, b in zip(one, other, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in SHAPES)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_without_compression_the_result_is_the_mean(world: int) -> None:
    results = on_gloo(lambda wire: _run(GradientExchange(_settings(NONE), wire), range(2)), world)
    for step in range(2):
        expected = {name: sum(_gradients(rank, step)[name] for rank in range(world)) / world for name in SHAPES}
        for found in results:
            torch.testing.assert_close(found[step], expected)


@pytest.mark.parametrize("scheme", LOSSY)
@pytest.mark.parametrize("world", [2, 3])
def test_what_is_not_sent_is_owed(scheme: str, world: int) -> None:
    """The sum of all means and of the debt is the sum of all gradients, and every rank gets the same means."""

    def job(wire: ThreadWire) -> tuple[list[Grads], Residuals]:
        exchange = GradientExchange(_settings(scheme), wire)
        return _run(exchange, range(4)), exchange.residuals

    results = on_gloo(job, world)
    for found, _ in results[1:]:
        _assert_equal(found, results[0][0])
    debt = _debt([residuals for _, residuals in results])
    for name in SHAPES:
        gradients = sum(_gradients(rank, step)[name].double() / world for rank in range(world) for step in range(4))
        sent = sum(means[name].double() for means in results[0][0])
        torch.testing.assert_close((gradients - sent).view(-1), debt[name], atol=2e-5, rtol=0)
    assert debt["weight"].any()
    assert not debt["bias"].any()


@pytest.mark.parametrize("scheme", LOSSY)
def test_a_resumed_job_goes_on_bit_by_bit_in_other_buckets(scheme: str) -> None:
    """``DistributedDataParallel`` orders its buckets anew after its first step."""
    before = [["gain", "bias"], ["weight", "embed"]]
    after = [["embed"], ["bias", "weight", "gain"]]

    def whole(wire: ThreadWire) -> list[Grads]:
        return _run(GradientExchange(_settings(scheme), wire), range(6), after)

    def half(wire: ThreadWire) -> tuple[object, object]:
        exchange = GradientExchange(_settings(scheme), wire)
        _run(exchange, range(3), after)
        return exchange.residuals.to_object(), exchange.common.to_object()

    saved = on_gloo(half, 3)

    def resumed(wire: ThreadWire) -> list[Grads]:
        exchange = GradientExchange(_settings(scheme), wire)
        assert exchange.restore(lambda rank: saved[rank][0], saved[0][1])
        return _run(exchange, range(3, 4), before) + _run(exchange, range(4, 6), after)

    for found, expected in zip(on_gloo(resumed, 3), on_gloo(whole, 3), strict=True):
        _assert_equal(found, expected[3:])


@pytest.mark.parametrize("scheme", LOSSY)
@pytest.mark.parametrize(("before", "now"), [(3, 2), (2, 4), (2, 1)])
def test_on_another_number_of_ranks_the_debt_is_conserved(scheme: str, before: int, now: int) -> None:
    def job(wire: ThreadWire) -> Residuals:
        exchange = GradientExchange(_settings(scheme), wire)
        _run(exchange, range(3))
        return exchange.residuals

    saved = on_gloo(job, before)
    owed, kept = _debt(saved), _debt([resized(saved, rank, now) for rank in range(now)])
    for name in SHAPES:
        torch.testing.assert_close(owed[name], kept[name], atol=1e-6, rtol=0)

    def resumed(wire: ThreadWire) -> list[Grads]:
        exchange = GradientExchange(_settings(scheme), wire)
        assert not exchange.restore(lambda rank: saved[rank].to_object(), Common().to_object())
        return _run(exchange, range(3, 4))

    found = on_gloo(resumed, now)[0][0]
    assert all(torch.isfinite(found[name]).all() for name in SHAPES)
    if now == 1:  # one rank owes nothing after a step
        for name in SHAPES:
            expected = _gradients(0, 3)[name].double().view(-1) + owed[name]
            torch.testing.assert_close(found[name].double().view(-1), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("world", [2, 3])
def test_bytes_on_the_wire_are_as_promised(scheme: str, world: int) -> None:
    def job(wire: ThreadWire) -> int:
        _run(GradientExchange(_settings(scheme), wire), range(1))
        return wire.sent_bytes

    promised = sent_bytes(_settings(scheme), SHAPES.values(), world)
    assert on_gloo(job, world) == [promised] * world
    plain = sent_bytes(_settings(NONE), SHAPES.values(), world)
    assert (promised < plain) == (scheme != NONE)


@pytest.mark.parametrize("scheme", LOSSY)
def test_an_overflow_on_one_rank_reaches_all_and_leaves_the_residuals(scheme: str) -> None:
    def job(wire: ThreadWire) -> tuple[Grads, bool]:
        exchange = GradientExchange(_settings(scheme), wire)
        _run(exchange, range(2))
        before = exchange.residuals.sent["weight"].clone()
        own = _gradients(wire.rank, 2)
        if wire.rank == 1:
            own["weight"][3, 3] = float("inf")
        exchange.exchange(list(own.items()))
        return own, torch.equal(before, exchange.residuals.sent["weight"])

    for found, kept in on_gloo(job, 2):
        assert not torch.isfinite(found["weight"]).all()
        assert torch.isfinite(found["embed"]).all()
        assert kept


def test_without_error_feedback_nothing_is_kept() -> None:
    def job(wire: ThreadWire) -> Mapping[str, torch.Tensor]:
        exchange = GradientExchange(_settings("sign", error_feedback=False), wire)
        _run(exchange, range(2))
        return {**exchange.residuals.sent, **exchange.residuals.returned}

    assert on_gloo(job, 2) == [{}, {}]


def test_scales_of_a_loss_do_not_change_the_residuals() -> None:
    """A framework passes gradients times the loss scale, divided by the number of ranks."""

    def job(wire: ThreadWire) -> tuple[Grads, Grads, Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]:
        plain, scaled = (GradientExchange(_settings("top-k"), wire) for _ in range(2))
        one, other = _gradients(wire.rank, 0), {name: grad * 512 for name, grad in _gradients(wire.rank, 0).items()}
        plain.exchange(list(one.items()))
        scaled.exchange(list(other.items()), scale_in=2 / 1024, scale_out=1024)
        return one, other, plain.residuals.sent, scaled.residuals.sent

    for one, other, sent, scaled in on_gloo(job, 2):
        assert all(torch.equal(one[name] * 1024, other[name]) for name in SHAPES)
        assert all(torch.equal(sent[name], scaled[name]) for name in sent)


def test_residuals_of_a_missing_rank_are_an_error() -> None:
    states = [Residuals(rank, 3, {"weight": torch.ones(4)}) for rank in range(3)]
    with pytest.raises(FormatError, match="saved by 3"):
        resized(states[:2], 0, 2)
    with pytest.raises(FormatError, match="rank 1 of 3"):
        resized([states[0], states[2]], 0, 2)
    with pytest.raises(FormatError, match="form"):
        Residuals.from_object({"rank": 0, "world": 2, "sent": {"weight": 3}, "returned": {}})


def test_residuals_of_other_parameters_are_forgotten() -> None:
    """A model that was renamed or resized resumes without residuals of these parameters."""

    def job(wire: ThreadWire) -> tuple[list[str], set[str], set[str]]:
        exchange = GradientExchange(_settings("sign"), wire)
        _run(exchange, range(2))
        sizes = {name: torch.Size(shape).numel() for name, shape in SHAPES.items()}
        assert exchange.keep_fitting(sizes) == []
        before = set(exchange.residuals.sent)
        del sizes["embed"]
        sizes["weight"] += 1
        return exchange.keep_fitting(sizes), before - set(exchange.residuals.sent), set(exchange.common.counts)

    for strange, gone, counts in on_gloo(job, 2):
        assert strange == ["embed", "weight"]
        assert gone == {"embed", "weight"}
        assert counts == SHAPES.keys() - gone
