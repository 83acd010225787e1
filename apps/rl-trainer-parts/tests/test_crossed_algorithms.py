"""Every pair of an algorithm's settings learns as an oracle in plain float64 does, or is refused by name."""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from algorithm_oracle import COMPONENTS, Oracle
from algorithm_oracle import Row as TableRow
from crossed import Crossing, Problem, Row
from torch import Tensor

from rl_core import Batch, Ragged
from rl_core.data.row_keys import RowKey
from rl_distill.learner import MicroBatch, StepResult
from rl_distill.learners import Learners
from rl_distill.objectives import (
    ADVANTAGES,
    AGGREGATIONS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    SESSION_RULES,
    with_reward_components,
)
from rl_distill.objectives.logit_divergence import LogitDivergence
from rl_distill.objectives.micro_batches import LOSSES, MEASURED, WEIGHTED, comparison_of, with_columns
from rl_distill.objectives.teacher_tokens import teacher_tokens
from rl_distill.objectives.vocabulary import VocabularyPart
from rl_distill.packing import pack_batch
from rl_distill.skipping import SkippedUpdates
from rl_metrics.reductions.recorder import Recorder
from rl_trainer_parts.checks.algorithm import algorithm_problems
from rl_trainer_parts.checks.distillation import distillation_problems
from rl_trainer_parts.learning.step import LearningParts, learn
from rl_trainer_parts.settings.schema import Settings
from rl_trainer_parts.settings.sources import build_settings

SETTINGS: dict[str, Sequence[Any]] = {
    "advantage": ["grpo", *(name for name in ADVANTAGES.names() if name != "grpo")],
    "policy_loss": ["ppo_clip", *(name for name in POLICY_LOSSES.names() if name != "ppo_clip")],
    "distillation": ["none", "forward_kl", "reverse_kl", "js", "k1", "abs", "k2", "k3"],
    "kl_estimator": ["k3", *(name for name in KL_ESTIMATORS.names() if name != "k3")],
    "aggregation": ["token-mean", *(name for name in AGGREGATIONS.names() if name != "token-mean")],
    "session_rule": ["last", *(name for name in SESSION_RULES.names() if name != "last")],
    "weights": ["none", "token", "sequence"],
    "reject": ["none", "token_k1", "seq_mean_k3"],
    "tail": ["bucket", "drop", "renormalise"],
    "used_as": ["loss", "reward"],
    "use_task_rewards": [False, True],
    "kl_coefficient": [0.0, 0.1],
    "kl_in": ["loss", "reward"],
    "kl_target": [None, 0.5],
    "floor": [None, 0.8],
    "entropy_coefficient": [0.0, 0.01],
    "old_logprobs": ["rollout", "recompute"],
    "mask_truncated": [False, True],
    "filter": ["", "reward_spread"],
    "group_size": [4, 1],
}
"""Settings by their own names; `distillation` is its loss, or "none"."""

NAMES = {
    "advantage": r"algorithm\.advantage",
    "policy_loss": r"algorithm\.policy_loss",
    "distillation": r"distillation\b.*is off|needs a loss|distillation\.use_task_rewards",
    "used_as": "(used_as|applies to the policy gradient)",
    "weights": r"correction\.weights",
    "reject": r"correction\.reject",
    "floor": r"correction\.floor",
    "filter": r"dynamic_sampling\.filter",
}
PATTERNS = {name: re.compile(rf"{NAMES.get(name, rf'(?<!num_){name}')}\b") for name in SETTINGS}
ADVICE = re.compile(r"(\. |; |, or )(Set|set|Leave|Omit|omit|Add|Or set)\b.*")
LIMIT = 6
"""Most tokens of a response."""


