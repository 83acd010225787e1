import threading
from concurrent.futures import Future

import crc32c
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import rounding_bound

from rl_core.errors import ShapeError
from rl_core.weights import digests
from rl_core.weights.digests import (
    digest_tensors,
    probe_tensor,
    probe_vector,
    tensor_checksum,
    tensor_crc32c,
    to_host,
)
from rl_core.weights.update import Canary


def test_the_probe_vector_is_fixed():
    expected = [np.sin(12.9898), np.sin(2 * 12.9898), np.sin(3 * 12.9898)]
    assert probe_vector(3).tolist() == pytest.approx(expected, abs=1e-7)
    assert probe_vector(5)[:3].tolist() == pytest.approx(probe_vector(3).tolist(), abs=rounding_bound(1.0, roundings=2))
    assert probe_vector(3).dtype == torch.float32


def test_a_matrix_is_probed_by_what_it_does_to_the_vector():
    a, b = probe_vector(2).tolist()
    matrix = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 3.0]])
    assert probe_tensor(matrix).tolist() == pytest.approx([a, b, 2 * a + 3 * b], abs=rounding_bound(5.0, roundings=3))


def test_experts_are_probed_one_after_the_other():
    experts = torch.arange(12, dtype=torch.float32).reshape(2, 3, 2)
    expected = np.concatenate([probe_tensor(expert) for expert in experts])
    assert probe_tensor(experts).shape == (6,)
    np.testing.assert_allclose(probe_tensor(experts), expected, rtol=0, atol=rounding_bound(10.0 + 11.0, roundings=3))


def test_a_vector_is_its_own_probe_and_a_copy():
    scale = torch.tensor([1.0, -2.0])
    probe = probe_tensor(scale)
    scale.zero_()
    assert probe.tolist() == [1.0, -2.0]
    (digest,) = digest_tensors({"a": torch.arange(6.0)[::2]}).values()
    assert digest.probe.tolist() == [0.0, 2.0, 4.0]


def test_low_precision_is_probed_in_float32():
    matrix = torch.tensor([[1.0, 0.5]], dtype=torch.bfloat16)
    assert probe_tensor(matrix).dtype == np.float32
    assert probe_tensor(matrix).tolist() == probe_tensor(matrix.float()).tolist()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 5), st.integers(0, 6), st.integers(0, 6))
def test_a_probe_notices_a_changed_element_and_swapped_columns(row, first, second):
    matrix = torch.randn(6, 7, generator=torch.Generator().manual_seed(0))
    changed = matrix.clone()
    changed[row, first] += 0.5
    difference = np.abs(probe_tensor(changed) - probe_tensor(matrix))
    assert np.flatnonzero(difference > 1e-3).tolist() == [row]
    swapped = matrix.clone()
    swapped[:, [first, second]] = matrix[:, [second, first]]
    assert (np.abs(probe_tensor(swapped) - probe_tensor(matrix)).max() > 1e-3) == (first != second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(4,), (2, 3), (2, 3, 4)])
def test_a_checksum_is_of_the_bytes(dtype, shape):
    tensor = torch.arange(int(np.prod(shape))).reshape(shape).to(dtype)
    raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert len(raw) == tensor.numel() * dtype.itemsize
    assert tensor_crc32c(tensor) == crc32c.crc32c(raw)
    (digest,) = digest_tensors({"a": tensor}).values()
    assert (digest.shape, digest.dtype) == (shape, str(dtype).split(".")[1])
    assert digest.checksum == f"crc32c:{crc32c.crc32c(raw):08x}"
    assert digest.kind == "crc32c"


def test_digests_of_many_tensors_stay_with_their_names():
    tensors = {f"layer.{index}": torch.full((index + 1, 3), float(index)) for index in range(40)}
    digests = digest_tensors(tensors)
    assert list(digests) == list(tensors)
    for name, tensor in tensors.items():
        (alone,) = digest_tensors({name: tensor}).values()
        assert (digests[name].shape, digests[name].checksum) == (alone.shape, alone.checksum)
        assert digests[name].probe.tolist() == alone.probe.tolist()


