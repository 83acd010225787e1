"""Token probes: the policy's alternatives at chosen tokens."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from rl_core import Prompt, Trajectory
from rl_core.errors import EngineError, SettingsError
from rl_rollout.engines.protocol import EngineTraits, TokenScores
from rl_rollout.rollouter.served_policy import PolicyScores, policy_scores
from rl_trainer_parts.reporting.token_probes import MAX_TOKENS, TokenProbes
from rl_trainer_parts.rollouts.answers import Answer
from rl_trainer_parts.rollouts.inputs import named_tokens
from rl_trainer_parts.settings.schema import Settings
from rl_trainer_parts.settings.sources import build_settings

PROMPT = (7, 8)


class Letters:
    """A tokenizer whose tokens are letters."""

    def decode(self, sequences: Any, *, skip_special_tokens: bool) -> list[str]:
        assert not skip_special_tokens
        return ["".join(chr(96 + int(token)) for token in sequence) for sequence in sequences]

    def encode(self, texts: Any, *, add_special_tokens: bool) -> list[list[int]]:
        assert not add_special_tokens
        return [[ord(letter) - 96 for letter in text] for text in texts]

    num_token_ids = 27


class Engine:
    """Ranks the next letters of the alphabet highest after each token, with logprobs set by the test."""

    def __init__(self) -> None:
        self.sure: dict[int, float] = {}
        self.asked: list[list[list[int]]] = []
        self.error: BaseException | None = None
        self.version = 0
        self.is_deaf = False
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    @property
    def traits(self) -> EngineTraits:
        return EngineTraits(name="letters", max_model_len=99, vocab_size=99, max_top_k=3)

    async def score(self, sequences: Any, *, top_k: int) -> list[TokenScores]:
        return [self._scores(sequence, top_k) for sequence in sequences]

    async def policy_scores(self, sequences: Any, top_k: int) -> PolicyScores:
        if self.error is not None:
            raise self.error
        self.asked.append([sequence.tolist() for sequence in sequences])
        await self.may_answer.wait()
        if self.is_deaf:
            return PolicyScores(version=-1, scores=())
        return await policy_scores(self, sequences, top_k, version=self.version)  # type: ignore[arg-type]

    def _scores(self, sequence: Any, top_k: int) -> TokenScores:
        ids = np.stack([sequence, *[sequence + 1 + rank for rank in range(top_k)]], axis=1)
        likeliest = np.asarray([self.sure.get(int(token), -0.01) for token in sequence], dtype=np.float32)
        logprobs = np.stack([np.full(len(sequence), -2.0), *[likeliest - rank for rank in range(top_k)]], axis=1)
        return TokenScores(token_ids=ids.astype(np.int32), logprobs=logprobs.astype(np.float32))


def answer(uid: str, *response: int, sample: int = 0, failure: str | None = None) -> Answer:
    ids = np.asarray([*PROMPT, *response], dtype=np.int32)
    row = Trajectory(
        prompt_uid=uid,
        session_index=sample,
        input_ids=ids,
        loss_mask=np.arange(len(ids)) >= len(PROMPT),
        rollout_logprobs=np.zeros(len(ids), dtype=np.float32),
        policy_versions=np.zeros(len(ids), dtype=np.int32),
    )
    prompt = Prompt(uid=uid, input_ids=ids[:2])
    return Answer(prompt=prompt, trajectory=row, failure=failure, source="test")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "probes.jsonl"


def ask(probes: TokenProbes, engine: Engine, *answers: Answer, step: int = 0, **options: Any) -> None:
    engine.version = step
    asyncio.run(probes.ask(engine.policy_scores, answers, step=step, **options))


def lines(path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_least_sure_tokens_are_asked_about_at_each_validation(path):
    engine = Engine()
    engine.sure = {2: -1.5, 5: -0.7}
    probes = TokenProbes(path, Letters(), count=2)  # type: ignore[arg-type]
    answers = (answer("p", 1, 2, 3), answer("p", 9, 9, sample=1), answer("q", 4, 5))
    ask(probes, engine, *answers, step=0)
    engine.sure[2] = -0.25
    ask(probes, engine, step=5)
    found = lines(path)
    assert [(row["step"], row["probe"], row["position"], row["token"]) for row in found] == [
        (0, "p/1", 1, "b"),
        (0, "q/1", 1, "e"),
        (5, "p/1", 1, "b"),
        (5, "q/1", 1, "e"),
    ]
    assert (found[2]["prompt"], found[2]["response"], found[2]["policy_version"]) == ("gh", "ab", 5)
    assert found[2]["logprob"] == -2.0
    assert found[2]["candidates"] == [["c", -0.25], ["d", -1.25], ["e", -2.25]], "as many as the engine gives"
    assert engine.asked[-1] == [[7, 8, 1, 2], [7, 8, 4, 5]]


def test_a_resumed_run_goes_on_with_the_same_tokens(path):
    engine = Engine()
    ask(TokenProbes(path, Letters(), count=1), engine, answer("p", 1, 2))  # type: ignore[arg-type]
    with path.open("a") as file:
        file.write(
            '{"probe":"x","ids":[1,2],"num_prompt_tokens":9}\n{"probe":"y","ids":[1,null],"num_prompt_tokens":1}\n{"to'
        )
    engine.asked.clear()
    ask(TokenProbes(path, Letters(), count=1), engine, answer("other", 3, 4), step=5)  # type: ignore[arg-type]
    assert engine.asked == [[[7, 8, 1]]]


@pytest.mark.parametrize(
    "wrong",
    [
        {"ids": [1, 2], "num_prompt_tokens": 2},
        {"ids": [1, 2], "num_prompt_tokens": 0},
        {"ids": [1, -2], "num_prompt_tokens": 1},
        {"ids": [1, 2**31], "num_prompt_tokens": 1},
        {"ids": [1] * (MAX_TOKENS + 1), "num_prompt_tokens": 1},
        {"ids": "12", "num_prompt_tokens": 1},
        {"ids": [1, 2]},
    ],
)
def test_a_record_that_an_engine_cannot_score_is_passed_over(path, wrong):
    whole = {"probe": "q/0", "ids": [4, 5], "num_prompt_tokens": 1}
    path.write_text("".join(f"{json.dumps(row)}\n" for row in ({"probe": "p/0", **wrong}, whole)))
    engine = Engine()
    ask(TokenProbes(path, Letters(), count=1), engine, answer("r", 1, 2), step=5)  # type: ignore[arg-type]
    assert engine.asked == [[[4, 5]]]


def test_named_tokens_are_probed_where_they_are_or_as_the_first_token(path):
    engine = Engine()
    answers = [answer("p", 1, 3, 3), answer("q", 5), answer("r", 3), answer("s", 3)]
    ask(TokenProbes(path, Letters(), count=0, named=[3, 9]), engine, *answers)  # type: ignore[arg-type]
    found = [(row["probe"], row["prompt"], row["response"], row["token"]) for row in lines(path)]
    assert found == [("p/1=3", "gh", "ac", "c"), ("r/0=3", "gh", "c", "c"), ("p/0=9", "gh", "i", "i")]
    assert engine.asked == [[[7, 8, 1, 3], [7, 8, 3], [7, 8, 9]]]
    ask(TokenProbes(path, Letters(), count=1, named=[5, 9]), engine, answer("q", 4, 5), step=5)  # type: ignore[arg-type]
    assert engine.asked[-1] == [[7, 8, 4], [7, 8, 9], [7, 8, 4, 5]], "9 as before, 5 anew, and one uncertain token"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ab", r"'ab' is 2 tokens: 'a' \(1\), 'b' \(2\)\. Name one of them"),
        ("", "'' is 0 tokens: none"),
        (27, "ids must be from 0 to 26 in this tokenizer; found 27"),
    ],
)
def test_what_names_no_token_is_refused(name, message):
    with pytest.raises(SettingsError, match=message):
        named_tokens(settings_naming(name), Letters())  # type: ignore[arg-type]
    assert named_tokens(settings_naming("c", 0), Letters()) == [3, 0]  # type: ignore[arg-type]


def settings_naming(*tokens: str | int) -> Settings:
    return build_settings(
        {"policy": {"path": "p"}, "prompts": {"train": "t.jsonl"}, "metrics": {"probe_tokens": list(tokens)}}
    )


def test_what_cannot_be_probed_is_left_out(path):
    engine = Engine()
    failed = answer("f", 5, 6, failure="no verdict")
    probes = TokenProbes(path, Letters(), count=3)  # type: ignore[arg-type]
    ask(probes, engine, failed, answer("long", *([1] * MAX_TOKENS)))
    assert not path.exists()
    ask(probes, engine, failed, answer("p", 1))
    assert [row["probe"] for row in lines(path)] == ["p/0"]


def test_none_are_asked_where_none_are_wanted(path):
    engine = Engine()
    ask(TokenProbes(path, Letters(), count=0), engine, answer("p", 1))  # type: ignore[arg-type]
    assert engine.asked == []
    assert not path.exists()


def test_who_cannot_tell_now_is_asked_again(path):
    engine = Engine()
    probes = TokenProbes(path, Letters(), count=1)  # type: ignore[arg-type]
    for step, is_deaf in ((0, True), (5, False), (10, True), (15, False)):
        engine.is_deaf = is_deaf
        ask(probes, engine, answer("p", 1), step=step)
    assert [(row["step"], row["policy_version"]) for row in lines(path)] == [(5, 5), (15, 15)]


def test_who_takes_too_long_is_waited_for_no_more(path):
    engine = Engine()
    probes = TokenProbes(path, Letters(), count=1, deadline_s=0.05)  # type: ignore[arg-type]

    async def run() -> None:
        engine.may_answer.clear()
        await probes.ask(engine.policy_scores, [answer("p", 1)], step=0)
        engine.may_answer.set()
        while asyncio.all_tasks() - {asyncio.current_task()}:  # the late answer arrives and is dropped
            await asyncio.sleep(0)
        await probes.ask(engine.policy_scores, [answer("p", 1)], step=5)

    with capture_logs() as logs:
        asyncio.run(run())
    assert [(one["event"], one["error"]) for one in logs] == [("probes_failed", "no answer within 0.05 s")]
    assert not path.exists()


def test_a_run_that_ends_meanwhile_is_not_held_up(path):
    engine = Engine()
    probes = TokenProbes(path, Letters(), count=1)  # type: ignore[arg-type]

    async def run() -> None:
        engine.may_answer.clear()
        asking = asyncio.create_task(probes.ask(engine.policy_scores, [answer("p", 1)], step=0))
        while not engine.asked:
            await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(run())
    assert not path.exists()


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (EngineError("no prompt logprobs here"), "EngineError: no prompt logprobs here"),
        (ZeroDivisionError("an engine of one's own"), "ZeroDivisionError: an engine of one's own"),
        (asyncio.CancelledError(), "the call was cancelled"),
    ],
)
def test_an_engine_that_cannot_score_stops_nothing(path, error, says):
    engine = Engine()
    engine.error = error
    probes = TokenProbes(path, Letters(), count=2)  # type: ignore[arg-type]
    with capture_logs() as logs:
        ask(probes, engine, answer("p", 1))
        engine.error = None
        ask(probes, engine, answer("p", 1))
    assert [(one["event"], one["error"]) for one in logs] == [("probes_failed", says)]
    assert engine.asked == []


def test_an_engine_gives_as_many_likeliest_tokens_as_it_can() -> None:
    engine: Any = Engine()
    sequences = [np.asarray([1, 2], dtype=np.int32)]
    for top_k, expected in ((2, 2), (5, 3)):
        found = asyncio.run(policy_scores(engine, sequences, top_k, version=7))
        assert found.version == 7
        assert [one.token_ids.shape for one in found.scores] == [(2, expected + 1)]


def test_an_engine_that_gives_none_is_not_asked() -> None:
    class Mute(Engine):
        @property
        def traits(self) -> EngineTraits:
            return EngineTraits(name="mute", max_model_len=99, vocab_size=99)

    engine: Any = Mute()
    assert asyncio.run(policy_scores(engine, [np.asarray([1], dtype=np.int32)], 5, version=7)).scores == ()
