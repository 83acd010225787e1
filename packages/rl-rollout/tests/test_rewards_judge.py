import asyncio
from dataclasses import replace

import numpy as np
import pytest

from rl_core.data.records import Prompt
from rl_core.errors import SettingsError
from rl_rollout.engines.scripted import ScriptedEngine
from rl_rollout.rewards import JudgeModel, RewardInput, RewardOptions, RewardPart, build_scorer, resolve_reward

TEMPLATE = "Task: {prompt}\nAnswer: {response}\nRight: {ground_truth} {level} {column:level}\nScore 0 to 10:"


def encode(text):
    return [ord(character) for character in text]


END = 0


def decode(sequences):
    return ["".join(chr(token) for token in ids.tolist() if token != END) for ids in sequences]


def given(text="18", **columns):
    return RewardInput(
        prompt_uid="p7",
        response_text=text,
        response_ids=np.array([1], np.int32),
        messages=({"role": "user", "content": "9 + 9?"},),
        ground_truth="18",
        columns={"level": 3, **columns},
    )


def judge_model(answer):
    """Return a judge that answers with a fixed text, or with a function of its question."""
    say = answer if callable(answer) else lambda _question: answer
    engine = ScriptedEngine(
        lambda request, _index: [*encode(say(decode([request.input_ids])[0])), END], end_token_ids=[END]
    )
    asyncio.run(engine.start())
    return JudgeModel(engine=engine, encode=encode, decode=decode)


def judge(answer, **options):
    options = {"template": TEMPLATE, "low": 0.0, "high": 10.0, **options}
    return resolve_reward("judge", options, parts={"model": judge_model(answer)})


def score(answer, **options):
    return asyncio.run(judge(answer, **options)(given()))


def test_the_judge_is_asked_with_the_template_and_its_score_is_scaled():
    reward = judge("It is right. Score: 8.")
    result = asyncio.run(reward(given()))
    assert (result.reward, result.components) == (0.8, {"score": 8.0})
    assert result.extras == {"judge_answer": "It is right. Score: 8."}
    (request,) = reward.model.engine.requests
    asked = decode([request.input_ids])[0]
    assert asked == "Task: user: 9 + 9?\nAnswer: 18\nRight: 18 {level} 3\nScore 0 to 10:"
    assert (request.sampling.temperature, request.sampling.max_tokens) == (0.0, 512)


def test_fields_in_a_response_stay_as_they_are():
    assert "Answer: {ground_truth} {column:level}\n" in judge("1").ask(given("{ground_truth} {column:level}"))


def test_a_long_response_loses_its_middle():
    asked = judge("1", max_response_characters=10).ask(given("a" * 50 + "b" * 50))
    assert "aaaaa\n[... 90 characters left out ...]\nbbbbb" in asked


@pytest.mark.parametrize(
    ("answer", "options", "reward"),
    [
        ("7", {}, 0.7),
        ("First 3, then 9.5", {}, 0.95),
        ("8/10", {}, 0.8),
        ("8 / 10", {}, 0.8),
        ("8 out of 10", {}, 0.8),
        ("8 Out  of\n10", {}, 0.8),
        ("8 out of a possible 10", {}, 0.8),
        ("7 of 10", {}, 0.7),
        ("I give a score of 7", {}, 0.7),
        ("6 on a scale of 0-10", {}, 0.6),
        ("On a scale from 0 to 10: 6.", {}, 0.6),
        ("Yes, in all. No, wait: yes", {"parse": "yes_no"}, 1.0),
        ("YES... no", {"parse": "yes_no"}, 0.0),
        ("I know nothing, yes", {"parse": "yes_no"}, 1.0),
        ("<score>4</score> of 10", {"parse": r"<score>(\d+)</score>"}, 0.4),
        ("-1", {"low": -1.0, "high": 1.0}, 0.0),
        ("Score: 7. The 2nd proof is better", {}, 0.7),
        ("Between 1, 2 and 3, I say 4", {}, 0.4),
        ("It is 6.", {}, 0.6),
        ("Score: 9 (criteria 1-3 met)", {}, 0.9),
        ("I give 9 (criteria 1 and 3 are met)", {}, 0.9),
        ("**Score:** 4, because steps 1 and 2 are wrong", {}, 0.4),
        ("Score for style: 3\nOverall rating is 8. Only rule 2 is broken", {}, 0.8),
        ("Score (from 0 to 10): 8", {}, 0.8),
        ("The score is in parentheses (7)", {}, 0.7),
        ("A score of 1 would be unfair; I give 9", {}, 0.9),
        ("The maximum score is 10. My verdict: 9", {}, 0.9),
        ("Overall: 9. There was 1 issue", {}, 0.9),
        ("Score: (9) criteria 3", {}, 0.9),
        ("<score>9</score> 3 criteria", {}, 0.9),
        ("[[9]] because of 3", {}, 0.9),
        ("The score is 9, since step 2 is right", {}, 0.9),
        ("Points 1 to 3 are met, so 9", {}, 0.9),
    ],
)
def test_how_scores_are_read(answer, options, reward):
    assert score(answer, **options).reward == pytest.approx(reward)


