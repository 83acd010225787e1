"""Values sent to a role: arrays and tensors travel outside the pickle."""

import threading

import numpy as np
import pytest
import torch

from rl_core.cluster.processes.packing import Packed, pack, unpack


def test_arrays_are_not_copied_into_the_pickle():
    value = np.arange(100_000, dtype=np.int64)
    packed = pack({"rows": value})
    assert len(packed.body) < 1000
    assert packed.size_bytes == len(packed.body) + value.nbytes
    assert np.shares_memory(np.frombuffer(packed.buffers[0], dtype=np.int64), value)
    assert np.array_equal(unpack(packed)["rows"], value)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).reshape(2, 3),
        torch.ones(2, 3, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor(1.5),
        torch.empty(0, 4),
        torch.arange(12).reshape(3, 4).T,
        torch.ones(3, requires_grad=True),
        torch.complex(torch.ones(2), torch.ones(2)).conj(),
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_writeable", [True, False])
def test_tensors_arrive_as_they_were_and_can_be_written(tensor, is_writeable):
    packed = pack([tensor])
    kind = bytearray if is_writeable else bytes
    (found,) = unpack(Packed(packed.body, [kind(buffer) for buffer in packed.buffers]))
    assert type(found) is type(tensor)
    assert (found.dtype, found.shape, found.requires_grad) == (tensor.dtype, tensor.shape, tensor.requires_grad)
    assert torch.equal(found, tensor)
    if found.dtype is torch.float32 and not found.requires_grad:
        found += 1


def test_a_view_takes_its_own_bytes_along_and_not_its_tensor_s():
    packed = pack(torch.zeros(1_000_000)[:2])
    assert packed.size_bytes < 1000


def test_what_cannot_be_pickled_is_refused():
    with pytest.raises(TypeError, match="pickle"):
        pack(threading.Lock())
