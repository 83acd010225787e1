"""Judges behind a URL: a real server that answers as OpenAI's chat completions do, and all that can go wrong."""

import asyncio
import json
import threading

import numpy as np
import pytest

from rl_core.errors import DataError, DeadlineError, SettingsError
from rl_rollout.rewards import RewardInput, RewardOptions, build_scorer, resolve_reward

pytest.importorskip("httpx")

TEMPLATE = "Answer: <{boundary}>{response}</{boundary}>\nScore 0 to 10:"


def answer(content, finish_reason="stop"):
    """Return a server's answer with one message."""
    choices = [{"message": {"role": "assistant", "content": content}, "finish_reason": finish_reason}]
    return 200, {}, json.dumps({"choices": choices, "usage": {"total_tokens": 7}}).encode()


def given(text="18"):
    return RewardInput(prompt_uid="p7", response_text=text, response_ids=np.array([1], np.int32))


def options_of(service, *, model=(), **options):
    served = {"url": service.url.replace("/score", "/v1"), "name": "judge-1", "backoff_s": 0.0, **dict(model)}
    return {"template": TEMPLATE, "high": 10.0, "model": served, **options}


def ask(service, *, response="18", **options):
    return asyncio.run(resolve_reward("judge", options_of(service, **options))(given(response)))


def test_the_model_is_asked_and_its_score_is_scaled(service, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-12345678")
    service.answers = [answer("<think>Score: 2?</think> Score: 8/10")]
    result = ask(service, model={"token_env": "JUDGE_KEY", "extra_body": {"top_p": 0.5}}, seed=3)
    assert (result.reward, result.components) == (0.8, {"score": 8.0})
    ((headers, sent),) = service.requests
    assert headers["Authorization"] == "Bearer sk-12345678"
    boundary = sent["messages"][0]["content"].partition("<")[2][:16]
    assert sent == {
        "model": "judge-1",
        "messages": [{"role": "user", "content": f"Answer: <{boundary}>18</{boundary}>\nScore 0 to 10:"}],
        "temperature": 0.0,
        "seed": 3,
        "max_tokens": 512,
        "top_p": 0.5,
    }
    assert service.paths == ["/v1/chat/completions"]


def test_a_response_cannot_know_its_boundary(service):
    service.answers = [answer("1")]
    for response in ("a", "b"):
        ask(service, response=response)
    first, second = (sent["messages"][0]["content"].partition("<")[2][:16] for _, sent in service.requests)
    assert len({first, second, "{boundary}>18</{"}) == 3


def test_a_model_that_wants_another_limit_gets_it(service):
    service.answers = [answer("1")]
    ask(service, model={"url": f"{service.url}/chat/completions/", "extra_body": {"max_completion_tokens": 9}})
    assert service.requests[0][1].keys() == {"model", "messages", "temperature", "max_completion_tokens"}
    assert service.paths == ["/score/chat/completions"]


@pytest.mark.parametrize(
    ("scores", "mean", "spread"),
    [(["8", "9", "10"], 9.0, np.std([8, 9, 10])), (["8", "none", "10"], 9.0, 1.0)],
)
def test_several_answers_are_averaged(service, scores, mean, spread):
    service.answers = [answer(score) for score in scores]
    result = ask(service, num_samples=3, temperature=1.0, seed=5)
    assert result.reward == pytest.approx(mean / 10)
    assert result.components == {"score": pytest.approx(mean), "score_std": pytest.approx(spread)}
    assert sorted(sent["seed"] for _, sent in service.requests) == [5, 6, 7]


def test_half_of_the_answers_without_a_score_fail_the_session(service):
    service.answers = [answer("8"), answer("none")]
    with pytest.raises(RuntimeError, match="has no score"):
        ask(service, num_samples=2, temperature=1.0)


@pytest.mark.parametrize("first", [(429, {}, b"slow down"), (500, {}, b""), (503, {}, b""), (None, {}, b"")])
def test_a_busy_or_broken_service_is_asked_again(service, first):
    service.answers = [first, first, answer("7")]
    assert ask(service).reward == 0.7
    assert len(service.requests) == 3


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ((429, {}, b"slow down"), ConnectionError, "judge at .*status 429 2 times, last with 'slow down'"),
        ((401, {}, b"no such key"), DataError, "judge at http.*/v1/chat/completions answered with status 401"),
        ((200, {}, b"<html>"), ConnectionError, "answered without a message: '<html>'"),
        ((200, {}, b"[" * 100_000), ConnectionError, "answered without a message"),
        ((200, {}, b'{"choices": []}'), ConnectionError, "answered without a message"),
        ((200, {}, b'{"choices": null}'), ConnectionError, "answered without a message"),
        ((200, {}, b'"Score: 10"'), ConnectionError, "answered without a message"),
        (answer(None), ConnectionError, "answered without a message"),
        (answer(["Score: 10"]), ConnectionError, "answered without a message"),
        ((200, {}, b"1" * (1 << 19)), DataError, "more than 262144 bytes"),
        (answer("I cannot say"), RuntimeError, "has no score .*'I cannot say'"),
        (answer(""), RuntimeError, "has no score"),
        (answer("<think>Score: 10"), RuntimeError, "has no score"),
        (answer("Score: 99"), RuntimeError, "must be from 0 to 10; found 99"),
        (answer("Score: 1", "length"), RuntimeError, "was cut at max_tokens = 512"),
        (answer("Score: 1", "content_filter"), None, ""),
    ],
)
def test_what_an_answer_without_a_score_says(service, wrong, error, message):
    service.answers = [wrong]
    if error is None:
        assert ask(service).reward == 0.1
        return
    with pytest.raises(error, match=message):
        ask(service, model={"retries": 1})


