import asyncio
import re
from dataclasses import replace

import numpy as np
import pytest
from chat_model import encode, make_tokenizer

from rl_core.data.records import Prompt
from rl_core.errors import SettingsError
from rl_rollout import (
    Generation,
    LoopContext,
    RewardResult,
    RewardScorer,
    SamplingParams,
    SessionLoop,
    SessionResult,
    SingleTurnLoop,
    quick,
    resolve_loop,
)
from rl_rollout.loops import trajectory_of, with_reward
from rl_rollout.loops.protocol import stable_seed
from rl_rollout.rewards import Scored

PROMPT = Prompt(
    uid="p-e0", input_ids=np.array([7, 8], dtype=np.int32), ground_truth="a", columns={"level": 3}, data_source="sums"
)


def generation(*token_ids, version=4, finish_reason="stop", num_preempted=0):
    return Generation(
        token_ids=np.array(token_ids, dtype=np.int32),
        logprobs=-np.arange(1, len(token_ids) + 1, dtype=np.float32),
        policy_versions=np.full(len(token_ids), version, dtype=np.int32),
        finish_reason=finish_reason,
        num_preempted=num_preempted,
    )


class FixedEngine:
    """Returns the same responses to every request, and records the requests."""

    def __init__(self, *generations):
        self.generations = list(generations)
        self.requests = []

    async def generate(self, request):
        self.requests.append(request)
        await asyncio.sleep(0)
        return self.generations


def letters(sequences):
    return ["".join(chr(96 + token) for token in sequence.tolist()) for sequence in sequences]


@quick
def is_ground_truth(given):
    return {"reward": given.response_text == given.ground_truth, "length": len(given.response_ids)}


def run(engine, reward=is_ground_truth, loop=None, seed=100):
    sampling = SamplingParams(max_tokens=4, seed=seed)
    context = LoopContext(engine=engine, sampling=sampling, scorer=RewardScorer(reward), decode=letters)
    num_sessions = len(engine.generations)
    return asyncio.run((loop or SingleTurnLoop()).run_group(PROMPT, num_sessions=num_sessions, context=context))


CHAT = "<|im_start|>user\nUse <think>.<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("prompt_text", "text"),
    [
        ("gh", "18"),
        ("<think>\n", ""),
        ("<think>g", "18"),
        (CHAT, "18"),
        (f"{CHAT}<think>\n", ""),
        (f"{CHAT}<think>\nLet me", ""),
        (f"{CHAT}So: <think>{' and so on' * 9}", ""),
        (f"{CHAT}<think>\nLet me</think>It is", "18"),
        ("<|im_start|><think>\nLet me", "18"),
        ("<|im_start|>3<|im_end|>[INST] Use <think>. [/INST]", "18"),
        ("<|im_start|>3<|im_end|><think>\nLet me", ""),
    ],
)
def test_a_response_after_an_open_thinking_mark_in_the_prompt_is_no_answer(prompt_text, text):
    tokenizer = make_tokenizer()
    prompt = Prompt(uid="p", input_ids=encode(tokenizer, prompt_text))
    seen = []

    def judge(given):
        seen.append(given)
        return 0.0

    context = LoopContext(
        engine=FixedEngine(generation(*encode(tokenizer, "18"))),
        sampling=SamplingParams(max_tokens=4),
        scorer=RewardScorer(quick(judge)),
        decode=tokenizer.decode,
        tokenizer=tokenizer if "<|im_start|>" in prompt_text else None,
    )
    loop = SingleTurnLoop()
    (session,) = asyncio.run(loop.run_group(prompt, num_sessions=1, context=context))
    assert [seen[0].final_text, loop.judged(prompt, session, context).final_text] == [text, text]


def test_a_trajectory_holds_prompt_and_response_as_sampled():
    engine = FixedEngine(generation(1), generation(2, 3, finish_reason="length", num_preempted=2))
    first, second = run(engine)
    (trajectory,) = second.trajectories
    assert trajectory.input_ids.tolist() == [7, 8, 2, 3]
    assert trajectory.loss_mask.tolist() == [False, False, True, True]
    assert trajectory.rollout_logprobs.tolist() == [0, 0, -1, -2]
    assert trajectory.policy_versions.tolist() == [-1, -1, 4, 4]
    assert [getattr(trajectory, name).dtype for name in ("input_ids", "rollout_logprobs", "policy_versions")] == [
        np.int32,
        np.float32,
        np.int32,
    ]
    assert (trajectory.prompt_uid, trajectory.session_index, trajectory.output_index) == ("p-e0", 1, 0)
    assert (trajectory.finish_reason, trajectory.timings.preemptions) == ("length", 2)
    assert (trajectory.reward, trajectory.reward_components) == (0.0, {"length": 2.0})
    assert first.trajectories[0].reward == 1.0
    assert (first.failure, second.failure) == (None, None)


def test_the_engine_is_asked_once_for_all_sessions():
    engine = FixedEngine(generation(1), generation(2))
    run(engine)
    (request,) = engine.requests
    assert (request.num_samples, request.sampling.seed, request.input_ids.tolist()) == (2, 100, [7, 8])