def settings_of(row: Row) -> Settings:
    reject = {"none": {}, "token_k1": {"token_k1": 1.5}, "seq_mean_k3": {"seq_mean_k3": 0.06}}[row["reject"]]
    of_algorithm = (
        *("advantage", "policy_loss", "aggregation", "session_rule", "kl_coefficient", "kl_in", "kl_estimator"),
        *("kl_target", "entropy_coefficient", "old_logprobs"),
    )
    options: dict[str, Any] = {"gamma": 0.9} if row["advantage"] in ("gae", "reinforce_plus_plus") else {}
    if row["advantage"] == "gae":
        options["lam"] = 0.8
    if row["advantage"] == "gdpo":
        options["weights"] = dict(zip(COMPONENTS, (1.0, 2.0), strict=True))
    if row["policy_loss"] == "clip_cov":
        options |= {"share": 1.0, "low": 0.05, "high": 0.4}
    if row["policy_loss"] == "kl_cov":
        options |= {"share": 0.25}
    distillation = {name: row[name] for name in ("tail", "used_as", "use_task_rewards")}
    if row["distillation"] != "none":
        distillation |= {"loss": row["distillation"], "top_k": 3, "coefficient": 0.5}
        distillation["self_teacher"] = {"model": "reference"}
    return build_settings({
        "policy": {"path": Path("p")},
        "prompts": {"train": Path("t")},
        "reward": {"function": "exact_match"},
        "trainer": {"minibatches": 1},
        "rollout": {
            "prompts_per_step": 3,
            "max_response_tokens": LIMIT,
            **{name: row[name] for name in ("group_size", "mask_truncated")},
        },
        "algorithm": {name: row[name] for name in of_algorithm} | options,
        "correction": {"weights": row["weights"], "floor": row["floor"], "reject": reject},
        "distillation": distillation,
        "dynamic_sampling": {"filter": row["filter"]},
    })  # fmt: skip


def problems(row: Row) -> Iterator[Problem]:
    """Yield the lines in which the checks refuse a row; what they say of advantages holds where rewards train."""
    settings = settings_of(row)
    for line in (*algorithm_problems(settings), *distillation_problems(settings)):
        said = ADVICE.sub("", line)
        names = {name for name, words in PATTERNS.items() if words.search(said)}
        if "advantage" in names:
            names |= {"distillation"} if row["distillation"] == "none" else {"distillation", "use_task_rewards"}
        yield Problem(names=names, text=line)


@cache
def crossing(seed: int) -> Crossing:
    return Crossing(SETTINGS, problems, seed=seed)


LENGTHS, NUM_TOKENS = (2, 6, 4, 5, 3, 6, 2, 4, 5, 3, 4, 6, 3), 7
PROMPT = 2
"""Tokens of each prompt."""


def make_rows(group_size: int) -> list[TableRow]:
    """Return rows of three prompts; a session of the first has two trajectories, and a prompt has equal rewards."""
    random = torch.Generator().manual_seed(3)
    places = [(group, session, 0) for group in range(3) for session in range(group_size)]
    places.insert(1, (0, 0, 1))
    rows = []
    for (group, session, output), length in zip(places, LENGTHS, strict=False):
        total = PROMPT + length
        old = 1.2 * torch.randn(total, NUM_TOKENS, generator=random, dtype=torch.float64)
        reference, teacher = (old + 0.5 * torch.randn(old.shape, generator=random).double() for _ in range(2))
        ids = torch.randint(0, NUM_TOKENS, (total,), generator=random)
        mask = torch.arange(total) >= PROMPT
        mask[PROMPT + 1] = length < 4  # such as a tool's answer
        engine = (
            old.log_softmax(-1).gather(-1, ids[:, None])[:, 0] + 0.3 * torch.randn(total, generator=random).double()
        )
        values = torch.randn(total, generator=random).double()
        numbers = torch.rand(4, generator=random).tolist()
        reward = 0.5 if group == 2 else round(numbers[0], 2)
        rows.append(
            TableRow(
                group=group,
                session=session,
                output=output,
                reward=float(np.float32(reward)),
                baseline=float(np.float32(numbers[1])),
                components={name: float(np.float32(one)) for name, one in zip(COMPONENTS, numbers[2:], strict=True)},
                is_truncated=session == 1,
                ids=ids,
                mask=mask,
                engine=engine.float().double(),
                old=old.log_softmax(-1),
                reference=reference.log_softmax(-1),
                teacher=teacher.log_softmax(-1),
                values=values.float().double(),
                weights=values + 0.3 * torch.randn(total, generator=random).double(),
            )
        )
    return rows


