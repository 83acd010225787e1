import asyncio
import json
import threading

import numpy as np
import pytest
from chat_model import CHATML, Speaker, chat_prompt, in_turn, make_tokenizer, run_loop

from rl_core.data.records import Prompt
from rl_core.errors import EngineError, SettingsError
from rl_rollout import RewardScorer, Rollout, SamplingParams, quick
from rl_rollout.engines.scripted import ScriptedEngine
from rl_rollout.loops.conversation import TurnLimits
from rl_rollout.loops.tools import ToolsLoop, ToolsOptions
from rl_rollout.loops.turns import TurnFormat
from rl_rollout.tools import CallOptions, ToolBox

END = "<|im_end|>"
TOKENIZER = make_tokenizer()


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class Add:
    name, description = "add", "Adds."

    def __init__(self):
        self.parameters = {"type": "object"}
        self.num_closed = 0

    async def call(self, arguments):
        await asyncio.sleep(0)
        return str(arguments["a"] + arguments["b"])

    def close(self):
        self.num_closed += 1


class Give(Add):
    """A tool that returns the result of its function."""

    def __init__(self, name, function):
        super().__init__()
        self.name = name
        self._function = function

    async def call(self, arguments):
        return await self._function(**arguments)


def loop(*tools, **options):
    return ToolsLoop(ToolsOptions(**options), toolbox=ToolBox(tools or [Add()]))


def sessions(say, *tools, num_sessions=1, sampling=None, max_model_len=4096, **options):
    speaker = Speaker(TOKENIZER, say, max_model_len=max_model_len)
    given = {} if sampling is None else {"sampling": sampling}
    (group,) = run_loop(
        loop(*tools, **options), speaker, [chat_prompt(TOKENIZER, "1+2+3?")], num_sessions=num_sessions, **given
    )
    assert group.num_audit_failures == 0
    return group.sessions


def text(ids):
    return TOKENIZER.decode([np.asarray(ids)], skip_special_tokens=False)[0]


def test_three_turns_train_what_was_sampled_and_mask_the_rest():
    turns = [f"First. {call('add', a=1, b=2)}{END}", f"{call('add', a=3, b=3)}{END}", f"It is 6.{END}"]
    (session,) = sessions(in_turn(*turns))
    assert session.failure is None
    (trajectory,) = session.trajectories
    assert text(trajectory.input_ids[trajectory.loss_mask]) == "".join(turns)
    assert text(trajectory.input_ids[trajectory.num_prompt_tokens :]) == (
        f"{turns[0]}\n<|im_start|>tool\n3{END}\n<|im_start|>assistant\n"
        f"{turns[1]}\n<|im_start|>tool\n6{END}\n<|im_start|>assistant\n{turns[2]}"
    )
    assert trajectory.extras == {"ended_by": "answer", "num_turns": 3, "tool_calls": {"ok": 2}}
    assert trajectory.finish_reason == "stop"
    assert trajectory.reward == len("It is 6.")
    assert trajectory.timings.generate_s > 0
    assert trajectory.timings.tools_s > 0
    assert set(trajectory.policy_versions[trajectory.loss_mask].tolist()) == {0}
    assert set(trajectory.policy_versions[~trajectory.loss_mask].tolist()) == {-1}


def test_the_reward_gets_the_last_turn_and_all_sampled_tokens():
    seen = []

    def judge(given):
        seen.append((given.response_text, text(given.response_ids), given.finish_reason))
        return 1.0

    turns = [f"{call('add', a=1, b=2)}{END}", f"It is 3.{END}"]
    run_loop(loop(), Speaker(TOKENIZER, in_turn(*turns)), [chat_prompt(TOKENIZER, "1+2?")], reward=quick(judge))
    assert seen == [("It is 3.", "".join(turns), "stop")]


def test_calls_of_one_turn_run_at_once_and_come_back_in_order():
    waiting = 0
    both = asyncio.Event()

    async def meet(number):
        nonlocal waiting
        waiting += 1
        if waiting == 2:
            both.set()
        await asyncio.wait_for(both.wait(), 30)
        return f"result {number}"

    meeting = Give("meet", meet)
    turns = [f"{call('meet', number=1)}{call('meet', number=2)}{END}", f"Done.{END}"]
    (session,) = sessions(in_turn(*turns), meeting)
    said = text(session.trajectories[0].input_ids)
    assert session.trajectories[0].extras["tool_calls"] == {"ok": 2}
    assert said.index("result 1") < said.index("result 2")


