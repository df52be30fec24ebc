"""Hashes notice what sums and xor do not, and do not depend on strides, devices or blocks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unickpt.base.errors import ConfigError
from unickpt.training.witness import hashes as module
from unickpt.training.witness.hashes import combined, hashes

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool,
    torch.complex64, torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
]  # fmt: skip
WORD = st.integers(-(2**63), 2**63 - 1)


def of(*tensors: torch.Tensor) -> list[int]:
    return list(map(int, hashes(tensors)))


def of_words(words: list[int]) -> int:
    return of(torch.tensor(words, dtype=torch.int64))[0]


def random(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.rand(*shape, generator=generator) > 0.5
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of some hundred bytes have several blocks."""
    monkeypatch.setattr(module, "BLOCK", 4)


@settings(max_examples=300, deadline=None)
@given(st.lists(WORD, min_size=1, max_size=40), st.data())
def test_every_flip_of_one_bit_changes_the_hash(words: list[int], data: st.DataObject) -> None:
    at, bit = data.draw(st.integers(0, len(words) - 1)), data.draw(st.integers(0, 63))
    flipped = torch.tensor(words, dtype=torch.int64)
    flipped[at] ^= torch.tensor(1, dtype=torch.int64) << bit
    assert of(flipped)[0] != of_words(words)


@settings(max_examples=300, deadline=None)
@given(st.lists(WORD, min_size=2, max_size=40, unique=True), st.data())
def test_every_exchange_of_two_words_changes_the_hash(words: list[int], data: st.DataObject) -> None:
    i, j = data.draw(st.lists(st.integers(0, len(words) - 1), min_size=2, max_size=2, unique=True))
    other = list(words)
    other[i], other[j] = other[j], other[i]
    assert of_words(other) != of_words(words)


@settings(max_examples=300, deadline=None)
@given(st.lists(WORD, min_size=2, max_size=40), st.integers(0, 63), st.data())
def test_the_same_bit_in_several_words_changes_the_hash(words: list[int], bit: int, data: st.DataObject) -> None:
    """xor misses every even number of them."""
    places = data.draw(st.lists(st.integers(0, len(words) - 1), min_size=2, unique=True))
    other = torch.tensor(words, dtype=torch.int64)
    other[torch.tensor(places)] ^= torch.tensor(1, dtype=torch.int64) << bit
    assert of(other)[0] != of_words(words)


def test_pairs_of_equal_flips_never_cancel() -> None:
    """All pairs of places in 40 words, the upper bits, which have few others above them: with keys 1, 3, 5, ... some cancel."""
    words = random(torch.int64, 40)
    sound = of(words)[0]
    for bit in range(56, 64):
        mask = torch.tensor(1, dtype=torch.int64) << bit
        other = words.repeat(40 * 39 // 2, 1)
        rows = torch.arange(len(other))
        pairs = torch.combinations(torch.arange(40))
        other[rows, pairs[:, 0]] ^= mask
        other[rows, pairs[:, 1]] ^= mask
        assert sound not in of(*other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 3, 7, 13, 64])
def test_every_bit_of_every_dtype_counts_also_in_the_tail(small_blocks: None, dtype: torch.dtype, count: int) -> None:
    tensor = random(dtype, count)
    sound = of(tensor)[0]
    seen = {sound}
    for at in range(count * dtype.itemsize):
        flipped = tensor.clone()
        flipped.view(torch.uint8)[at] ^= 1  # of a bool, 0 and 1
        seen.add(of(flipped)[0])
    assert len(seen) == count * dtype.itemsize + 1
    assert of(tensor.clone())[0] == sound


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_and_offsets_do_not_count(small_blocks: None, dtype: torch.dtype) -> None:
    tensor = random(dtype, 5, 7, 3)
    expected = of(tensor)[0]
    padded = random(dtype, 6, 8, 4, seed=1)
    padded[1:, 1:, 1:] = tensor
    shifted = torch.cat([tensor.view(-1)[:1], tensor.view(-1)])[1:].view(5, 7, 3)
    turned = tensor.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert of(padded[1:, 1:, 1:], shifted, turned) == [expected] * 3
    assert of(tensor[:, :1, :1][3:4], tensor.view(-1)[::105]) == of(*(tensor[3:4, :1, :1].clone(), tensor.view(-1)[:1].clone()))
    assert of(random(dtype, 1, 7).expand(3, 7)) == of(random(dtype, 1, 7).expand(3, 7).contiguous())


def test_views_of_conjugates_and_negatives_have_the_hash_of_their_values() -> None:
    z = random(torch.complex64, 9)
    assert of(z.conj(), z.conj().imag) == of(z.conj().resolve_conj(), z.conj().imag.resolve_neg().clone())


def test_dtype_and_shape_count() -> None:
    zeros = [torch.zeros(0), torch.zeros(0, 3), torch.zeros(8), torch.zeros(2, 4), torch.zeros(4, 2), torch.zeros(())]
    assert len(set(of(*zeros, torch.zeros(8).int(), torch.zeros(32, dtype=torch.uint8), torch.zeros(16).half()))) == 9
    assert of(torch.tensor([0.0])) != of(torch.tensor([-0.0]))


def test_blocks_of_another_size_still_tell_all_changes(small_blocks: None) -> None:
    tensor = random(torch.int64, 4 * 3 + 1)
    swapped = tensor[[4, 5, 6, 7, 0, 1, 2, 3, *range(8, 13)]]  # two blocks
    assert of(swapped) != of(tensor)


def test_hashes_of_other_tensors_do_not_count() -> None:
    """The keys reach to the longest of them."""
    short, long = random(torch.float32, 5), random(torch.float32, 1001)
    assert of(short, long) == [*of(short), *of(long)]
    assert combined(hashes([short, long])) != combined(hashes([long, short]))


def test_values_stay_the_same_over_releases() -> None:
    """Ranks of one job compare them, and a record may outlive a release."""
    assert of(torch.arange(5), torch.zeros(3, dtype=torch.bfloat16)) == [-3656331247735218366, 7149216165923538312]


def test_what_has_no_bytes_of_its_own_is_refused() -> None:
    for tensor in (torch.eye(2).to_sparse(), torch.empty(2, device="meta")):
        with pytest.raises(ConfigError, match="only tensors with memory of their own"):
            hashes([tensor])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_devices_agree() -> None:
    tensors = [random(dtype, 1013) for dtype in DTYPES]
    assert of(*(tensor.cuda() for tensor in tensors)) == of(*tensors)