def make_batch(rows: Sequence[TableRow]) -> Batch:
    def column(name: str) -> Ragged:
        return Ragged.from_rows([getattr(row, name).float().numpy() for row in rows], dtype="float32")

    batch = Batch(
        [RowKey(f"p{row.group}", row.session, row.output) for row in rows],
        {
            "input_ids": Ragged.from_rows([row.ids.numpy() for row in rows], dtype="int32"),
            "loss_mask": Ragged.from_rows([row.mask.numpy() for row in rows], dtype="bool"),
            "rollout_logprobs": column("engine"),
            "reward": np.asarray([row.reward for row in rows], np.float32),
            "reward_baseline": np.asarray([row.baseline for row in rows], np.float32),
            "is_truncated": np.asarray([row.is_truncated for row in rows]),
        },
    )
    return with_reward_components(batch, [row.components for row in rows])


class Tables:
    """The models of a run: each says what a table says about each row.

    Attributes:
        tables: Logits [T, V] of the policy in training, of each row.
        rows: Number of each row.
        losses: The losses of the last step, by model.
    """

    def __init__(self, rows: Sequence[TableRow]) -> None:
        random = torch.Generator().manual_seed(4)
        noise = [0.4 * torch.randn(row.old.shape, generator=random).double() for row in rows]
        self.rows = {RowKey(f"p{row.group}", row.session, row.output): number for number, row in enumerate(rows)}
        self._of_row = rows
        self.tables = [(row.old + one).requires_grad_() for row, one in zip(rows, noise, strict=True)]
        self.losses: dict[str, float] = {}

    def _numbers(self, batch: Batch) -> list[int]:
        return [self.rows[key] for key in batch.keys]

    def said(self, batch: Batch, table: str, temperature: float = 1.0) -> Ragged:
        """Return the logprobs of a model."""
        rows = [self._of_row[number] for number in self._numbers(batch)]
        found = [row.sampled((getattr(row, table) / temperature).log_softmax(-1)).float().numpy() for row in rows]
        return Ragged.from_rows(found, dtype="float32")

    def old_values(self, batch: Batch) -> Ragged:
        return Ragged.from_rows([self._of_row[n].values.float().numpy() for n in self._numbers(batch)], dtype="float32")

    def taught(self, batch: Batch, *, top_k: int) -> tuple[Ragged, Ragged, None]:
        logprobs, ids = [], []
        for number in self._numbers(batch):
            row = self._of_row[number]
            best = row.teacher.topk(top_k, dim=-1)
            logprobs.append(torch.cat([row.sampled(row.teacher)[:, None], best.values], -1).float().numpy())
            ids.append(torch.cat([row.ids[:, None], best.indices], -1).numpy())
        return Ragged.from_rows(logprobs, dtype="float32"), Ragged.from_rows(ids, dtype="int32"), None

    def train(self, batch: Batch, objective: Any, **_: Any) -> StepResult:
        """Add up the objective of micro-batches, and its gradients in `tables`."""
        numbers, total, tokens = self._numbers(batch), 0.0, np.zeros(len(batch.ragged("input_ids").values), np.float32)
        for pack in pack_batch(batch, max_tokens=16, device=torch.device("cpu")):
            logits = torch.cat([self.tables[numbers[row]] for row in pack.rows])
            log_q = logits.log_softmax(-1)
            own = log_q.gather(-1, pack.micro_batch.input_ids[:, None])[:, 0]
            micro = compared(pack.micro_batch, logits, objective)
            loss, _sums = objective(own, -(log_q.exp() * log_q).sum(-1), micro)
            loss.backward()
            total += float(loss.detach())
        self.losses["policy"] = total
        column = Ragged(tokens, batch.ragged("input_ids").offsets)
        return StepResult(
            step=1, loss=total, grad_norm=1.0, learning_rate=1.0, metrics={}, tokens={"policy_logprobs": column}
        )

    def train_critic(self, batch: Batch, objective: Any) -> StepResult:
        numbers, total = self._numbers(batch), 0.0
        for pack in pack_batch(batch, max_tokens=16, device=torch.device("cpu")):
            values = torch.cat([self._of_row[numbers[row]].weights for row in pack.rows])
            total += float(objective(values, pack.micro_batch)[0])
        self.losses["critic"] = total
        return StepResult(step=1, loss=total, grad_norm=1.0, learning_rate=1.0, metrics={})


