"""Flash attention over packs, with kernels for the CPU, compared with the bucketed attention."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cpu_kernels import install_cpu_kernels
from torch.nn import attention

from rl_core.errors import SettingsError
from rl_distill.megatron import kernels
from rl_distill.megatron.attention import varlen
from rl_distill.megatron.attention.layout import PackedLayout, packed_layout
from rl_distill.megatron.attention.packed import PackedAttention
from rl_distill.megatron.attention.varlen import has_gpu_kernels, plan_blocks, varlen_attention
from rl_distill.megatron.kernels import chosen_kernels
from rl_distill.prefixes import prefix_forest

CPU, META = torch.device("cpu"), torch.device("meta")
HEAD_DIM = 8

ROWS = {
    "one segment": ["abcdefg"],
    "one token": ["a"],
    "many segments": ["abcdefgh", "b", "cd", "efghijkl", "m"],
    "one level": ["abcdefgh", "abcdei", "abcdejk", "l", "mno"],
    "two levels": ["abcdefgh", "abcdefij", "abckl", "mno", "mp", "mq"],
    "three levels": ["abcdefghi", "abcdefghj", "abcdefk", "abcl", "m", "abcdefghi"],
    "one token goes on": ["abc", "abcd", "x", "xy"],
}
DEPTHS = dict(zip(ROWS, (0, 0, 0, 1, 2, 3, 1), strict=True))


@pytest.fixture(autouse=True)
def _kernels():
    install_cpu_kernels()


class Config:
    kv_channels = HEAD_DIM
    context_parallel_size = 1
    kernels = kernels.PLAIN


def layouts(
    rows: list[str], *, heads: int, groups: int, rotated: int = HEAD_DIM, device: str = "cpu"
) -> list[PackedLayout]:
    """Return two layouts of the rows' forest: for buckets, and for flash attention."""
    forest = prefix_forest([np.array([ord(letter) for letter in row]) for row in rows], min_shared=1)
    positions = torch.arange(forest.num_computed, device=device) % 7
    frequencies = 1.0 / 100 ** (torch.arange(0, rotated, 2, device=device) / rotated)
    return [
        packed_layout(positions, forest.offsets, frequencies=frequencies, head_counts=counts, spans=forest.spans)
        for counts in ((heads, groups), None)
    ]


def random_qkv(
    num_tokens: int, *, heads: int, groups: int, head_dim: int = HEAD_DIM, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(num_tokens, 1, count, head_dim) for count in (heads, groups, groups)]
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(("heads", "groups", "rotated"), [(4, 2, 8), (4, 4, 4), (3, 1, 2)])
@pytest.mark.parametrize("rows", ROWS)
def test_equals_the_buckets(rows: str, heads: int, groups: int, rotated: int):
    buckets, blocks = layouts(ROWS[rows], heads=heads, groups=groups, rotated=rotated)
    qkv = random_qkv(blocks.cos.shape[0], heads=heads, groups=groups)
    weights = torch.randn(len(qkv[0]), 1, heads * HEAD_DIM, generator=torch.Generator().manual_seed(1))
    core = PackedAttention(Config(), layer_number=1)

    outs = [core(*qkv, packed_seq_params=layout) for layout in (blocks, buckets)]
    grads = [torch.autograd.grad((out * weights).sum(), qkv) for out in outs]

    assert (len(blocks.blocks), blocks.buckets, blocks.heads) == (1 + DEPTHS[rows], (), {})
    torch.testing.assert_close(*outs, rtol=0, atol=2e-6)
    for found, expected in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_forest_has_the_right_gradient():
    _, layout = layouts(ROWS["three levels"], heads=2, groups=1)
    qkv = [x.squeeze(1) for x in random_qkv(layout.cos.shape[0], heads=2, groups=1, dtype=torch.float64)]

    assert torch.autograd.gradcheck(lambda *x: varlen_attention(x, layout.blocks, scale=0.3), qkv, fast_mode=True)


