"""Sessions are scored again with the weights that sampled them, and refused if their context differed."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from rl_core.data import Prompt, Trajectory
from rl_core.errors import DataError, EngineError, SettingsError
from rl_core.weights import TokenScores
from rl_rollout import AuditOptions, RewardScorer, Rollout, RolloutOptions, SamplingParams, SingleTurnLoop, quick
from rl_rollout.engines.scripted import ScriptedEngine
from rl_rollout.score_audit import Rescored, ScoreAudit

SAMPLING = SamplingParams(max_tokens=40)
EVERY = RolloutOptions(audit=AuditOptions(rescored_share=1.0))


class Scoring:
    """Scores each token as -1 plus `more`."""

    def __init__(self, more=0.0, meanwhile=lambda: None, error=None):
        self.more, self.meanwhile, self.error = more, meanwhile, error
        self.asked = []

    async def score(self, sequences):
        if self.error is not None:
            raise self.error
        self.asked += [sequence.tolist() for sequence in sequences]
        self.meanwhile()
        return [token_scores(one, np.full(len(one), -1.0, np.float32) + np.float32(self.more)) for one in sequences]


def token_scores(sequence, logprobs):
    return TokenScores(token_ids=sequence[:, None], logprobs=logprobs[:, None])


def trajectory(mask, *, version=3, output=0):
    mask = np.array(mask, dtype=bool)
    return Trajectory(
        prompt_uid="p",
        session_index=0,
        output_index=output,
        input_ids=np.arange(len(mask), dtype=np.int32),
        loss_mask=mask,
        rollout_logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        policy_versions=np.where(mask, version, -1).astype(np.int32),
    )


def check(engine, rows, served=lambda: 3):
    return asyncio.run(ScoreAudit(engine, served, tolerance=0.3).check(rows))


def test_differences_are_those_of_trained_tokens_of_all_trajectories():
    engine = Scoring(more=[0, 0, 0.5, 0, -0.25, 0])
    rows = [trajectory([0, 0, 1, 0, 1, 1]), trajectory([0, 0, 0, 0, 1, 0], output=1)]
    found = check(engine, [rows[0]])
    assert (found.num_sessions, found.num_tokens, found.sum_diff, found.max_diff) == (1, 3, 0.75, 0.5)
    engine = Scoring()
    assert check(engine, rows) == Rescored(num_sessions=1, num_tokens=4)
    assert engine.asked == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4]]  # tokens after the last trained one are not scored


@pytest.mark.parametrize("off", [np.nan, 0.5, -5.0])
def test_a_turn_in_another_context_is_refused_by_its_place(off):
    mask = [0] + [1] * 10 + [0] * 2 + [1] * 20
    more = np.zeros(len(mask))
    more[13:] = off
    with pytest.raises(
        DataError, match=r"output 0: scored again, the 20 tokens from 13 on differ .* a different context"
    ):
        check(Scoring(more=more), [trajectory(mask)])


def test_a_single_token_of_a_short_turn_may_be_rounded():
    more = np.array([0, 0.6, 0, 0, 0])
    assert check(Scoring(more=more), [trajectory([0, 1, 1, 0, 1])]).max_diff == pytest.approx(0.6)


def test_the_tolerance_is_the_callers():
    more = np.array([0, *[0.02] * 40])
    rows = [trajectory([0] + [1] * 40)]
    assert check(Scoring(more=more), rows).num_tokens == 40
    with pytest.raises(DataError, match=r"about 0\.01 is allowed"):
        asyncio.run(ScoreAudit(Scoring(more=more), None, tolerance=0.01).check(rows))


@pytest.mark.parametrize("served", [None, 2, 4])
def test_weights_that_are_no_longer_served_are_not_asked(served):
    engine = Scoring(more=9.0)
    assert check(engine, [trajectory([0, 1])], served=lambda: served) == Rescored(num_skipped=1)
    assert engine.asked == []


def test_what_two_versions_sampled_is_skipped():
    rows = [trajectory([0, 1]), trajectory([0, 1], version=2, output=1)]
    assert check(Scoring(more=9.0), rows) == Rescored(num_skipped=1)


def test_scores_of_weights_that_came_meanwhile_count_for_nothing():
    version = [3]
    engine = Scoring(more=9.0, meanwhile=lambda: version.append(4))
    assert check(engine, [trajectory([0, 1])], served=lambda: version[-1]) == Rescored(num_skipped=1)


@pytest.mark.parametrize("error", [EngineError("no logprobs of prompts"), NotImplementedError()])
def test_an_engine_that_cannot_score_is_told_of_once(error, caplog):
    audit = ScoreAudit(Scoring(error=error), lambda: 3, tolerance=0.3)
    found = [asyncio.run(audit.check([trajectory([0, 1])])) for _ in range(2)]
    assert found == [Rescored(num_skipped=1)] * 2


@pytest.mark.parametrize("change", [{"temperature": 0.7}, {"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 5}])
def test_logprobs_of_another_distribution_are_not_compared(change):
    assert ScoreAudit(Scoring(), None, tolerance=0.3).can_compare(SAMPLING)
    assert not ScoreAudit(Scoring(), None, tolerance=0.3).can_compare(replace(SAMPLING, **change))


def run_group(engine, options=EVERY):
    rollout = Rollout(
        engine,
        SingleTurnLoop(),
        scorer=RewardScorer(quick(lambda _: 1.0)),
        decode=lambda rows: ["" for _ in rows],
        options=options,
    )
    prompts = [Prompt(uid="p", input_ids=np.arange(3, dtype=np.int32), messages=())]
    return asyncio.run(rollout.run(prompts, num_sessions=4, sampling=SAMPLING))[0]


class Changed(ScriptedEngine):
    """Scores responses as if they followed another context."""

    async def score(self, sequences):
        return [replace(scores, logprobs=scores.logprobs - 3) for scores in await super().score(sequences)]


def test_groups_say_what_was_scored_again_and_refuse_what_differs():
    script = lambda *_: [5] * 30
    engine = ScriptedEngine(script)
    asyncio.run(engine.start())
    assert run_group(engine).rescored == Rescored(num_sessions=4, num_tokens=120)
    assert run_group(engine, RolloutOptions(audit=AuditOptions(rescored_share=0.0))).rescored == Rescored()
    changed = Changed(script)
    asyncio.run(changed.start())
    group = run_group(changed)
    assert (len(group.failures), group.num_audit_failures) == (4, 4)
    assert all("a different context" in failure for failure in group.failures)
    assert {row.reward for session in group.sessions for row in session.trajectories} == {None}


def test_a_share_that_is_none_is_refused():
    with pytest.raises(
        SettingsError, match=r"rescored_share of AuditOptions must be .* at least 0 and at most 1; found 2"
    ):
        AuditOptions(rescored_share=2)
