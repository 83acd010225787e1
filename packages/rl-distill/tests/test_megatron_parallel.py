"""Every parallel layout compared with one rank: loss and gradient norm of three steps, weights and checkpoints.

The layouts compute shared prefixes once; the single rank computes each row separately.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from equal_tensors import different_tensors
from offered_weights import OfferedTo, assert_offered
from rounding import rounding_bound

from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.weights.broadcast import SenderOptions
from rl_distill.architecture.memory import rank_memory
from rl_distill.architecture.policy_config import parse_policy_config, read_policy_config
from rl_distill.learner import MetricSums, MicroBatch, StepResult
from rl_distill.megatron.convert import Shard
from rl_distill.megatron.host import RankHost
from rl_distill.megatron.learner import MegatronCritic, MegatronLearner, MegatronReference
from rl_distill.megatron.ranks import LearnerRanks
from rl_distill.megatron.setup import VALUE_HEAD, chunk_blocks
from rl_distill.options import KernelChoice, LearnerOptions, ParallelOptions

MakeBatch = Callable[..., Batch]
Started = Any  # `Started` of conftest.py
LENGTHS = (7, 3, 12, 3, 5, 1, 9, 12, 4, 6)
OPTIONS = LearnerOptions(learning_rate=1e-3, weight_decay=0.1, micro_batch_tokens=24, num_threads=1, eps=1e-6)
SHARING, NOT_SHARING = replace(OPTIONS, shared_prefix_tokens=1), replace(OPTIONS, shared_prefix_tokens=0)
NUM_TOKEN_IDS = 64
NUM_PROMPTS = {1: 2, 2: None, 3: 3}
"""Size of each step's batch."""


TWO = {
    "TP2": ParallelOptions(ranks=2, tensor=2),
    "PP2": ParallelOptions(ranks=2, pipeline=2),
    "PP2 interleaved": ParallelOptions(ranks=2, pipeline=2, virtual_pipeline=2),
    "DP2 distributed optimizer": ParallelOptions(ranks=2, distributed_optimizer=True),
    "CP2": ParallelOptions(ranks=2, context=2),
    "TP2+SP": ParallelOptions(ranks=2, tensor=2, sequence=True),
}
FOUR = {
    "TP2 PP2": ParallelOptions(ranks=4, tensor=2, pipeline=2),
    "TP2+SP CP2": ParallelOptions(ranks=4, tensor=2, sequence=True, context=2),
    "PP2 CP2": ParallelOptions(ranks=4, pipeline=2, context=2),
    "TP2 DP2 distributed optimizer": ParallelOptions(ranks=4, tensor=2, distributed_optimizer=True),
    "PP2 interleaved DP2": ParallelOptions(ranks=4, pipeline=2, virtual_pipeline=2),
    "CP4": ParallelOptions(ranks=4, context=4),
}
TWO_OF_EXPERTS = {
    "EP2": ParallelOptions(ranks=2, expert=2),
    "EP2 distributed optimizer": ParallelOptions(ranks=2, expert=2, distributed_optimizer=True),
    "PP2": ParallelOptions(ranks=2, pipeline=2),
    "CP2": ParallelOptions(ranks=2, context=2),
    "TP2+SP, experts whole": ParallelOptions(ranks=2, tensor=2, sequence=True, expert_tensor=1),
}
FOUR_OF_EXPERTS = {
    "TP2 EP2": ParallelOptions(ranks=4, tensor=2, sequence=True, expert=2),
    "TP2 EP2, experts whole": ParallelOptions(ranks=4, tensor=2, sequence=True, expert=2, expert_tensor=1),
    "PP2 EP2": ParallelOptions(ranks=4, pipeline=2, expert=2),
}
FOUR_THAT_REPLAY = {
    "EP2": ParallelOptions(ranks=4, expert=2),
    "TP2 EP2": FOUR_OF_EXPERTS["TP2 EP2"],
    "PP2 EP2": FOUR_OF_EXPERTS["PP2 EP2"],
    "CP2 EP2": ParallelOptions(ranks=4, context=2, expert=2),
}
OF_EXPERTS = {**TWO, **TWO_OF_EXPERTS, **FOUR_OF_EXPERTS}
EXPERT_CASES = [
    *[("Qwen3MoeForCausalLM", layout) for layout in (*TWO_OF_EXPERTS, *FOUR_OF_EXPERTS)],
    ("Glm4MoeForCausalLM", "TP2 EP2"),
    *[
        pytest.param("Glm4MoeForCausalLM", layout, marks=pytest.mark.soak)
        for layout in (
            "PP2 interleaved",
            "TP2+SP",
            "CP2",
            "EP2 distributed optimizer",
            "TP2 EP2, experts whole",
            "PP2 EP2",
        )
    ],
]
"""GLM's first stage is half dense; its shared experts are split like attention."""