def test_tensors_of_an_accelerator_are_summed_in_the_callers_thread_and_others_in_threads():
    def names_of(device):
        tensors = [torch.empty(1, device=device)] * 3
        return set(digests._on_threads(lambda *_: threading.current_thread().name.partition("_")[0], tensors, "abc"))

    assert names_of("meta") == {threading.current_thread().name}
    assert names_of("cpu") == {"digest"}
    assert digests._on_threads(lambda tensor, name: (len(tensor), name), [torch.empty(1), torch.empty(2)], "ab") == [
        (1, "a"),
        (2, "b"),
    ]
    assert [digests._own_kind(torch.empty(1, device=device)) for device in ("meta", "cpu")] == ["sums", "crc32c"]


class OneAtATime:
    """An executor that computes a result when it is asked for."""

    def __init__(self, num_threads, name):
        self.made, self.num_asked, self.ended = (num_threads, name), 0, None

    def submit(self, compute, tensor):
        future = Future()
        future.result = lambda: (setattr(self, "num_asked", self.num_asked + 1), compute(tensor))[1]
        return future

    def shutdown(self, **options):
        self.ended = options


def test_at_most_one_passing_tensor_is_kept_for_its_checksum(monkeypatch):
    monkeypatch.setattr(digests, "ThreadPoolExecutor", OneAtATime)
    tensors = {name: torch.full((2,), float(ord(name))) for name in "abcd"}
    with digests.PassingChecksums({"c": "sums"}) as sums:
        assert sums._thread.made == (1, "checksums of weights")
        asked = [sums._thread.num_asked for _ in sums.passing(tensors.items())]
        assert asked == [0, 1, 2, 3], "each had its checksum before the next one passed"
        assert sums.result() == {
            name: tensor_checksum(tensor, "sums" if name == "c" else "crc32c") for name, tensor in tensors.items()
        }
        assert sums._thread.ended is None
    assert sums._thread.ended == {"cancel_futures": True}


def test_copies_on_the_host_are_of_their_own_shape_dtype_and_memory():
    matrix = torch.arange(6.0).reshape(2, 3)
    given = [matrix.T, torch.tensor(3, dtype=torch.int64), torch.empty(0, 2), matrix[0].to(torch.bfloat16)]
    found = to_host([*given, *given[:1]])
    for one, other in zip(found, [*given, *given[:1]], strict=True):
        assert (one.shape, one.dtype, one.tolist()) == (other.shape, other.dtype, other.tolist())
    matrix.zero_()
    assert found[0].tolist() == found[4].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert len({one.untyped_storage().data_ptr() for one in found if one.numel()}) == 4
    assert to_host([]) == []


@pytest.mark.parametrize(("dtype", "size"), [("float64", 8), ("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_a_digest_knows_its_size_in_bytes(dtype, size):
    (digest,) = digest_tensors({"a": torch.zeros(3, 5, dtype=getattr(torch, dtype))}).values()
    assert digest.size_bytes == 15 * size


def test_a_checksum_of_a_known_text():
    assert tensor_crc32c(torch.tensor(list(b"123456789"), dtype=torch.uint8)) == 0xE3069283


def test_a_checksum_follows_the_values_not_the_strides():
    matrix = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    assert tensor_crc32c(matrix.T) == tensor_crc32c(matrix.T.contiguous())
    assert tensor_crc32c(matrix.T) != tensor_crc32c(matrix)
    assert tensor_crc32c(torch.nn.Parameter(matrix)) == tensor_crc32c(matrix)


def test_a_flipped_sign_of_zero_is_another_tensor():
    assert tensor_crc32c(torch.tensor([0.0])) != tensor_crc32c(torch.tensor([-0.0]))


@pytest.mark.parametrize(
    ("sequences", "logprobs", "message"),
    [
        ([], [], "at least one sequence"),
        ([np.asarray([1, 2])], [], "1 sequences and 0 rows"),
        ([np.asarray([1])], [np.zeros(1)], r"T >= 2; found \[1\] and \[1\]"),
        ([np.asarray([1, 2])], [np.zeros(3)], r"found \[2\] and \[3\]"),
    ],
)
def test_a_canary_that_proves_nothing_is_refused(sequences, logprobs, message):
    with pytest.raises(ShapeError, match=message):
        Canary(sequences=sequences, logprobs=logprobs)