def compared(micro: MicroBatch, logits: Tensor, objective: Any) -> MicroBatch:
    """Return the micro-batch with the comparison that an objective requests, as learners compute it."""
    comparison = comparison_of(objective)
    if comparison is None:
        return micro
    compare = LogitDivergence(options=comparison.options, part=VocabularyPart(NUM_TOKENS), heads=[])
    columns = {MEASURED + name: one for name, one in compare(logits, teacher_tokens(micro))._asdict().items()}
    if comparison.is_alone:
        columns[WEIGHTED] = columns[LOSSES] * micro.columns["loss_weights"]
    return with_columns(micro, columns)


def check(chosen: Row) -> None:
    """Compare a step's losses, and the gradient of the policy's logits, with the oracle's."""
    settings, rows = settings_of(chosen), make_rows(chosen["group_size"])
    models, oracle = Tables(rows), Oracle(rows, chosen, horizon=LIMIT)
    num_top = settings.distillation.num_top
    reference = SimpleNamespace(logprobs=lambda batch, temperature: models.said(batch, "reference", temperature))
    policy = SimpleNamespace(
        logprobs=lambda batch, temperature: models.said(batch, "old", temperature), train_step=models.train
    )
    critic = SimpleNamespace(values=models.old_values, train_step=models.train_critic)
    learners: Any = Learners(
        policy=policy,  # type: ignore[arg-type]
        reference=reference if chosen["kl_coefficient"] else None,
        critic=critic if chosen["advantage"] == "gae" else None,  # type: ignore[arg-type]
        close=lambda: None,
        self_teacher=None if chosen["distillation"] == "none" else lambda batch: models.taught(batch, top_k=num_top),
    )
    parts = LearningParts(
        settings=settings, learners=learners, skipped=SkippedUpdates(most=0, directory=Path("unused"))
    )
    learn(parts, make_batch(rows), Recorder(), step=1, kl_state={})

    tables = [table.detach().clone().requires_grad_() for table in models.tables]
    wanted = oracle.loss(tables)
    wanted.backward()
    assert models.losses["policy"] == pytest.approx(float(wanted.detach()), rel=1e-5, abs=1e-5)
    for found, expected in zip(models.tables, tables, strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-5)
    if chosen["advantage"] == "gae":
        assert models.losses["critic"] == pytest.approx(float(oracle.value_loss()), rel=1e-5)


def failed_rows(pairs: Crossing) -> list[str]:
    """Return the rows that do not learn as the oracle, with the reasons."""
    failed = []
    for row in pairs.rows:
        try:
            check(row)
        except Exception as error:
            failed.append(f"{row}: {error!r}")
    return failed


def test_every_pair_is_tried_or_refused_by_name() -> None:
    pairs = crossing(0)
    print(pairs)  # noqa: T201 - shown with -s
    assert pairs.left_over() == []
    assert pairs.tried().isdisjoint(pairs.refused)
    assert pairs.wrongly_refused(5) == []


def test_settings_learn_as_the_oracle() -> None:
    assert crossing(0).rows
    assert failed_rows(crossing(0)) == []


@pytest.mark.soak
def test_other_rows_learn_as_the_oracle(seed: int) -> None:
    pairs = crossing(seed + 1)
    assert pairs.left_over() == []
    assert failed_rows(pairs) == []
