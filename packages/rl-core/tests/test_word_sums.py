"""The checksum for GPUs, on a CPU: the integer operations and their order are the same."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import rounding_bound

from rl_core.weights import rectangle_sums as rectangles
from rl_core.weights import word_sums as module
from rl_core.weights.digests import (
    PassingChecksums,
    digest_tensors,
    probe_tensor,
    tensor_checksum,
)
from rl_core.weights.rectangle_sums import digest_rectangles, join_digests
from rl_core.weights.update import Rectangle
from rl_core.weights.word_sums import BASE, ROW_WORDS, word_sums

MODULUS = 2**64


def sums_of(content: bytes) -> list[int]:
    """Compute the checksum by its definition, with Python integers."""
    words = np.frombuffer(content + bytes(-len(content) % 4), "<i4").tolist()
    first = sum((2 * place + 1) * word for place, word in enumerate(words))
    second = sum(pow(BASE, place, MODULUS) * word for place, word in enumerate(words))
    return [first % MODULUS, second % MODULUS]


def found(tensor: torch.Tensor) -> list[int]:
    return [number % MODULUS for number in word_sums(tensor).tolist()]


def as_bytes(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=100), st.integers(1, 3))
def test_sums_are_those_of_the_definition_wherever_a_view_begins(content: bytes, offset: int) -> None:
    assert found(as_bytes(content)) == sums_of(content)
    assert found(as_bytes(bytes(offset) + content)[offset:]) == sums_of(content)


def test_sums_equal_known_numbers() -> None:
    assert found(torch.tensor([1, 1], dtype=torch.int32)) == [1 + 3, 1 + 0x9E3779B97F4A7C15]
    assert found(torch.tensor([0, -1], dtype=torch.int32)) == [MODULUS - 3, MODULUS - BASE]
    assert tensor_checksum(torch.tensor([1], dtype=torch.int32), "sums") == f"sums:{1:016x}{1:016x}"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (3, 5, 7), (ROW_WORDS,), (ROW_WORDS - 1,), (4 * ROW_WORDS + 1,)])
def test_sums_are_of_the_bytes_whatever_their_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(9).to(dtype)
    content = tensor.reshape(-1).view(torch.uint8)
    assert found(tensor) == found(content) == sums_of(content.numpy().tobytes())


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use chunks of 64 bytes, so that small tensors have many."""
    monkeypatch.setattr(module, "ROW_WORDS", 4)
    monkeypatch.setattr(module, "CHUNK_BYTES", 64)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
def test_chunks_and_strides_change_nothing(dtype: torch.dtype) -> None:
    for size in (15, 16, 17, 31, 32, 33, 63, 64, 65, 129):
        tensor = torch.arange(size, dtype=torch.float32).to(dtype)
        assert found(tensor) == sums_of(tensor.view(torch.uint8).numpy().tobytes())
    whole = torch.randn(6, 10, 14, generator=torch.Generator().manual_seed(1)).mul(50).to(dtype)
    for view in (whole.transpose(0, 2), whole.transpose(1, 2), whole[:, 1:9, ::3], whole[::2], whole[1:, :, 3]):
        assert found(view) == sums_of(view.contiguous().view(torch.uint8).numpy().tobytes())