@pytest.mark.parametrize(
    ("answer", "reward"), [("0", 0.0), ("2", 0.0), ("4", 0.25), ("6", 0.5), ("7.5", 0.75), ("9", 1.0), ("10", 1.0)]
)
def test_a_calibration_says_what_a_score_is_worth(answer, reward):
    result = score(answer, calibration=[[2, 0.0], [6, 0.5], [9, 1.0]])
    assert (result.reward, result.components) == (pytest.approx(reward), {"score": float(answer)})


def test_a_calibration_applies_to_each_answer():
    answers = iter(["2", "9", "10", "no score"])
    options = {"calibration": [(2, 0.0), (6, 0.5), (9, 2.0)], "num_samples": 4, "temperature": 1.0}
    engine = ScriptedEngine(lambda *_: [*encode(next(answers)), END], end_token_ids=[END])
    asyncio.run(engine.start())
    model = JudgeModel(engine=engine, encode=encode, decode=decode)
    reward = resolve_reward("judge", {"template": TEMPLATE, "high": 10.0, **options}, parts={"model": model})
    result = asyncio.run(reward(given()))
    assert result.reward == pytest.approx(4 / 3)  # the worth of the mean score, 7, would be 1
    assert result.components["score"] == 7.0


@pytest.mark.parametrize(
    "pairs",
    [
        [],
        [[2, 0.0]],
        [[2, 0], [2, 1]],
        [[3, 0], [2, 1]],
        [[2, 0, 1], [3, 1, 1]],
        [2, 3],
        5,
        "ab",
        [[2, 0], [3, "a"]],
        [[2, 0.0], [3, float("nan")]],
        [[2, 0.0], [float("inf"), 1.0]],
        [[2, None], [3, 1]],
    ],
)
def test_an_impossible_calibration_is_refused(pairs):
    with pytest.raises(SettingsError, match="calibration of "):
        judge("1", calibration=pairs)


@pytest.mark.parametrize(
    ("answer", "options", "message"),
    [
        ("I cannot say", {}, "the judge's answer has no score .*'I cannot say'"),
        ("maybe", {"parse": "yes_no"}, "has no score"),
        ("1,5", {}, "has no score"),
        ("5e-1", {}, "has no score"),
        ("\u22123", {}, "has no score"),
        ("1,500.25", {}, "has no score"),
        ("11", {}, "must be from 0 to 10; found 11"),
        ("score: high", {"parse": r"score: (\w+)"}, "the score 'high', which is not a number"),
        ("score: nan", {"parse": r"score: (\w+)"}, "must be from 0 to 10; found nan"),
    ],
)
def test_an_answer_without_a_score_is_a_failed_session(answer, options, message):
    options = {"template": TEMPLATE, "low": 0.0, "high": 10.0, **options}
    scorer = build_scorer(RewardOptions(function="judge", options=options), parts={"model": judge_model(answer)})
    (scored,) = asyncio.run(scorer.score([given()]))
    assert scored.result is None
    with pytest.raises(ValueError, match=message):
        raise ValueError(scored.failure)