def test_the_reward_sees_the_row():
    seen = []

    def reward(given):
        seen.append(given)
        return RewardResult(reward=0.5, extras={"prediction": "b"})

    (session,) = run(FixedEngine(generation(2, finish_reason="length")), reward)
    (given,) = seen
    assert (given.prompt_uid, given.response_text, given.response_ids.tolist()) == ("p-e0", "b", [2])
    assert (given.ground_truth, given.data_source, given.columns) == ("a", "sums", {"level": 3})
    assert given.finish_reason == "length"
    assert session.trajectories[0].extras == {"prediction": "b"}


def test_timings_are_measured_by_part():
    (session,) = run(FixedEngine(generation(1)), lambda _given: 0.0)
    timings = session.trajectories[0].timings
    assert timings.generate_s > 0
    assert timings.reward_s > 0
    assert timings.tools_s == 0


def test_a_sessions_reward_goes_to_all_its_trajectories_and_its_time_to_the_last():
    first = trajectory_of(PROMPT, generation(1), session_index=0, generate_s=2.0)
    second = replace(trajectory_of(PROMPT, generation(2), session_index=0, generate_s=3.0), output_index=1)
    session = with_reward([first, second], Scored(result=RewardResult(reward=0.5), reward_s=7.0))
    assert [trajectory.reward for trajectory in session.trajectories] == [0.5, 0.5]
    assert [trajectory.timings.reward_s for trajectory in session.trajectories] == [0.0, 7.0]
    assert [trajectory.timings.generate_s for trajectory in session.trajectories] == [2.0, 3.0]


def test_a_failed_reward_fails_its_session_and_keeps_the_trajectory_unscored():
    def reward(given):
        return None if given.response_text == "b" else 1.0

    sessions = run(FixedEngine(generation(1), generation(2), generation(3)), reward)
    assert [session.failure is None for session in sessions] == [True, False, True]
    assert "returned reward = None" in sessions[1].failure
    assert sessions[1].trajectories[0].reward is None
    assert [session.trajectories[0].session_index for session in sessions] == [0, 1, 2]


def test_aborted_and_empty_responses_fail_unscored():
    scored = []
    engine = FixedEngine(generation(1, 2, finish_reason="abort"), generation(), generation(3))
    sessions = run(engine, quick(lambda given: scored.append(given.response_text) or 1.0))
    assert sessions[0].failure == "the engine aborted the response after 2 tokens"
    assert sessions[0].trajectories[0].input_ids.tolist() == [7, 8, 1, 2]
    assert sessions[1].failure == "the engine returned a response without tokens"
    assert sessions[2].failure is None
    assert scored == ["c"]


def test_session_loop_runs_sessions_at_once_and_alone():
    class Pairs(SessionLoop):
        """Sessions wait for each other, so they must run concurrently; session 1 raises."""

        def __init__(self):
            self.arrived = 0
            self.all_here = asyncio.Event()

        async def run_session(self, prompt, *, session_index, context):
            self.arrived += 1
            if self.arrived == 3:
                self.all_here.set()
            await asyncio.wait_for(self.all_here.wait(), timeout=60)
            if session_index == 1:
                raise KeyError("tool")
            return SessionResult()

    sessions = run(FixedEngine(generation(1), generation(2), generation(3)), loop=Pairs())
    assert [session.failure is None for session in sessions] == [True, False, True]
    assert re.fullmatch(
        r"agent loop Pairs raised KeyError: 'tool' \(test_loops_single_turn.py, line \d+, in run_session\)",
        sessions[1].failure,
    )


def test_session_seeds_are_the_samples_of_one_request_and_turns_differ():
    context = LoopContext(
        engine=FixedEngine(),
        sampling=SamplingParams(max_tokens=4, seed=100),
        scorer=RewardScorer(is_ground_truth),
        decode=letters,
    )
    assert [context.session_sampling(index).seed for index in range(3)] == [100, 101, 102]
    seeds = {context.session_sampling(index, turn=turn).seed for index in range(8) for turn in range(8)}
    assert len(seeds) == 64
    unseeded = LoopContext(
        engine=FixedEngine(),
        sampling=SamplingParams(max_tokens=4),
        scorer=RewardScorer(is_ground_truth),
        decode=letters,
    )
    assert unseeded.session_sampling(3, turn=2).seed is None


def test_stable_seed_is_pinned():
    assert stable_seed(0, "p-e0") == 3722409882663153
    assert stable_seed(0, "p-e1") != stable_seed(0, "p-e0") != stable_seed(1, "p-e0")
    assert all(0 <= stable_seed(seed, "x") < 2**52 for seed in range(1000))


def test_loops_are_found_by_name():
    assert isinstance(resolve_loop("single_turn"), SingleTurnLoop)
    with pytest.raises(SettingsError, match=r"unknown agent loop 'single_trun'\. Did you mean 'single_turn'\?"):
        resolve_loop("single_trun")