def policy_gradient(
    logprobs: torch.Tensor, entropy: torch.Tensor | None, micro: MicroBatch
) -> tuple[torch.Tensor, MetricSums]:
    weights, mask = micro.columns["loss_weights"], micro.columns["loss_mask"]
    loss = -(logprobs.exp() * micro.columns["advantages"] * weights).sum()
    if entropy is not None:
        loss = loss - 0.1 * (entropy * weights).sum()
    return loss, {"nll": (-(logprobs.detach() * mask).sum(), mask.sum())}


def squared_error(values: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, MetricSums]:
    return ((values - micro.columns["advantages"]).square() * micro.columns["loss_weights"]).sum(), {}


def size_of_loss(learner: MegatronLearner, batch: Batch) -> float:
    """Return the sum of the absolute values that `policy_gradient` adds up; most of them cancel in the loss."""
    probabilities = np.exp(learner.logprobs(batch).values)
    columns = (batch.ragged(name).values for name in ("advantages", "loss_weights"))
    return float(np.abs(np.prod([probabilities, *columns], axis=0)).sum())


@pytest.fixture(scope="session")
def four_layers(policy_writer: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return policy_writer(tmp_path_factory.mktemp("four-layers"), num_hidden_layers=4)


@pytest.fixture(scope="session")
def four_layers_untied(policy_writer: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {"num_hidden_layers": 4, "tie_word_embeddings": False, "vocab_size": 41}
    return policy_writer(tmp_path_factory.mktemp("four-layers-untied"), **changes)


def three_steps(learner: MegatronLearner, make_batch: MakeBatch) -> list[StepResult]:
    return [
        learner.train_step(
            make_batch(LENGTHS, seed=step, num_prompts=NUM_PROMPTS[step]),
            policy_gradient,
            temperature=0.8,
            with_entropy=True,
            with_tokens=True,
        )
        for step in (1, 2, 3)
    ]


class OneRank(NamedTuple):
    """What a single rank computes, each row separately.

    Attributes:
        num_parameters: Of the policy.
        before: Weights before the steps.
        logprobs: Of the tokens of a batch, by its number of prompts.
        steps: Results of `three_steps`.
        after: Weights after the steps.
    """

    num_parameters: int
    before: Mapping[str, torch.Tensor]
    logprobs: Mapping[int | None, np.ndarray]
    steps: Sequence[StepResult]
    after: Mapping[str, torch.Tensor]


@cache
def on_one_rank(policy: Path, make_batch: MakeBatch) -> OneRank:
    """Train the policy on one rank, once for all layouts that are compared with it."""
    learner = MegatronLearner(policy, NOT_SHARING)
    return OneRank(
        num_parameters=learner.num_parameters,
        before={name: tensor.clone() for name, tensor in learner.export_weights().items()},
        logprobs={number: learner.logprobs(make_batch(LENGTHS, num_prompts=number)).values for number in (None, 3)},
        steps=three_steps(learner, make_batch),
        after={name: tensor.clone() for name, tensor in learner.export_weights().items()},
    )


def check_parity(
    started: Started, parallel: ParallelOptions, policy: Path, make_batch: MakeBatch, *, kernels: KernelChoice = "plain"
) -> None:
    """Check logprobs, loss and gradient norm of three steps, metrics and weights against those of one rank."""
    alone = on_one_rank(policy, make_batch)
    ranks = started.in_layout(parallel) if kernels == "plain" else started.with_cpu_kernels(parallel)
    together = MegatronLearner(policy, replace(SHARING, kernels=kernels), ranks=ranks)
    assert together.num_parameters == alone.num_parameters
    before = together.export_weights()
    for name, tensor in alone.before.items():
        assert torch.equal(before[name], tensor), name
    for num_prompts, logprobs in alone.logprobs.items():
        found = together.logprobs(make_batch(LENGTHS, num_prompts=num_prompts)).values
        np.testing.assert_allclose(found, logprobs, rtol=0, atol=5e-6)
    steps = zip(three_steps(together, make_batch), alone.steps, (rounding_bound(1.0), 1e-5, 1e-5), strict=True)
    for found, expected, tolerance in steps:
        assert found.loss == pytest.approx(expected.loss, rel=tolerance, abs=tolerance)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=tolerance)
        assert found.metrics == pytest.approx(expected.metrics, rel=tolerance)
        assert found.step == expected.step
        is_shared = found.step != 2
        assert (found.computed_tokens < sum(LENGTHS)) is is_shared
        assert expected.computed_tokens == sum(LENGTHS)
        assert found.tokens.keys() == expected.tokens.keys() == {"policy_logprobs", "entropy"}
        for name, column in expected.tokens.items():
            np.testing.assert_allclose(found.tokens[name].values, column.values, rtol=0, atol=2e-5)
    after = together.export_weights()
    for name, tensor in alone.after.items():
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=2e-5)
    check_offer(together)
    check_memory(ranks, parallel, policy)