def test_an_engine_that_fails_or_a_missing_column_fails_that_session_alone():
    def breaks_on_b(question):
        if "Answer: b" in question:
            raise RuntimeError("out of memory")
        return "5"

    options = {"template": TEMPLATE, "high": 10.0}
    scorer = build_scorer(RewardOptions(function="judge", options=options), parts={"model": judge_model(breaks_on_b)})
    bare = replace(given("c"), columns={})
    scored = asyncio.run(scorer.score([given("a"), given("b"), bare, given("d")]))
    assert [one.result is None for one in scored] == [False, True, True, False]
    assert "out of memory" in scored[1].failure
    assert "KeyError: 'level'" in scored[2].failure


def test_an_answer_that_is_cut_is_no_score_unless_it_is_meant_to_be():
    answer = "There are 3 errors in the proof, so it is a 2."
    with pytest.raises(RuntimeError, match=r"cut at max_tokens = 25; .*accept_cut.* ends: '.*3 errors in the'"):
        score(answer, max_tokens=25)
    assert score(answer, max_tokens=len(answer) + 1).reward == pytest.approx(0.2)
    assert score("yes, it is", max_tokens=3, parse="yes_no", accept_cut=True).reward == 1.0


def test_an_aborted_answer_is_no_score():
    class Aborting(ScriptedEngine):
        async def generate(self, request):
            return [replace(one, finish_reason="abort") for one in await super().generate(request)]

    engine = Aborting(lambda _request, _index: encode("5"))
    asyncio.run(engine.start())
    model = JudgeModel(engine=engine, encode=encode, decode=decode)
    with pytest.raises(RuntimeError, match="aborted after 1 characters"):
        asyncio.run(resolve_reward("judge", {"template": TEMPLATE, "high": 10.0}, parts={"model": model})(given()))


class Tokenizer:
    has_chat_template = True

    def render(self, messages, *, where):
        return f"<{messages[0]['role']}>{messages[0]['content']}"

    def encode(self, texts, *, add_special_tokens):
        return [([2] if add_special_tokens else []) + encode(text) for text in texts]

    decode = staticmethod(decode)


def test_a_tokenizer_with_a_template_asks_as_a_user():
    tokenizer = Tokenizer()
    assert JudgeModel.with_tokenizer(None, tokenizer).encode("hi") == encode("<user>hi")
    tokenizer.has_chat_template = False
    assert JudgeModel.with_tokenizer(None, tokenizer).encode("hi") == [2, *encode("hi")]


def test_a_judge_is_one_part_of_several_and_rehearses_without_an_engine():
    parts = (
        RewardPart(function="exact_match"),
        RewardPart(function="judge", weight=0.5, options={"template": TEMPLATE, "high": 10.0}),
    )
    scorer = build_scorer(RewardOptions(parts=parts), parts={"model": judge_model("6")})
    (scored,) = asyncio.run(scorer.score([given()]))
    assert scored.result.reward == 1.0 + 0.5 * 0.6
    assert scored.result.components == {"exact_match": 1.0, "judge": 0.6, "judge/score": 6.0}
    prompt = Prompt(uid="p0", input_ids=np.array([1], np.int32), columns={"level": 1})
    asyncio.run(scorer.rehearse(prompt))
    with pytest.raises(SettingsError, match="names the column 'level', which the first prompt lacks"):
        asyncio.run(scorer.rehearse(replace(prompt, columns={})))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"template": "Score it"}, "must have {response}"),
        ({"template": TEMPLATE, "low": 1.0, "high": 1.0}, "needs finite low < high"),
        ({"template": TEMPLATE, "high": float("inf")}, "needs finite low < high"),
        ({"template": TEMPLATE, "parse": "("}, "regular expression; found '\\('"),
        ({"template": TEMPLATE, "max_tokens": 0}, "at least 1"),
        ({}, "needs the option 'template'"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(SettingsError, match=message):
        resolve_reward("judge", options, parts={"model": judge_model("1")})


def test_without_a_model_the_option_is_named():
    with pytest.raises(SettingsError, match="'judge' needs the option 'model'"):
        resolve_reward("judge", {"template": TEMPLATE})
    with pytest.raises(SettingsError, match=r"which the program passes: build_scorer\(.*; found 'gpt'"):
        resolve_reward("judge", {"template": TEMPLATE, "model": "gpt"})