def bad_tools():
    async def fail():
        raise ValueError("broken")

    async def hang():
        await asyncio.Event().wait()

    async def flood():
        return "x" * 10_000_000

    return [Add(), Give("fail", fail), Give("hang", hang), Give("flood", flood)]


@pytest.mark.parametrize(
    ("said", "outcome", "told"),
    [
        (call("fail"), "raised", "Error: fail raised ValueError: broken"),
        (call("hang"), "timed_out", "Error: hang did not return within 0.05 s."),
        (call("flood"), "truncated", "[cut: the first 200 of 10000000 characters]"),
        (call("nope"), "unknown_tool", "Error: unknown tool 'nope'."),
        (call("add", a=1), "raised", "Error: add raised KeyError"),
        ("<tool_call>{bad json}</tool_call>", "malformed_call", "Error: a tool call is not JSON"),
        ("<tool_call>", "malformed_call", "Error: a tool call has no < "),
    ],
)
def test_what_goes_wrong_goes_back_to_the_model_and_is_counted(said, outcome, told):
    options = CallOptions(timeout_s=0.05, max_result_chars=200)
    (session,) = sessions(in_turn(f"{said}{END}", f"Sorry.{END}"), *bad_tools(), calls=options)
    assert session.failure is None
    (trajectory,) = session.trajectories
    assert trajectory.extras["tool_calls"] == {outcome: 1}
    if said != "<tool_call>":
        assert told in text(trajectory.input_ids)
    assert trajectory.reward == len("Sorry.")


def test_the_other_sessions_are_untouched():
    """Of eight prompts, one fails in the engine, one is empty, one is too long, and the template refuses one."""
    refusing = make_tokenizer(
        CHATML + "{% if messages[0].content == 'bad' %}{{ raise_exception('a bad prompt') }}{% endif %}"
    )

    def say(heard):
        if "user\n3?" in heard:
            raise EngineError("no memory")
        return f"It is 6.{END}" if "tool\n" in heard else f"{call('add', a=1, b=2)}{END}"

    prompts = [chat_prompt(TOKENIZER, f"{index}?", uid=f"p{index}") for index in range(8)]
    prompts[5] = Prompt(uid="p5", input_ids=np.zeros(0, np.int32))
    prompts[6] = Prompt(uid="p6", input_ids=np.ones(1, np.int32), messages=({"role": "user", "content": "bad"},))
    prompts[7] = chat_prompt(TOKENIZER, "7" * 5000, uid="p7")
    groups = run_loop(loop(), Speaker(refusing, say), prompts, num_sessions=2)
    failed = {group.prompt.uid: group.failures for group in groups if group.failures}
    assert set(failed) == {"p3", "p5", "p6", "p7"}
    assert failed["p3"] == ("EngineError: no memory",) * 2
    assert "Add at least one token to an empty prompt" in failed["p5"][0]
    assert "prompt p6: the chat template refuses the messages (TemplateError: a bad prompt)" in failed["p6"][0]
    assert "must be at most max_model_len = 4096" in failed["p7"][0]
    for group in groups:
        if group.prompt.uid not in failed:
            assert [session.trajectories[0].extras["ended_by"] for session in group.sessions] == ["answer"] * 2


def test_a_session_that_fails_in_its_second_turn_keeps_what_there_was():
    def say(heard):
        if "tool\n" in heard:
            raise EngineError("no memory")
        return f"{call('add', a=1, b=2)}{END}"

    (session,) = sessions(say)
    assert session.failure == "EngineError: no memory"
    assert text(session.trajectories[0].input_ids[session.trajectories[0].loss_mask]).startswith("<tool_call>")
    assert session.trajectories[0].reward is None


@pytest.mark.parametrize(
    ("limits", "max_tokens", "ended_by", "num_turns"),
    [
        (TurnLimits(max_turns=3), 2000, "max_turns", 3),
        (TurnLimits(), 390, "context", 3),
        (TurnLimits(), 300, "length", 3),
        (TurnLimits(max_turn_tokens=20), 2000, "length", 1),
    ],
)
def test_limits_end_a_session_with_finish_reason_length(limits, max_tokens, ended_by, num_turns):
    again = f"{call('add', a=1, b=2)}{'.' * 40}{END}"  # 110 tokens, then a reply of 21
    (session,) = sessions(lambda _: again, limits=limits, sampling=SamplingParams(max_tokens=max_tokens))
    (trajectory,) = session.trajectories
    assert trajectory.extras["ended_by"] == ended_by
    assert trajectory.extras["num_turns"] == num_turns
    assert trajectory.finish_reason == "length"
    prompt_size = trajectory.num_prompt_tokens
    assert len(trajectory.input_ids) - prompt_size <= max_tokens
    assert trajectory.loss_mask[-1]