def check_offer(learner: MegatronLearner) -> None:
    """Check that the weights sent directly by the ranks equal the exported ones."""
    engine, update = OfferedTo(), learner.offer_weights(SenderOptions(bucket_bytes=5000), version=1)
    try:
        assert_offered(engine.take(update)[0], update, learner.export_weights())
    finally:
        engine.close()


def check_memory(
    ranks: LearnerRanks, parallel: ParallelOptions, policy: Path, *, model: str = "policy", dtype: str = "float32"
) -> None:
    """Check each rank's memory after a step against the plan, to the byte.

    A distributed optimizer has tolerances: it pads its gradient buffers, and its shards differ in size.
    """
    config = parse_policy_config(read_policy_config(policy))
    kind: Any = {"policy": "policy", "critic": "critic", "reference": "frozen"}[model]
    stages = rank_memory(config, parallel, dtype=dtype, kind=kind) * (parallel.ranks // parallel.pipeline)
    found = ranks.call_all(RankHost.run, model, "memory", (), {})
    if not parallel.distributed_optimizer:
        assert sorted(found) == sorted(stages)
        return
    for one, expected in zip(sorted(found), sorted(stages), strict=True):
        assert one.weights == expected.weights
        assert one.gradients == pytest.approx(expected.gradients, rel=0.05)
    optimizers = [sum(one.optimizer for one in of) for of in (found, stages)]
    assert optimizers[0] == pytest.approx(optimizers[1], rel=1e-3)


@pytest.mark.parametrize("layout", TWO)
def test_two_ranks_are_one(layout: str, two_ranks: Started, four_layers: Path, make_batch: MakeBatch):
    check_parity(two_ranks, TWO[layout], four_layers, make_batch)


@pytest.mark.parametrize("layout", ["CP2", "TP2+SP"])
def test_two_ranks_with_flash_attention_are_one(
    layout: str, two_ranks: Started, four_layers: Path, make_batch: MakeBatch
):
    check_parity(two_ranks, TWO[layout], four_layers, make_batch, kernels="fused")


@pytest.mark.parametrize("layout", FOUR)
def test_four_ranks_are_one(layout: str, four_ranks: Started, four_layers_untied: Path, make_batch: MakeBatch):
    check_parity(four_ranks, FOUR[layout], four_layers_untied, make_batch)


@pytest.fixture(scope="session")
def four_layers_of(policy_writer: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    folders: dict[str, Path] = {}

    def folder_of(architecture: str) -> Path:
        if architecture not in folders:
            folder = tmp_path_factory.mktemp("four-layers-of-experts")
            folders[architecture] = policy_writer(folder, architecture, num_hidden_layers=4)
        return folders[architecture]

    return folder_of


@pytest.fixture(scope="session")
def four_layers_of_experts(four_layers_of: Callable[..., Path]) -> Path:
    return four_layers_of("Qwen3MoeForCausalLM")


@pytest.mark.parametrize(("architecture", "layout"), EXPERT_CASES)
def test_ranks_of_experts_are_one(
    architecture: str,
    layout: str,
    two_ranks: Started,
    four_ranks: Started,
    four_layers_of: Callable[..., Path],
    make_batch: MakeBatch,
):
    parallel = OF_EXPERTS[layout]
    started = two_ranks if parallel.ranks == 2 else four_ranks
    check_parity(started, parallel, four_layers_of(architecture), make_batch)


@pytest.mark.parametrize(
    ("architecture", "layout"),
    [("Qwen3MoeForCausalLM", "EP2 distributed optimizer"), ("Glm4MoeForCausalLM", "TP2+SP")],
)
def test_ranks_with_grouped_experts_are_one(
    architecture: str,
    layout: str,
    two_ranks: Started,
    four_layers_of: Callable[..., Path],
    make_batch: MakeBatch,
):
    check_parity(two_ranks, OF_EXPERTS[layout], four_layers_of(architecture), make_batch, kernels="fused")


def test_models_share_ranks_and_a_reference_stays(two_ranks: Started, four_layers: Path, make_batch: MakeBatch):
    ranks = two_ranks.in_layout(TWO["TP2"])
    batch = make_batch(LENGTHS)
    learner = MegatronLearner(four_layers, OPTIONS, ranks=ranks)
    reference = MegatronReference(four_layers, OPTIONS, ranks=ranks)
    before = reference.logprobs(batch)
    np.testing.assert_allclose(before.values, learner.logprobs(batch).values, rtol=0, atol=5e-6)

    learner.train_step(batch, policy_gradient)

    assert np.array_equal(reference.logprobs(batch).values, before.values)
    assert not np.array_equal(learner.logprobs(batch).values, before.values)


@pytest.mark.parametrize("budget", [1, 13, 200])
def test_a_step_over_ranks_does_not_depend_on_the_budget(
    budget: int, two_ranks: Started, four_layers: Path, make_batch: MakeBatch
):
    alone = MegatronLearner(four_layers, OPTIONS)
    bound = rounding_bound(size_of_loss(alone, make_batch(LENGTHS)))
    expected = alone.train_step(make_batch(LENGTHS), policy_gradient)
    ranks = two_ranks.in_layout(TWO["PP2 interleaved"])
    learner = MegatronLearner(four_layers, replace(OPTIONS, micro_batch_tokens=budget), ranks=ranks)

    found = learner.train_step(make_batch(LENGTHS), policy_gradient)

    assert found.loss == pytest.approx(expected.loss, rel=0, abs=bound)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=rounding_bound(1.0))


def test_a_rank_whose_tokens_are_all_padding_learns_the_same(
    four_ranks: Started, tmp_path: Path, policy_writer: Callable[..., Path], make_batch: MakeBatch
):
    """Of 9 tokens in the vocabulary, split over four ranks, the last rank has none."""
    policy = policy_writer(tmp_path / "narrow", vocab_size=9, num_key_value_heads=4)
    batch = make_batch([9, 4, 12, 7])
    ids = batch.ragged("input_ids")
    batch = batch.only(batch.names - {"input_ids"})
    batch = batch.with_columns({"input_ids": Ragged((ids.values % 9).astype(np.int32), ids.offsets)})
    options = replace(OPTIONS, learning_rate=1e-3)
    expected = MegatronLearner(policy, options).train_step(batch, policy_gradient, with_entropy=True)
    ranks = four_ranks.in_layout(ParallelOptions(ranks=4, tensor=4))

    found = MegatronLearner(policy, options, ranks=ranks).train_step(batch, policy_gradient, with_entropy=True)

    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)