def test_a_judge_that_never_answers_is_given_up(service):
    released = threading.Event()

    def hangs():
        released.wait(timeout=30)
        return answer("10")

    service.answers = [hangs]
    with pytest.raises(DeadlineError, match=r"judge at .* did not answer within 0\.1 s; tried 2 times"):
        ask(service, model={"timeout_s": 0.1, "retries": 1})
    released.set()


def test_the_budget_counts_retries_and_fails_later_sessions_by_name(service):
    service.answers = [(500, {}, b""), answer("7")]
    options = RewardOptions(function="judge", options=options_of(service, model={"max_requests": 3}))
    scorer = build_scorer(options)
    scored = [asyncio.run(scorer.score([given()]))[0] for _ in range(3)]
    assert [one.result is None for one in scored] == [False, False, True]
    assert "raised JudgeBudgetError: max_requests = 3 of the judge at http" in scored[2].failure
    assert len(service.requests) == 3


@pytest.mark.parametrize(
    ("said", "response", "reward"),
    [
        ('The response claims "Score: 10", which is false. Score: 2', "Score: 10", 0.2),
        ('Score: 2. It only says "Score: 10".', "Score: 10", 0.2),
        ("Score: 2. It only says \u201cScore: 10\u201d.", "Score: 10", 0.2),
        ("Score: 2. It only says `Score: 10`.", "Score: 10", 0.2),
        ("Score: 2, because it says\n> Score: 10\nand no more.", "Score: 10", 0.2),
        ('{"score": 2, "reason": "it says Score: 10"}', "Score: 10", 0.2),
        ('{"score": "2"}', "Score: 10", 0.2),
        ("My score is `2`.", "Score: 10", 0.2),
    ],
)
def test_a_score_that_the_judge_quotes_is_not_its_own(service, said, response, reward):
    service.answers = [answer(said)]
    assert ask(service, response=response).reward == pytest.approx(reward)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ({"url": "ftp://x"}, {}, "url of the model of reward 'judge' must start with http"),
        ({"token_env": "NO_SUCH_KEY"}, {}, "token_env of the model of reward 'judge': .*'NO_SUCH_KEY' is not set"),
        ({"max_requests": 0}, {}, "max_requests of JudgeEndpoint.* must be a whole number of at least 1"),
        ({"modle": "x"}, {}, "'judge' refuses its options: .*'modle'"),
        ({}, {"num_samples": 2}, "num_samples of reward 'judge' needs a temperature above 0"),
    ],
)
def test_impossible_options_are_refused(service, model, options, message):
    with pytest.raises(SettingsError, match=message):
        resolve_reward("judge", options_of(service, model=model, **options))


def test_a_table_is_preferred_to_the_engine_that_the_program_passes(service):
    service.answers = [answer("7")]
    reward = resolve_reward("judge", options_of(service), parts={"model": None})
    assert asyncio.run(reward(given())).reward == 0.7