@pytest.mark.usefixtures("small_chunks")
@settings(max_examples=80, deadline=None)
@given(st.binary(min_size=8, max_size=300), st.data())
def test_every_flip_and_every_swap_is_seen_by_either_sum(content: bytes, data: st.DataObject) -> None:
    before = found(as_bytes(content))
    place = data.draw(st.integers(0, 8 * len(content) - 1))
    flipped = bytearray(content)
    flipped[place // 8] ^= 1 << place % 8
    after = found(as_bytes(bytes(flipped)))
    assert all(old != new for old, new in zip(before, after, strict=True))
    words = np.frombuffer(content[: len(content) // 4 * 4], "<i4").copy()
    one, other = (data.draw(st.integers(0, len(words) - 1)) for _ in range(2))
    before = found(torch.from_numpy(words.copy()))
    words[[one, other]] = words[[other, one]]
    after = found(torch.from_numpy(words))
    assert all((old != new) == (words[one] != words[other]) for old, new in zip(before, after, strict=True))


def test_far_and_worst_swaps_are_seen() -> None:
    """Swap two words that differ only in the highest bit, at indices up to 2**18 apart."""
    highest = -(2**31)
    for distance in (1, 1024, 2**18):
        words = torch.zeros(2**18 + 8, dtype=torch.int32)
        words[7] = highest
        before = found(words)
        words[7], words[7 + distance] = 0, highest
        assert before
        assert [old != new for old, new in zip(before, found(words), strict=True)] == [True] * len(before)


FAULTS = {
    "a row is shifted by one": lambda t: t[3].copy_(t[3].roll(1)),
    "two rows are swapped": lambda t: t.copy_(t[[0, 1, 7, 3, 4, 5, 6, 2]]),
    "all rows move by one": lambda t: t.copy_(t.roll(1, 0)),
    "columns are swapped": lambda t: t.copy_(t.flip(1)),
    "a row is stale": lambda t: t[5].mul_(1.01),
    "the end is missing": lambda t: t[-1, -3:].zero_(),
    "the last bit of one element": lambda t: t.view(torch.int16)[4, 9].bitwise_xor_(1),
    "a sign": lambda t: t[0, 0].neg_(),
    "gate and up are swapped": lambda t: t.copy_(torch.cat([t[4:], t[:4]])),
    "transposed blocks": lambda t: t[:, :8].copy_(t[:, :8].T.clone()),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_crc32c_sees_is_seen(fault: str) -> None:
    tensor = torch.randn(8, 16, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    changed = tensor.clone()
    FAULTS[fault](changed)
    for kind in ("crc32c", "sums"):
        assert tensor_checksum(changed, kind) != tensor_checksum(tensor, kind)


@pytest.mark.usefixtures("small_chunks")
def test_no_temporary_is_as_large_as_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    whole = module.row_sums

    def noted(rows: torch.Tensor, first: int, stride: int) -> torch.Tensor:
        sizes.append(rows.nbytes)
        return whole(rows, first, stride)

    monkeypatch.setattr(module, "row_sums", noted)
    word_sums(torch.zeros(2, 300, dtype=torch.bfloat16).T)
    assert 1200 <= sum(sizes) < 1200 + 64
    assert max(sizes) <= 64


def test_digests_name_their_checksum_and_receipts_have_the_same() -> None:
    tensors = {f"{index}": torch.randn(index + 1, 3, dtype=torch.float64).to(torch.bfloat16) for index in range(5)}
    digests = digest_tensors(tensors, kind="sums")
    kinds = {name: digest.kind for name, digest in digests.items()}
    assert set(kinds.values()) == {"sums"}
    kinds["3"] = "crc32c"
    expected = {name: tensor_checksum(tensor, kinds[name]) for name, tensor in tensors.items()}
    assert expected["4"] == digests["4"].checksum
    with PassingChecksums(kinds) as sums:
        assert [name for name, _ in sums.passing(tensors.items())] == list(tensors)
        assert sums.result() == expected
        arrived, live = sums.with_probes(tensors)
    assert arrived == expected
    for name, tensor in tensors.items():
        assert live[name].tolist() == probe_tensor(tensor).tolist() == digests[name].probe.tolist()


def test_a_large_tensor_is_probed_in_pieces_as_it_is_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0))
    whole = probe_tensor(tensor)
    monkeypatch.setattr("rl_core.weights.digests.PROBED_AT_ONCE", 20)
    split, sizes = torch.split, []
    monkeypatch.setattr(torch, "split", lambda rows, size: sizes.append(size) or split(rows, size))
    bound = rounding_bound(float(tensor.abs().sum(-1).max()), roundings=8)
    np.testing.assert_allclose(probe_tensor(tensor), whole, rtol=0, atol=bound)
    assert probe_tensor(torch.empty(0, 4)).shape == (0,)
    assert probe_tensor(torch.empty(3, 0)).tolist() == [0.0] * 3
    assert sizes == [2, 5, 20], "rows of 7, 4 and no elements, of which 20 are converted at once"


SHAPES = [(), (7,), (6, 8), (5, 7), (4, 12), (1, 9), (3, 4, 6), (3, 5, 7), (2, 3, 4, 5)]


@pytest.mark.parametrize("chunk_words", [None, 1, 6])
@settings(max_examples=25, deadline=None)
@given(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64]), st.data())
def test_digests_of_rectangles_make_those_of_the_tensors(
    chunk_words: int | None, dtype: torch.dtype, data: st.DataObject
) -> None:
    shapes = data.draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=2))
    tensors = {
        f"t{index}": torch.nn.Parameter(
            torch.randn(shape, generator=torch.Generator().manual_seed(3)).mul(9).to(dtype), dtype.is_floating_point
        )
        for index, shape in enumerate(shapes)
    }
    parts = []
    for name, tensor in tensors.items():
        inner = [data.draw(st.sets(st.integers(1, size), max_size=2)) for size in tensor.shape]
        cuts = [[0, *sorted(within - {size}), size] for within, size in zip(inner, tensor.shape, strict=True)]
        for axes in itertools.product(*(itertools.pairwise(cut) for cut in cuts)):
            sizes = tuple(stop - start for start, stop in axes)
            rectangle = Rectangle(name, tuple(start for start, _ in axes), sizes)
            parts.append((rectangle, tensor.shape, tensor[tuple(slice(*axis) for axis in axes)]))
    parts = data.draw(st.permutations(parts)) if len(parts) < 8 else parts
    with pytest.MonkeyPatch.context() as patched:
        if chunk_words is not None:
            patched.setattr(rectangles, "CHUNK_WORDS", chunk_words)
        found = digest_rectangles(parts)
    assert [(one.shape, one.dtype) for one in found] == [(shape, str(dtype)[6:]) for _, shape, _ in parts]
    for (rectangle, shape, values), one in zip(parts, found, strict=True):
        kept = torch.zeros(shape, dtype=dtype)
        kept[tuple(slice(o, o + n) for o, n in zip(rectangle.offsets, rectangle.sizes, strict=True))] = values.detach()
        assert list(one.sums) == sums_of(kept.reshape(-1).view(torch.uint8).numpy().tobytes())
    joined = join_digests(zip((part[0] for part in parts), found, strict=True))
    expected = digest_tensors(tensors, kind="sums")
    assert joined.keys() == expected.keys()
    for name, digest in expected.items():
        other = joined[name]
        assert (other.shape, other.dtype, other.checksum) == (digest.shape, digest.dtype, digest.checksum)
        assert other.probe.dtype == np.float32
        bound = rounding_bound(float(tensors[name].detach().abs().double().sum()), roundings=60)
        np.testing.assert_allclose(other.probe, digest.probe, rtol=0, atol=bound)


def test_what_is_trained_is_digested_as_it_is() -> None:
    matrix = torch.nn.Parameter(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)))
    for tensor in (matrix, torch.nn.Parameter(matrix.detach()[0])):
        assert probe_tensor(tensor).tolist() == probe_tensor(tensor.detach()).tolist()
        for kind in ("crc32c", "sums"):
            assert tensor_checksum(tensor, kind) == tensor_checksum(tensor.detach(), kind)
