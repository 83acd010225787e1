"""Stored sessions get the rewards that a run would give them."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest
from chat_model import Speaker, chat_prompt, in_turn, make_tokenizer, run_loop
from skip_groups import assert_same_groups

from rl_core.data.records import Timings
from rl_core.errors import SettingsError
from rl_rollout import RewardScorer, Rollout, SamplingParams, SessionLoop, SingleTurnLoop, quick
from rl_rollout.engines.scripted import ScriptedEngine
from rl_rollout.loops.conversation import TurnLimits
from rl_rollout.loops.tools import ToolsLoop, ToolsOptions
from rl_rollout.rollout import can_score_again
from rl_rollout.tools import ToolBox

END = "<|im_end|>"
TOKENIZER = make_tokenizer()
CALL = f"<tool_call>{json.dumps({'name': 'add', 'arguments': {'a': 1}})}</tool_call>{END}"


CALLS = []


class Add:
    name, description = "add", "Adds."

    def __init__(self):
        self.parameters = {"type": "object"}

    async def call(self, arguments):
        CALLS.append(arguments)
        return "3"


def tools(**options):
    return ToolsLoop(ToolsOptions(**options), toolbox=ToolBox([Add()]))


def in_many_turns(heard):
    num_turns = heard.count("<|im_start|>tool")
    return f"{'x' * 30}{CALL}" if num_turns < 3 else f"It is 6.{END}"


CASES = {
    "single turn": (SingleTurnLoop, in_turn(f"Six.{END}"), {}),
    "single turn, cut": (SingleTurnLoop, in_turn("s" * 40), {"sampling": SamplingParams(max_tokens=7)}),
    "tools": (tools, in_turn(CALL, f"{CALL}", f"It is 6.{END}"), {}),
    "tools, no call": (tools, in_turn(f"It is 6.{END}"), {}),
    "tools, cut": (tools, in_turn(CALL, "6" * 400), {"sampling": SamplingParams(max_tokens=200)}),
    "tools, last turn calls": (lambda: tools(limits=TurnLimits(max_turns=2)), in_turn(CALL), {}),
    "tools, several trajectories": (
        lambda: tools(limits=TurnLimits(max_turns=20, on_context_full="new_trajectory", max_trajectories=5)),
        in_many_turns,
        {"sampling": SamplingParams(max_tokens=300)},
    ),
}


def spy(seen, factor):
    @quick
    def judge(given):
        seen.append((given.response_text, given.response_ids.tolist(), given.finish_reason, given.messages))
        return {"reward": factor * len(given.response_text), "tokens": len(given.response_ids)}

    return judge


def without_times(groups):
    return [
        replace(
            group,
            sessions=tuple(
                replace(s, trajectories=tuple(replace(t, timings=Timings()) for t in s.trajectories))
                for s in group.sessions
            ),
        )
        for group in groups
    ]


def score_again(make_loop, reward, groups):
    async def everything():
        rollout = Rollout(
            ScriptedEngine({}), make_loop(), scorer=RewardScorer(reward), decode=TOKENIZER.decode, tokenizer=TOKENIZER
        )
        try:
            return await rollout.score_again(groups)
        finally:
            rollout.close()

    return asyncio.run(everything())


@pytest.mark.parametrize("name", CASES)
def test_the_reward_sees_what_it_saw_in_the_run_and_nothing_runs_again(name):
    make_loop, say, options = CASES[name]
    prompts = [chat_prompt(TOKENIZER, text, uid=text) for text in ("1+2+3?", "2+4?")]
    seen, again = [], []
    first = run_loop(make_loop(), Speaker(TOKENIZER, say), prompts, num_sessions=2, reward=spy(seen, 1), **options)
    wanted = run_loop(make_loop(), Speaker(TOKENIZER, say), prompts, num_sessions=2, reward=spy([], 3), **options)
    num_calls = len(CALLS)
    found = score_again(make_loop, spy(again, 3), first)
    assert len(seen) == 4
    assert sorted(again, key=str) == sorted(seen, key=str)
    assert len(CALLS) == num_calls
    assert_same_groups(without_times(found), without_times(wanted))
    if name == "tools, several trajectories":
        assert len(found[0].sessions[0].trajectories) > 1


def test_a_reward_that_fails_now_fails_its_session_and_failed_sessions_stay():
    prompt = chat_prompt(TOKENIZER, "1?")
    (group,) = run_loop(SingleTurnLoop(), Speaker(TOKENIZER, in_turn(f"One.{END}")), [prompt], num_sessions=2)
    failed = replace(group.sessions[1], failure="the engine died")
    group = replace(group, sessions=(group.sessions[0], failed))

    @quick
    def raises(_given):
        raise ValueError("no grader")

    (found,) = score_again(SingleTurnLoop, raises, [group])
    assert "no grader" in found.sessions[0].failure
    assert found.sessions[0].trajectories[0].reward is None
    assert found.sessions[1].failure == "the engine died"
    assert found.sessions[1].trajectories == failed.trajectories


def test_a_loop_that_cannot_tell_what_was_judged_is_refused():
    class Own(SessionLoop):
        async def run_session(self, prompt, *, session_index, context):
            raise NotImplementedError

    assert not can_score_again(Own)
    assert can_score_again(SingleTurnLoop)
    with pytest.raises(SettingsError, match="agent loop Own cannot recover the text that its reward"):
        score_again(Own, quick(lambda _: 1.0), [])


def test_the_ids_that_are_judged_are_of_one_dtype():
    seen = []
    prompt = chat_prompt(TOKENIZER, "1?")
    groups = run_loop(SingleTurnLoop(), Speaker(TOKENIZER, in_turn(f"One.{END}")), [prompt])
    score_again(SingleTurnLoop, quick(lambda given: seen.append(given.response_ids.dtype) or 1.0), groups)
    assert seen == [np.dtype(np.int32)]