def test_bfloat16_is_as_exact_as_the_buckets():
    buckets, blocks = layouts(ROWS["three levels"], heads=4, groups=2)
    qkv = random_qkv(blocks.cos.shape[0], heads=4, groups=2)
    rounded = [x.to(torch.bfloat16) for x in qkv]
    core = PackedAttention(Config(), layer_number=1)
    exact = core(*qkv, packed_seq_params=buckets)

    errors = [(core(*rounded, packed_seq_params=layout) - exact).abs().mean() for layout in (blocks, buckets)]

    assert errors[0] < 1.5 * errors[1]


def test_bfloat16_gradients_of_many_levels_are_summed_in_float32():
    """The last of 66 tokens attends to each earlier one in a separate call, with equal probabilities.

    Its query gets a gradient of 256 from its own token's call, 1 from each of 64 others, and 0 from one. In bfloat16,
    256 + 1 is 256.
    """
    num_tokens = 66
    keys = torch.tensor([0.0, *[1.0] * 64, 256.0])
    signs = torch.tensor([1.0, -1.0]).repeat(num_tokens // 2)  # the mean is 0, and so are the output and its part
    q, k, v, weights = torch.zeros(4, num_tokens, 1, HEAD_DIM, dtype=torch.bfloat16)
    k[:, 0, 1], v[:, 0, 0] = signs * keys, signs
    weights[-1, 0, 0] = num_tokens  # the inverse of each probability
    spans = tuple((token, token + 1, num_tokens) for token in range(num_tokens - 1))
    blocks = plan_blocks(np.arange(num_tokens + 1), spans, device=CPU)

    (grad,) = torch.autograd.grad((varlen_attention((q.requires_grad_(), k, v), blocks, scale=1.0) * weights).sum(), q)

    assert len(blocks) == num_tokens
    assert grad[-1, 0].tolist() == [0.0, 320.0] + [0.0] * (HEAD_DIM - 2)


def test_blocks_are_the_levels_of_the_forest():
    """The forest a (b (c, d), e), f (g), with the spans of a, b and f."""
    spans = ((0, 2, 9), (2, 4, 7), (9, 10, 12))
    own, first, second = plan_blocks(np.array([0, 2, 4, 5, 7, 9, 10, 12]), spans, device=CPU)

    assert (own.queries, own.keys, own.longest, own.is_causal) == (slice(0, 12), slice(0, 12), (2, 2), True)
    assert own.query_starts.tolist() == [0, 2, 4, 5, 7, 9, 10, 12]
    assert first.queries.tolist() == [2, 3, 4, 5, 6, 7, 8, 10, 11]
    assert first.keys.tolist() == [0, 1, 9]
    assert (first.query_starts.tolist(), first.key_starts.tolist()) == ([0, 7, 9], [0, 2, 3])
    assert (first.longest, first.is_causal) == ((7, 2), False)
    assert (second.queries, second.keys, second.longest) == (slice(4, 7), slice(2, 4), (3, 2))
    assert {block.query_starts.dtype for block in (own, first, second)} == {torch.int32}


def test_shapes_and_dtypes_on_the_meta_device():
    blocks = plan_blocks(np.array([0, 3, 5, 9]), ((0, 3, 9),), device=META)
    q, k, v = (
        x.detach().to(META, torch.bfloat16).squeeze(1).requires_grad_() for x in random_qkv(9, heads=4, groups=2)
    )

    out = varlen_attention((q, k, v), blocks, scale=0.3)
    out.sum().backward()

    assert (out.shape, out.dtype, out.device) == (q.shape, torch.bfloat16, META)
    for x in (q, k, v):
        assert x.grad is not None
        assert (x.grad.shape, x.grad.dtype, x.grad.device) == (x.shape, torch.bfloat16, META)


def visible(num_queries: int, num_keys: int) -> torch.Tensor:
    """Return a mask: the last query attends to all keys, and each query before it to one less."""
    return torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)


