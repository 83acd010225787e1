"""Packed attention compared with one trajectory at a time."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import rl_distill.megatron.attention.layout as layout_module
import rl_distill.megatron.attention.packed as attention
from rl_core.data.ragged import offsets_of
from rl_core.errors import ShapeError
from rl_distill.megatron.attention.layout import packed_layout, plan_buckets
from rl_distill.megatron.kernels import PLAIN

HEADS, GROUPS, HEAD_DIM, BASE = 4, 2, 8, 1e4


class Config:
    kv_channels = HEAD_DIM
    context_parallel_size = 1
    kernels = PLAIN


def core_attention() -> attention.PackedAttention:
    return attention.PackedAttention(Config(), layer_number=1)


def layout_of(lengths: list[int]) -> layout_module.PackedLayout:
    positions = torch.cat([torch.arange(length) for length in lengths])
    frequencies = 1.0 / BASE ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
    return packed_layout(positions, offsets_of(lengths), frequencies=frequencies, head_counts=(HEADS, GROUPS))


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotate [L, heads, head_dim] like transformers."""
    inverse = 1.0 / BASE ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
    angles = torch.arange(len(x)).float()[:, None] * inverse
    angles = torch.cat((angles, angles), -1)[:, None]
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()


def one_by_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    outs = []
    for qs, ks, vs in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        heads = [x.transpose(0, 1)[None] for x in (rotate(qs[:, 0]), rotate(ks[:, 0]), vs[:, 0])]
        out = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        outs.append(out[0].transpose(0, 1).flatten(1)[:, None])
    return torch.cat(outs)


def random_qkv(num_tokens: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(num_tokens, 1, heads, HEAD_DIM, generator=generator, dtype=dtype).requires_grad_()
        for heads in (HEADS, GROUPS, GROUPS)
    ]


@pytest.mark.parametrize("matmul_length", [0, 6, 256], ids=["fused", "mixed", "matmul"])
@pytest.mark.parametrize("slack", [0.0, 0.5])
def test_packed_attention_equals_one_by_one(matmul_length: int, slack: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention, "MATMUL_LENGTH", matmul_length)
    monkeypatch.setattr(layout_module, "_SLACK", slack)
    lengths = [5, 1, 12, 5, 7, 1, 9, 3]
    qkv = random_qkv(sum(lengths))
    weights = torch.randn(sum(lengths), 1, HEADS * HEAD_DIM, generator=torch.Generator().manual_seed(1))

    found = core_attention()(*qkv, packed_seq_params=layout_of(lengths))
    found_grads = torch.autograd.grad((found * weights).sum(), qkv)
    expected = one_by_one(*qkv, lengths)
    expected_grads = torch.autograd.grad((expected * weights).sum(), qkv)

    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
    for found_grad, expected_grad in zip(found_grads, expected_grads, strict=True):
        torch.testing.assert_close(found_grad, expected_grad, rtol=0, atol=5e-6)


def test_matmul_attention_has_the_right_gradient():
    buckets = ((1, 3), (2, 2))
    qkv = [
        torch.randn(7 * heads, HEAD_DIM, dtype=torch.float64, requires_grad=True) for heads in (HEADS, GROUPS, GROUPS)
    ]

    assert torch.autograd.gradcheck(
        lambda q, k, v: attention._MatmulAttention.apply(q, k, v, buckets, GROUPS, 0.3), qkv
    )


def test_other_packed_formats_are_refused():
    with pytest.raises(ShapeError, match="PackedLayout"):
        core_attention()(*random_qkv(3))


def test_buckets_hold_each_trajectory_once_and_pad_little():
    lengths = np.array([40, 1, 39, 20, 1, 38, 20])

    buckets = plan_buckets(lengths)

    assert [rows.tolist() for rows in buckets] == [[0, 2, 5], [3, 6], [1, 4]]
    assert sum(len(rows) * lengths[rows].max() for rows in buckets) <= lengths.sum() * 1.05


def test_layout_places_lead_there_and_back():
    layout = layout_of([4, 2, 4, 3])
    rows = torch.arange(13 * HEADS)

    index = layout.heads[HEADS]

    assert torch.equal(rows[index.to_buckets][index.from_buckets], rows)
    assert len(index.to_buckets) - len(index.padding) == 13 * HEADS
