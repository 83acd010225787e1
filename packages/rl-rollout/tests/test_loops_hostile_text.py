"""Any text from any source passes through loops, rewards, caches and queues, or fails only its session."""

import asyncio
import json
from contextlib import ExitStack
from dataclasses import replace
from functools import reduce

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from skip_groups import assert_same_groups

from rl_core.data import Prompt, encodable
from rl_core.errors import DataError
from rl_core.queue import InProcessQueue, QueueOptions, SharedMemoryQueue, TaskSpec
from rl_core.queue.messages import decode_prompt, encode_prompt
from rl_rollout import RewardScorer, Rollout, SamplingParams, SessionLoop, SessionResult, quick
from rl_rollout.engines import GenerateRequest
from rl_rollout.engines.scripted import ScriptedEngine
from rl_rollout.loops import trajectory_of
from rl_rollout.prompts.schema import read_problem
from rl_rollout.rewards import RewardResult
from rl_rollout.rewards.scorer import reward_input
from rl_rollout.rollouter.group_events import settle
from rl_rollout.skip.rows import decode_groups, iter_arrays

TASKS = [TaskSpec(name="learner", needs=frozenset({"input_ids", "reward"}))]
NASTY = [
    "\ud800",
    "\udfff\ud800",
    "\x00",
    "\x1b]0;x\x07",
    "\u202e",
    "\ufffe\uffff",
    "\U0010ffff",
    "\r\n",
    r"\ud800",
    "",
]
TEXT = st.sampled_from(NASTY) | st.text(st.characters(), max_size=20)  # including lone surrogates
LARGE = "\ud800\x1b" * (1 << 16)


class Says(SessionLoop):
    """Session 0 is scored, 1 returns the text in its extras, 2 fails with it as the reason, and 3 raises it."""

    def __init__(self, text):
        self._text = text

    async def run_session(self, prompt, *, session_index, context):
        if session_index == 2:
            return SessionResult(failure=self._text or "nothing")
        if session_index == 3:
            raise ValueError(self._text)
        request = GenerateRequest(input_ids=prompt.input_ids, sampling=context.session_sampling(session_index))
        (generation,) = await context.engine.generate(request)
        row = trajectory_of(prompt, generation, session_index=session_index, generate_s=0.0)
        if session_index == 1:
            extras = {self._text: [self._text, {"b": self._text}]}
            return SessionResult(trajectories=(replace(row, reward=1.0, extras=extras),))
        (scored,) = await context.scorer.score([_input(prompt)])
        if scored.result is None:
            return SessionResult(failure=scored.failure)
        return SessionResult(
            trajectories=(
                replace(row, reward=1.0, reward_components=scored.result.components, extras=scored.result.extras),
            )
        )


def _input(prompt):
    return reward_input(prompt, text="", ids=np.empty(0, np.int32))


async def roll(prompt, text):
    engine = ScriptedEngine({(1, 2): [[3, 4]]})
    await engine.start()
    reward = quick(lambda _: RewardResult(reward=1.0, components={text: 1.0}, extras={text: {text: text}, "a": text}))
    rollout = Rollout(engine, Says(text), scorer=RewardScorer(reward), decode=lambda rows: ["" for _ in rows])
    (group,) = await rollout.run([prompt], num_sessions=4, sampling=SamplingParams(max_tokens=4))
    return group


def prompt_of(text, uid):
    """Return a prompt with the text in most fields, as read from a line of a data file."""
    row = {"prompt": [{"role": text or "x", "content": "?", text: text}], "data_source": text or "x", "answer": [text]}
    problem = read_problem(json.loads(json.dumps({**row, text: {text: text}})), where="line 1")
    return Prompt(
        uid=uid,
        input_ids=np.array([1, 2], np.int32),
        messages=problem.messages,
        data_source=problem.data_source,
        ground_truth=problem.ground_truth,
        columns=problem.columns,
    )


@pytest.fixture(scope="module")
def queues(tmp_path_factory):
    """Open a queue of each kind, with a journal."""
    with ExitStack() as stack:
        made = []
        for kind in (InProcessQueue, SharedMemoryQueue):
            directory = tmp_path_factory.mktemp("queue") / "journal"
            made.append(kind(TASKS, options=QueueOptions(directory=str(directory))))
            stack.callback(made[-1].close)
        yield made


def check(text, queues, uid):
    prompt = prompt_of(text, uid)
    kept = encodable(text)
    assert prompt.ground_truth == [kept]
    assert prompt.columns[kept] == {kept: kept}
    group = asyncio.run(roll(prompt, text))
    assert group.sessions[2].failure == (kept or "nothing")
    assert "raised ValueError" in group.sessions[3].failure
    assert len(group.trajectories) == 2 - (len(text) > 1 << 16)
    assert group.trajectories[-1].extras == {kept: [kept, {"b": kept}]}
    (again,) = decode_groups(dict(iter_arrays([group])), path="entry")
    assert_same_groups([again], [group])
    for queue in queues:
        queue.issue([prompt], num_sessions=4)
        settle(queue, [group])
        lease = queue.lease("learner", prompts=[uid])
        assert [dict(extras) for extras in lease.batch.extras] == [dict(row.extras) for row in group.trajectories]
        assert lease.prompts[0].columns == prompt.columns
        (entry,) = [entry for entry in queue.ledger() if entry.prompt_uid == uid]
        assert entry.sessions_failed[2] == group.sessions[2].failure
        queue.ack(lease)


def test_any_text_passes_through_loops_rewards_caches_and_queues(queues):
    uids = iter(range(1_000_000))

    @settings(max_examples=10, deadline=None)
    @given(TEXT)
    def passes(text):
        check(text, queues, f"p{next(uids)}")

    passes()


def test_a_megabyte_of_text_fails_no_session_but_the_one_whose_reward_gives_it(queues):
    check(LARGE, queues, "large")


@pytest.mark.parametrize(
    "extras", [{"\ud800": 1, r"\ud800": 2}, {"deep": reduce(lambda deep, _: [deep], range(200), 1)}]
)
def test_extras_that_cannot_be_kept_fail_their_session(extras):
    reward = quick(lambda _: RewardResult(reward=1.0, extras=extras))
    prompt = Prompt(uid="p", input_ids=np.array([1, 2], np.int32))
    (scored,) = asyncio.run(RewardScorer(reward).score([_input(prompt)]))
    assert "returned extras with JSON" in scored.failure


def test_a_number_that_json_does_not_have_is_none_before_a_queue_makes_it_so():
    row = json.loads('{"prompt": "a", "answer": [1e999], "missing": NaN}')
    problem = read_problem(row, where="line 1")
    prompt = Prompt(
        uid="p",
        input_ids=np.array([1], np.int32),
        ground_truth=problem.ground_truth,
        columns=problem.columns,
    )
    travelled = decode_prompt(encode_prompt(prompt))
    assert (prompt.ground_truth, prompt.columns["missing"]) == ([None], None)
    assert (travelled.ground_truth, travelled.columns) == (prompt.ground_truth, prompt.columns)
    with pytest.raises(DataError, match="`answer`: missing"):
        read_problem({**row, "answer": float("nan")}, where="line 1")
