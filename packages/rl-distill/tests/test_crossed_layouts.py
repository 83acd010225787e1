"""Every pair of settings of layouts, memory and models trains as one rank does, or is refused by name.

The one rank computes each row separately, with plain kernels, and keeps all activations.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
import torch
from cpu_kernels import install_cpu_kernels
from crossed import Crossing, Problem, Row
from rounding import rounding_bound
from safetensors.torch import load_file, save_file
from tiny_policies import tiny_config, write_policy
from torch import Tensor

from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.errors import SettingsError
from rl_distill.architecture.policy_config import PolicyConfig, parse_policy_config
from rl_distill.checkpoints.pieces import Piece, TensorFolder
from rl_distill.learner import MetricSums, MicroBatch, StepResult
from rl_distill.megatron.host import RankHost
from rl_distill.megatron.learner import MegatronCritic, MegatronLearner
from rl_distill.megatron.ranks import LearnerRanks
from rl_distill.options import LearnerOptions, LoraOptions, ParallelOptions
from rl_distill.parallel_layout import check_layout, check_learner

MakeBatch = Callable[..., Batch]
LENGTHS = (7, 3, 12, 3, 5, 1, 9, 12, 4, 6)
SIZES = {"num_hidden_layers": 4, "tie_word_embeddings": False}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Qwen3": ("Qwen3ForCausalLM", "megatron", {"num_hidden_layers": 4}),
    "Llama": ("LlamaForCausalLM", "megatron", {**SIZES, "vocab_size": 41}),
    "Qwen2": ("Qwen2ForCausalLM", "megatron", SIZES),
    "Qwen3Moe": ("Qwen3MoeForCausalLM", "megatron", SIZES),
    "Qwen3Moe, replayed": ("Qwen3MoeForCausalLM", "megatron", SIZES),
    "Glm4Moe": ("Glm4MoeForCausalLM", "megatron", SIZES),
    "class of Qwen3": ("Qwen3ForCausalLM", "transformers", SIZES),
    "class of Qwen3Moe": ("Qwen3MoeForCausalLM", "transformers", SIZES),
}
"""Architecture, backend, and changes of the tiny policy."""

SETTINGS: dict[str, list[Any]] = {
    "model": list(MODELS),
    "tensor": [1, 2],
    "pipeline": [1, 2],
    "context": [1, 2],
    "data": [1, 2],
    "virtual_pipeline": [1, 2],
    "expert": [1, 2],
    "expert_tensor": [None, 1, 2],
    "sequence": [False, True],
    "distributed_optimizer": [False, True],
    "shard_weights": [False, True],
    "trained": ["policy", "adapter", "critic"],
    "algorithm": ["adam", "muon"],
    "recompute": ["none", "full", "core_attn layernorm", "mlp", "moe"],
    "overlap": ["none", "sums", "sums and gathers"],
    "shared_prefix_tokens": [0, 1],
    "kernels": ["plain", "fused"],
    "offload": [False, True],
}
"""The settings, by their names where they are one; `data` makes `ranks`, at most four."""

NAMES = {
    "model": "policy|mixture|our layers|transformers' class",
    "tensor": "(tensor|ranks) [=>*]",
    "pipeline": "(pipeline|ranks) [=>*]",
    "context": "(context|ranks) [=>*]",
    "data": "ranks =",
    "expert": r"expert [=*]",
    "trained": r"lora\.rank|adapters",
    "overlap": "overlap_(grad_reduce|param_gather)",
    "recompute": "recompute(_modules)?",
}
"""Words by which messages name a setting, if they are not its name."""

PATTERNS = {name: re.compile(rf"\b{NAMES.get(name, name)}") for name in SETTINGS}
ADVICE = re.compile(r"(\. |; )(Set|set|Leave|Omit|remove)\b.*")


@cache
def config_of(model: str) -> PolicyConfig:
    architecture, backend, changes = MODELS[model]
    return parse_policy_config(json.loads(tiny_config(architecture, **changes).to_json_string()), backend=backend)  # type: ignore[arg-type]


def parallel_of(row: Row) -> ParallelOptions:
    names = ("tensor", "pipeline", "context", "virtual_pipeline", "expert", "expert_tensor", "sequence")
    chosen = {name: row[name] for name in (*names, "distributed_optimizer", "shard_weights")}
    return ParallelOptions(ranks=row["tensor"] * row["pipeline"] * row["context"] * row["data"], **chosen)


def options_of(row: Row, **changes: Any) -> LearnerOptions:
    recompute: dict[str, Any] = {"recompute": row["recompute"]}
    if row["recompute"] not in ("none", "full"):
        recompute = {"recompute": "selective", "recompute_modules": tuple(row["recompute"].split())}
    return LearnerOptions(
        learning_rate=1e-3,  # small, because Muon makes rounding errors in small singular values as large as these
        weight_decay=0.1,
        eps=1e-3,
        clip_grad=0.0,
        micro_batch_tokens=24,
        num_threads=1,
        algorithm=row["algorithm"],
        shared_prefix_tokens=row["shared_prefix_tokens"],
        kernels=row["kernels"],
        overlap_grad_reduce=row["overlap"] != "none",
        overlap_param_gather=row["overlap"] == "sums and gathers",
        **recompute,
        **changes,
    )


def lora_of(row: Row) -> LoraOptions:
    return LoraOptions(rank=2 if row["trained"] == "adapter" else 0)


def problems(row: Row) -> Iterator[Problem]:
    """Yield the lines in which the checks refuse a row."""
    parallel, options, config, lora = parallel_of(row), options_of(row), config_of(row["model"]), lora_of(row)
    if parallel.ranks > 4:
        yield Problem(names=("tensor", "pipeline", "context", "data"), text="these tests start at most four ranks")
    for check in (
        options.check,
        lambda: check_layout(parallel, config, lora=lora),
        lambda: check_learner(options, parallel, config, lora=lora),
    ):
        try:
            check()
        except SettingsError as error:
            for line in str(error).splitlines():
                said = ADVICE.sub("", line)
                yield Problem(names=[name for name, words in PATTERNS.items() if words.search(said)], text=line)


def policy_gradient(logprobs: Tensor, entropy: Tensor | None, micro: MicroBatch) -> tuple[Tensor, MetricSums]:
    weights, mask = micro.columns["loss_weights"], micro.columns["loss_mask"]
    loss = -(logprobs.exp() * micro.columns["advantages"] * weights).sum()
    if entropy is not None:
        loss = loss - 0.1 * (entropy * weights).sum()
    return loss, {"nll": (-(logprobs.detach() * mask).sum(), mask.sum())}


def squared_error(values: Tensor, micro: MicroBatch) -> tuple[Tensor, MetricSums]:
    loss = ((values - micro.columns["advantages"]).square() * micro.columns["loss_weights"]).sum()
    return loss, {"values": (values.detach().sum(), micro.columns["loss_mask"].sum())}


class Bounds(NamedTuple):
    """Bounds on the differences of a dtype.

    Attributes:
        dtype: The dtype.
        of_sums: Of losses, norms and metrics.
        of_scores: Of logprobs, entropies and values.
        of_tensors: Of gradients and weights, relative to the largest value of the tensor.
    """

    dtype: Literal["float32", "bfloat16"]
    of_sums: float
    of_scores: float
    of_tensors: float


FLOAT32 = Bounds("float32", of_sums=rounding_bound(1.0), of_scores=2 * rounding_bound(1.0), of_tensors=1e-5)


class Trained(NamedTuple):
    """What a learner computes in two steps.

    Attributes:
        scores: Logprobs or values of tokens after the first step.
        steps: The results.
        states: Sums of gradients and weights, as a checkpoint saves them, by name.
        weights: The exported weights, by name.
    """

    scores: np.ndarray
    steps: list[StepResult]
    states: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]


class Crossed:
    """Learners with crossed settings, and the single rank that they are compared with."""

    def __init__(self, folder: Path, make_batch: MakeBatch, ranks: Mapping[int, Any]) -> None:
        self._folder, self._make_batch, self._ranks = folder, make_batch, ranks
        self._alone: dict[tuple[str, ...], Trained] = {}

    def check(self, row: Row, bounds: Bounds) -> None:
        """Compare two steps with those of one rank."""
        wanted, found = self._trained_alone(row, bounds.dtype), self._trained(row, bounds.dtype)
        assert np.abs(found.scores - wanted.scores).max() <= bounds.of_scores, row
        for one, other in zip(found.steps, wanted.steps, strict=True):
            assert one.loss == pytest.approx(other.loss, rel=0, abs=bounds.of_sums)
            assert one.grad_norm == pytest.approx(other.grad_norm, rel=bounds.of_sums)
            # A shared prefix is routed once, so the router's shares are of fewer tokens.
            names = {n for n in other.metrics if not (row["shared_prefix_tokens"] and n.startswith("router/"))}
            assert one.metrics.keys() == other.metrics.keys() >= names > set()
            for name in names:
                assert one.metrics[name] == pytest.approx(other.metrics[name], rel=bounds.of_sums, abs=bounds.of_sums)
            assert one.tokens.keys() == other.tokens.keys()
            for name, column in other.tokens.items():
                assert np.abs(one.tokens[name].values - column.values).max() <= bounds.of_scores
        for of_found, of_wanted in ((found.states, wanted.states), (found.weights, wanted.weights)):
            assert of_found.keys() == of_wanted.keys()
            far = {n: d for n, one in of_wanted.items() if (d := distance(of_found[n], one)) > bounds.of_tensors}
            assert far == {}, row

    def _trained_alone(self, row: Row, dtype: str) -> Trained:
        key = (row["model"], row["trained"], row["algorithm"], dtype)
        if key not in self._alone:
            plain = {name: values[0] for name, values in SETTINGS.items()}
            self._alone[key] = self._trained(
                {**plain, **dict(zip(("model", "trained", "algorithm"), key, strict=False))}, dtype
            )
        return self._alone[key]

    def _trained(self, row: Row, dtype: str) -> Trained:
        parallel = parallel_of(row)
        started = self._ranks.get(parallel.ranks)
        if started is None:
            ranks = LearnerRanks(parallel, num_threads=1)
        else:
            ranks = (started.in_layout if row["kernels"] == "plain" else started.with_cpu_kernels)(parallel)
        learner = self._learner(row, dtype, ranks)
        if row["offload"]:
            learner._ranks.call_all(RankHost.run, learner._name, "keep_optimizer_on_host", (), {})
        is_critic = row["trained"] == "critic"
        wanted: dict[str, Any] = {} if is_critic else {"temperature": 0.8, "with_entropy": True, "with_tokens": True}
        objective: Any = squared_error if is_critic else policy_gradient
        steps = [learner.train_step(self._batch(row, 1), objective, **wanted)]
        if row["offload"]:
            learner.offload()
        score = learner.values if is_critic else partial(learner.logprobs, temperature=0.8)
        scores = score(self._batch(row, 2)).values
        steps.append(learner.train_step(self._batch(row, 2), objective, **wanted))
        saved = self._folder / str(len(list(self._folder.iterdir())))
        learner.save(saved)
        weights = {name: tensor.clone() for name, tensor in learner.export_weights().items()}
        learner.close()
        states = {n: t for n, t in read_state(saved).items() if not n.startswith("exp_avg_sq/")}
        return Trained(scores, steps, states, weights)

    def _learner(self, row: Row, dtype: str, ranks: Any) -> Any:
        architecture, backend, changes = MODELS[row["model"]]
        policy = self._folder.parent / f"{row['model']} {row['trained'] == 'critic'}"
        if not policy.exists():
            write_policy(policy, architecture, **changes)
            if row["trained"] == "critic":
                add_value_head(policy)
        options = options_of(row, dtype=dtype)
        if row["trained"] == "critic":
            return MegatronCritic(policy, options, ranks=ranks, backend=backend)  # type: ignore[arg-type]
        return MegatronLearner(policy, options, ranks=ranks, backend=backend, lora=lora_of(row))  # type: ignore[arg-type]

    def _batch(self, row: Row, number: int) -> Batch:
        batch, config = self._make_batch(LENGTHS, seed=number, num_prompts=3), config_of(row["model"])
        if not row["model"].endswith("replayed") or config.mixture is None:
            return batch
        ids = batch.ragged("input_ids")
        each = np.tile(np.arange(config.num_experts), (64, config.num_layers, 1))
        orders = np.random.default_rng(3).permuted(each, axis=2)[..., : config.mixture.top_k]
        orders[5::7] = -1  # unknown
        return batch.with_columns({"routed_experts": Ragged(orders[ids.values].astype(np.int16), ids.offsets)})


def add_value_head(policy: Path) -> None:
    """Give a critic's folder a head that is not zero, so that the first step has gradients in the layers."""
    file, random = policy / "model.safetensors", torch.Generator().manual_seed(5)
    tensors = load_file(file)
    tensors["score.weight"] = torch.empty(1, 32).normal_(0, 0.3, generator=random)
    tensors["score.bias"] = torch.full((1,), 0.1)
    save_file(tensors, file)


