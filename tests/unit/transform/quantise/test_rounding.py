"""Rounding and packing, compared with the functions of compressed-tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.packed_levels import unpacked
from unickpt.base.errors import ConfigError
from unickpt.transform.quantise.rounding import packed, restored, rounded
from unickpt.transform.quantise.scheme import Scheme

SCHEMES = [Scheme(4, 32), Scheme(4, 128), Scheme(4), Scheme(8, 64), Scheme(8)]


def weight(dtype: torch.dtype) -> torch.Tensor:
    found = torch.randn(24, 256, generator=torch.Generator().manual_seed(5))
    found[3, 64:128] = 0.0
    found[4] = 0.0
    found[5, 7] = 40.0  # an outlier
    found[6, :128] = torch.arange(128) - 64.0  # many ties
    return found.to(dtype)


def arguments(scheme: Scheme) -> Any:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    strategy = "group" if scheme.group else "channel"
    return quantization.QuantizationArgs(num_bits=scheme.bits, strategy=strategy, group_size=scheme.group or None)


@pytest.mark.hf
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_levels_scales_and_words_are_those_of_compressed_tensors(scheme: Scheme, dtype: torch.dtype) -> None:
    given = arguments(scheme)
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
    from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    values = weight(dtype)
    grouped = values.view(*scheme.scales(values.shape), -1)
    scales, zeros = calculate_qparams(grouped.amin(2), grouped.amax(2), given)
    theirs = quantize(values.float(), scales.float(), zeros.float(), given, dtype=torch.int8)

    levels, own = rounded(values, scheme, dtype)
    assert torch.equal(own, scales.to(dtype))
    assert torch.equal(levels, theirs)
    assert torch.equal(restored(levels, own), dequantize(theirs, scales.float(), zeros.float(), given))
    words = packed(levels, scheme.bits)
    assert words.shape == scheme.packed(values.shape)
    assert torch.equal(words, pack_to_int32(theirs, scheme.bits))
    assert torch.equal(unpacked(words, scheme.bits), levels)
    assert torch.equal(unpack_from_int32(words, scheme.bits, values.shape), levels)
    assert levels.unique().numel() > 2 ** (scheme.bits - 1)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_every_value_is_at_its_nearest_level(scheme: Scheme) -> None:
    values = weight(torch.float32)
    levels, scales = rounded(values, scheme, torch.float32)
    most = 2 ** (scheme.bits - 1)
    possible = torch.arange(-most, most).float() * scales[:, :, None]
    apart = values.view(*scales.shape, -1)[..., None] - possible[:, :, None]
    error = (restored(levels, scales) - values).abs().view(*scales.shape, -1)
    assert torch.allclose(error, apart.abs().amin(3), atol=1e-6)


@pytest.mark.parametrize(
    ("text", "scheme"),
    [
        ("4", Scheme(4, 128)), ("8", Scheme(8, 128)), ("16", Scheme(16)), ("4/32", Scheme(4, 32)), ("8/channel", Scheme(8)),
    ],
)  # fmt: skip
def test_a_scheme_is_its_text(text: str, scheme: Scheme) -> None:
    assert Scheme.parse(text) == scheme
    assert Scheme.parse(str(scheme)) == scheme


@pytest.mark.parametrize("text", ["", "2", "4/", "4/0", "16/128", "8/rows", "4.0"])
def test_other_schemes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Scheme.parse(text)


def test_sizes_count_packed_values_and_scales() -> None:
    assert Scheme(4, 128).size_bytes((64, 256), 2) == 64 * 256 // 2 + 64 * 2 * 2
    assert Scheme(8).size_bytes((64, 256), 2) == 64 * 256 + 64 * 2
    assert Scheme(16).size_bytes((64, 256), 2) == 64 * 256 * 2


def test_shapes_that_do_not_divide_get_the_next_scheme() -> None:
    assert Scheme(4, 128).fitted([(8, 256)]) == Scheme(4, 128)
    assert Scheme(4, 128).fitted([(8, 256), (8, 96)]) == Scheme(4)
    assert Scheme(4, 128).fitted([(8, 100)]) == Scheme(16)
    assert Scheme(8).fitted([(8, 100)]) == Scheme(8)
