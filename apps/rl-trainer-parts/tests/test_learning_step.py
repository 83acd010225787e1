"""What a learning step adds to a batch, hands to its models, and records; the models are stand-ins."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rl_core import Batch, Ragged
from rl_core.errors import DataError
from rl_core.testing import make_trajectory
from rl_distill import objectives
from rl_distill.learner import StepResult
from rl_metrics.reductions import Recorder
from rl_trainer_parts.learning import step as learning_step
from rl_trainer_parts.learning.objective import make_selection, objective_options
from rl_trainer_parts.learning.step import learn, prepare_batch, update, with_late_columns, with_update
from rl_trainer_parts.settings.sources import build_settings

TEACHERS = {"teachers": {"large": {"model": Path("large")}}, "loss": "k1"}
RECOMPUTE = {"old_logprobs": "recompute"}


def settings_of(sections: dict[str, Any]) -> Any:
    values: dict[str, Any] = {
        "policy": {"path": Path("p")},
        "prompts": {"train": Path("t")},
        "reward": {"function": "exact_match"},
    }
    return build_settings(values | sections)


def numbers(batch: Batch, seed: int) -> Ragged:
    """Return random logprobs of the trained tokens."""
    mask = batch.ragged("loss_mask")
    drawn = -np.random.default_rng(seed).exponential(1.0, len(mask.values)).astype(np.float32)
    return Ragged(np.where(mask.values, drawn, np.float32(0)), mask.offsets)


def rows_of(**changes: Any) -> Batch:
    """Return two groups of three sessions with every column that a step may read; one session is truncated."""
    rows = Batch.from_trajectories(
        [
            make_trajectory(
                f"p{prompt}",
                session,
                num_response_tokens=3 + session,
                reward=float(prompt + session * session),
                finish_reason="length" if (prompt, session) == (1, 2) else "stop",
            )
            for prompt in range(2)
            for session in range(3)
        ]
    )
    mask = rows.ragged("loss_mask")
    names = ("rollout_logprobs", "old_logprobs", "reference_logprobs")
    columns: dict[str, Any] = {name: numbers(rows, seed) for seed, name in enumerate(names)}
    taught = numbers(rows, 9).values
    columns["teacher_logprobs"] = Ragged(np.stack([taught, taught], 1), mask.offsets)
    columns["teacher_ids"] = Ragged(np.stack([rows.ragged("input_ids").values] * 2, 1), mask.offsets)
    columns["teacher_index"] = Ragged(np.where(mask.values, 0, -1).astype(np.int16), mask.offsets)
    return rows.with_columns(columns | changes)


def parts_of(sections: dict[str, Any], **learners: Any) -> Any:
    models = {"policy": None, "reference": None, "critic": None, "self_teacher": None} | learners
    skipped = SimpleNamespace(seen=[])
    skipped.check = lambda result, batch, *, what: skipped.seen.append((what, result.is_applied, len(batch)))
    return SimpleNamespace(settings=settings_of(sections), learners=SimpleNamespace(**models), skipped=skipped)


def assert_same(found: Batch, expected: Batch) -> None:
    assert found.names == expected.names
    for name in expected.names:
        column = expected[name]
        is_ragged = isinstance(column, Ragged)
        values = (found.ragged(name).values, column.values) if is_ragged else (found.dense(name), column)
        np.testing.assert_array_equal(*values, err_msg=name)


def prepared(rows: Batch, sections: dict[str, Any], *, kl_coefficient: float = 0.3) -> tuple[Batch, dict[str, float]]:
    recorder = Recorder(strict=True)
    found = prepare_batch(parts_of(sections), rows, recorder, kl_coefficient=kl_coefficient)
    return found, dict(recorder.reduce())


def with_rewards(rows: Batch, advantage: str = "grpo", **options: Any) -> Batch:
    return objectives.with_advantages(rows, advantage=advantage, **options)


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"algorithm": RECOMPUTE},
        {"distillation": {**TEACHERS, "use_task_rewards": True}},
        {"algorithm": {"kl_in": "reward"}},  # with a coefficient of 0
        {"algorithm": {"kl_coefficient": 0.1}},  # in the loss
        {"distillation": {"loss": "k1", "used_as": "reward"}},  # without teachers
    ],
)
def test_advantages_of_task_rewards_are_all_that_is_added(sections: dict[str, Any]) -> None:
    rows = rows_of()
    found, recorded = prepared(rows, sections)
    assert_same(found, with_rewards(rows))
    assert recorded == {}


def test_options_of_the_advantage_and_the_session_rule_are_the_users() -> None:
    rows = rows_of()
    found, _ = prepared(rows, {"algorithm": {"advantage": "grpo", "eps": 0.5, "session_rule": "mean"}})
    assert_same(found, with_rewards(rows, options={"eps": 0.5}, session_rule="mean"))


@pytest.mark.parametrize(
    "bounds",
    [{"weights": "token"}, {"weights": "sequence", "cap": 1.2}, {"weights": "token", "cap": 1.5, "floor": 0.4}],
)
def test_correction_weights_and_their_metrics_have_the_users_bounds(bounds: dict[str, Any]) -> None:
    rows = rows_of()
    found, recorded = prepared(rows, {"algorithm": RECOMPUTE, "correction": bounds})
    of = {"level": bounds["weights"], "cap": bounds.get("cap", 2.0), "floor": bounds.get("floor")}
    expected = objectives.with_correction_weights(with_rewards(rows), **of)
    assert_same(found, expected)
    assert recorded == pytest.approx(objectives.correction_weight_metrics(expected, **of))


@pytest.mark.parametrize(("old", "column"), [("rollout", "rollout_logprobs"), ("recompute", "old_logprobs")])
def test_a_kl_in_the_reward_has_the_current_coefficient(old: str, column: Any) -> None:
    rows = rows_of()
    algorithm = {"kl_in": "reward", "kl_coefficient": 0.1, "kl_estimator": "k1", "old_logprobs": old}
    found, _ = prepared(rows, {"algorithm": algorithm}, kl_coefficient=0.7)
    penalized = objectives.with_kl_in_reward(rows, coefficient=0.7, estimator="k1", policy_logprobs=column)
    assert_same(found, with_rewards(penalized))


def test_tokens_are_rejected_after_the_advantages() -> None:
    rows, bounds = rows_of(), {"token_k1": (0.5, 2.0)}
    sections = {"algorithm": RECOMPUTE, "correction": {"reject": bounds}}
    found, recorded = prepared(rows, sections)
    expected, metrics = objectives.with_rejection(with_rewards(rows), bounds=bounds)
    assert 0 < expected.ragged("loss_mask").values.sum() < rows.ragged("loss_mask").values.sum()
    assert_same(found, expected)
    assert recorded == pytest.approx(metrics)
    far = rows.ragged("old_logprobs")
    apart = rows.with_columns({"rollout_logprobs": Ragged(far.values - 9 * (far.values != 0), far.offsets)})
    with pytest.raises(DataError, match=r"rejected every token of 6 trajectories"):
        prepared(apart, sections)


@pytest.mark.parametrize(("old", "column"), [("rollout", "rollout_logprobs"), ("recompute", "old_logprobs")])
def test_the_tokens_that_a_loss_treats_apart_are_selected(old: str, column: Any) -> None:
    rows, sections = rows_of(), {"algorithm": {"policy_loss": "kl_cov", "share": 0.3, "old_logprobs": old}}
    found, _ = prepared(rows, sections)
    select = make_selection(settings_of(sections))
    assert select is not None
    assert_same(found, objectives.with_token_selection(with_rewards(rows), select=select, policy_logprobs=column))


@pytest.mark.parametrize("use_task_rewards", [False, True])
@pytest.mark.parametrize(("old", "column"), [("rollout", "rollout_logprobs"), ("recompute", "old_logprobs")])
def test_teachers_as_a_reward_are_in_the_advantages_alone(use_task_rewards: bool, old: str, column: Any) -> None:
    rows = rows_of()
    distillation = {**TEACHERS, "used_as": "reward", "coefficient": 0.5, "use_task_rewards": use_task_rewards}
    sections = {"distillation": distillation, "algorithm": {"old_logprobs": old}}
    found, recorded = prepared(rows, sections)
    expected, metrics = objectives.with_distillation_advantages(
        with_rewards(rows) if use_task_rewards else rows,
        options=objective_options(settings_of(sections)),
        policy_logprobs=column,
        keep_advantages=use_task_rewards,
    )
    assert_same(found, expected.only(expected.names - {"teacher_logprobs", "teacher_ids", "teacher_index"}))
    assert recorded == pytest.approx(metrics)


def test_teachers_in_the_loss_need_no_advantages_nor_corrections() -> None:
    rows = rows_of()
    correction = {"weights": "token", "reject": {"token_k1": 1.0001}}
    found, recorded = prepared(rows, {"distillation": TEACHERS, "algorithm": RECOMPUTE, "correction": correction})
    assert_same(found, rows)
    assert recorded == {}


def test_texts_of_others_have_no_logprobs_of_the_engine() -> None:
    rows = rows_of()
    found, _ = prepared(rows, {"distillation": {"texts": "answer", "loss": "nll"}})
    assert_same(found, rows.only(rows.names - {"rollout_logprobs"}))


def test_a_batch_that_is_all_truncated_is_neither_corrected_nor_refused() -> None:
    rows = rows_of(is_truncated=np.ones(6, np.bool_))
    sections = {"rollout": {"mask_truncated": True}, "algorithm": {"policy_loss": "kl_cov", **RECOMPUTE}}
    found, recorded = prepared(rows, sections | {"correction": {"reject": {"token_k1": 2.0}}})
    masked, _ = objectives.without_truncated(with_rewards(rows))
    assert_same(found, masked)
    assert recorded == {"response/masked_ratio": 1.0}


def test_the_share_of_masked_trajectories_is_weighted_by_their_number() -> None:
    rows, recorder = rows_of(), Recorder(strict=True)
    sections = {"rollout": {"mask_truncated": True}}
    for part in (rows, rows.select(np.array([3, 4, 5]))):
        prepare_batch(parts_of(sections), part, recorder, kl_coefficient=0.0)
    assert recorder.reduce() == {"response/masked_ratio": pytest.approx(2 / 9)}


class Model:
    """Records its calls; logprobs and values are -temperature and 0.5, updates are numbered from 1."""

    def __init__(self, *, name: str = "policy", is_applied: bool = True, computed_tokens: int = 30) -> None:
        self.name, self.is_applied, self.computed_tokens = name, is_applied, computed_tokens
        self.calls: list[tuple[Batch, Any, dict[str, Any]]] = []

    def logprobs(self, batch: Batch, *, temperature: float) -> Ragged:
        self.calls.append((batch, None, {"temperature": temperature}))
        ids = batch.ragged("input_ids")
        return Ragged(np.full(len(ids.values), -temperature, np.float32), ids.offsets)

    def values(self, batch: Batch) -> Ragged:
        self.calls.append((batch, None, {}))
        ids = batch.ragged("input_ids")
        return Ragged(np.full(len(ids.values), 0.5, np.float32), ids.offsets)

    def train_step(self, batch: Batch, loss: Any, **options: Any) -> StepResult:
        self.calls.append((batch, loss, options))
        ids = batch.ragged("input_ids")
        said = Ragged(np.full(len(ids.values), len(self.calls), np.float32), ids.offsets)
        return StepResult(
            step=len(self.calls),
            loss=0.25,
            grad_norm=2.0,
            learning_rate=0.125,
            is_applied=self.is_applied,
            metrics={"actor/entropy" if self.name == "policy" else "critic/vf_loss": 3.0},
            tokens={"policy_logprobs": said},
            computed_tokens=self.computed_tokens,
        )


CRITIC = {"algorithm": {"advantage": "gae"}, "critic": {"value_clip": 0.7, "head_start_steps": 2}}


def test_an_update_is_recorded() -> None:
    rows, recorder, parts = with_rewards(rows_of()), Recorder(strict=True), parts_of({}, policy=Model())
    update(parts, rows, recorder, step=0, kl_coefficient=0.0)
    num_tokens = len(rows.ragged("input_ids").values)
    found = {name: value for name, value in recorder.reduce().items() if not name.startswith("timing")}
    assert found == {
        "actor/skipped_updates": 0.0,
        "actor/entropy": 3.0,
        "actor/grad_norm": 2.0,
        "actor/lr": 0.125,
        "actor/loss": 0.25,
        "perf/computed_tokens": 30,
        "perf/saved_tokens": num_tokens - 30,
        "perf/saved_share": pytest.approx(1 - 30 / num_tokens),
    }
    assert parts.skipped.seen == [("actor", True, 6)]


def test_of_a_skipped_update_only_that_is_recorded() -> None:
    rows, recorder = with_rewards(rows_of()), Recorder(strict=True)
    parts = parts_of({}, policy=Model(is_applied=False))
    update(parts, rows, recorder, step=0, kl_coefficient=0.0)
    found = {name: value for name, value in recorder.reduce().items() if not name.startswith("timing")}
    assert found == {"actor/skipped_updates": 1.0}
    assert parts.skipped.seen == [("actor", False, 6)]


@pytest.mark.parametrize(("step", "trains"), [(0, False), (1, False), (2, True)])
def test_a_critic_has_a_head_start_of_its_steps(step: int, trains: bool) -> None:
    rows = with_rewards(rows_of())
    experts = Ragged(np.zeros((len(rows.ragged("input_ids").values), 2, 2), np.int16), rows.ragged("input_ids").offsets)
    nuclei = Ragged(np.full((len(experts.values), 2), -1, np.int32), experts.offsets)
    rows = rows.with_columns({"routed_experts": experts, "nucleus_ids": nuclei})
    policy, critic, recorder = Model(), Model(name="critic"), Recorder(strict=True)
    parts = parts_of(CRITIC, policy=policy, critic=critic)
    told = update(parts, rows, recorder, step=step, kl_coefficient=0.0)
    recorded = recorder.reduce()
    assert bool(told) == bool(policy.calls) == trains
    assert ("actor/lr" in recorded) == trains
    assert (recorded["critic/lr"], recorded["critic/vf_loss"], recorded["critic/grad_norm"]) == (0.125, 3.0, 2.0)
    assert "critic/loss" not in recorded
    ((batch, loss, _),) = critic.calls
    assert loss == objectives.ValueObjective(clip=0.7)
    assert batch.names == (rows.names | {"loss_weights"}) - {"routed_experts", "nucleus_ids"}
    assert parts.skipped.seen == [("critic", True, 6)] + [("actor", True, 6)] * trains
    alone = parts_of({"critic": CRITIC["critic"]}, policy=Model())
    assert update(alone, rows, Recorder(), step=step, kl_coefficient=0.0), "without a critic there is no head start"


def test_a_policy_trains_with_the_users_weights_objective_and_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, policy = with_rewards(rows_of()), Model()
    sections = {
        "algorithm": {"aggregation": "seq-mean-token-sum-norm", "kl_coefficient": 0.1},
        "rollout": {"max_response_tokens": 7, "temperature": 0.6},
    }
    asked: list[float] = []
    make = learning_step.make_objective
    monkeypatch.setattr(learning_step, "make_objective", lambda of, kl: (asked.append(kl), make(of, kl))[1])
    update(parts_of(sections, policy=policy), rows, Recorder(), step=0, kl_coefficient=0.4)
    ((batch, objective, options),) = policy.calls
    assert_same(batch, objectives.with_loss_weights(rows, aggregation="seq-mean-token-sum-norm", horizon=7))
    assert asked == [0.4]
    assert objective.options.kl_coefficient == 0.4
    assert options == {"temperature": 0.6, "with_entropy": True, "with_tokens": True}


def test_a_mini_batch_without_a_trained_token_makes_no_update() -> None:
    rows = with_rewards(rows_of())
    mask = rows.ragged("loss_mask")
    first = np.repeat(np.arange(6) < 3, mask.lengths)
    rows, policy = rows.with_columns({"loss_mask": Ragged(mask.values & ~first, mask.offsets)}), Model()
    told = update(
        parts_of({"trainer": {"minibatches": 2, "epochs": 2}}, policy=policy),
        rows,
        Recorder(),
        step=0,
        kl_coefficient=0.0,
    )
    assert [batch.keys[0].prompt_uid for batch, *_ in policy.calls] == ["p1", "p1"]
    assert told["policy_logprobs"].values.tolist() == np.where(first, 0.0, 1.0).tolist()


def test_late_columns_are_those_that_the_settings_need() -> None:
    rows = rows_of()
    rows = rows.only(rows.names - {"old_logprobs", "reference_logprobs"})
    models = {"policy": Model(), "reference": Model(), "critic": Model()}
    algorithm = {"kl_coefficient": 0.1, "old_logprobs": "recompute", "advantage": "optimal_token_baseline"}
    parts = parts_of({"algorithm": algorithm, "rollout": {"temperature": 0.5}}, **models)
    recorder = Recorder(strict=True)
    found = with_late_columns(parts, rows, recorder)
    assert found.names == rows.names | {"old_logprobs", "reference_logprobs", "values", "sum_pi_squared"}
    assert {float(found.ragged(name).values[2]) for name in ("old_logprobs", "reference_logprobs")} == {-0.5}
    assert found.ragged("values").values[2] == 0.5
    np.testing.assert_allclose(found.ragged("sum_pi_squared").values, np.exp(2 * -0.5 + 0.25), rtol=1e-6)
    timed = {name.rpartition("/")[2] for name in recorder.reduce()}
    assert {"ref", "old_log_prob", "values"} <= {name.removesuffix("_s") for name in timed} | timed
    assert [call[2] for call in models["policy"].calls] == [{"temperature": 0.5}, {"temperature": 0.25}]
    assert_same(with_late_columns(parts_of({}, **models), rows, Recorder()), found.only(rows.names | {"values"}))


def test_a_step_shows_its_batch_with_all_sampled_tokens_and_adapts_the_coefficient() -> None:
    rows = rows_of()
    rows = rows.only(rows.names - {"old_logprobs", "reference_logprobs"})
    policy, reference = Model(), Model()
    algorithm = {"kl_coefficient": 0.1, "kl_target": 1.0, "kl_horizon": 60, "kl_estimator": "k1"}
    parts = parts_of({"algorithm": algorithm}, policy=policy, reference=reference)
    recorder = Recorder(strict=True)
    trained, state = learn(parts, rows, recorder, step=1, kl_state={})
    measured = objectives.mean_reference_kl(trained, estimator="k1", policy_logprobs="rollout_logprobs")
    recorded = recorder.reduce()
    assert recorded["actor/kl_coef"] == 0.1
    assert recorded["actor/reference_kl"] == pytest.approx(measured)
    error = min(max(measured - 1.0, -0.2), 0.2)
    assert state == {"coefficient": pytest.approx(0.1 * (1 + error * 6 / 60))}
    _, later = learn(parts, rows, Recorder(), step=2, kl_state=state)
    assert later == {"coefficient": pytest.approx(0.1 * (1 + error * 6 / 60) ** 2)}
    assert trained.ragged("policy_logprobs").values[2] == 1.0
    recorder, ids = Recorder(strict=True), rows.ragged("input_ids")
    rows = rows.with_columns({"routed_experts": Ragged(np.zeros((len(ids.values), 2, 2), np.int16), ids.offsets)})
    _, unchanged = learn(parts_of({}, policy=policy), rows, recorder, step=1, kl_state={})
    assert unchanged == {"coefficient": 0.0}
    assert {"router/k3_kl/replay", "router/k3_kl/no_replay"} <= recorder.reduce().keys()


def test_maxrl_alone_refuses_a_reward_below_zero() -> None:
    maxrl = {"algorithm": {"advantage": "maxrl"}}
    rewards = np.array([0, -0.5, 1, 0, 0, 2], np.float32)
    with pytest.raises(DataError, match=r"maxrl needs rewards of at least 0; found -0\.5"):
        prepared(rows_of(reward=rewards), maxrl)
    rows = rows_of(reward=np.abs(rewards))
    assert_same(prepared(rows, maxrl)[0], with_rewards(rows, "maxrl"))
    rows = rows_of(reward=rewards)
    assert_same(prepared(rows, {})[0], with_rewards(rows))


def test_a_critic_alone_trains_in_the_first_steps_counted_from_one() -> None:
    rows = rows_of()
    for step, trains in ((1, False), (2, False), (3, True)):
        policy, critic = Model(), Model(name="critic")
        learn(parts_of(CRITIC, policy=policy, critic=critic), rows, Recorder(), step=step, kl_state={})
        assert (len(policy.calls), len(critic.calls)) == (int(trains), 2)  # values and an update


@pytest.mark.parametrize("prompts", [[], ["{prompt} Hint"]])
def test_a_policy_that_teaches_itself_scores_the_rows_late(prompts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rows, asked = rows_of(), []

    def scores(rows: Batch, score: Any, *, keeps_prompts: bool) -> Batch:
        asked.append((score, keeps_prompts))
        return rows.with_columns({"returns": rows.ragged("old_logprobs")})

    monkeypatch.setattr(learning_step, "with_self_scores", scores)
    distillation = {"self_teacher": {"model": "policy", "prompts": prompts}}
    parts, recorder = parts_of({"distillation": distillation}, self_teacher="the policy"), Recorder(strict=True)
    assert "returns" in with_late_columns(parts, rows, recorder).names
    assert asked == [("the policy", not prompts)]
    assert [name for name in recorder.reduce() if name.startswith("timing_s/teacher")]
    assert with_late_columns(parts_of({"distillation": distillation}), rows, Recorder()) is rows


def test_a_kl_needs_a_reference_that_is_loaded() -> None:
    rows = rows_of()
    assert with_late_columns(parts_of({"algorithm": {"kl_coefficient": 0.1}}), rows, Recorder()) is rows


def test_tokens_that_the_correction_rejected_are_shown_without_result() -> None:
    rows = rows_of()
    mask = rows.ragged("loss_mask")
    kept = mask.values.copy()
    kept[2] = False
    result = {"entropy": Ragged(np.ones(len(kept), np.float32), mask.offsets)}
    shown = with_update(rows.with_columns({"loss_mask": Ragged(kept, mask.offsets)}), result, loss_mask=mask)
    np.testing.assert_array_equal(shown.ragged("loss_mask").values, mask.values)
    expected = np.ones(len(kept))
    expected[2] = np.nan
    np.testing.assert_array_equal(shown.ragged("entropy").values, expected)