def read_state(checkpoint: Path) -> dict[str, Tensor]:
    folder = TensorFolder(checkpoint / "state")
    pieces = [
        Piece(name=name, shape=shape, offsets=(0,) * len(shape), tensor=torch.empty(shape))
        for name, shape in folder.shapes().items()
    ]
    folder.read(pieces)
    return {piece.name: piece.tensor for piece in pieces}


def distance(found: Tensor, wanted: Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    largest = float(wanted.abs().max())
    return float((found.double() - wanted.double()).abs().max()) / (largest or 1.0)


@pytest.fixture(scope="module")
def crossed(
    tmp_path_factory: pytest.TempPathFactory, make_batch: MakeBatch, two_ranks: Any, four_ranks: Any
) -> Crossed:
    folder = tmp_path_factory.mktemp("crossed") / "checkpoints"
    folder.mkdir()
    return Crossed(folder, make_batch, {2: two_ranks, 4: four_ranks})


NUM_ROWS = 37


@cache
def crossing(seed: int) -> Crossing:
    return Crossing(SETTINGS, problems, seed=seed)


def test_every_pair_is_tried_or_refused_by_name() -> None:
    pairs = crossing(1)
    print(pairs)  # noqa: T201 - shown with -s
    assert pairs.left_over() == []
    assert pairs.tried().isdisjoint(pairs.refused)
    assert pairs.wrongly_refused(10) == []
    assert len(pairs.rows) == NUM_ROWS


@pytest.mark.parametrize("number", range(NUM_ROWS))
@pytest.mark.usefixtures("uncompiled")
def test_settings_train_as_one_rank(number: int, crossed: Crossed) -> None:
    install_cpu_kernels()
    crossed.check(crossing(1).rows[number], FLOAT32)


@pytest.mark.soak
@pytest.mark.usefixtures("uncompiled")
def test_other_rows_train_as_one_rank(seed: int, crossed: Crossed) -> None:
    install_cpu_kernels()
    pairs = crossing(seed + 2)
    assert pairs.left_over() == []
    for row in pairs.rows:
        crossed.check(row, FLOAT32)