def test_one_row_is_enough_for_four_ranks(four_ranks: Started, four_layers: Path, make_batch: MakeBatch):
    batch = make_batch((5,))
    expected = MegatronLearner(four_layers, OPTIONS).train_step(batch, policy_gradient)
    ranks = four_ranks.in_layout(ParallelOptions(ranks=4))

    found = MegatronLearner(four_layers, OPTIONS, ranks=ranks).train_step(batch, policy_gradient)

    assert found.loss == pytest.approx(expected.loss, rel=rounding_bound(1.0))
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=rounding_bound(1.0))


MOVES = [("TP2", "one"), ("TP2", "PP2"), ("TP2", "DP2 distributed optimizer"), ("DP2 distributed optimizer", "TP2")]
EXPERT_MOVES = [
    ("Qwen3MoeForCausalLM", "EP2", "one"),
    ("Qwen3MoeForCausalLM", "EP2 distributed optimizer", "PP2"),
    ("Glm4MoeForCausalLM", "TP2+SP", "EP2 distributed optimizer"),
]


@pytest.mark.parametrize(("before", "after"), [("TP2", "TP2"), ("PP2 interleaved", "PP2 interleaved"), *MOVES])
def test_a_checkpoint_goes_on_under_any_layout(
    before: str, after: str, two_ranks: Started, four_layers: Path, make_batch: MakeBatch, tmp_path: Path
):
    check_moves(two_ranks, (TWO[before], TWO.get(after)), four_layers, make_batch, tmp_path)


