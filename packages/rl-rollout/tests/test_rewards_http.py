import asyncio
import json
import threading
import time

import numpy as np
import pytest

from rl_core.errors import DataError, DeadlineError, SettingsError
from rl_rollout.rewards import RewardInput, RewardScorer, resolve_reward

pytest.importorskip("httpx")

GIVEN = RewardInput(
    prompt_uid="p7",
    response_text="18",
    response_ids=np.array([1, 8], np.int32),
    messages=({"role": "user", "content": "9 + 9?"},),
    ground_truth="18",
    columns={"level": np.int64(3)},
)


def reward_of(service, **options):
    return resolve_reward("http", {"url": service.url, "backoff_s": 0.0, **options})


def ask(service, **options):
    return asyncio.run(reward_of(service, **options)(GIVEN))


def test_the_service_gets_the_response_and_gives_the_reward(service):
    answer = {"reward": 0.5, "components": {"style": 1}, "extras": {"why": "terse"}}
    service.answers = [(200, {}, json.dumps(answer).encode())]
    result = ask(service)
    assert (result.reward, result.components, result.extras) == (0.5, {"style": 1}, {"why": "terse"})
    (_, sent), *_ = service.requests
    assert sent == {
        "prompt_uid": "p7",
        "response_text": "18",
        "messages": [{"role": "user", "content": "9 + 9?"}],
        "ground_truth": "18",
        "data_source": "default",
        "finish_reason": "stop",
    }


def test_headers_token_and_fields(service, monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", "abc")
    ask(service, headers={"X-Run": "7"}, token_env="JUDGE_TOKEN", send=("response_ids", "columns"))
    headers, sent = service.requests[0]
    assert (headers["X-Run"], headers["Authorization"]) == ("7", "Bearer abc")
    assert sent == {"response_ids": [1, 8], "columns": {"level": 3}}


@pytest.mark.parametrize("first", [(500, {}, b""), (503, {}, b"busy"), (429, {}, b""), (None, {}, b"")])
def test_a_service_that_is_busy_or_breaks_is_asked_again(service, first):
    service.answers = [first, first, (200, {}, b"0.25")]
    assert ask(service, retries=2).reward == 0.25
    assert len(service.requests) == 3


def test_a_header_may_refer_to_the_environment_and_is_shown_nowhere(service, monkeypatch):
    monkeypatch.setenv("REWARD_TOKEN", "sk-12345678")
    headers = {"Authorization": "Bearer $REWARD_TOKEN"}
    service.answers = [
        (403, {}, b"no such key: sk-12345678"),
        (200, {}, b'{"reward": 1, "extras": {"k": "sk-12345678"}}'),
    ]
    with pytest.raises(DataError, match=r"answered with status 403: 'no such key: \(redacted\)'"):
        ask(service, headers=headers, retries=0)
    assert ask(service, headers=headers).extras == {"k": "(redacted)"}
    assert [sent["Authorization"] for sent, _ in service.requests] == ["Bearer sk-12345678"] * 2
    assert "sk-1" not in repr(reward_of(service, headers=headers))


@pytest.mark.parametrize("value", ["sk-12345678\n", "sk-12345678\r\nX: 1", " sk-12345678", 12345678])
def test_a_header_that_the_client_would_quote_in_its_error_is_refused_without_it(service, value):
    with pytest.raises(
        SettingsError, match=r"value of the header 'A' \(not shown\)|headers of .* with int at 'A'"
    ) as caught:
        reward_of(service, headers={"A": value})
    assert "12345678" not in str(caught.value)


def test_the_password_of_a_url_is_not_shown():
    with pytest.raises(SettingsError, match=r"found 'ftp://me:\(redacted\)@host'"):
        resolve_reward("http", {"url": "ftp://me:sk-12345678@host"})


def test_after_the_last_retry_it_is_a_failure(service):
    service.answers = [(503, {}, b"busy")]
    with pytest.raises(ConnectionError, match="answered with status 503 3 times, last with 'busy'"):
        ask(service, retries=2)
    assert len(service.requests) == 3


def test_retry_after_is_heeded(service):
    service.answers = [(429, {"Retry-After": "1"}, b""), (200, {}, b"1")]
    started_at = time.monotonic()
    ask(service)
    assert time.monotonic() - started_at >= 0.95


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((400, {}, b"no such task"), "answered with status 400: 'no such task'"),
        ((302, {"Location": "/else"}, b""), "answered with status 302"),
        ((200, {}, b"<html>"), "answered with invalid JSON: '<html>'"),
        (
            (200, {}, b'{"score": 1}'),
            r"answered without 'reward'; it has \['score'\]. Answer with a number, or as in {",
        ),
        ((200, {}, b'{"reward": 1, "components": [1]}'), "must return components and extras as objects"),
        ((200, {}, b"[" * 100_000), "invalid JSON"),
        ((200, {}, b"1" * (1 << 19)), "more than 262144 bytes"),
    ],
)
def test_a_bad_answer_is_a_failure_at_once(service, answer, message):
    service.answers = [answer]
    with pytest.raises(DataError, match=message):
        ask(service)
    assert len(service.requests) == 1


@pytest.mark.parametrize(
    "content", [b'"1.0"', b"NaN", b"null", b'{"reward": "high"}', b'{"reward": 1, "components": {"a": "b"}}']
)
def test_an_answer_without_a_number_is_a_failed_session(service, content):
    service.answers = [(200, {}, content)]
    (scored,) = asyncio.run(RewardScorer(reward_of(service)).score([GIVEN]))
    assert scored.result is None
    assert "expected a finite number" in scored.failure


def test_a_service_that_hangs_is_given_up(service):
    released = threading.Event()

    def hangs():
        released.wait(timeout=30)
        return 200, {}, b"1"

    service.answers = [hangs]
    with pytest.raises(DeadlineError, match=r"did not answer within 0\.1 s; tried 2 times"):
        ask(service, timeout_s=0.1, retries=1)
    released.set()


def test_a_service_that_is_not_there_is_named(service):
    service.close()
    with pytest.raises(ConnectionError, match=r"cannot be reached \(ConnectError.*; tried 2 times"):
        ask(service, retries=1)


def test_one_reward_serves_one_event_loop_after_another_and_many_calls_at_once(service):
    scorer = RewardScorer(reward_of(service))
    for _ in range(2):
        scored = asyncio.run(scorer.score([GIVEN] * 8))
        assert [one.result.reward for one in scored] == [1.0] * 8
    scorer.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "ftp://x"}, "must start with http:// or https://"),
        ({"url": "score"}, "must start with http"),
        ({"url": "http://x", "retries": -1}, "retries of HttpReward.* must be a whole number of at least 0"),
        ({"url": "http://x", "timeout_s": 0}, "timeout_s of HttpReward.* must be a finite number above 0"),
        ({"url": "http://x", "send": ["logprobs"]}, "send of reward 'http' has 'logprobs'; known: prompt_uid"),
        ({"url": "http://x", "token_env": "NO_SUCH_VARIABLE"}, "environment variable 'NO_SUCH_VARIABLE' is not set"),
        ({}, "needs the option 'url'"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(SettingsError, match=message):
        resolve_reward("http", options)
