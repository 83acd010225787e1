"""Shared prefixes of a prompt's rows, and attention over them."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.data import Batch, Ragged, RowKey, offsets_of
from rl_distill.megatron.attention.layout import PackedLayout, packed_layout
from rl_distill.megatron.attention.prefixes import prefix_attention
from rl_distill.packing import plan_batch
from rl_distill.prefixes import PrefixForest, batch_forest, computed_units, prefix_forest

HEADS, GROUPS, HEAD_DIM = 4, 2, 8


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int64)


def batch_of(rows, prompts, **columns) -> Batch:
    counts: dict[str, int] = {}
    keys = []
    for prompt in prompts:
        keys.append(RowKey(prompt, counts.setdefault(prompt, 0), 0))
        counts[prompt] += 1
    offsets = offsets_of([len(row) for row in rows])
    values = np.concatenate(rows).astype(np.int32)
    return Batch(keys, {"input_ids": Ragged(values, offsets), **{n: Ragged(v, offsets) for n, v in columns.items()}})


def check(rows, forest: PrefixForest) -> np.ndarray:
    """Check that every token is computed after the preceding tokens of its row; return the computed ids."""
    computed = np.full(forest.num_computed, -1)
    computed[forest.places] = np.concatenate(rows)
    np.testing.assert_array_equal(computed[forest.places], np.concatenate(rows))
    assert (computed >= 0).all()
    segment = np.repeat(np.arange(len(forest.parent)), np.diff(forest.offsets))
    for path in np.split(forest.places, offsets_of([len(row) for row in rows])[1:-1]):
        segments = segment[path]
        assert (np.diff(path) > 0).all()
        for before, after in itertools.pairwise(path):
            same = segment[before] == segment[after]
            assert after == before + 1 if same else forest.parent[segment[after]] == segment[before]
        if len(segments):
            assert forest.parent[segments[0]] == -1
    for number, above in enumerate(forest.parent):
        assert above < number < forest.stop[number]
        assert above < 0 or forest.stop[number] <= forest.stop[above]
    return computed


def test_a_prompt_is_computed_once():
    rows = [ids(1, 2, 3, 4), ids(1, 2, 3, 5, 6), ids(7)]

    forest = prefix_forest(rows, min_shared=2)

    np.testing.assert_array_equal(check(rows, forest), [1, 2, 3, 4, 5, 6, 7])
    np.testing.assert_array_equal(forest.parent, [-1, 0, 0, -1])
    np.testing.assert_array_equal(forest.places, [0, 1, 2, 3, 0, 1, 2, 4, 5, 6])
    assert forest.spans == ((0, 3, 6),)


def test_a_shorter_stretch_is_not_shared():
    rows = [ids(1, 2, 3, 4), ids(1, 2, 3, 5)]

    assert prefix_forest(rows, min_shared=4).spans == ()


def test_turns_and_forks_make_a_tree_of_three_levels():
    prompt, turn = list(range(10)), list(range(20, 30))
    rows = [ids(*prompt, *turn, 1), ids(*prompt, *turn, 2), ids(*prompt, 3), ids(*prompt, *turn)]

    forest = prefix_forest(rows, min_shared=4)

    check(rows, forest)
    assert forest.num_computed == 23
    assert forest.spans == ((0, 10, 23), (11, 21, 23))


def num_computed(rows, least: int, depth: int = 0) -> int:
    """Count computed tokens: rows that agree on the next `least` tokens compute what they have in common once."""
    alike: dict[tuple[int, ...], list[np.ndarray]] = {}
    total = 0
    for row in rows:
        if len(row) - depth < least:
            total += len(row) - depth  # too short to share
        else:
            alike.setdefault(tuple(row[depth : depth + least]), []).append(row)
    for group in alike.values():
        end = depth + least
        while all(len(row) > end and row[end] == group[0][end] for row in group):
            end += 1
        end = len(group[0]) if len(group) == 1 else end
        total += end - depth + (num_computed(group, least, end) if len(group) > 1 else 0)
    return total


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=6),
    least=st.integers(1, 5),
    prompts=st.lists(st.sampled_from("ab"), min_size=6, max_size=6),
)
def test_any_rows_compute_once_what_they_share(rows, least, prompts):
    arrays, prompts = [ids(*row) for row in rows], prompts[: len(rows)]

    forest = prefix_forest(arrays, min_shared=least)
    of_batch = batch_forest(batch_of(arrays, prompts), min_shared=least)

    check(arrays, forest)
    assert forest.num_computed == num_computed(arrays, least)
    assert forest.is_shared == (forest.num_computed < sum(map(len, arrays)))
    lengths = np.diff(forest.offsets)
    inner = forest.stop > np.arange(len(forest.stop)) + 1
    assert (lengths[inner] >= least).all()
    segments = np.flatnonzero(inner).tolist()
    stops = [max([s, *(t for t in range(s + 1, len(inner)) if is_below(forest, t, s))]) + 1 for s in segments]
    expected = [
        (forest.offsets[s], forest.offsets[s + 1], forest.offsets[stop])
        for s, stop in zip(segments, stops, strict=True)
    ]
    assert forest.spans == tuple(map(tuple, expected))

    check(arrays, of_batch)
    groups = {prompt: [row for row, of in zip(arrays, prompts, strict=True) if of == prompt] for prompt in prompts}
    assert of_batch.num_computed == sum(num_computed(group, least) for group in groups.values())
    if not of_batch.is_shared:
        np.testing.assert_array_equal(of_batch.places, np.arange(len(of_batch.places)))
        np.testing.assert_array_equal(np.diff(of_batch.offsets), [len(row) for row in arrays])


def is_below(forest: PrefixForest, segment: int, above: int) -> bool:
    """Whether a segment continues another one."""
    while segment > above:
        segment = int(forest.parent[segment])
    return segment == above


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=9),
    prompts=st.lists(st.sampled_from("abc"), min_size=9, max_size=9),
    least=st.integers(0, 3),
    max_tokens=st.integers(1, 20),
    num_ranks=st.integers(1, 3),
)
def test_units_are_halved_until_they_fit(rows, prompts, least, max_tokens, num_ranks):
    arrays, prompts = [ids(*row) for row in rows], prompts[: len(rows)]

    units, sizes = computed_units(
        batch_of(arrays, prompts), min_shared=least, max_tokens=max_tokens, num_ranks=num_ranks
    )

    def halved(unit: list[int], limit: float) -> list[list[int]]:
        size = num_computed([arrays[row] for row in unit], least)
        if size == sum(len(arrays[row]) for row in unit):
            return [[row] for row in unit]
        half = -(-len(unit) // 2)
        return [unit] if size <= limit else halved(unit[:half], limit) + halved(unit[half:], limit)

    groups = [[row for row, of in enumerate(prompts) if of == prompt] for prompt in dict.fromkeys(prompts)]
    expected = [[row] for row in range(len(rows))]
    if least:
        expected = [part for group in groups for part in halved(group, max_tokens)]
        share = -(-sum(num_computed([arrays[row] for row in unit], least) for unit in expected) // num_ranks)
        expected = [part for unit in expected for part in halved(unit, min(share, max_tokens))]
    assert [unit.tolist() for unit in units] == sorted(expected)
    computed = [num_computed([arrays[row] for row in unit], least or 99) for unit in sorted(expected)]
    assert sizes.tolist() == computed


def test_a_thousand_rows_that_each_go_on_from_the_last():
    rows = [np.arange(1, 2 + number, dtype=np.int64) for number in range(1000)]

    assert prefix_forest(rows, min_shared=1).num_computed == 1000


def test_rows_that_share_nothing_stay_in_their_order():
    forest = batch_forest(batch_of([ids(5, 6), ids(1, 2, 3)], ["a", "a"]), min_shared=1)

    assert not forest.is_shared
    np.testing.assert_array_equal(forest.places, np.arange(5))


def test_equal_rows_are_computed_once():
    forest = batch_forest(batch_of([ids(5, 6), ids(5, 6)], ["a", "a"]), min_shared=1)

    assert forest.is_shared
    assert forest.spans == ()
    np.testing.assert_array_equal(forest.places, [0, 1, 0, 1])


def test_prompts_share_nothing_with_one_another():
    batch = batch_of([ids(1, 2, 3), ids(1, 2, 4), ids(1, 2, 5)], ["a", "b", "a"])

    forest = batch_forest(batch, min_shared=2)

    check([ids(1, 2, 3), ids(1, 2, 4), ids(1, 2, 5)], forest)
    assert forest.num_computed == 7
    assert batch_forest(batch, min_shared=0).num_computed == 9


def test_other_experts_are_computed_apart():
    experts = np.zeros((6, 2, 1), dtype=np.int16)
    experts[4] = 1  # the second token of the second row
    batch = batch_of([ids(1, 2, 3), ids(1, 2, 4)], ["a", "a"], routed_experts=experts)

    forest = batch_forest(batch, min_shared=1)

    np.testing.assert_array_equal(forest.places, [0, 1, 2, 0, 3, 4])


def test_units_are_groups_halved_where_they_are_too_large():
    rows = [np.concatenate([np.arange(10), ids(100 + number)]) for number in range(8)] + [ids(1, 2)]
    batch = batch_of(rows, ["a"] * 8 + ["b"])

    units, sizes = computed_units(batch, min_shared=4, max_tokens=100)
    assert [list(unit) for unit in units] == [list(range(8)), [8]]
    assert list(sizes) == [18, 2]
    units, sizes = computed_units(batch, min_shared=4, max_tokens=14)
    assert [list(unit) for unit in units] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert list(sizes) == [14, 14, 2]


def test_a_group_is_spread_over_ranks():
    rows = [np.concatenate([np.arange(10), ids(100 + number)]) for number in range(8)]

    plans = plan_batch(batch_of(rows, ["a"] * 8), max_tokens=100, num_ranks=2, min_shared=4)

    assert [[len(part) for part in plan] for plan in plans] == [[4], [4]]


def dense(qkv, forest: PrefixForest, scale: float) -> torch.Tensor:
    """Compute attention with a [T, T] mask of the tokens that each computed token attends to."""
    segment = np.repeat(np.arange(len(forest.parent)), np.diff(forest.offsets))
    sees = torch.zeros(forest.num_computed, forest.num_computed, dtype=torch.bool)
    for token, number in enumerate(segment):
        sees[token, forest.offsets[number] : token + 1] = True
        while (number := forest.parent[number]) >= 0:
            sees[token, forest.offsets[number] : forest.offsets[number + 1]] = True
    q, k, v = qkv
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    return torch.einsum("hqk,khd->qhd", torch.softmax(scores.masked_fill(~sees, -torch.inf), -1), v)


def forest_and_layout(rows, *, least: int) -> tuple[PrefixForest, PackedLayout]:
    forest = prefix_forest(rows, min_shared=least)
    positions = torch.zeros(forest.num_computed, dtype=torch.int64)
    layout = packed_layout(
        positions, forest.offsets, frequencies=torch.ones(4), head_counts=(HEADS, GROUPS), spans=forest.spans
    )
    return forest, layout


def tree(rng: np.random.Generator, *, longest: int) -> list[np.ndarray]:
    """Return rows of two prompts with a shared trunk: some continue it, one ends there, and two rows are equal."""
    draw = lambda size: rng.integers(0, 99, size)
    prompt = draw(longest // 2)
    trunk = np.concatenate([prompt, draw(9)])
    rows = [np.concatenate([prompt, draw(n)]) for n in (1, 17, longest)]
    rows += [np.concatenate([trunk, draw(n)]) for n in (1, 6, longest // 2)]
    return [*rows, draw(12), trunk, rows[1]]


@pytest.mark.parametrize("matmul_length", [0, 20, 1000], ids=["fused", "mixed", "matmul"])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-9), (torch.float32, 5e-6), (torch.bfloat16, 2e-2)])
def test_attention_over_a_forest_is_that_of_a_mask(matmul_length, dtype, atol):
    forest, layout = forest_and_layout(tree(np.random.default_rng(0), longest=40), least=4)
    generator = torch.Generator().manual_seed(0)
    shapes = [(forest.num_computed, heads, HEAD_DIM) for heads in (HEADS, GROUPS, GROUPS)]
    qkv = [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]
    weights = torch.randn(shapes[0], generator=generator, dtype=dtype)

    found = prefix_attention(tuple(qkv), layout, scale=0.3, matmul_length=matmul_length)
    grads = torch.autograd.grad((found * weights).sum(), qkv)
    expected = dense([x.double() for x in qkv], forest, 0.3)
    expected_grads = torch.autograd.grad((expected * weights).sum(), qkv)

    assert len(forest.spans) >= 2
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=atol)
    for one, other in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2 if dtype == torch.bfloat16 else 0, atol=10 * atol)


@pytest.mark.parametrize("matmul_length", [0, 1000], ids=["fused", "matmul"])
def test_attention_over_a_forest_has_the_right_gradient(matmul_length):
    rows = [ids(1, 2, 3, 4, 5), ids(1, 2, 3, 4, 6, 7), ids(1, 2, 8), ids(1, 2, 3, 4, 6, 7, 9)]
    forest, layout = forest_and_layout(rows, least=1)
    qkv = [
        torch.randn(forest.num_computed, heads, 4, dtype=torch.float64).requires_grad_()
        for heads in (HEADS, GROUPS, GROUPS)
    ]

    assert len(forest.spans) == 3
    assert torch.autograd.gradcheck(lambda *x: prefix_attention(x, layout, scale=0.3, matmul_length=matmul_length), qkv)