@pytest.mark.parametrize(("architecture", "before", "after"), EXPERT_MOVES)
def test_a_checkpoint_of_experts_goes_on_under_any_layout(
    architecture: str,
    before: str,
    after: str,
    two_ranks: Started,
    four_layers_of: Callable[..., Path],
    make_batch: MakeBatch,
    tmp_path: Path,
):
    layouts = (OF_EXPERTS[before], OF_EXPERTS.get(after))
    check_moves(two_ranks, layouts, four_layers_of(architecture), make_batch, tmp_path)


def check_moves(
    started: Started,
    layouts: tuple[ParallelOptions, ParallelOptions | None],
    policy: Path,
    make_batch: MakeBatch,
    tmp_path: Path,
) -> None:
    """Check that two steps, a checkpoint, and two more steps in the second layout equal four uninterrupted steps."""

    def step(learner: MegatronLearner, number: int) -> StepResult:
        return learner.train_step(make_batch(LENGTHS, seed=number), policy_gradient)

    ranks = started.in_layout(layouts[0])
    learner = MegatronLearner(policy, OPTIONS, ranks=ranks)
    for number in (1, 2):
        step(learner, number)
    pending = learner.save(tmp_path / "saved", in_background=True)
    size = size_of_loss(learner, make_batch(LENGTHS, seed=3))
    expected = [step(learner, number) for number in (3, 4)]
    pending.wait()
    last = {name: tensor.clone() for name, tensor in learner.export_weights().items()}
    after = None if layouts[1] is None else started.in_layout(layouts[1])
    resumed = MegatronLearner(policy, OPTIONS, ranks=after)
    resumed.load(tmp_path / "saved")
    assert resumed.step == 2
    for number, wanted in zip((3, 4), expected, strict=True):
        found = step(resumed, number)
        assert found.step == wanted.step
        if layouts[0] == layouts[1]:
            assert (found.loss, found.grad_norm) == (wanted.loss, wanted.grad_norm)
        assert found.loss == pytest.approx(wanted.loss, rel=0, abs=2 * rounding_bound(size))
        assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-5)
    for name, tensor in resumed.export_weights().items():
        torch.testing.assert_close(tensor, last[name], rtol=0, atol=2e-5)