@pytest.mark.parametrize(
    ("max_turns", "max_tokens", "ended_by"), [(2, 2000, "max_turns"), (9, 90, "context"), (9, 60, "length")]
)
def test_the_arguments_of_a_last_call_are_no_answer(max_turns, max_tokens, ended_by):
    judged = []

    def judge(given):
        judged.append(given.response_text)
        return 0.0

    (group,) = run_loop(
        loop(limits=TurnLimits(max_turns=max_turns)),
        Speaker(TOKENIZER, lambda _: f"So far 41: {call('add', a=42, b=42)}{END}"),
        [chat_prompt(TOKENIZER, "1+2?")],
        sampling=SamplingParams(max_tokens=max_tokens),
        reward=quick(judge),
    )
    assert group.sessions[0].trajectories[-1].extras["ended_by"] == ended_by
    assert judged == ["So far 41: "]


def test_the_models_context_is_a_limit_too():
    again = f"{call('add', a=1, b=2)}{END}"
    (session,) = sessions(lambda _: again, limits=TurnLimits(max_turns=100), max_model_len=500)
    assert len(session.trajectories[0].input_ids) <= 500
    assert session.trajectories[0].finish_reason == "length"


def test_a_full_context_goes_on_in_a_new_trajectory():
    num_turns = 0

    def say(_heard):
        nonlocal num_turns
        num_turns += 1
        return f"{num_turns}:{call('add', a=num_turns, b=0)}{END}" if num_turns < 9 else f"Done.{END}"

    (session,) = sessions(
        say,
        limits=TurnLimits(max_turns=20, on_context_full="new_trajectory", max_trajectories=10),
        sampling=SamplingParams(max_tokens=330),
    )
    assert session.failure is None
    assert [trajectory.output_index for trajectory in session.trajectories] == [0, 1, 2, 3]
    trained = [text(t.input_ids[t.loss_mask]) for t in session.trajectories]
    assert (
        "".join(trained) == "".join(f"{n}:{call('add', a=n, b=0)}{END}" for n in range(1, 9)) + f"Done.{END}"
    )  # each turn trains once
    first = session.trajectories[0].input_ids[: session.trajectories[0].num_prompt_tokens].tolist()
    for trajectory in session.trajectories:
        assert trajectory.input_ids[: len(first)].tolist() == first
        assert len(trajectory.input_ids) <= len(first) + 330
        assert trajectory.reward == len("Done.")
    assert [t.finish_reason for t in session.trajectories] == ["length"] * 3 + ["stop"]
    assert [bool(t.extras) for t in session.trajectories] == [False, False, False, True]
    assert session.trajectories[-1].extras["num_turns"] == 9
    second = session.trajectories[1]
    kept = text(second.input_ids[len(first) : second.num_prompt_tokens])
    assert kept.startswith("3:<tool_call>")  # the latest turns that fit half of the room, as sampled
    assert kept.endswith("<|im_start|>assistant\n")


def test_the_number_of_trajectories_is_bounded():
    limits = TurnLimits(max_turns=50, on_context_full="new_trajectory", max_trajectories=2)
    (session,) = sessions(
        lambda _: f"{call('add', a=1, b=2)}{END}", limits=limits, sampling=SamplingParams(max_tokens=260)
    )
    assert len(session.trajectories) == 2
    assert session.trajectories[-1].extras["ended_by"] == "context"
    assert session.trajectories[-1].finish_reason == "length"


def test_a_reply_that_fits_nowhere_ends_the_session():
    async def flood():
        return "x" * 3000

    limits = TurnLimits(on_context_full="new_trajectory")
    (session,) = sessions(lambda _: f"{call('flood')}{END}", Give("flood", flood), limits=limits)
    assert len(session.trajectories) == 1
    assert session.trajectories[0].extras["ended_by"] == "context"


def test_an_aborted_turn_fails_its_session():
    async def everything():
        started = asyncio.Event()

        async def wait(_request, _index):
            started.set()
            await asyncio.Event().wait()

        engine = ScriptedEngine(wait)
        await engine.start()
        rollout = Rollout(
            engine,
            loop(),
            scorer=RewardScorer(quick(lambda _: 1.0)),
            decode=TOKENIZER.decode,
            tokenizer=TOKENIZER,
        )
        running = asyncio.create_task(
            rollout.run([chat_prompt(TOKENIZER, "1?")], num_sessions=1, sampling=SamplingParams(max_tokens=50))
        )
        await started.wait()
        await engine.abort(None)
        return await running

    (group,) = asyncio.run(everything())
    assert group.failures == ("EngineError: the engine aborted turn 1 after 0 tokens.",)