def test_cpu_kernels_align_a_causal_mask_to_the_end():
    q, k, v = (torch.randn(size, 2, HEAD_DIM) for size in (2 + 3, 4 + 3, 4 + 3))
    starts = [torch.tensor(column, dtype=torch.int32) for column in ([0, 2, 5], [0, 4, 7])]

    out, lse, _ = torch.ops.torch_attn._varlen_attn(q, k, v, *starts, 3, 4, is_causal=True, scale=0.5)

    for (a, b), (c, d) in zip([(0, 2), (2, 5)], [(0, 4), (4, 7)], strict=True):
        mask = visible(b - a, d - c)
        parts = [x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d])]
        expected = F.scaled_dot_product_attention(*parts, attn_mask=mask, scale=0.5)[0].transpose(0, 1)
        torch.testing.assert_close(out[a:b], expected)
        scores = (parts[0] @ parts[1].transpose(-1, -2) * 0.5).masked_fill(~mask, -torch.inf)
        torch.testing.assert_close(lse[:, a:b], scores.logsumexp(-1)[0])


def test_cpu_kernels_give_nothing_where_no_key_is_seen():
    q, k = torch.randn(3, 1, HEAD_DIM), torch.randn(1, 1, HEAD_DIM)
    starts = [torch.tensor([0, size], dtype=torch.int32) for size in (3, 1)]

    out, lse, state = torch.ops.torch_attn._varlen_attn(q, k, k, *starts, 3, 1, window_size=[-1, 0])
    grads = torch.ops.torch_attn._varlen_attn_backward(
        torch.ones_like(q), q, k, k, out, lse, *starts, 3, 1, True, state, window_size=[-1, 0]
    )

    torch.testing.assert_close(out, torch.cat([torch.zeros(2, 1, HEAD_DIM), k]))
    assert torch.isinf(lse).tolist() == [[True, True, False]]
    assert [bool(grad.isfinite().all()) for grad in grads] == [True, True, True]
    torch.testing.assert_close(grads[2], torch.ones_like(k))


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "wanted", "attention_by"),
    [
        (CPU, torch.float32, 8, "auto", "buckets"),
        (CPU, torch.float32, 20, "fused", "varlen"),
        (META, torch.bfloat16, 256, "auto", "varlen"),
        (META, torch.bfloat16, 256, "plain", "buckets"),
        (META, torch.bfloat16, 264, "fused", "buckets"),
        (META, torch.bfloat16, 20, "fused", "buckets"),
        (META, torch.float32, 64, "fused", "buckets"),
    ],
)
def test_flash_attention_is_taken_where_its_kernels_are(device, dtype, head_dim, wanted, attention_by):
    assert chosen_kernels(wanted, device=device, dtype=dtype, head_dim=head_dim).attention == attention_by


def test_a_cpu_without_kernels_refuses_flash_attention(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels, "has_cpu_kernels", lambda: False)

    with pytest.raises(SettingsError, match=r"needs a GPU.*Set optimizer\.kernels = .auto."):
        chosen_kernels("fused", device=CPU, dtype=torch.float32, head_dim=64)


def test_old_gpus_have_no_flash_attention(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))

    assert not has_gpu_kernels(torch.device("cuda", 0), dtype=torch.float16, head_dim=64)


class Handle:
    def remove(self) -> None: ...