@pytest.mark.parametrize("layout", ["TP2", "DP2 distributed optimizer"])
def test_a_learner_that_was_offloaded_goes_on(
    layout: str, two_ranks: Started, four_layers: Path, make_batch: MakeBatch
):
    ranks = two_ranks.in_layout(TWO[layout])
    learner, other = (MegatronLearner(four_layers, OPTIONS, ranks=ranks, name=name) for name in ("a", "b"))
    for step in (1, 2, 3):
        batch = make_batch(LENGTHS, seed=step)
        assert learner.offload() >= 4 * learner.num_parameters
        assert learner.train_step(batch, policy_gradient) == other.train_step(batch, policy_gradient)


def with_experts(batch: Batch, *, num_layers: int = 4, num_experts: int = 4) -> Batch:
    """Add random experts, as from an engine."""
    ids, random = batch.ragged("input_ids"), np.random.default_rng(5)
    chosen = random.random((len(ids.values), num_layers, num_experts)).argsort(-1)[..., :2].astype(np.int16)
    return batch.with_columns({"routed_experts": Ragged(chosen, ids.offsets)})


def test_a_reference_of_a_mixture_chooses_its_own_experts(
    two_ranks: Started, four_layers_of_experts: Path, make_batch: MakeBatch
):
    ranks, batch = two_ranks.in_layout(TWO_OF_EXPERTS["EP2"]), make_batch(LENGTHS)
    reference = MegatronReference(four_layers_of_experts, OPTIONS, ranks=ranks)
    model = transformers.AutoModelForCausalLM.from_pretrained(four_layers_of_experts, trust_remote_code=False)
    found = reference.logprobs(batch)
    for ids, logprobs in zip(batch.ragged("input_ids"), found, strict=True):
        tokens = torch.from_numpy(ids.astype(np.int64))
        with torch.no_grad():
            expected = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        np.testing.assert_allclose(logprobs[1:], expected, rtol=0, atol=1e-5)
    assert np.array_equal(reference.logprobs(with_experts(batch)).values, found.values)
    check_memory(ranks, TWO_OF_EXPERTS["EP2"], four_layers_of_experts, model="reference")


def test_a_critic_of_a_mixture_learns_over_ranks_and_is_transformers(
    two_ranks: Started, four_layers_of_experts: Path, make_batch: MakeBatch, tmp_path: Path
):
    layout = TWO_OF_EXPERTS["EP2 distributed optimizer"]
    ranks = two_ranks.in_layout(layout)
    alone = MegatronCritic(four_layers_of_experts, NOT_SHARING)
    together = MegatronCritic(four_layers_of_experts, SHARING, ranks=ranks)
    for step, tolerance in ((1, rounding_bound(1.0)), (2, 1e-5), (3, 1e-5)):
        batch = make_batch(LENGTHS, seed=step, num_prompts=NUM_PROMPTS[step])
        expected, found = (
            alone.train_step(batch, squared_error),
            together.train_step(with_experts(batch), squared_error),
        )
        assert found.loss == pytest.approx(expected.loss, rel=tolerance)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=tolerance)
    check_memory(ranks, layout, four_layers_of_experts, model="critic")
    together.save(tmp_path)
    kind = transformers.AutoModelForTokenClassification
    model = kind.from_pretrained(tmp_path / "policy", num_labels=1, trust_remote_code=False)
    for ids, values in zip(batch.ragged("input_ids"), together.values(with_experts(batch)), strict=True):
        with torch.no_grad():
            expected = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, :-1, 0]
        np.testing.assert_allclose(values[1:], expected, rtol=0, atol=1e-5)
    assert float(np.abs(alone.values(batch).values).max()) > 1e-3