def test_each_session_and_turn_draws_for_itself():
    speaker = Speaker(TOKENIZER, in_turn(f"{call('add', a=1, b=2)}{END}", f"3{END}"))
    run_loop(loop(), speaker, [chat_prompt(TOKENIZER, "1+2?")], num_sessions=3, sampling=SamplingParams(max_tokens=900))
    seeds = [request.sampling.seed for request in speaker.engine.requests]
    assert len(set(seeds)) == 6
    again = Speaker(TOKENIZER, in_turn(f"{call('add', a=1, b=2)}{END}", f"3{END}"))
    run_loop(loop(), again, [chat_prompt(TOKENIZER, "1+2?")], num_sessions=3, sampling=SamplingParams(max_tokens=900))
    assert sorted(seeds) == sorted(request.sampling.seed for request in again.engine.requests)


def test_too_many_calls_in_a_turn_are_answered_with_an_error():
    (session,) = sessions(in_turn(call("add", a=1, b=2) * 5 + END, f"3{END}"), max_calls_per_turn=2)
    assert session.trajectories[0].extras["tool_calls"] == {"malformed_call": 3, "ok": 2}
    assert "more than 2 calls in one turn" in text(session.trajectories[0].input_ids)


def test_plain_turns_need_no_chat_template():
    tokenizer = make_tokenizer(None)
    speaker = Speaker(
        tokenizer, lambda heard: f"={heard.count('=')}{END}" if "[3]" in heard else f"{call('add', a=1, b=2)}{END}"
    )
    prompt = Prompt(uid="p", input_ids=np.array(tokenizer.encode(["1+2"], add_special_tokens=False)[0], np.int32))
    turns = TurnFormat(kind="plain", prefix="[", suffix="]")
    (group,) = run_loop(loop(turns=turns), speaker, [prompt])
    assert text(group.trajectories[0].input_ids) == f"1+2{call('add', a=1, b=2)}{END}[3]=0{END}"


def test_what_cannot_work_is_refused_before_the_first_session():
    prompt = chat_prompt(TOKENIZER, "1?")
    speaker = Speaker(make_tokenizer("{{ raise_exception('never') }}"), lambda _: END)
    with pytest.raises(SettingsError, match=r"the chat template cannot join turns: .*never"):
        run_loop(loop(), speaker, [prompt])
    with pytest.raises(SettingsError, match=r"has no tools\. Set tools or mcp_servers"):
        run_loop(ToolsLoop(), Speaker(TOKENIZER, lambda _: END), [prompt])
    with pytest.raises(SettingsError, match=r"needs a tokenizer\. Pass tokenizer="):
        asyncio.run(loop().start(None))
    assert speaker.engine.requests == []


def test_closing_the_rollout_closes_the_tools():
    add = Add()
    run_loop(loop(add), Speaker(TOKENIZER, lambda _: f"3{END}"), [chat_prompt(TOKENIZER, "1?")])
    assert add.num_closed >= 1


def test_preemptions_add_up_over_the_turns():
    speaker = Speaker(TOKENIZER, in_turn(f"{call('add', a=1, b=2)}{END}", f"{call('add', a=1, b=2)}{END}", f"3{END}"))
    generate = speaker.engine.generate

    async def preempted(request):
        from dataclasses import replace

        return [replace(generation, num_preempted=2) for generation in await generate(request)]

    speaker.engine.generate = preempted
    (group,) = run_loop(loop(), speaker, [chat_prompt(TOKENIZER, "1+2?")])
    assert group.trajectories[0].timings.preemptions == 6


def test_blocking_tools_of_many_sessions_run_beside_each_other():
    pytest.importorskip("pydantic")
    from rl_rollout.tools import tool

    barrier = threading.Barrier(4)

    @tool
    def meet() -> str:
        """Wait for the others."""
        barrier.wait(30)
        return "met"

    turns = in_turn(f"{call('meet')}{END}", f"Good.{END}")
    found = sessions(turns, meet, num_sessions=4)
    assert [session.trajectories[0].extras["tool_calls"] for session in found] == [{"ok": 1}] * 4
