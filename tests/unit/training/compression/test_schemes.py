"""Codecs: what they keep, how many bytes they make, and what they do with numbers that are not finite."""

from __future__ import annotations

import pytest
import torch

from unickpt.base.errors import ConfigError
from unickpt.training.compression.powersgd import factored, orthogonal
from unickpt.training.compression.schemes import codec_of
from unickpt.training.compression.settings import NONE, POWERSGD, SCHEMES, Compression

CODED = [scheme for scheme in SCHEMES if scheme != POWERSGD]
ELEMENTS = 1003  # nothing divides it


def _rows(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.randn(3, ELEMENTS, generator=torch.Generator().manual_seed(seed))
    rows[2, 900:] = 0
    return rows, torch.tensor([ELEMENTS, ELEMENTS, 900])


def _settings(scheme: str, **more: float) -> Compression:
    return Compression(scheme, least_elements=0, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("scheme", CODED)
def test_a_code_has_its_size_and_is_the_same_on_every_rank(scheme: str) -> None:
    codec, (rows, counts) = codec_of(_settings(scheme, ratio=0.1), ELEMENTS), _rows()
    payload = codec.encode(rows, counts, 7)
    assert payload.dtype == torch.uint8
    assert payload.shape == (3, codec.size_bytes(ELEMENTS))
    assert torch.equal(payload, codec.encode(rows.clone(), counts, 7))
    found = codec.decode(payload, ELEMENTS, 7)
    assert found.shape == rows.shape
    assert codec.lossless == (scheme == NONE) == torch.equal(found, rows)


@pytest.mark.parametrize(("scheme", "loss"), [("fp16", 5e-4), ("bf16", 4e-3), ("int8", 2e-2)])
def test_narrow_types_lose_their_rounding(scheme: str, loss: float) -> None:
    rows, counts = _rows()
    codec = codec_of(_settings(scheme), ELEMENTS)
    found = codec.decode(codec.encode(rows, counts, 0), ELEMENTS, 0)
    assert (found - rows).abs().max() <= loss * rows.abs().max()


def test_top_k_keeps_the_largest_and_random_k_one_of_each_range() -> None:
    rows, counts = _rows()
    for scheme in ("top-k", "random-k"):
        codec = codec_of(_settings(scheme, ratio=0.1), ELEMENTS)
        found = codec.decode(codec.encode(rows, counts, 3), ELEMENTS, 3)
        kept = found != 0
        assert torch.equal(found[kept], rows[kept])
        assert kept[0].sum() == 101
        if scheme == "top-k":
            assert rows[0][kept[0]].abs().min() >= rows[0][~kept[0]].abs().max()
        else:
            assert torch.equal(kept[0], kept[1])
            gaps = torch.nonzero(kept[0])[:, 0].diff()
            assert gaps.max() < 20


def test_random_k_draws_other_positions_with_another_seed() -> None:
    rows, counts = _rows()
    codec = codec_of(_settings("random-k", ratio=0.1), ELEMENTS)
    one, other = (codec.decode(codec.encode(rows, counts, seed), ELEMENTS, seed) for seed in (1, 2))
    assert not torch.equal(one != 0, other != 0)


def test_sign_scales_by_the_mean_of_the_elements_without_padding() -> None:
    rows, counts = _rows()
    codec = codec_of(_settings("sign"), ELEMENTS)
    found = codec.decode(codec.encode(rows, counts, 0), ELEMENTS, 0)
    assert torch.equal(found[:2] > 0, rows[:2] >= 0)
    torch.testing.assert_close(found[2, :900].abs(), rows[2, :900].abs().mean().expand(900))


@pytest.mark.parametrize("scheme", CODED)
def test_numbers_that_are_not_finite_stay_so(scheme: str) -> None:
    codec = codec_of(_settings(scheme), ELEMENTS)
    rows = torch.full((1, ELEMENTS), float("nan"))
    found = codec.decode(codec.encode(rows, torch.tensor([ELEMENTS]), 0), ELEMENTS, 0)
    assert not torch.isfinite(found).all()


def test_zeros_stay_zeros() -> None:
    for scheme in CODED:
        codec = codec_of(_settings(scheme), ELEMENTS)
        found = codec.decode(codec.encode(torch.zeros(1, ELEMENTS), torch.tensor([ELEMENTS]), 0), ELEMENTS, 0)
        assert not found.any(), scheme


def test_small_parameters_travel_as_they_are() -> None:
    assert codec_of(Compression("sign"), 1023).lossless
    assert not codec_of(Compression("sign"), 1024).lossless


def test_a_matrix_is_factored_only_if_that_is_smaller() -> None:
    assert factored(_settings(POWERSGD, rank=2), (64, 32, 3)) == (64, 96, 2)
    assert factored(_settings(POWERSGD, rank=2), (64,)) is None
    assert factored(_settings(POWERSGD, rank=2), (3, 3)) is None
    assert factored(_settings("sign"), (64, 64)) is None


def test_orthogonal_columns() -> None:
    found = orthogonal(torch.randn(20, 3, generator=torch.Generator().manual_seed(0)))
    torch.testing.assert_close(found.T @ found, torch.eye(3))
    assert not orthogonal(torch.zeros(4, 2)).any()
    assert orthogonal(torch.full((4, 2), float("nan"))).isnan().all()


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown"):
        Compression("gzip")
    with pytest.raises(ConfigError, match="ratio"):
        Compression("top-k", ratio=0.0)