def test_ranks_count_the_blocks_of_a_critic_in_one_order(four_layers: Path):
    """Copies share out blocks by number: different orders would assign some blocks twice and others never."""
    config = parse_policy_config(read_policy_config(four_layers))
    state = {name: torch.zeros(1, 1) for name in VALUE_HEAD}
    plan: Any = SimpleNamespace(source=SimpleNamespace(config=config))
    orders = [dict(sorted(state.items(), reverse=reverse)) for reverse in (False, True)]
    for order in orders:
        blocks = chunk_blocks(order, plan, Shard(layers=range(config.num_layers)))
        assert [block.name for block in blocks] == list(VALUE_HEAD.values())


def test_float32_weights_behind_bfloat16_ones_are_foretold(
    two_ranks: Started, four_layers_of_experts: Path, make_batch: MakeBatch
):
    for layout in (TWO_OF_EXPERTS["EP2"], TWO_OF_EXPERTS["EP2 distributed optimizer"]):
        ranks = two_ranks.in_layout(layout)
        learner = MegatronLearner(four_layers_of_experts, replace(OPTIONS, dtype="bfloat16"), ranks=ranks)
        learner.train_step(make_batch(LENGTHS), policy_gradient)
        check_memory(ranks, layout, four_layers_of_experts, dtype="bfloat16")


def check_replay(started: Started, layout: str, policy: Path, batch: Batch) -> None:
    """Check logprobs and a step against one rank that computes each row separately."""
    alone = MegatronLearner(policy, NOT_SHARING)
    together = MegatronLearner(policy, SHARING, ranks=started.in_layout(FOUR_THAT_REPLAY[layout]))
    expected = alone.logprobs(batch).values
    np.testing.assert_allclose(together.logprobs(batch).values, expected, rtol=0, atol=5e-6)
    plain = batch.only(batch.names - {"routed_experts"})
    assert float(np.abs(expected - alone.logprobs(plain).values).max()) > 1e-2
    bound = rounding_bound(size_of_loss(alone, batch))
    found, wanted = (learner.train_step(batch, policy_gradient) for learner in (together, alone))
    assert found.loss == pytest.approx(wanted.loss, rel=0, abs=bound)
    assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=rounding_bound(1.0))


@pytest.mark.parametrize(("architecture", "num_experts", "top_k", "layout"), [
    *[("Qwen3MoeForCausalLM", 4, 2, layout) for layout in FOUR_THAT_REPLAY],
    ("Glm4MoeForCausalLM", 8, 3, "TP2 EP2"),
])  # fmt: skip
def test_replayed_experts_are_the_same_over_ranks(
    architecture: str,
    num_experts: int,
    top_k: int,
    layout: str,
    four_ranks: Started,
    four_layers_of: Callable[..., Path],
    make_batch: MakeBatch,
):
    plain = make_batch(LENGTHS, num_prompts=3)
    offsets = plain.ragged("input_ids").offsets
    each = np.tile(np.arange(num_experts), (NUM_TOKEN_IDS, 4, 1))
    orders = np.random.default_rng(3).permuted(each, axis=2)[..., :top_k]
    orders[5::7], orders[3::5, 2] = -1, -1  # unknown in all layers, or in one
    chosen = orders[plain.ragged("input_ids").values]  # equal for equal tokens, as in a shared prefix
    of_another = [[0, 3, 1], [1, 2, 0], [3, 2, 1]]
    chosen[offsets[3] + 1] = [*(row[:top_k] for row in of_another), [-1] * top_k]  # except in this row

    batch = plain.with_columns({"routed_experts": Ragged(chosen.astype(np.int16), offsets)})

    assert 0 < (chosen < 0).mean() < 0.5
    check_replay(four_ranks, layout, four_layers_of(architecture), batch)


