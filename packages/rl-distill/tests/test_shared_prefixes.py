"""A learner that computes shared prefixes once, compared with one that computes each row separately."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cpu_kernels import install_cpu_kernels
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import rounding_bound

from rl_core.data import Batch, Ragged, RowKey, offsets_of
from rl_distill.learner import LearnerOptions, MetricSums, MicroBatch
from rl_distill.megatron.learner import MegatronLearner, MegatronTeacherModel

OPTIONS = LearnerOptions(learning_rate=1e-30, clip_grad=0.0, micro_batch_tokens=60, num_threads=1)
KINDS = {
    "dense": ("Qwen3ForCausalLM", {}),
    "recomputed": ("LlamaForCausalLM", {"recompute": "full"}),
    "mixture": ("Qwen3MoeForCausalLM", {}),
    "partly rotated": ("Glm4MoeForCausalLM", {}),
    "flash attention": ("Glm4MoeForCausalLM", {"kernels": "fused", "recompute": "full"}),
}


def sequence_loss(
    logprobs: torch.Tensor, entropy: torch.Tensor | None, micro: MicroBatch
) -> tuple[torch.Tensor, MetricSums]:
    """Return a loss that couples the tokens of a row, but not those of different rows."""
    weights = micro.columns["loss_weights"]
    rows = torch.repeat_interleave(torch.arange(len(micro.offsets) - 1), micro.offsets.diff())
    of_row = torch.zeros(len(micro.offsets) - 1).index_add(0, rows, logprobs * weights)
    loss = of_row.exp().sum() + (logprobs * weights).sum()
    return loss if entropy is None else loss - 0.1 * (entropy * weights).sum(), {}


def size_of_loss(batch: Batch, tokens: Mapping[str, Ragged]) -> float:
    """Return the sum of the absolute values that `sequence_loss` adds up."""
    weights = batch.ragged("loss_weights")
    weighted = Ragged(tokens["policy_logprobs"].values * weights.values, weights.offsets)
    of_rows = sum(float(np.exp(row.sum())) for row in weighted)
    return of_rows + float(
        np.abs(weighted.values).sum() + np.abs(0.1 * tokens["entropy"].values * weights.values).sum()
    )


class Pair:
    """Two learners with the same weights; a learning rate of 1e-30 leaves them unchanged."""

    def __init__(self, policy: Path, **changes: str) -> None:
        options = replace(OPTIONS, **changes)
        install_cpu_kernels()
        self.shared = MegatronLearner(policy, replace(options, shared_prefix_tokens=1))
        self.apart = MegatronLearner(policy, replace(options, shared_prefix_tokens=0, kernels="plain"))

    def check(self, batch: Batch) -> int:
        """Check that both learners agree; return the number of computed tokens."""
        scores = [learner.logprobs(batch, temperature=0.7).values for learner in (self.shared, self.apart)]
        np.testing.assert_allclose(*scores, rtol=0, atol=5e-6)
        steps, grads = [], []
        for learner in (self.shared, self.apart):
            steps.append(learner.train_step(batch, sequence_loss, with_entropy=True, with_tokens=True))
            (chunk,) = learner._ranks._host._models["policy"]._chunks
            grads.append({name: p.main_grad.clone() for name, p in chunk.named_parameters() if p.requires_grad})
        found, expected = steps
        bound = rounding_bound(size_of_loss(batch, expected.tokens))
        assert found.loss == pytest.approx(expected.loss, rel=0, abs=bound)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=rounding_bound(1.0))
        for name, column in expected.tokens.items():
            np.testing.assert_allclose(found.tokens[name].values, column.values, rtol=0, atol=5e-6, err_msg=name)
        largest = max(float(grad.norm()) for grad in grads[1].values())
        for name, grad in grads[1].items():
            difference = float((grads[0][name] - grad).norm())
            assert difference <= 1e-5 * float(grad.norm()) + 1e-7 * largest, name
        return found.computed_tokens


@pytest.fixture(scope="module", params=KINDS)
def pair(
    request: pytest.FixtureRequest, policy_writer: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    architecture, changes = KINDS[request.param]
    with torch.compiler.set_stance("force_eager"):  # like the fixture `uncompiled`
        yield Pair(policy_writer(tmp_path_factory.mktemp("pair"), architecture), **changes)


def batch_of(rows: list[list[int]], prompts: list[int], seed: int) -> Batch:
    random = np.random.default_rng(seed)
    offsets = offsets_of([len(row) for row in rows])
    mask = random.random(int(offsets[-1])) < 0.6
    mask[offsets[:-1]] = False
    mask[-1] = len(rows[-1]) > 1
    weights = (mask * random.uniform(-1, 2, len(mask)) / max(1, mask.sum())).astype(np.float32)
    columns = {"input_ids": np.concatenate(rows).astype(np.int32), "loss_mask": mask, "loss_weights": weights}
    keys = [RowKey(f"p{prompt}", number, 0) for number, prompt in enumerate(prompts)]
    return Batch(keys, {name: Ragged(values, offsets) for name, values in columns.items()})


ROWS = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=20), st.integers(0, 2)), min_size=1, max_size=9
)


@settings(max_examples=12, deadline=None)
@given(rows=ROWS, seed=st.integers(0, 99))
def test_any_rows_agree(pair: Pair, rows: list[tuple[list[int], int]], seed: int):
    """Duplicates, rows with common beginnings, rows of one token, and different loss masks on shared tokens."""
    rows = [*rows, ([1, 2, 1], 0)]
    batch = batch_of([row for row, _ in rows], [prompt for _, prompt in rows], seed)

    pair.check(batch)


def test_a_group_saves_its_prompt(pair: Pair, make_batch: Callable[..., Batch]):
    prompt = list(range(1, 25))
    batch = batch_of([[*prompt, 30 + number, 7, number] for number in range(4)], [0] * 4, seed=1)

    assert pair.check(batch) == 24 + 4 * 3


def test_a_row_does_not_depend_on_those_beside_it(pair: Pair):
    rows = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7], [1, 2, 9, 9], [1, 2, 3, 4, 5, 6, 8, 8]]
    together = pair.shared.logprobs(batch_of(rows, [0] * 4, seed=0))
    for number, row in enumerate(rows):
        alone = pair.shared.logprobs(batch_of([row], [0], seed=0)).values
        np.testing.assert_allclose(together[number], alone, rtol=0, atol=5e-6)


def test_a_teacher_says_the_same(tied_policy: Path, make_batch: Callable[..., Batch]):
    batch = make_batch((12, 7, 12, 9, 3, 12), num_prompts=2)
    shared, apart = (
        MegatronTeacherModel(tied_policy, replace(OPTIONS, shared_prefix_tokens=least)) for least in (1, 0)
    )

    found, expected = (teacher.score(batch, top_k=3, temperature=0.9, has_hidden=True) for teacher in (shared, apart))

    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.values, other.values, rtol=0, atol=2e-5)
