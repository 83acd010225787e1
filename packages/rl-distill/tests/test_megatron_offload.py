"""Storages leave and come back, whoever looks into them."""

import torch

from rl_distill.megatron.offload import Offloaded


def test_what_is_kept_comes_back_and_what_is_dropped_is_zeros():
    kept, dropped = torch.arange(6.0), torch.ones(4)
    view = kept.view(2, 3)[1]

    offloaded = Offloaded([kept, view], [dropped])

    assert offloaded.num_bytes == 24 + 16
    assert kept.untyped_storage().nbytes() == dropped.untyped_storage().nbytes() == 0
    offloaded.restore()
    assert view.tolist() == [3.0, 4.0, 5.0]
    assert kept.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert dropped.tolist() == [0.0] * 4


def test_a_storage_that_is_kept_is_not_dropped():
    tensor = torch.ones(3)

    offloaded = Offloaded([tensor], [tensor])
    offloaded.restore()

    assert tensor.tolist() == [1.0, 1.0, 1.0]