@pytest.mark.parametrize(("lengths", "experts"), [(LENGTHS, [1, 0]), ((3,), [2, 3])])
@pytest.mark.parametrize("layout", FOUR_THAT_REPLAY)
def test_ranks_without_tokens_for_their_experts(
    layout: str,
    lengths: tuple[int, ...],
    experts: list[int],
    four_ranks: Started,
    four_layers_of_experts: Path,
    make_batch: MakeBatch,
):
    """All tokens go to the experts of one rank; with a single row, some ranks have no tokens at all."""
    plain = make_batch(lengths)
    offsets = plain.ragged("input_ids").offsets
    chosen = np.full((int(offsets[-1]), 4, 2), experts, dtype=np.int16)

    check_replay(
        four_ranks, layout, four_layers_of_experts, plain.with_columns({"routed_experts": Ragged(chosen, offsets)})
    )


ROUTED = {**TWO_OF_EXPERTS, **FOUR_OF_EXPERTS, "PP2 interleaved": TWO["PP2 interleaved"]}


@pytest.mark.parametrize("layout", ["EP2", "CP2", "PP2 interleaved", "TP2 EP2", "PP2 EP2"])
def test_replayed_rows_are_counted_alike_over_ranks(
    layout: str, four_layers_of_experts: Path, make_batch: MakeBatch, request: pytest.FixtureRequest
):
    parallel = ROUTED[layout]
    ranks = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[parallel.ranks]).in_layout(parallel)
    plain = make_batch(LENGTHS, num_prompts=3)
    ids = plain.ragged("input_ids")
    orders = np.random.default_rng(5).permuted(np.tile(np.arange(4), (NUM_TOKEN_IDS, 4, 1)), axis=2)[..., :2]
    chosen = orders[ids.values]
    chosen[ids.offsets[1:] - 1] = -1  # engines return no experts for the last token
    chosen[ids.offsets[2] + 4] = -1
    batch = plain.with_columns({"routed_experts": Ragged(chosen.astype(np.int16), ids.offsets)})
    options = SHARING if parallel.data == 1 else NOT_SHARING  # data-parallel ranks share other prefixes than one rank

    found, wanted = (
        MegatronLearner(four_layers_of_experts, replace(options, recompute=recompute), ranks=of)
        .train_step(batch, policy_gradient)
        .metrics
        for of, recompute in ((ranks, "full"), (None, "none"))
    )

    assert found == pytest.approx(wanted, rel=rounding_bound(1.0))
    assert 0.5 < found["router/rerouted_share"] < 1.0
    num_tokens = sum(LENGTHS) - len(LENGTHS)
    if options is NOT_SHARING:
        assert found["router/unknown_share"] == 1 / num_tokens
    assert found["router/unknown_share"] >= 1 / num_tokens


@pytest.mark.parametrize("layout", ["TP2 PP2", "TP2 DP2 distributed optimizer"])
def test_a_step_that_is_not_finite_is_skipped_by_every_rank(
    layout: str, four_ranks: Started, four_layers: Path, make_batch: MakeBatch
):
    learner = MegatronLearner(four_layers, OPTIONS, ranks=four_ranks.in_layout(FOUR[layout]))
    batch = make_batch(LENGTHS)
    values = batch.ragged("advantages").values.copy()
    values[int(batch.ragged("advantages").offsets[3]) - 1] = np.nan
    before = {name: tensor.clone() for name, tensor in learner.export_weights().items()}

    skipped = learner.train_step(
        batch.with_columns({"advantages": Ragged(values, batch.ragged("advantages").offsets)}), policy_gradient
    )

    assert not skipped.is_applied
    assert skipped.broken_rows == (2,)
    assert learner.step == 0
    assert different_tensors(before, learner.export_weights()) == []
    alone = MegatronLearner(four_layers, OPTIONS).train_step(batch, policy_gradient)
    assert learner.train_step(batch, policy_gradient).grad_norm == pytest.approx(
        alone.grad_norm, rel=rounding_bound(1.0)
    )