def test_the_first_newer_kernels_that_agree_are_used(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(varlen, "_refused", set())
    asked = []

    def attend() -> list[torch.Tensor]:
        asked.append(attention.current_flash_attention_impl())
        if asked[-1] == "broken":
            raise RuntimeError("no kernel image")
        return [torch.tensor([1.0, 3.0 if asked[-1] == "wrong" else 2.0])]

    def missing() -> Handle:
        raise ImportError("flash_attn_interface")

    kinds = {"missing": missing, "broken": Handle, "wrong": Handle, "fast": Handle, "faster": Handle}
    for name, register in kinds.items():
        attention.register_flash_attention_impl(name, register_fn=register)
    try:
        assert varlen._first_that_agrees(("missing", "broken", "wrong"), attend) == "FA2"
        assert attention.current_flash_attention_impl() is None
        assert varlen._first_that_agrees(tuple(kinds), attend) == "fast"
        assert varlen._first_that_agrees(("fast",), attend) == "fast"
        assert attention.current_flash_attention_impl() == "fast"
        assert varlen._first_that_agrees((), attend) == "FA2"
    finally:
        if attention.current_flash_attention_impl() is not None:
            attention.restore_flash_attention_impl()
    assert asked == [None, "broken", "wrong", None, "fast", None, "fast"]


@pytest.fixture(params=["FA2", "FA3", "FA4"])
def gpu_kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Activate torch's own flash kernels, then newer ones where installed."""
    if request.param != "FA2":
        if request.param not in varlen._NEWER_KERNELS.get(torch.cuda.get_device_capability()[0], ()):
            pytest.skip(f"{request.param} has no kernels for this GPU")
        try:
            attention.activate_flash_attention_impl(request.param)
        except Exception as error:
            pytest.skip(f"{request.param} is not installed: {error}")
    yield request.param
    if attention.current_flash_attention_impl() is not None:
        attention.restore_flash_attention_impl()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("heads", "groups", "head_dim"), [(8, 2, 128), (4, 4, 64), (2, 1, 72)])
@pytest.mark.parametrize("repeats", [1, 50])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.usefixtures("gpu_kernels")
def test_a_gpu_equals_float32_on_the_cpu(rows: str, repeats: int, heads: int, groups: int, head_dim: int):
    longer = ["".join(letter * repeats for letter in row) for row in ROWS[rows]]
    (exact_layout, _), (_, layout) = (
        layouts(longer, heads=heads, groups=groups, rotated=head_dim, device=device) for device in ("cpu", "cuda")
    )
    shapes = {"heads": heads, "groups": groups, "head_dim": head_dim}
    rounded = [x.detach().bfloat16() for x in random_qkv(exact_layout.cos.shape[0], **shapes)]
    weights = torch.randn(len(rounded[0]), 1, heads * head_dim, generator=torch.Generator().manual_seed(1)).bfloat16()
    core = PackedAttention(Config(), layer_number=1, softmax_scale=head_dim**-0.5)

    columns = []
    for device, dtype, of_device in (("cuda", torch.bfloat16, layout), ("cpu", torch.float32, exact_layout)):
        qkv = [x.to(device, dtype).requires_grad_() for x in rounded]
        out = core(*qkv, packed_seq_params=of_device)
        grads = torch.autograd.grad((out * weights.to(device, dtype)).sum(), qkv)
        columns.append([x.detach().float().cpu() for x in (out, *grads)])

    assert [len(column) for column in columns] == [4, 4]
    for found, expected in zip(columns[0], columns[1], strict=True):
        assert (found - expected).norm() < 2e-2 * expected.norm().clamp_min(1.0)  # a lone token has no gradient


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_takes_the_newest_kernels_that_work():
    device = torch.device("cuda", torch.cuda.current_device())
    assert chosen_kernels("auto", device=device, dtype=torch.bfloat16, head_dim=128).attention == "varlen"
    assert chosen_kernels("auto", device=device, dtype=torch.float32, head_dim=128).attention == "buckets"
    try:
        chosen = varlen.use_newest_kernels(device, dtype=torch.bfloat16, head_dim=128)
        assert chosen == (attention.current_flash_attention_impl() or "FA2")
        qkv = [torch.ones(3, 2, 128, dtype=torch.bfloat16, device=device) for _ in range(3)]
        out = varlen_attention(qkv, plan_blocks(np.array([0, 1, 3]), (), device=device), scale=1.0)
        torch.testing.assert_close(out, qkv[2])
    finally:
        if attention.current_flash_attention_impl() is not None:
            attention.restore_flash_attention_impl()
